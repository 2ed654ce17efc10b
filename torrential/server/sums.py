"""The pushes of one clock, and their sum: in the order of ranks, so that it does not depend on who came first.

    worker 2 ─┐
    worker 0 ─┼─► complete when the others are too ──► g0 + g1 + g2 ──► one step of the optimizer ──► replicas
    worker 1 ─┘

Tensors stay where the workers have them until the sum is taken: a request is not answered before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from torrential.server.chain import Ask
from torrential.server.clocks import RangeClock
from torrential.server.messages import Push
from torrential.server.shard import RequestInfo, Shard, ShardOperation, coalesced


class Clock:
    """Pushes by worker. A worker may push its range in several parts; it is complete when they cover it."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._asks: dict[int, dict[int, Ask]] = {}  # by worker and number
        self._covered: dict[int, RangeClock] = {}
        self.complete: list[int] = []  # workers, in the order of arrival
        self.abstained: set[int] = set()  # those of them that had nothing to add

    def add(self, ask: Ask) -> None:
        asks = self._asks.setdefault(ask.worker, {})
        again = ask.request.seq in asks
        asks[ask.request.seq] = ask  # the newest is answered: it may be addressed by a newer view
        if again:
            return
        covered = self._covered.get(ask.worker)
        if covered is None:
            covered = self._covered[ask.worker] = RangeClock(self._start, self._stop)
        elif covered.least():
            return
        for first, last in ask.request.spans:
            covered.set(first, last, 1)
        if covered.least():
            self.complete.append(ask.worker)
            if not any(part.tensors for part in asks.values()):
                self.abstained.add(ask.worker)

    def forget(self, workers: Collection[int]) -> None:
        for worker in workers:
            self._asks.pop(worker, None)
            self._covered.pop(worker, None)
        self.complete = [worker for worker in self.complete if worker not in workers]
        self.abstained -= set(workers)

    def chosen(self, first: int | None) -> list[Ask]:
        """The pushes that make the step: those of the first so many workers with something to add, or of all; by
        rank."""
        if first is None:
            workers = sorted(self._asks)
        else:
            adding = [worker for worker in self.complete if worker not in self.abstained]
            workers = sorted(adding[:first] + list(self.abstained))
        return [ask for worker in workers for ask in self._asks[worker].values()]

    def others(self, chosen: Sequence[Ask]) -> list[Ask]:
        used = {(ask.worker, ask.request.seq) for ask in chosen}
        return [a for asks in self._asks.values() for a in asks.values() if (a.worker, a.request.seq) not in used]


def operands(shard: Shard, clock: int, asks: Sequence[Ask]) -> tuple[ShardOperation, list[Tensor], bool]:
    """The step that these pushes make, its tensors, and whether they lie in the store's buffer for sums."""
    pushes = [ask.request for ask in asks]
    assert all(isinstance(push, Push) for push in pushes)
    everyone = tuple(
        RequestInfo(ask.worker, p.seq, p.floor, p.clock, p.version, p.lease)  # type: ignore[attr-defined]
        for ask, p in zip(asks, pushes, strict=True)
    )
    filled: list[tuple[Push, Sequence[Tensor]]] = [(a.request, a.tensors) for a in asks if a.tensors]  # type: ignore[misc]
    if not filled or any(push.scale == 0.0 for push, _ in filled):
        return ShardOperation("step", everyone, number=clock), [], False
    whole = ((shard.start, shard.stop),)
    used: set[int] | None = set()
    for push, _ in filled:
        used = None if used is None or push.used is None else used | set(push.used)
    lr, rates, needed = filled[0][0].lr, filled[0][0].rates, None if used is None else tuple(sorted(used))
    if all(push.keys for push, _ in filled):
        keys = torch.cat([tensors[1] for _, tensors in filled])
        values = torch.cat([tensors[0] * push.scale for push, tensors in filled])
        once, summed = coalesced(keys, values)
        return ShardOperation("step", everyone, whole, lr, keys=True, number=clock, rates=rates), [summed, once], False
    if len(filled) == 1 and filled[0][0].spans == whole:
        push, tensors = filled[0]
        step = ShardOperation("step", everyone, whole, lr, push.scale, needed, number=clock, rates=rates)
        return step, list(tensors), False
    total = shard.store.sum[shard.start : shard.stop]
    _add_up(shard, total, filled)
    return ShardOperation("step", everyone, whole, lr, used=needed, number=clock, rates=rates), [total], True


def _add_up(shard: Shard, total: Tensor, filled: Sequence[tuple[Push, Sequence[Tensor]]]) -> None:
    whole = ((shard.start, shard.stop),)
    first, tensors = filled[0]
    rest = filled
    if first.spans == whole and not first.keys and len(filled) > 1:
        second, others = filled[1]
        if first.scale == second.scale == 1.0 and second.spans == whole and not second.keys:
            torch.add(tensors[0], others[0], out=total)
            rest = filled[2:]
        else:
            torch.mul(tensors[0], first.scale, out=total)
            rest = filled[1:]
    else:
        total.zero_()
    for push, parts in rest:
        if push.keys:
            total.index_add_(0, parts[1] - shard.start, parts[0], alpha=push.scale)
        else:
            for (begin, end), part in zip(push.spans, parts, strict=True):
                total[begin - shard.start : end - shard.start].add_(part, alpha=push.scale)
