"""All-reduce in two levels: through shared memory inside a host, by messages between the hosts' first members.

    host 0        host 1                                     up     workers of a host sum into their first one's buffer
    0 <── 1       2 <── 3        up, in memory               wire   the first ones all-reduce: small vectors by halving,
    0 <─────────> 2              wire                               which has the least latency, large ones as asked
    0 ──> 1       2 ──> 3        down, in memory             down   the first one's buffer is copied by its host

Ups, wires and downs each follow one order, that of the operations, which is the same on every host (Goyal et al.,
2017); so going up and going down have a shared carrier each. Everything but all_reduce goes by messages.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torrential.comm.carrier import Operation
from torrential.comm.channel import Channel
from torrential.comm.order import InOrder
from torrential.comm.protocol import Meter
from torrential.comm.scheduled import Execution, ScheduledCarrier, planned
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.shared import SharedCarrier

SMALL_BYTES = 256 << 10


class HierarchicalCarrier(ScheduledCarrier):
    def __init__(
        self,
        rank: int,
        meter: Meter,
        check: Callable[[], None],
        timeout: float,
        channel: Channel,
        shared: Callable[[str, Meter], SharedCarrier],  # makes one, its counters apart from those of another name
        host: Callable[[int], object],  # names the host of a rank
    ) -> None:
        super().__init__(rank, meter, check, timeout, channel)
        self._inside = Meter()  # the shared carriers'; their bytes are ours, their time is in ours already
        self.up, self.down = shared("up", self._inside), shared("down", self._inside)
        self._host = host

    def regroup(self, generation: int, members: tuple[int, ...]) -> None:
        super().regroup(generation, members)
        by_host: dict[object, list[int]] = {}
        for rank in members:
            by_host.setdefault(self._host(rank), []).append(rank)
        mine = tuple(by_host[self._host(self.rank)])
        self.first = mine[0]  # the first worker of this host
        self.firsts = tuple(ranks[0] for ranks in by_host.values())
        self.up.regroup(generation, mine)
        self.down.regroup(generation, mine)
        self._count = 0
        self._not_down: dict[int, _Levels] = {}  # by place
        self.downs = InOrder(lambda place: self._not_down.pop(place).descend())

    def all_reduce(self, tensor: Tensor, algorithm: str | None = None) -> Operation:
        """`tensor` is part of a registered buffer; `algorithm` is for the wire."""
        name = "halving" if tensor.nbytes < SMALL_BYTES else algorithm or "ring"
        operation = self._not_down[self._count] = _Levels(self, tensor, name, self._count)
        self._count += 1
        return self.launch(operation)

    def all_reduce_flat(self, tensor: Tensor, algorithm: str) -> Operation:
        """By messages between all members, whichever host they are on."""
        return super().all_reduce(tensor, algorithm)

    def _advance(self) -> None:
        super()._advance()
        self.meter.bytes_sent += self._inside.bytes_sent
        self._inside.bytes_sent = 0

    def idle(self, head: Operation, waited: float) -> None:
        below = head.waits_in_memory() if isinstance(head, _Levels) else None
        if below is None:
            super().idle(head, waited)
        else:
            below.carrier.idle(below, waited)


class _Levels(Operation):
    what = "hierarchical all-reduce"
    carrier: HierarchicalCarrier

    def __init__(self, carrier: HierarchicalCarrier, tensor: Tensor, algorithm: str, place: int) -> None:
        super().__init__(carrier)
        self.tensor, self.algorithm, self.place = tensor, algorithm, place
        self.up: Operation | None = None
        self.wire: Execution | None = None
        self.down: Operation | None = None

    def start(self) -> None:
        self.up = self.carrier.up.reduce(self.tensor, self.carrier.first)
        if self.carrier.rank != self.carrier.first:
            self.carrier.downs.ready(self.place)  # it waits there for the first one

    def descend(self) -> None:
        self.down = self.carrier.down.broadcast(self.tensor, self.carrier.first)

    def advance(self) -> bool:
        assert self.up is not None
        if not self.up.done():
            return False
        if self.carrier.rank == self.carrier.first and self.down is None and not self._crossed():
            return False
        return self.down is not None and self.down.done()

    def _crossed(self) -> bool:
        """Advance the sum over all hosts, on a host's first worker; True once it is here and may be passed to the
        others."""
        firsts = self.carrier.firsts
        if self.wire is None:
            make = ALGORITHMS[self.algorithm].plan
            plan = planned(make, firsts.index(self.carrier.rank), len(firsts), self.tensor.numel())
            self.wire = Execution(self.carrier, self.number, plan, self.tensor, firsts, self.what)
            self.wire.start()
        if not (self.wire.advance() and self.wire.all_sent()):
            return False
        self.carrier.downs.ready(self.place)
        return True

    def waits_in_memory(self) -> Operation | None:
        """The operation of a shared carrier that it waits for now, if it is one."""
        if self.up is not None and not self.up.finished:
            return self.up
        return self.down

    def lagging(self) -> int:
        below = self.waits_in_memory()
        if below is not None:
            return below.lagging()
        return self.carrier.rank if self.wire is None else self.wire.lagging()
