"""Who trains on which samples where workers come as they please. It lives with the range that holds key 0.

    epoch's order   0 ....... cursor ................. samples
                    | leased, | given back |  not dealt yet
                    | or used | dealt again first

A worker takes a lease on some samples. The update made of them ends it; the death of the worker, or an update that
came too late, gives the samples back. So every sample of every epoch is used exactly once, whatever happens, and a
fast worker takes more of them. What is given back keeps its epoch, so nobody waits at the end of one, only at the very
end.

A checkpoint holds the dealer as `saved` gives it: whoever goes on from there deals again what no update in that
checkpoint was made of, and nothing else.

In step (`deal_together`) all workers of a clock are given one joined batch, cut as data/deal.py does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from torrential.data.deal import part


class Hand(msgspec.Struct, frozen=True, array_like=True):
    """Samples [first, last) of an epoch's order, in the hands of a worker."""

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
    leases: dict[int, Hand] = {}
    returned: list[Hand] = []
    used: dict[int, int] = {}  # samples that updates were made of, by epoch

    def ready(self) -> bool:
        """Whether there is something to deal."""
        return bool(self.returned) or self.epoch < self.epochs

    def finished(self) -> bool:
        """Whether all samples of all epochs have been used."""
        return not self.ready() and not self.leases

    def deal(self, worker: int, count: int) -> tuple[int, Hand]:
        """A lease's number, and the samples: `count` of them, or as many as the epoch has left."""
        assert self.ready() and count > 0
        if not self.returned:
            return self._lease(self._next(worker, min(count, self.samples - self.cursor)))
        hand = self.returned.pop(0)
        if hand.last - hand.first > count:
            self.returned.insert(0, Hand(-1, hand.epoch, hand.first + count, hand.last))
        return self._lease(Hand(worker, hand.epoch, hand.first, min(hand.last, hand.first + count)))

    def deal_together(self, workers: Sequence[int], count: int) -> list[tuple[int, Hand]]:
        """To each of the workers, what was given back first; some may get nothing (lease 0) at the end of an epoch."""
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
                dealt.append((0, Hand(worker, epoch, at, at)))
        return dealt

    def _next(self, worker: int, count: int) -> Hand:
        hand = Hand(worker, self.epoch, self.cursor, self.cursor + count)
        self.cursor += count
        if self.cursor == self.samples:
            self.epoch, self.cursor = self.epoch + 1, 0
        return hand

    def _lease(self, hand: Hand) -> tuple[int, Hand]:
        self.lease += 1
        self.leases[self.lease] = hand
        return self.lease, hand

    def complete(self, lease: int) -> None:
        """An update was made of these samples."""
        hand = self.leases.pop(lease, None)
        if hand is not None:
            self.used[hand.epoch] = self.used.get(hand.epoch, 0) + hand.last - hand.first

    def give_back(self, lease: int) -> None:
        hand = self.leases.pop(lease, None)
        if hand is not None:
            self.returned.append(hand)
            self.returned.sort(key=lambda h: (h.epoch, h.first))

    def forget(self, workers: Collection[int]) -> None:
        """Take back what these hold."""
        for lease in [number for number, hand in self.leases.items() if hand.worker in workers]:
            self.give_back(lease)

    def saved(self, undone: Collection[Hand] = ()) -> Dealer:
        """A copy in which nothing is leased, and no update was made of the samples in `undone`. What was dealt last is
        then as if it had not been, so that it is dealt again in the same batches."""
        copy = msgspec.convert(msgspec.to_builtins(self), Dealer)
        for hand in undone:
            copy.used[hand.epoch] -= hand.last - hand.first
        copy.returned.extend(undone)
        copy.forget(copy.holders())
        copy.returned.sort(key=lambda h: (h.epoch, h.first))
        while copy.returned:
            hand = copy.returned[-1]
            if (hand.epoch, hand.last) != (
                (copy.epoch, copy.cursor) if copy.cursor else (copy.epoch - 1, copy.samples)
            ):
                break
            copy.returned.pop()
            copy.epoch, copy.cursor = hand.epoch, hand.first
        copy.dealt = copy.lease = 0
        return copy

    def holders(self) -> set[int]:
        return {hand.worker for hand in self.leases.values()}
