"""The commands that say what there is: `tasks` and `strategies`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from torrential import completion

if TYPE_CHECKING:
    from torrential.options import Option
    from torrential.strategies.base import Strategy


def tasks() -> None:
    """List the built-in tasks."""
    from torrential.tasks import TASKS

    for name, builtin in TASKS.items():
        print(f"{name:16} {builtin.description}")


def strategies(
    name: Annotated[
        str | None,
        typer.Argument(help="One to show in full, or file.py[:Class].", autocompletion=completion.strategies),
    ] = None,
) -> None:
    """List the strategies; with a NAME, the idea of one, and all that --set can set for it, explained."""
    from torrential.strategies.registry import registered, resolve_strategy

    if name is None:
        for known, about in registered().items():
            print(f"{known:14} {about}")
        return
    kind = resolve_strategy(name).kind
    print(_about(kind))
    print("\nWhat can be set with --set name=value; shown with the default, if there is one.")
    for heading, options in _sections(kind):
        print(f"\n{heading}")
        _print_options(options)


def _about(kind: type[Strategy]) -> str:
    """What a strategy does, in its author's words: the docstring of a built-in's file, or of another's class."""
    import inspect

    from torrential.strategies import STRATEGIES

    explained = sys.modules[kind.__module__] if kind in STRATEGIES.values() else kind
    return inspect.getdoc(explained) or kind.name


def _sections(kind: type[Strategy]) -> Iterator[tuple[str, list[Option]]]:
    """All options that have an effect on a strategy: a heading for each owner, and its options."""
    import inspect

    from torrential.config import (
        Compression,
        HostsSettings,
        LocalSettings,
        RaySettings,
        Recipe,
        Settings,
        SimSettings,
        without_effect,
    )
    from torrential.options import explain
    from torrential.strategies.base import needs_servers

    with_servers = needs_servers(kind)
    own = "." if kind.__struct_fields__ else ": there are none."
    yield f"Options of {kind.name} itself{own}", list(explain(kind))
    compression = () if kind.uncompressed else (Compression,)
    for owner in (Settings, LocalSettings, HostsSettings, RaySettings, SimSettings, Recipe, *compression):
        common = {*owner.__struct_fields__} - {*inspect.get_annotations(owner)}  # shown before
        hidden = without_effect(with_servers) | common
        options = [option for option in explain(owner) if option.name not in hidden]
        if with_servers:  # which know nothing of a scaled loss
            options = [o._replace(choices=[c for c in o.choices if c != "loss"]) for o in options]
        yield (owner.__doc__ or "").strip(), options


def _print_options(options: Iterable[Option]) -> None:
    import shutil
    from textwrap import TextWrapper

    width = max(40, min(100, shutil.get_terminal_size().columns))
    head = TextWrapper(width, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    body = TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    for option in options:
        default = f"={option.default}" if option.default else ""
        allowed = " | ".join(option.choices) or option.bounds
        choices = f"  ({allowed})" if allowed else ""
        print(head.fill(f"{option.name}{default}{choices}"))
        if option.about:
            print(body.fill(option.about))
