"""Which worker has which part of the parameters, where a replica of the model is of several workers.

    worker            0   1   2  |  3   4   5        two replicas of three stages
    stage             0   1   2  |  0   1   2
    key space    |2222222|11111111|00000|            every key belongs to one stage; ranges end where stages do

A range is read and written by those workers alone that have its stage, one of each replica. A replica that lacks a
worker does not count anywhere: it is gone until that one is back. The worker that has key 0, where samples are dealt,
is its replica's leader.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torrential.params.layout import Layout


class OwnedSpan(NamedTuple):
    """Consecutive parameters of a stage: where they are in the key space, and in the stage's own vector."""

    key: int
    start: int
    size: int


@dataclass(frozen=True)
class Shares:
    """The stages that the key space is shared out to; by default one, which has all of it."""

    stages: int = 1
    starts: tuple[int, ...] = (0,)  # the keys at which a share begins
    owners: tuple[int, ...] = (0,)  # the stage whose share begins there

    def replica(self, worker: int) -> tuple[int, ...]:
        """The workers of a worker's replica."""
        first = worker - worker % self.stages
        return tuple(range(first, first + self.stages))

    def holders(self, key: int, workers: Collection[int]) -> tuple[int, ...]:
        """Those of some workers that have the parameter at a key, and whose replica is complete."""
        if self.stages == 1:
            return tuple(workers)
        stage = self.owners[bisect_right(self.starts, key) - 1]
        there = set(workers)
        return tuple(w for w in workers if w % self.stages == stage and there.issuperset(self.replica(w)))

    def leaders(self, workers: Collection[int]) -> tuple[int, ...]:
        """Those of some workers that lead a complete replica: they take samples for all of it."""
        return self.holders(0, workers)

    def leader(self, worker: int) -> int:
        """The leader of a worker's replica."""
        return self.replica(worker)[self.owners[0]]

    def owned(self, stage: int, whole: Layout, part: Layout) -> list[OwnedSpan]:
        """What a stage owns of the key space, in ascending order; `part` is the layout of its own vector."""
        keys, ends = {e.name: e.start for e in whole.entries}, _ends(part)
        found: list[OwnedSpan] = []
        for entry, end in zip(part.entries, ends, strict=True):
            key, size = keys[entry.name], end - entry.start
            if self.owners[bisect_right(self.starts, key) - 1] != stage:
                continue  # a parameter that an earlier stage has, too
            last = found[-1] if found else None
            if last is not None and (last.key + last.size, last.start + last.size) == (key, entry.start):
                found[-1] = OwnedSpan(last.key, last.start, last.size + size)
            else:
                found.append(OwnedSpan(key, entry.start, size))
        return sorted(found)


def share_out(layout: Layout, stages: Sequence[Collection[str]]) -> Shares:
    """The shares of stages, given the names of the parameters that each has. Of several stages that have a parameter
    it belongs to the first."""
    starts: list[int] = []
    owners: list[int] = []
    for entry in layout.entries:
        owner = next(stage for stage, names in enumerate(stages) if entry.name in names)
        if not owners or owners[-1] != owner:
            starts.append(entry.start)
            owners.append(owner)
    return Shares(len(stages), tuple(starts), tuple(owners))


def _ends(layout: Layout) -> list[int]:
    """Where the next entry of a layout begins, or the vector ends: what lies between belongs to the entry."""
    (size,) = layout.sizes.values()
    return [*(entry.start for entry in layout.entries[1:]), size]
