"""Tensors from one member to another, over any channel that carries messages between them.

    member 1   send(activation, to=2, tag="forward") ──►   member 2   recv(into, source=1, tag="forward")

What one member sends another under one tag arrives in order. Both sides belong to one generation: when members change,
waits raise Regrouped, and what was on its way is dropped. What is passed on (`pass_on`, `take`) travels through memory
that both see, where there is such between the two (comm/lanes.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from torrential.comm.channel import Channel
from torrential.comm.lanes import Lane, lane_bytes
from torrential.comm.outbox import Outgoing
from torrential.comm.protocol import Complaints, Meter, role_name
from torrential.errors import RunFailed, WaitedTooLong

REST_SECONDS = 2e-3
WRITTEN = Outgoing()  # the handle of what lies where the other side reads it
WRITTEN.mark()


class PointToPoint:
    """One member's ends of such transfers."""

    def __init__(
        self,
        channel: Channel,
        meter: Meter,
        check: Callable[[], None],
        timeout: float,
        complaints: Complaints,
        common: Callable[[str, int], Tensor] | None = None,
        near: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        """`check` raises Regrouped when members have changed; `complaints` are told of waits that last longer than
        `timeout`; `common`: gives so many bytes, by name, that members who are `near` one another see, where memory is
        shared."""
        self.channel, self.meter, self.check, self.timeout = channel, meter, check, timeout
        self.complaints, self._common, self._near = complaints, common, near
        self._lanes: dict[str, Lane] = {}
        self._generation = 0
        self.rank, self.members = -1, tuple[int, ...]()
        self._sent: Counter[tuple[int, str]] = Counter()
        self._received: Counter[tuple[int, str]] = Counter()

    def regroup(self, rank: int, members: tuple[int, ...], generation: int) -> None:
        """A new generation begins: transfers are counted anew."""
        self.rank, self.members, self._generation = rank, members, generation
        for lane in self._lanes.values():
            lane.regroup(generation)
        self._sent.clear()
        self._received.clear()

    def _check_member(self, other: int) -> None:
        if other == self.rank or other not in self.members:
            others = ", ".join(str(rank) for rank in self.members if rank != self.rank) or "none"
            two = f"{role_name(self.rank)} exchanges a tensor with {role_name(other) if other >= 0 else other}"
            raise RunFailed(f"{two}, which is no other member ({others})")

    def refuse_unlike(self, came: Tensor, dtype: torch.dtype, sizes: Sequence[int], source: int, tagged: str) -> None:
        """Raise RunFailed if a tensor that came is not of the type and shape that were expected."""
        if came.dtype != dtype or came.shape != torch.Size(sizes):
            raise RunFailed(
                f"worker {source} sent a tensor{tagged} of {_kind(came.dtype, came.shape)}, and worker {self.rank} "
                f"expects one of {_kind(dtype, sizes)}; make both of one type and shape"
            )

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

    # -- through memory that both see ---------------------------------------------------------------------------------
    def pass_on(self, tensor: Tensor, to: int, tag: str, room: int) -> Transfer:
        self._check_member(to)
        lane = self._lane(self.rank, to, tag, room, tensor.nbytes)
        if lane is None or not lane.put(tensor.detach()):
            return self.send(tensor, to, tag)
        self.meter.bytes_sent += tensor.nbytes
        return Transfer(self, to, f"to take a tensor{_tagged(tag)}", WRITTEN)

    def take(self, sizes: Sequence[int], dtype: torch.dtype, source: int, tag: str, room: int) -> Arrival | Passed:
        self._check_member(source)
        nbytes = math.prod(sizes) * dtype.itemsize
        lane = self._lane(source, self.rank, tag, room, nbytes)
        letter = partial(self._letter, sizes, dtype, source, tag)
        return letter() if lane is None else Passed(self, lane, sizes, dtype, source, tag, letter)

    def _letter(self, sizes: Sequence[int], dtype: torch.dtype, source: int, tag: str) -> Arrival:
        return self.recv(torch.empty(sizes, dtype=dtype), source, tag)

    def _lane(self, source: int, to: int, tag: str, room: int, nbytes: int) -> Lane | None:
        if self._common is None or not nbytes or not (self._near(source) and self._near(to)):
            return None
        name = f"lane {source}>{to} {tag} {room}x{nbytes}"
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(self._common(name, lane_bytes(room, nbytes)), room, nbytes)
            lane.regroup(self._generation)
        return lane

    # -- waiting ------------------------------------------------------------------------------------------------------
    def finish(
        self,
        done: Callable[[], bool],
        whom: int,
        what: str,
        timeout: float | None,
        pause: Callable[[float], None] | None = None,
    ) -> None:
        """Wait until it is done. `what`: what `whom` is waited for; `pause`: sleeps for a moment, given how long it was
        waited. Raises WaitedTooLong after a `timeout` that the caller has given."""
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
                if pause is None:
                    self.channel.pause(REST_SECONDS)
                else:
                    pause(waited)
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
            self._points.refuse_unlike(came, self._into.dtype, self._into.shape, self._source, self._tagged)
            if not self._into.is_meta and came.data_ptr() != self._into.data_ptr():
                self._into.copy_(came)
            self._here = True
        return self._here

    def wait(self, timeout: float | None = None) -> Tensor:
        self._points.finish(self.done, self._source, f"to send a tensor{self._tagged}", timeout)
        return self._into


class Passed:
    """The handle of a tensor that is to come through memory that both see, or else as a letter."""

    def __init__(
        self,
        points: PointToPoint,
        lane: Lane,
        sizes: Sequence[int],
        dtype: torch.dtype,
        source: int,
        tag: str,
        letter: Callable[[], Arrival],
    ) -> None:
        self._points, self._lane, self._sizes, self._dtype = points, lane, sizes, dtype
        self._source, self._tagged, self._letter = source, _tagged(tag), letter
        self._number = lane.expect()

    def done(self) -> bool:
        return self._lane.posted(self._number)

    def wait(self, timeout: float | None = None) -> Tensor:
        pause = partial(self._lane.pause, self._number)
        self._points.finish(self.done, self._source, f"to send a tensor{self._tagged}", timeout, pause)
        tensor = self._lane.take(self._number)
        if tensor is None:
            return self._letter().wait(timeout)
        self._points.refuse_unlike(tensor, self._dtype, self._sizes, self._source, self._tagged)
        return tensor


def _tagged(tag: str) -> str:
    return f" (tag {tag!r})" if tag else ""


def _kind(dtype: torch.dtype, sizes: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(sizes)}"
