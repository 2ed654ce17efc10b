"""What a message takes: latency, and the time of its bytes on the sender's and on the receiver's NIC.

    sender's NIC     |== a ==|== b ==|                one message after the other, receivers taking turns
    latency                  ·········
    receiver's NIC            |== a ==|== c ==|        first come, first served, whoever sent it
    receiver                          |= a =|= c =|    applies or copies it, and has it then

So what many send to one queues there. Small messages do not queue: on a real line they pass between the packets of
large ones. Messages of one role to another never overtake each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from torrential.comm.protocol import SERVERS, role_name
from torrential.worlds.sim.cluster import Network as Costs
from torrential.worlds.sim.kernel import Kernel
from torrential.worlds.sim.trace import IN, OUT, Trace

SMALL = 16_384  # bytes
TINY = 1_024  # nothing to deal with


Pair = tuple[int, int]  # the addresses of a sender and a receiver


class Line:
    """One direction of a NIC, or of a role's memory."""

    __slots__ = ("bandwidth", "busy", "free_at")

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth, self.free_at, self.busy = bandwidth, 0.0, 0.0

    def take(self, now: float, nbytes: int) -> float:
        """From now on, or after those before it; returns when the first byte goes."""
        seconds = nbytes / self.bandwidth
        start = now if nbytes <= SMALL else max(now, self.free_at)
        if nbytes > SMALL:
            self.free_at = start + seconds
        self.busy += seconds
        return start


class Network:
    def __init__(self, kernel: Kernel, costs: Costs, trace: Trace | None = None) -> None:
        self._kernel, self._costs, self._trace = kernel, costs, trace
        self._out: dict[int, Line] = {}  # by host
        self._in: dict[int, Line] = {}
        self._inside: dict[int, Line] = {}  # by the address of the sender
        self._handled: dict[int, float] = {}  # by address: when the last that came will have been dealt with
        self._coming: dict[Pair, tuple[int, float]] = {}  # by pair: how many are on the way, and till when
        self._last: dict[Pair, float] = {}  # by pair of addresses: when the last message was delivered
        self._leaving: dict[Pair, float] = {}  # when the last large message of a pair has left the sender's NIC
        self._backlog: dict[Pair, deque[tuple[Any, ...]]] = {}  # what waits for that
        self._held: dict[frozenset[int], float] = {}  # sides of partitions: until when
        self._slow: list[tuple[frozenset[int], float]] = []  # sides of slow links, and what they add
        self.messages = 0
        self.bytes = 0

    def send(
        self, source: int, from_host: int, to: int, to_host: int, nbytes: int, deliver: Callable[..., None], *args: Any
    ) -> None:
        """`deliver(*args)` is called when all of it is there."""
        self.messages += 1
        self.bytes += nbytes
        now, costs = self._kernel.now, self._costs
        if from_host == to_host:
            line = self._inside.get(source) or self._inside.setdefault(source, Line(costs.inside_bandwidth))
            start = line.take(now, nbytes) + costs.inside_latency
            self._deliver(source, to, to_host, start + nbytes / line.bandwidth, nbytes, deliver, args)
            return
        pair = source, to
        if pair in self._backlog or (nbytes > SMALL and self._leaving.get(pair, 0.0) > now):
            self._queue(pair, from_host, to_host, nbytes, deliver, args)
        else:
            self._leave(pair, from_host, to_host, nbytes, deliver, args)

    def _queue(self, pair: Pair, *rest: Any) -> None:
        """Behind those of the same pair, of which one at a time is on the line."""
        if pair not in self._backlog:
            self._backlog[pair] = deque()
            self._kernel.at(self._leaving[pair], self._next, pair)
        self._backlog[pair].append(rest)

    def _next(self, pair: Pair) -> None:
        backlog = self._backlog[pair]
        self._leave(pair, *backlog.popleft())
        if backlog:
            self._kernel.at(max(self._kernel.now, self._leaving[pair]), self._next, pair)
        else:
            del self._backlog[pair]

    def _leave(
        self,
        pair: Pair,
        from_host: int,
        to_host: int,
        nbytes: int,
        deliver: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        (source, to), now, costs = pair, self._kernel.now, self._costs
        line = self._out.get(from_host) or self._out.setdefault(from_host, Line(costs.bandwidth))
        start = line.take(now, nbytes)
        if nbytes > SMALL:
            self._leaving[pair] = line.free_at
        if self._trace is not None:
            self._trace.span(from_host, OUT, f"to {to_host}", start, start + nbytes / line.bandwidth)
        start += costs.latency
        if self._held or self._slow:
            start = self._across(from_host, to_host, start)
            if start == inf:
                return
        if nbytes <= SMALL and pair not in self._coming:
            self._deliver(source, to, to_host, start + nbytes / line.bandwidth, nbytes, deliver, args)
            return
        count, last = self._coming.get(pair, (0, 0.0))
        start = max(start, last)
        self._coming[pair] = count + 1, start
        self._kernel.after(start - now, self._arrive, source, to, to_host, nbytes, deliver, args)

    def _arrive(
        self, source: int, to: int, to_host: int, nbytes: int, deliver: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        """The first byte has come."""
        pair = source, to
        count, last = self._coming[pair]
        if count > 1:
            self._coming[pair] = count - 1, last
        else:
            del self._coming[pair]
        line = self._in.get(to_host) or self._in.setdefault(to_host, Line(self._costs.bandwidth))
        start = line.take(self._kernel.now, nbytes)
        if self._trace is not None:
            self._trace.span(to_host, IN, "arrives", start, start + nbytes / line.bandwidth)
        self._deliver(source, to, to_host, start + nbytes / line.bandwidth, nbytes, deliver, args)

    def _deliver(
        self,
        source: int,
        to: int,
        to_host: int,
        when: float,
        nbytes: int,
        deliver: Callable[..., None],
        args: tuple[Any, ...],
    ) -> None:
        """All of it is there at `when`."""
        pair = source, to
        last = self._last.get(pair, 0.0)
        if last > when:
            when = last
        if nbytes > TINY and self._costs.handling:
            start = max(when, self._handled.get(to, 0.0))
            when = self._handled[to] = start + nbytes * self._costs.handling
            if self._trace is not None and to >= SERVERS:
                self._trace.span(to_host, to, f"from {role_name(source)}", start, when)
        self._last[pair] = when
        self._kernel.at(when, deliver, *args)  # not after a difference, which would be rounded

    # -- faults ---------------------------------------------------------------------------------------------------
    def part(self, side: frozenset[int], seconds: float | None) -> None:
        """What is sent across waits until it is over."""
        until = inf if seconds is None else self._kernel.now + seconds
        self._held[side] = max(until, self._held.get(side, 0.0))

    def slow(self, side: frozenset[int], delay: float, seconds: float | None = None) -> None:
        """What is sent across takes longer, from now on or so long; several at once add up."""
        link = side, delay
        self._slow.append(link)
        if seconds is not None:
            self._kernel.after(seconds, self._slow.remove, link)

    def _across(self, one: int, other: int, start: float) -> float:
        for side, until in self._held.items():
            if (one in side) != (other in side):
                start = max(start, until)
        return start + sum(delay for side, delay in self._slow if (one in side) != (other in side))
