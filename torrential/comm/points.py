"""Tensors from one member to another, over whatever carries messages between them.

    member 1   send(activation, to=2, tag="forward") ──►   member 2   recv(into, source=1, tag="forward")

What one member sends another under one tag arrives in order. Both sides belong to one generation: when members change,
waits raise Regrouped, and what was on its way is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from torrential.comm.channel import Channel
from torrential.comm.outbox import Outgoing
from torrential.comm.protocol import Complaints, Meter, role_name
from torrential.errors import RunFailed, WaitedTooLong

REST_SECONDS = 2e-3


class PointToPoint:
    """One member's ends of such transfers."""

    def __init__(
        self,
        channel: Channel,
        meter: Meter,
        check: Callable[[], None],
        timeout: float,
        complaints: Complaints,
    ) -> None:
        """`check` raises Regrouped when members have changed; `complaints` are told of waits that last longer than
        `timeout`."""
        self.channel, self.meter, self.check, self.timeout = channel, meter, check, timeout
        self.complaints = complaints
        self.rank, self.members = -1, tuple[int, ...]()
        self._sent: Counter[tuple[int, str]] = Counter()
        self._received: Counter[tuple[int, str]] = Counter()

    def regroup(self, rank: int, members: tuple[int, ...]) -> None:
        """A new generation begins: transfers are counted anew."""
        self.rank, self.members = rank, members
        self._sent.clear()
        self._received.clear()

    def _check_member(self, other: int) -> None:
        if other == self.rank or other not in self.members:
            others = ", ".join(str(rank) for rank in self.members if rank != self.rank) or "none"
            two = f"{role_name(self.rank)} exchanges a tensor with {role_name(other) if other >= 0 else other}"
            raise RunFailed(f"{two}, which is no other member ({others})")

    def send(self, tensor: Tensor, to: int, tag: str) -> Transfer:
        self._check_member(to)
        number = self._sent[to, tag]
        self._sent[to, tag] += 1
        self.meter.bytes_sent += tensor.nbytes
        outgoing = self.channel.send(to, f"to/{tag}/{number}", [tensor.detach().contiguous()])
        return Transfer(self, to, f"to take a tensor{_tagged(tag)}", outgoing)

    def recv(self, into: Tensor, source: int, tag: str) -> Arrival:
        self._check_member(source)
        number = self._received[source, tag]
        self._received[source, tag] += 1
        name = f"to/{tag}/{number}"
        if self.channel.lands and into.is_contiguous():
            self.channel.expect(source, name, [into])
        return Arrival(self, source, name, _tagged(tag), into)

    def finish(self, done: Callable[[], bool], whom: int, what: str, timeout: float | None) -> None:
        """Wait until it is done. `what`: what `whom` is waited for. Raises WaitedTooLong after a `timeout` that the
        caller has given."""
        began = self.meter.clock()
        limit, late = self.timeout if timeout is None else timeout, False
        try:
            while not done():
                self.check()
                waited = self.meter.clock() - began
                if waited > limit:
                    if timeout is not None:
                        raise WaitedTooLong(f"worker {whom}", waited, what)
                    late = True
                    self.complaints.overdue(whom, what, waited)
                    limit += self.timeout
                self.channel.pause(REST_SECONDS)
        finally:
            if late:
                self.complaints.relieved()
            self.meter.wait += self.meter.clock() - began


class Transfer:
    """The handle of a tensor that is being sent; done when it may be changed."""

    def __init__(self, points: PointToPoint, to: int, what: str, outgoing: Outgoing) -> None:
        self._points, self._to, self._what, self._outgoing = points, to, what, outgoing

    def done(self) -> bool:
        return self._outgoing.done()

    def wait(self, timeout: float | None = None) -> None:
        self._points.finish(self._outgoing.done, self._to, self._what, timeout)


class Arrival:
    """The handle of a tensor that is to come."""

    def __init__(self, points: PointToPoint, source: int, key: str, tagged: str, into: Tensor) -> None:
        self._points, self._source, self._key, self._tagged, self._into = points, source, key, tagged, into
        self._here = False

    def done(self) -> bool:
        channel = self._points.channel
        if not self._here:
            channel.poll()
        if not self._here and channel.arrived(self._source, self._key):
            (came,) = channel.take(self._source, self._key)
            if came.numel() != self._into.numel():
                raise RunFailed(
                    f"worker {self._source} sent a tensor{self._tagged} of {came.numel()} elements, and worker "
                    f"{self._points.rank} receives it into one of {self._into.numel()}; make both of one size"
                )
            if not self._into.is_meta and came.data_ptr() != self._into.data_ptr():
                self._into.copy_(came.view(self._into.shape))
            self._here = True
        return self._here

    def wait(self, timeout: float | None = None) -> Tensor:
        self._points.finish(self.done, self._source, f"to send a tensor{self._tagged}", timeout)
        return self._into


def _tagged(tag: str) -> str:
    return f" (tag {tag!r})" if tag else ""
