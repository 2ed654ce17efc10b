"""The roles of a strategy: which programs a world runs for it, how many of each, and what a death means.

    regroup   the others meet again and go on without it, or with its successor: a new generation
    view      news for the others in their view of who is there; nobody is interrupted
    restart   it is started again and goes on from its saved state
    fail      the run ends with a line that names it

An observer, which evaluates and saves, belongs to every run; no strategy declares it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torrential.membership.roles import Death
from torrential.server.consistency import Consistency
from torrential.server.shard import Handler

if TYPE_CHECKING:
    from torrential.strategies.context import Context


@dataclass(frozen=True)
class Role:
    """A role of the strategy's own: its program, how many run it, and what the death of one means."""

    name: Literal["worker", "coordinator"]
    count: int
    program: Callable[[Context], None]
    death: Death


@dataclass(frozen=True)
class Servers:
    """Servers that keep the parameters, each some ranges of them and replicas of others' (torrential/server)."""

    count: int
    consistency: Consistency
    """The rule of when a worker may read, and whether the gradients of one clock become one update."""
    joined: bool = False
    """Whether all workers of a clock are dealt one joined batch; else each takes samples as it comes."""
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    """The functions that `ctx.params.call(name)` runs on every range, given its shard, options and tensors."""
    vectors: Mapping[str, float] = field(default_factory=dict)
    """Vectors that the handlers keep beside the parameters, as long as these, by name: the value that they begin with.
    They are found in `shard.states`, and are replicated, saved and resumed with the parameters."""
    stages: int = 1
    """The number of workers that a replica of the model is of, each with a stage of it (server/shares.py)."""
    name: Literal["server"] = "server"
    death: Death = "view"


Roles = tuple[Role | Servers, ...]
