"""Collectives by messages: any plan of comm/schedules, carried out over a channel.

    start     say where every message of the plan shall land: in the vector what replaces, in scratch what is added
    advance   of each stream: start a step's sends; once its receives are here, add them up; on to the next step
    finished  every stream is at its end, and what was sent is with the kernel

A message's tag is the operation's number and name, and its key in the plan. Operations in flight progress side by side,
each as far as it can; only their numbers, the same for all members, are given out in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from torrential.comm.carrier import Carrier, Operation, with_article
from torrential.comm.channel import Channel
from torrential.comm.outbox import Outgoing
from torrential.comm.protocol import Meter, Part
from torrential.comm.schedules import ALGORITHMS, bruck, direct, naive, tree
from torrential.comm.schedules.base import Plan, Receive, Send, Stream
from torrential.comm.shared import CHUNK
from torrential.errors import UnequalCalls, UnequalSizes

REST_SECONDS = 2e-3
MANY = 16  # members; up to here all-gathers go straight to everybody, in one round

Place = tuple[int, str]  # who sends it, and its tag


@lru_cache(maxsize=8192)
def planned(make: Callable[..., Plan], *args: int) -> Plan:
    return make(*args)


class ScheduledCarrier(Carrier):
    def __init__(
        self,
        rank: int,
        meter: Meter,
        check: Callable[[], None],
        timeout: float,
        channel: Channel,
        prefix: str = "",
    ) -> None:
        super().__init__(rank, meter, check, timeout)
        self.channel = channel
        self.prefix = prefix  # of its tags, apart from those of other carriers over the same channel

    def idle(self, head: Operation, waited: float) -> None:
        self.channel.pause(REST_SECONDS)

    def _advance(self) -> None:
        self.channel.poll()
        for operation in list(self._queue):
            if operation.advance():
                operation.finished = True
                self._queue.remove(operation)

    def _plan(self, make: Callable[..., Plan], *args: int) -> Plan:
        return planned(make, self.index, len(self.members), *args)

    # -- sums ---------------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor, algorithm: str | None = None) -> Operation:
        name = algorithm or "direct"
        plan = self._plan(ALGORITHMS[name].plan, tensor.numel())
        return self.launch(Planned(self, "all-reduce", plan, tensor))

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Operation:
        for part in parts:
            region[part.start : part.stop] = 0 if part.data is None else part.data
        plan = self._plan(direct.reduce_scatter, region.numel())
        return self.launch(Planned(self, "reduce-scatter", plan, region))

    def reduce(self, tensor: Tensor, root: int) -> Operation:
        """The sum, in the root's tensor; the others' are scratch afterwards."""
        plan = self._plan(tree.reduce, tensor.numel(), self.members.index(root))
        return self.launch(Planned(self, "reduce", plan, tensor))

    # -- copies -------------------------------------------------------------------------------------------------
    def broadcast(self, tensor: Tensor, root: int) -> Operation:
        plan = self._plan(tree.broadcast, tensor.numel(), self.members.index(root))
        return self.launch(Planned(self, "broadcast", plan, tensor))

    def all_gather(self, vector: Tensor) -> Operation:
        """Finished once everybody's vector is here, whether or not ours has left: a vote counts when it is heard."""
        return self._all_gather("all-gather", vector)

    def _all_gather(self, what: str, vector: Tensor) -> Operation:
        rows = self._rows(vector)
        many = len(self.members) > MANY
        plan = self._plan(bruck.all_gather if many else direct.share, rows.shape[1])
        operation = Planned(self, what, plan, rows)
        operation.until_sent = False
        operation.result = rows[:, : vector.numel()]
        return self.launch(operation)

    def gather(self, vector: Tensor, root: int) -> Operation:
        """Waits for a (members, numel) tensor on the root, for nothing of value elsewhere."""
        rows = self._rows(vector)
        plan = self._plan(naive.gather, rows.shape[1], self.members.index(root))
        operation = Planned(self, "gather", plan, rows)
        operation.result = rows[:, : vector.numel()] if self.rank == root else None
        return self.launch(operation)

    def all_to_all(self, tensor: Tensor) -> Operation:
        """Row i of a (members, ...) tensor goes to member i; waits for the rows that came, by member."""
        both = torch.empty(2, *tensor.shape, dtype=tensor.dtype)
        both[0] = tensor
        both[1, self.index] = tensor[self.index]
        plan = self._plan(direct.all_to_all, tensor[0].numel())
        operation = Planned(self, "all-to-all", plan, both)
        operation.result = both[1]
        return self.launch(operation)

    def barrier(self) -> Operation:
        return self._all_gather("barrier", torch.empty(0))

    def _rows(self, vector: Tensor) -> Tensor:
        """Room for a vector of each member, ours filled in; at least one element, so that there is a message."""
        rows = torch.zeros(len(self.members), max(1, vector.numel()), dtype=vector.dtype)
        rows[self.index, : vector.numel()] = vector.detach().view(-1)
        return rows


class Planned(Operation):
    """A plan as an operation of the queue."""

    carrier: ScheduledCarrier
    until_sent = True

    def __init__(self, carrier: ScheduledCarrier, what: str, plan: Plan, tensor: Tensor) -> None:
        super().__init__(carrier)
        self.what = what
        self.execution = Execution(carrier, self.number, plan, tensor, carrier.members, what)

    def start(self) -> None:
        self.execution.start()

    def advance(self) -> bool:
        return self.execution.advance() and (not self.until_sent or self.execution.all_sent())

    def lagging(self) -> int:
        return self.execution.lagging()


class Execution:
    """One plan under way on this member."""

    def __init__(
        self, carrier: ScheduledCarrier, number: int, plan: Plan, tensor: Tensor, members: Sequence[int], what: str
    ) -> None:
        """`what`: the collective that it is, as in "all-gather"."""
        self._channel, self._meter = carrier.channel, carrier.meter
        self._prefix = f"{carrier.prefix}{number} {what}/"
        self._members, self._what = members, what
        self._index = members.index(carrier.rank)
        self._vector = tensor.view(-1)
        self._streams = [_Cursor(stream, self._places(stream)) for stream in plan if stream]
        self._sent: list[tuple[int, Outgoing]] = []

    def start(self) -> None:
        vector = self._vector
        for cursor in self._streams if self._channel.lands else ():
            for step, places in zip(cursor.stream, cursor.places, strict=True):
                for r, place in zip(step.receives, places, strict=True):
                    into = vector.new_empty(r.stop - r.start) if r.add else vector[r.start : r.stop]
                    self._channel.expect(*place, [into])

    def advance(self) -> bool:
        """Do what can be done now; True when all that was to come has come."""
        if self._streams:
            self._streams = [cursor for cursor in self._streams if not self._follow(cursor)]
        return not self._streams

    def all_sent(self) -> bool:
        return all(outgoing.done() for _, outgoing in self._sent)

    def lagging(self) -> int:
        for cursor in self._streams:
            for place in cursor.places[cursor.at]:
                if not self._channel.arrived(*place):
                    return place[0]
        return next((to for to, outgoing in self._sent if not outgoing.done()), self._members[self._index])

    def _places(self, stream: Stream) -> list[list[Place]]:
        """The keys under which the channel keeps what each step receives."""
        members, prefix = self._members, self._prefix
        return [[(members[r.source], f"{prefix}{r.key}") for r in step.receives] for step in stream]

    def _follow(self, cursor: _Cursor) -> bool:
        """Take a stream as far as it goes; True at its end."""
        arrived = self._channel.arrived
        while cursor.at < len(cursor.stream):
            step, places = cursor.stream[cursor.at], cursor.places[cursor.at]
            if not cursor.entered:
                cursor.entered, cursor.seen = True, 0
                for send in step.sends:
                    self._send(send)
            while cursor.seen < len(places):
                if not arrived(*places[cursor.seen]):
                    return False
                cursor.seen += 1
            self._land(step.receives, places)
            cursor.at, cursor.entered = cursor.at + 1, False
        return True

    def _send(self, send: Send) -> None:
        part = self._vector[send.start : send.stop]
        to = self._members[send.to]
        self._sent.append((to, self._channel.send(to, f"{self._prefix}{send.key}", [part])))
        self._meter.bytes_sent += part.nbytes

    def _land(self, receives: Sequence[Receive], places: Sequence[Place]) -> None:
        terms: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}  # by part: what is to be added, and whose it is
        for receive, place in zip(receives, places, strict=True):
            (came,) = self._channel.take(*place)
            start, stop = receive.start, receive.stop
            if came.dtype != self._vector.dtype:
                mine, theirs = (str(t.dtype).removeprefix("torch.") for t in (self._vector, came))
                call = with_article(self._what)
                raise UnequalCalls({self._members[self._index]: f"{call} of {mine}", place[0]: f"{call} of {theirs}"})
            if came.numel() != stop - start:
                raise UnequalSizes(self._what, {self._members[self._index]: stop - start, place[0]: came.numel()})
            if receive.add:
                terms.setdefault((start, stop), []).append((receive.source, came))
                continue
            into = self._vector[start:stop]
            if came.data_ptr() != into.data_ptr():  # too early to land in its place
                into.copy_(came.view(-1))
        for (start, stop), by_member in terms.items():
            by_member.sort(key=lambda term: term[0])
            before = [came for source, came in by_member if source < self._index]
            after = [came for source, came in by_member if source > self._index]
            _add(before, self._vector[start:stop], after)


class _Cursor:
    """The position of a member in a stream."""

    def __init__(self, stream: Stream, places: list[list[Place]]) -> None:
        self.stream, self.places = stream, places
        self.at, self.entered = 0, False
        self.seen = 0  # of this step's receives: how many are known to be here


def _add(before: list[Tensor], own: Tensor, after: list[Tensor]) -> None:
    """own = before + own + after, left to right, in chunks; uses `before` up."""
    if own.is_meta:
        return  # a size without contents
    if len(before) + len(after) == 1 or own.numel() <= CHUNK:
        return _add_whole(before, own, after)
    for a in range(0, own.numel(), CHUNK):
        part = slice(a, a + CHUNK)
        _add_whole([term[part] for term in before], own[part], [term[part] for term in after])


def _add_whole(before: list[Tensor], own: Tensor, after: list[Tensor]) -> None:
    if before:
        first = before[0]
        for term in before[1:]:
            first += term
        torch.add(first, own, out=own)
    for term in after:
        own += term
