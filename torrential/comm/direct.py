"""Collectives by messages, each slice sent straight to its owner: the same sums in the same order as `shared`.

    all_reduce       slice j of my data -> member j | member j adds up what came, by rank | its slice -> everybody
    reduce_scatter   the first half of that
    all_gather       my vector -> everybody

Two rounds, 2(P-1)/P of the data sent per member, fan-in P-1: the parameter-server style of all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torrential.comm.carrier import Carrier, Operation
from torrential.comm.messenger import Messenger, Outgoing
from torrential.comm.protocol import Meter, Part, slices
from torrential.comm.shared import add_up

REST_SECONDS = 2e-3


class DirectCarrier(Carrier):
    def __init__(
        self, rank: int, meter: Meter, check: Callable[[], None], timeout: float, messenger: Messenger
    ) -> None:
        super().__init__(rank, meter, check, timeout)
        self.messenger = messenger

    def rest(self, head: Operation, waited: float) -> None:
        self.messenger.pause(REST_SECONDS)

    def others(self) -> list[int]:
        return [r for r in self.members if r != self.rank]

    def all_reduce(self, tensor: Tensor) -> Operation:
        return self.launch(_Reduce(self, tensor))

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Operation:
        return self.launch(_Scatter(self, region, parts))

    def all_gather(self, vector: Tensor) -> Operation:
        return self.launch(_Gather(self, vector))

    def broadcast(self, tensor: Tensor, root: int) -> Operation:
        return self.launch(_Broadcast(self, tensor, root))

    def barrier(self) -> Operation:
        return self.launch(_Gather(self, torch.empty(0)))


class _Exchange(Operation):
    """Expect messages from others, send them ours, wait until both have happened."""

    carrier: DirectCarrier

    def __init__(self, carrier: DirectCarrier) -> None:
        super().__init__(carrier)
        self.sent: list[Outgoing] = []
        self.awaited: list[tuple[int, str, Sequence[Tensor]]] = []

    def send(self, to: int, phase: str, tensors: Sequence[Tensor]) -> None:
        self.sent.append(self.carrier.messenger.send(to, f"{self.number}/{phase}", tensors))
        self.carrier.meter.bytes_sent += sum(t.nbytes for t in tensors)

    def expect(self, source: int, phase: str, into: Sequence[Tensor]) -> None:
        tag = f"{self.number}/{phase}"
        self.carrier.messenger.expect(source, tag, into)
        self.awaited.append((source, tag, into))

    def all_here(self) -> bool:
        while self.awaited and self.carrier.messenger.arrived(*self.awaited[-1][:2]):
            self.carrier.messenger.take(*self.awaited.pop())
        return not self.awaited

    def all_sent(self) -> bool:
        return all(o.done() for o in self.sent)

    def lagging(self) -> int:
        return self.awaited[-1][0] if self.awaited else self.carrier.others()[0]


class _Scatter(_Exchange):
    what = "reduce-scatter"
    in_place = False  # the parts are the region itself

    def __init__(self, carrier: DirectCarrier, region: Tensor, parts: Sequence[Part]) -> None:
        super().__init__(carrier)
        self.region, self.parts = region, parts
        self.cuts = slices(region.numel(), len(carrier.members))

    def start(self) -> None:
        low, high = self.cuts[self.carrier.index]
        self.inbox = {r: torch.empty(high - low, dtype=self.region.dtype) for r in self.carrier.others()}
        for rank, (a, b) in zip(self.carrier.members, self.cuts, strict=True):
            if rank == self.carrier.rank:
                continue
            self.expect(rank, "part", [self.inbox[rank]])
            for part in self.parts:  # lay the owner's slice out in one piece, to be sent as one
                left, right = max(part.start, a), min(part.stop, b)
                if left < right and not self.in_place:
                    data = 0 if part.data is None else part.data[left - part.start : right - part.start]
                    self.region[left:right] = data
            self.send(rank, "part", [self.region[a:b]])

    def reduce(self) -> None:
        low, high = self.cuts[self.carrier.index]
        for part in self.parts:
            a, b = max(part.start, low), min(part.stop, high)
            if a < b:
                own = None if part.data is None else part.data[a - part.start : b - part.start]
                if own is not None and self.in_place:
                    own = own.clone()
                terms = (self.inbox[r][a - low : b - low] if r in self.inbox else own for r in self.carrier.members)
                add_up(self.region[a:b], [t for t in terms if t is not None])
        self.inbox = {}

    def advance(self) -> bool:
        if self.inbox or len(self.carrier.members) == 1:
            if not self.all_here():
                return False
            self.reduce()
        return self.all_sent()


class _Reduce(_Scatter):
    what = "all-reduce"
    in_place = True

    def __init__(self, carrier: DirectCarrier, tensor: Tensor) -> None:
        flat = tensor.view(-1)
        super().__init__(carrier, flat, [Part(0, flat.numel(), flat)])
        self.reduced = False

    def advance(self) -> bool:
        if not self.reduced:
            if not self.all_here():
                return False
            self.reduce()
            self.reduced = True
            low, high = self.cuts[self.carrier.index]
            for rank, (a, b) in zip(self.carrier.members, self.cuts, strict=True):
                if rank != self.carrier.rank:
                    self.expect(rank, "sum", [self.region[a:b]])
                    self.send(rank, "sum", [self.region[low:high]])
        return self.all_here() and self.all_sent()


class _Gather(_Exchange):
    what = "all-gather"

    def __init__(self, carrier: DirectCarrier, vector: Tensor) -> None:
        super().__init__(carrier)
        self.vector = vector.detach().clone().view(-1)
        self.result = torch.empty(len(carrier.members), vector.numel(), dtype=vector.dtype)

    def start(self) -> None:
        for index, rank in enumerate(self.carrier.members):
            if rank == self.carrier.rank:
                self.result[index] = self.vector
            else:
                self.expect(rank, "vector", [self.result[index]])
                self.send(rank, "vector", [self.vector])

    def advance(self) -> bool:
        return self.all_here()


class _Broadcast(_Exchange):
    what = "broadcast"

    def __init__(self, carrier: DirectCarrier, tensor: Tensor, root: int) -> None:
        super().__init__(carrier)
        self.tensor, self.root = tensor, root

    def start(self) -> None:
        if self.carrier.rank == self.root:
            for rank in self.carrier.others():
                self.send(rank, "copy", [self.tensor])
        else:
            self.expect(self.root, "copy", [self.tensor])

    def advance(self) -> bool:
        return self.all_here() and self.all_sent()
