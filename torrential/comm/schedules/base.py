"""A collective as data: who sends which part of a vector to whom, and in which order. Nothing here moves a byte.

A plan is what one member does. Its streams run side by side; the steps of a stream one after another. A step starts
its sends, then waits for its receives; a received part is added to the vector, or replaces it. Sends never block.

    stream   step: send [0, 5) to 1 · receive [5, 10) from 3, add | step: ... | step: ...

What a step adds is added in ascending order of member, its own part in its place: the same sum on every run. What
replaces may land as soon as it has been sent, and what is sent may be read until it has arrived; so no part may be
replaced that is still on its way. Messages of nothing are left out on both sides.

The same plan is executed over sockets, counted in tests, and costed; so schedule and execution know nothing of each
other. Members are numbered 0 .. members - 1 here, whatever their ranks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Send(NamedTuple):
    to: int
    start: int
    stop: int
    key: int  # the same in the matching Receive; unique among the messages of this pair in this direction


class Receive(NamedTuple):
    source: int
    start: int
    stop: int
    key: int
    add: bool  # else replace


class Exchange(NamedTuple):
    """The messages that a member sends and receives in one step of a schedule."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


Stream = list[Exchange]
Plan = list[Stream]
Range = tuple[int, int]  # first element, past the last


def step(sends: Iterable[Send] = (), receives: Iterable[Receive] = ()) -> Exchange:
    """A step without the messages that would be empty."""
    return Exchange(tuple(s for s in sends if s.start < s.stop), tuple(r for r in receives if r.start < r.stop))


def cut(start: int, stop: int, parts: int) -> list[Range]:
    """Near-equal ranges that cover [start, stop): sizes differ by one at the most."""
    bounds = [start + i * (stop - start) // parts for i in range(parts + 1)]
    return list(pairwise(bounds))


@dataclass(frozen=True)
class Costs:
    """The costs of messages, in seconds."""

    latency: float  # alpha: per message
    byte: float  # beta: per byte sent
    reduce: float  # gamma: per byte added


@dataclass(frozen=True)
class Algorithm:
    """One way to all-reduce."""

    name: str
    summary: str
    plan: Callable[[int, int, int], Plan]
    """The plan of a member, given its number, how many there are, and the elements of the vector."""
    seconds: Callable[[int, int, Costs], float]
    """The predicted seconds, given members, bytes and costs: the algorithm's line in the table of costs."""
