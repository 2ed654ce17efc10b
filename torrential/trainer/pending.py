"""Snapshots that wait to be evaluated and saved until every worker's part of them is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from torch import Tensor

from torrential.trainer.snapshot import Snapshot

T = TypeVar("T")
Parts = dict[int, Mapping[str, Tensor]]  # rank -> that worker's own states, by "<name>/<key>"


class PendingSnapshots(Generic[T]):
    """Snapshots in the order in which they came, until they are complete. After a change of members one step may be
    given twice, its parts too."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Snapshot, T]] = []
        self._parts: dict[int, Parts] = {}  # by Snapshot.parts_under
        self._furthest: dict[int, int] = {}  # rank -> the last one that it sent a part of
        self._gone: set[int] = set()
        self._newest = -1  # step that was given out

    def part(self, rank: int, under: int, states: Mapping[str, Tensor]) -> None:
        parts = self._parts.setdefault(under, {})
        parts[rank] = {**parts.get(rank, {}), **states}
        self._furthest[rank] = max(under, self._furthest.get(rank, -1))

    def add(self, snapshot: Snapshot, what: T) -> None:
        self._waiting.append((snapshot, what))

    def gone(self, rank: int) -> None:
        """No part will come from it."""
        self._gone.add(rank)

    def back(self, rank: int) -> None:
        self._gone.discard(rank)

    def next(self, ready_or_not: bool = False) -> tuple[Snapshot, T, Parts, bool] | None:
        """The first one if it is complete, its parts, and whether it is news: later than all before it."""
        if not self._waiting or not (ready_or_not or self._complete(self._waiting[0][0])):
            return None
        snapshot, what = self._waiting.pop(0)
        news = snapshot.step > self._newest
        self._newest = max(self._newest, snapshot.step)
        for under in [each for each in self._parts if each < snapshot.parts_under]:  # a second may want its own
            del self._parts[under]
        return snapshot, what, self._parts.get(snapshot.parts_under, {}), news

    def not_used(self, snapshot: Snapshot) -> None:
        """There was no whole model in it; one of the same step that members give again may have it."""
        self._newest = min(self._newest, snapshot.step - 1)

    def _complete(self, snapshot: Snapshot) -> bool:
        """Whether every member's part is there, or will never come: it is gone, or was, and another took its place."""
        if not snapshot.parts or snapshot.step <= self._newest:
            return True
        givers, under = snapshot.givers or snapshot.members, snapshot.parts_under
        return all(r in self._gone or self._furthest.get(r, -1) >= under for r in givers)
