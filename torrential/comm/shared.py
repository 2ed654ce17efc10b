"""Collectives through shared memory on one host: chunked sums over registered buffers, without needless copies.

Each member has two counters that all can see. `published` = n: its data for operations up to n may be read. `reduced` =
n: its share of the work for operations up to n is done. A member that must wait sleeps on the counter of the one it
waits for (a futex), so no member polls and no wake-up is lost.

    all_reduce       publish | every member sums its own slice of all buffers, writes it to all | all reduced: done
    reduce           the same, but written to the root alone
    reduce_scatter   copy the others' slices out, publish | sum my slice: mine from private memory, theirs from shared
    all_gather       copy to my mail slot, publish | read all slots     (small all_reduce: the same, then add)
                     large vectors: publish | read all buffers | all have read: done

Beside its counter a member writes what each operation is: which collective, of how many elements of what type, with
what root. No member does its work before it has found those of all members to be the same.

Slices are summed once, by their owner, in ascending order of rank: the same bits everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torrential.comm import wire
from torrential.comm.carrier import Carrier, Operation, with_article
from torrential.comm.futex import Futex
from torrential.comm.protocol import Meter, Part, slices
from torrential.errors import UnequalCalls, UnequalSizes

CHUNK = 1 << 15  # elements summed at a time: operands and result stay in the second-level cache
MAIL_BYTES = 1 << 20  # one slot; a member has two
MAX_RANKS = 1024
SMALL_BYTES = 1 << 14  # all_reduce by mail below this
WORDS = 64  # from one counter to the next: both, and what operations are, have cache lines of their own
KEPT = 16  # operations of which it is known what they are; a member is rarely further ahead than that
ABOUT = 32  # the first word about operations: two for each, its number and what it is
SPIN_SECONDS = 5e-5
REST_SECONDS = 2e-3

_TYPES = list(wire.DTYPES.values())
_NUMBERED = {dtype: number for number, dtype in enumerate(_TYPES)}
_KINDS = ["barrier", "all-reduce", "reduce-scatter", "all-gather", "broadcast"]

Find = Callable[[Tensor], Callable[[int], Tensor]]
"""Given a piece of a registered buffer, tells how to find the same piece of another member's buffer."""


class SharedCarrier(Carrier):
    def __init__(
        self,
        rank: int,
        meter: Meter,
        check: Callable[[], None],
        timeout: float,
        counters: Tensor,  # (ranks, 2, WORDS) int64, common to all
        mail: Callable[[int], Tensor],  # a rank's (2, MAIL_BYTES) uint8 slots
        find: Find,
        spin: bool,
    ) -> None:
        super().__init__(rank, meter, check, timeout)
        self._words = counters.view(-1).numpy().data
        self._address = counters.data_ptr()
        self._mail, self.find = mail, find
        self._futex = Futex()
        self._spin = spin
        self._gathers = 0
        self._last_gather: _Gather | None = None

    def regroup(self, generation: int, members: tuple[int, ...]) -> None:
        super().regroup(generation, members)
        self._last_gather, self._gathers = None, 0
        self.publish(self._issued)
        self.mark_reduced(self._issued)

    # -- counters -----------------------------------------------------------------------------------------------
    def _word(self, rank: int, which: int) -> int:
        return (rank * 2 + which) * WORDS

    def _set(self, which: int, number: int) -> None:
        word = self._word(self.rank, which)
        self._words[word] = number
        self._futex.wake(self._address + 8 * word)

    def publish(self, number: int) -> None:
        self._set(0, number)

    def mark_reduced(self, number: int) -> None:
        self._set(1, number)

    def announce(self, operation: _SharedOperation) -> None:
        """Write what an operation is, before it is published."""
        word = self._about(self.rank, operation.number)
        self._words[word] = operation.number  # first, so that nobody takes what follows for the one before
        self._words[word + 1] = operation.about

    def compare(self, operation: _SharedOperation) -> None:
        """Raise UnequalSizes or UnequalCalls if not all members, who have published it, do the same."""
        for rank in self.members:
            word = self._about(rank, operation.number)
            about = self._words[word + 1]
            if about != operation.about and self._words[word] == operation.number:  # else it is further ahead
                self._refuse(operation, rank, about)

    def _refuse(self, operation: _SharedOperation, other: int, about: int) -> None:
        mine, theirs = CollectiveCall.of(operation.about), CollectiveCall.of(about)
        if mine._replace(numel=theirs.numel) == theirs:
            raise UnequalSizes(operation.what, {self.rank: mine.numel, other: theirs.numel})
        raise UnequalCalls({self.rank: mine.in_words(), other: theirs.in_words()})

    def _about(self, rank: int, number: int) -> int:
        return self._word(rank, 0) + ABOUT + 2 * (number % KEPT)

    def behind(self, which: int, number: int) -> int | None:
        """A member whose counter has not come to `number`, if there is one."""
        for rank in self.members:
            if self._words[self._word(rank, which)] < number:
                return rank
        return None

    def published(self, rank: int) -> int:
        return self._words[self._word(rank, 0)]

    def idle(self, head: Operation, waited: float) -> None:
        assert isinstance(head, _SharedOperation)
        rank, which = head.lagging(), head.stage
        word = self._word(rank, which)
        seen = self._words[word]
        if seen >= head.number:
            return
        if waited < SPIN_SECONDS:
            if not self._spin:
                os.sched_yield()
            return
        self._futex.wait(self._address + 8 * word, seen & 0xFFFFFFFF, REST_SECONDS)

    # -- operations ---------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor) -> Operation:
        if tensor.nbytes <= SMALL_BYTES:
            return self.launch(_SmallReduce(self, tensor))
        return self.launch(_Reduce(self, tensor, self.members))

    def reduce(self, tensor: Tensor, root: int) -> Operation:
        """The sum, in the root's tensor; the first member's is scratch afterwards, the others' are as they were."""
        return self.launch(_Reduce(self, tensor, (root,)))

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Operation:
        return self.launch(_Scatter(self, region, parts))

    def all_gather(self, vector: Tensor) -> Operation:
        return self.launch(_LargeGather(self, vector) if vector.nbytes > MAIL_BYTES else _Gather(self, vector))

    def broadcast(self, tensor: Tensor, root: int) -> Operation:
        return self.launch(_Broadcast(self, tensor, root))

    def barrier(self) -> Operation:
        return self.launch(_Barrier(self))

    def slot(self, rank: int, gather: int) -> Tensor:
        return self._mail(rank)[gather % 2]

    def fill_slot(self, gather: int, vector: Tensor) -> None:
        self.slot(self.rank, gather)[: vector.nbytes].view(vector.dtype).copy_(vector.view(-1))

    def next_gather(self, operation: _Gather) -> int:
        """Two slots are enough if the previous gather is finished here before the next one starts."""
        if self._last_gather is not None and not self._last_gather.finished:
            self.finish(self._last_gather, None)
        self._last_gather = operation
        self._gathers += 1
        return self._gathers


class CollectiveCall(NamedTuple):
    """What an operation is, which must be the same on all members; it fits into a word."""

    kind: int
    numel: int = 0
    dtype: int = 0
    root: int = -1

    def word(self) -> int:
        return ((self.numel << 6 | self.dtype) << 11 | self.root + 1) << 3 | self.kind

    @classmethod
    def of(cls, word: int) -> CollectiveCall:
        return cls(word & 7, word >> 20, word >> 14 & 63, (word >> 3 & 2047) - 1)

    def in_words(self) -> str:
        given = f" of {self.numel} {str(_TYPES[self.dtype]).removeprefix('torch.')}" if self.kind else ""
        return with_article(_KINDS[self.kind]) + given + (f" with root {self.root}" if self.root >= 0 else "")


class _SharedOperation(Operation):
    carrier: SharedCarrier
    stage = 0  # which counter of the others it waits for

    def __init__(self, carrier: SharedCarrier, tensor: Tensor | None = None, root: int = -1) -> None:
        super().__init__(carrier)
        kind = _KINDS.index(self.what)
        call = (
            CollectiveCall(kind)
            if tensor is None
            else CollectiveCall(kind, tensor.numel(), _NUMBERED[tensor.dtype], root)
        )
        self.about = call.word()

    def lagging(self) -> int:
        rank = self.carrier.behind(self.stage, self.number)
        return self.carrier.rank if rank is None else rank

    def start(self) -> None:
        self.carrier.announce(self)
        self.carrier.publish(self.number)

    def work(self) -> None:
        """Sum this member's share, once everybody has published."""

    def advance(self) -> bool:
        if self.carrier.behind(0, self.number) is not None:
            return False
        self.carrier.compare(self)
        self.work()
        self.carrier.mark_reduced(self.number)
        return True


class _Barrier(_SharedOperation):
    what = "barrier"


class _Both(_SharedOperation):
    """Finished only when everybody's share of the work is done."""

    def advance(self) -> bool:
        if self.stage == 0:
            if not super().advance():
                return False
            self.stage = 1
        return self.carrier.behind(1, self.number) is None


class _Reduce(_Both):
    what = "all-reduce"

    def __init__(self, carrier: SharedCarrier, tensor: Tensor, targets: tuple[int, ...]) -> None:
        super().__init__(carrier, tensor, targets[0] if targets != carrier.members else -1)
        self.tensor, self.targets = tensor, targets

    def work(self) -> None:
        members = self.carrier.members
        if len(members) == 1:
            return
        twin = self.carrier.find(self.tensor)
        start, stop = slices(self.tensor.numel(), len(members))[self.carrier.index]
        first, *rest = (twin(rank).view(-1)[start:stop] for rank in members)
        targets = [other for rank, other in zip(members[1:], rest, strict=True) if rank in self.targets]
        for a in range(0, stop - start, CHUNK):
            total = first[a : a + CHUNK]
            for other in rest:
                total += other[a : a + CHUNK]
            for other in targets:
                other[a : a + CHUNK] = total
        others = sum(rank != self.carrier.rank for rank in self.targets)
        self.carrier.meter.bytes_sent += others * (stop - start) * self.tensor.element_size()


class _Scatter(_SharedOperation):
    what = "reduce-scatter"

    def __init__(self, carrier: SharedCarrier, region: Tensor, parts: Sequence[Part]) -> None:
        super().__init__(carrier, region)
        self.region, self.parts = region, parts
        self.mine = slices(region.numel(), len(carrier.members))[carrier.index]

    def start(self) -> None:
        """Copy out what others will sum; my own slice stays where autograd left it."""
        low, high = self.mine
        for part in self.parts:
            for a, b in ((part.start, min(part.stop, low)), (max(part.start, high), part.stop)):
                if a < b:
                    self.region[a:b] = 0 if part.data is None else part.data[a - part.start : b - part.start]
        super().start()
        self.carrier.meter.bytes_sent += (self.region.numel() - (high - low)) * self.region.element_size()

    def work(self) -> None:
        twin = self.carrier.find(self.region)
        theirs = {rank: twin(rank) for rank in self.carrier.members if rank != self.carrier.rank}
        low, high = self.mine
        for part in self.parts:
            a, b = max(part.start, low), min(part.stop, high)
            if a < b:
                own = None if part.data is None else part.data[a - part.start : b - part.start]
                terms = (theirs[r][a:b] if r in theirs else own for r in self.carrier.members)
                add_up(self.region[a:b], [t for t in terms if t is not None])


class _Gather(_SharedOperation):
    what = "all-gather"

    def __init__(self, carrier: SharedCarrier, vector: Tensor) -> None:
        super().__init__(carrier, vector)
        assert vector.nbytes <= MAIL_BYTES, f"vector of {vector.nbytes} bytes (limit: {MAIL_BYTES})"
        self.vector = vector.contiguous()
        self.gather = carrier.next_gather(self)

    def _view(self, rank: int) -> Tensor:
        slot = self.carrier.slot(rank, self.gather)[: self.vector.nbytes]
        return slot.view(self.vector.dtype)

    def start(self) -> None:
        self.carrier.fill_slot(self.gather, self.vector)
        self.carrier.meter.bytes_sent += (len(self.carrier.members) - 1) * self.vector.nbytes
        super().start()

    def work(self) -> None:
        self.result = torch.stack(self._views())

    def _views(self) -> list[Tensor]:
        """What every member has put there."""
        return [self._view(rank) for rank in self.carrier.members]


class _LargeGather(_Both):
    """Of vectors larger than a slot: pieces of registered buffers, which the others copy from where they lie."""

    what = "all-gather"

    def __init__(self, carrier: SharedCarrier, vector: Tensor) -> None:
        super().__init__(carrier)
        self.vector = vector

    def work(self) -> None:
        carrier, twin = self.carrier, self.carrier.find(self.vector)
        self.result = torch.stack([self.vector if rank == carrier.rank else twin(rank) for rank in carrier.members])
        carrier.meter.bytes_sent += (len(carrier.members) - 1) * self.vector.nbytes


class _SmallReduce(_Gather):
    what = "all-reduce"

    def work(self) -> None:
        total = self.vector.view(-1)
        add_up(total, [v.clone() if i == self.carrier.index else v for i, v in enumerate(self._views())])


class _Broadcast(_Both):
    what = "broadcast"

    def __init__(self, carrier: SharedCarrier, tensor: Tensor, root: int) -> None:
        super().__init__(carrier, tensor, root)
        self.tensor, self.root = tensor, root

    def work(self) -> None:
        if self.carrier.rank == self.root:
            self.carrier.meter.bytes_sent += (len(self.carrier.members) - 1) * self.tensor.nbytes
        else:
            self.tensor.copy_(self.carrier.find(self.tensor)(self.root))


def add_up(out: Tensor, terms: Sequence[Tensor]) -> None:
    """out = terms[0] + terms[1] + ..., left to right, in chunks; `out` is none of the terms."""
    if len(terms) < 2:
        out.copy_(terms[0]) if terms else out.zero_()
        return
    step = CHUNK if len(terms) > 2 else max(1, out.numel())
    for a in range(0, out.numel(), step):
        piece = out[a : a + step]
        torch.add(terms[0][a : a + step], terms[1][a : a + step], out=piece)
        for term in terms[2:]:
            piece += term[a : a + step]
