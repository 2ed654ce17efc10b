"""The samples of each member of a synchronous group, where a member keeps the samples that it was dealt.

A script computes on its batch before the step is voted on. If a member dies meanwhile, the others keep the batches that
they have, the step is taken without it, and what it held is dealt again, before anything later:

    roster    0 1 2          members when the round began; a joined batch is cut by it, even after deaths
    dealt     a a b b c c    worker 1 dies
    step      a a     c c    the mean over the members that vote
    owed          b b        the next joined batch, cut by the members that are left

Every member computes the same from (epoch, cursor, owed, roster), which is the whole state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor

from torrential.data.deal import Batch, Deal, Order, part

Span = tuple[int, int, int]  # epoch, and the places of the first sample and past the last in the epoch's order


class KeptDeal(Deal):
    def __init__(self, samples: int, seed: int, epoch: int, cursor: int, order: Order) -> None:
        super().__init__(samples, seed, epoch, cursor, order)
        self.owed: list[Span] = []
        self.roster: tuple[int, ...] = ()
        self.size = 0  # samples of a joined batch
        self._pieces = 1  # that each member has of a joined batch
        self._agreed, self._present = 0, frozenset[int]()  # of the step that is being concluded

    # -- what lies ahead ------------------------------------------------------------------------------------------
    def begin_round(self, batch_size: int, pieces: int) -> None:
        """Each member of the roster has `pieces` batches of every joined one."""
        self._batch_size, self._pieces = batch_size, pieces
        self.size = len(self.roster) * pieces * batch_size

    def ahead(self) -> Iterator[Span]:
        """Joined batches in order, without end: first what is owed, then what no member was dealt yet."""
        for epoch, first, last in self.owed:
            for start in range(first, last, self.size):
                yield epoch, start, min(last, start + self.size)
        epoch, cursor = self.epoch, self.cursor
        while True:
            last = min(self.samples, cursor + self.size)
            yield epoch, cursor, last
            epoch, cursor = (epoch, last) if last < self.samples else (epoch + 1, 0)

    def span(self, number: int) -> Span:
        """The joined batch `number` from here."""
        return next(islice(self.ahead(), number, None))

    def next_epoch(self) -> int:
        """The epoch that the next sample is of."""
        return self.owed[0][0] if self.owed else self.epoch

    def leave_before(self, epoch: int) -> None:
        """Leave out what is left of earlier epochs."""
        self.owed = [span for span in self.owed if span[0] >= epoch]
        if self.epoch < epoch:
            self.epoch, self.cursor = epoch, 0

    def pieces(self, number: int, rank: int, present: Collection[int]) -> list[Batch]:
        """The batches that a member has of the joined batch `number` from here, each with its weight among the members
        that are present."""
        if rank not in self.roster:
            return []
        span = self.span(number)
        total = sum(last - start for member in present for start, last in self._cut(span, member))
        return [
            Batch(span[0], start, self.order.between(span[0], start, last), total, (last - start) / total)
            for start, last in self._cut(span, rank)
        ]

    def _cut(self, span: Span, rank: int) -> list[tuple[int, int]]:
        """The places that a member has of a joined batch; none if it was not there when the round began."""
        if rank not in self.roster:
            return []
        _, first, last = span
        numbers = range(self.roster.index(rank) * self._pieces, (self.roster.index(rank) + 1) * self._pieces)
        parts = (part(last - first, n, len(self.roster) * self._pieces, self._batch_size) for n in numbers)
        return [(first + start, first + stop) for start, stop in parts if start < stop]

    # -- a step is taken ------------------------------------------------------------------------------------------
    def agree(self, batches: int, present: Collection[int]) -> None:
        """The step that is concluded next is made of so many joined batches, by these members."""
        self._agreed, self._present = batches, frozenset(present)

    def advance(self, taken: int) -> None:
        """Move past the step: samples of members that are absent are owed."""
        used = 0
        lost: list[Span] = []
        for span in list(islice(self.ahead(), self._agreed)):
            epoch = span[0]
            for rank in self.roster:
                for start, last in self._cut(span, rank):
                    if rank in self._present:
                        used += last - start
                    else:
                        lost.append((epoch, start, last))
            self._move_past(span)
        assert used == taken, (used, taken)
        self.owed = _merged([*lost, *self.owed])
        self.roster = tuple(sorted(self._present))

    def _move_past(self, span: Span) -> None:
        epoch, _, last = span
        if self.owed:
            held, _, stop = self.owed.pop(0)
            if last < stop:
                self.owed.insert(0, (held, last, stop))
            return
        self.epoch, self.cursor = (epoch, last) if last < self.samples else (epoch + 1, 0)

    # -- what is saved and handed to newcomers ---------------------------------------------------------------------
    def state(self) -> dict[str, Tensor]:
        owed = torch.tensor(self.owed, dtype=torch.int64).view(-1, 3)
        return {"owed": owed, "roster": torch.tensor(self.roster, dtype=torch.int64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.owed = [(e, f, s) for e, f, s in state["owed"].tolist()]
        self.roster = tuple(state["roster"].tolist())


def _merged(spans: list[Span]) -> list[Span]:
    """In order, with neighbours joined."""
    merged: list[Span] = []
    for epoch, first, last in sorted(spans):
        if merged and merged[-1][0] == epoch and merged[-1][2] == first:
            merged[-1] = (epoch, merged[-1][1], last)
        else:
            merged.append((epoch, first, last))
    return merged
