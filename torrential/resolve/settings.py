"""Whose an option after --set is: the strategy's, the world's, the recipe's or compression's; and what does not go
together."""

from __future__ import annotations

from typing import Any

import msgspec

from torrential.comm import futex
from torrential.config import WORLDS, Compression, HostsSettings, LocalSettings, Recipe
from torrential.errors import BadInput, UnknownName
from torrential.optim.recipe import make_recipe
from torrential.options import make
from torrential.resolve.request import AnySettings, RunRequest
from torrential.strategies.base import Strategy
from torrential.strategies.registry import Resolved, check_object

NEEDS = {  # what to say of an option of one world that is given in another
    "local": "is for real processes; leave it out, or use --world local",
    "hosts": "is for runs on several hosts; start them with --rendezvous, or leave it out",
    "ray": "is for runs on a Ray cluster; add --world ray, or leave it out",
    "sim": "needs a simulation; add --world sim",
}


def split_options(asked: RunRequest, found: Resolved) -> tuple[Strategy, AnySettings, Recipe, Compression]:
    """Options after --set belong to the strategy, the world, the recipe or compression; each name to one of them."""
    if asked.world not in WORLDS:
        raise UnknownName("world", asked.world, WORLDS)
    owners = {"strategy": found.kind, "world": WORLDS[asked.world], "recipe": Recipe, "compression": Compression}
    parts: dict[str, dict[str, Any]] = {owner: {} for owner in owners}
    for option, value in asked.options.items():
        owner = next((name for name, kind in owners.items() if option in kind.__struct_fields__), None)
        if owner is None:
            raise _nobodys(option, asked.world, [name for kind in owners.values() for name in kind.__struct_fields__])
        parts[owner][option] = value
    if not isinstance(asked.strategy, Strategy):
        strategy = found.make(parts["strategy"])
    elif parts["strategy"]:
        wrong = next(iter(parts["strategy"]))
        raise BadInput(f"{wrong} is an option of the strategy, which was given as an object; set it there")
    else:
        strategy = asked.strategy
        check_object(strategy)
    settings = _make_settings(asked.world, parts["world"])
    if isinstance(settings, LocalSettings):
        settings = _with_transport(settings)
    return strategy, settings, make_recipe(parts["recipe"]), make(Compression, parts["compression"])


def _nobodys(option: str, world: str, known: list[str]) -> BadInput:
    """The error of an option that nobody has, or only another world."""
    for other, kind in WORLDS.items():
        if other != world and option in kind.__struct_fields__:
            return BadInput(f"{option} {NEEDS[other]}")
    return UnknownName("option", option, known)


def _make_settings(world: str, given: dict[str, Any]) -> AnySettings:
    """The settings of a world. A value that an option has in the other world only is refused by that world's name."""
    for option, value in given.items():
        for other, kind in WORLDS.items():
            if not _takes(WORLDS[world], option, value) and _takes(kind, option, value):
                raise BadInput(f"{option}={value} {NEEDS[other]}")
    return make(WORLDS[world], given)


def _takes(kind: type[AnySettings], option: str, value: Any) -> bool:
    try:
        make(kind, {option: value} if option in kind.__struct_fields__ else {})
    except BadInput:
        return False
    return option in kind.__struct_fields__


def _with_transport(settings: LocalSettings) -> LocalSettings:
    """The settings with a transport that the algorithm can use."""
    by_messages = settings.algorithm not in ("auto", "shared", "native", "nccl")
    if settings.transport == "shared" and (by_messages or not futex.supported()):
        settings = msgspec.structs.replace(settings, transport="unix")  # flags in memory need x86-64 on Linux
    if settings.algorithm == "hierarchical" and not futex.supported():
        raise BadInput("algorithm=hierarchical needs shared memory, which needs Linux on x86-64; use algorithm=ring")
    if not isinstance(settings, HostsSettings) and settings.hosts > 1 and settings.algorithm != "hierarchical":
        raise BadInput(f"hosts={settings.hosts} needs algorithm=hierarchical (given: {settings.algorithm})")
    if settings.algorithm == "shared" and settings.transport != "shared":
        raise BadInput(
            f"algorithm=shared needs transport=shared (given: transport={settings.transport}); use algorithm=direct"
        )
    return settings
