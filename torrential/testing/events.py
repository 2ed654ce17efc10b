"""The last events of a simulation, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from torrential.comm.protocol import Letter, role_name
from torrential.membership.messages import Pong, Roster
from torrential.worlds.sim.comm import SimChannel
from torrential.worlds.sim.group import SimMembership
from torrential.worlds.sim.kernel import SimRole
from torrential.worlds.sim.mail import SimMail

EVENTS = 150  # kept
SHOWN = 30

Happened = tuple[float, Callable[..., None], tuple[Any, ...]]  # when, what was called, with what


def last(events: Iterable[Happened]) -> list[str]:
    """The last events without the turns of roles, which show in their messages, and without signs of life."""
    lines = [f"  {time:10.6f}  {_words(do, args)}" for time, do, args in events if _says_something(do, args)]
    return lines[-SHOWN:]


def _says_something(do: Callable[..., None], args: tuple[Any, ...]) -> bool:
    return not isinstance(getattr(do, "__self__", None), SimRole) and not any(isinstance(a, Pong) for a in args)


def _words(do: Callable[..., None], args: tuple[Any, ...]) -> str:
    owner = getattr(do, "__self__", None)
    if isinstance(owner, SimMail):
        return f"{who(owner.address)} gets {_brief(args[0])}"
    if isinstance(owner, SimMembership) and args:
        about = f"{_brief(args[1])}" if len(args) > 1 else do.__name__
        return f"{args[0]} gets {about}" if do == owner.deliver else f"the membership hears of {args[0]}: {about}"
    if isinstance(owner, SimChannel):
        source, generation, tag = args[0]
        return f"worker {owner.rank} gets {tag} of generation {generation} from worker {source}"
    return f"{do.__name__.strip('_')} {', '.join(_brief(a) for a in args if not callable(a))}"


def who(address: int) -> str:
    return "the world" if address < 0 else role_name(address)


def _brief(value: Any) -> str:
    if isinstance(value, Roster):
        return _brief(value.view)
    if isinstance(value, Letter):
        return f"{_brief(value.message)} from {who(value.source)}"
    if isinstance(value, SimMail):
        return who(value.address)
    if isinstance(value, msgspec.Struct):
        fields = {n: getattr(value, n) for n in value.__struct_fields__}
        if "seq" in fields:
            fields["seq"] &= 0xFFFFFFFF
        shown = (
            f"{n}={v}" for n, v in fields.items() if not isinstance(v, bytes) and v not in (0, False, None, "", ())
        )
        return f"{type(value).__name__}({', '.join(shown)})"
    return str(value) if isinstance(value, int | float | str) else type(value).__name__
