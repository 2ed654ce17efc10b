"""The dealer of samples to workers that ask at any time. It lives with the range that holds key 0.

    epoch's order   0 ....... cursor ................. samples
                    | leased, | given back |  not dealt yet
                    | or used | dealt again first

A worker takes a lease on some samples. The update made of them ends it; the death of the worker, or an update that came
too late, gives the samples back. So every sample of every epoch is used exactly once, even after deaths, and a fast
worker takes more samples. Samples that are given back keep their epoch, so no worker waits at the end of an epoch, only
at the very end.

A checkpoint holds the dealer as `saved` gives it: a run that goes on from it deals again the samples of which no update
in that checkpoint was made, and nothing else.

In step (`deal_together`) all workers of a clock are given one joined batch, cut as data/deal.py does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from torrential.data.deal import part


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """Samples [first, last) of an epoch's order, leased to a worker."""

    worker: int
    epoch: int
    first: int
    last: int


class Dealer(msgspec.Struct):
    """Plain data, so that it can be sent as it is."""

    samples: int
    epochs: int
    together: bool = False  # one joined batch per clock
    epoch: int = 0
    cursor: int = 0
    dealt: int = 0  # for clocks below this one; at later ones nobody has samples yet
    lease: int = 0  # the last one's number
    leases: dict[int, Lease] = {}
    returned: list[Lease] = []
    used: dict[int, int] = {}  # samples that updates were made of, by epoch

    def ready(self) -> bool:
        """Whether there is something to deal."""
        return bool(self.returned) or self.epoch < self.epochs

    def finished(self) -> bool:
        """Whether all samples of all epochs have been used."""
        return not self.ready() and not self.leases

    def deal(self, worker: int, count: int) -> tuple[int, Lease]:
        """A lease's number, and the samples: `count` of them, or as many as the epoch has left."""
        assert self.ready() and count > 0
        if not self.returned:
            return self._lease(self._next(worker, min(count, self.samples - self.cursor)))
        held = self.returned.pop(0)
        if held.last - held.first > count:
            self.returned.insert(0, Lease(-1, held.epoch, held.first + count, held.last))
        return self._lease(Lease(worker, held.epoch, held.first, min(held.last, held.first + count)))

    def deal_together(self, workers: Sequence[int], count: int) -> list[tuple[int, Lease]]:
        """Deal to each of the workers, first what was given back; some may get nothing (lease 0) at the end of an
        epoch."""
        dealt = []
        workers = list(workers)
        while self.returned and workers:
            dealt.append(self.deal(workers.pop(0), count))
        left = min(self.samples - self.cursor, count * len(workers)) if self.epoch < self.epochs else 0
        epoch, at = self.epoch, self.cursor
        for member, worker in enumerate(workers):
            first, last = part(left, member, len(workers), count) if left else (0, 0)
            if first < last:
                dealt.append(self._lease(self._next(worker, last - first)))
            else:
                dealt.append((0, Lease(worker, epoch, at, at)))
        return dealt

    def _next(self, worker: int, count: int) -> Lease:
        held = Lease(worker, self.epoch, self.cursor, self.cursor + count)
        self.cursor += count
        if self.cursor == self.samples:
            self.epoch, self.cursor = self.epoch + 1, 0
        return held

    def _lease(self, held: Lease) -> tuple[int, Lease]:
        self.lease += 1
        self.leases[self.lease] = held
        return self.lease, held

    def complete(self, lease: int) -> None:
        """An update was made of these samples."""
        held = self.leases.pop(lease, None)
        if held is not None:
            self.used[held.epoch] = self.used.get(held.epoch, 0) + held.last - held.first

    def give_back(self, lease: int) -> None:
        held = self.leases.pop(lease, None)
        if held is not None:
            self.returned.append(held)
            self.returned.sort(key=lambda h: (h.epoch, h.first))

    def forget(self, workers: Collection[int]) -> None:
        """Take back what these hold."""
        for lease in [number for number, held in self.leases.items() if held.worker in workers]:
            self.give_back(lease)

    def saved(self, undone: Collection[Lease] = ()) -> Dealer:
        """A copy in which nothing is leased, and no update was made of the samples in `undone`. What was dealt last is
        then as if it had not been, so that it is dealt again in the same batches."""
        copy = msgspec.convert(msgspec.to_builtins(self), Dealer)
        for held in undone:
            copy.used[held.epoch] -= held.last - held.first
        copy.returned.extend(undone)
        copy.forget(copy.holders())
        copy.returned.sort(key=lambda h: (h.epoch, h.first))
        while copy.returned:
            held = copy.returned[-1]
            if (held.epoch, held.last) != (
                (copy.epoch, copy.cursor) if copy.cursor else (copy.epoch - 1, copy.samples)
            ):
                break
            copy.returned.pop()
            copy.epoch, copy.cursor = held.epoch, held.first
        copy.dealt = copy.lease = 0
        return copy

    def holders(self) -> set[int]:
        return {held.worker for held in self.leases.values()}
