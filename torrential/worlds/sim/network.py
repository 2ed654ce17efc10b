"""What a message takes: latency, and the time of its bytes on the sender's and on the receiver's NIC.

    sender's NIC     |== a ==|== b ==|                one message after the other, receivers taking turns
    latency                  ·········
    receiver's NIC            |== a ==|== c ==|        first come, first served, from all senders
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
from torrential.worlds.sim.cluster import NetworkCosts
from torrential.worlds.sim.kernel import Kernel
from torrential.worlds.trace import IN, OUT, Trace

SMALL = 16_384  # bytes
TINY = 1_024  # nothing to deal with


class Line:
    """One direction of a NIC, or of a role's memory."""

    __slots__ = ("bandwidth", "busy", "free_at")

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth, self.free_at, self.busy = bandwidth, 0.0, 0.0

    def take(self, now: float, nbytes: int) -> float:
        """Send so many bytes now, or after those before them; returns when the first byte goes."""
        seconds = nbytes / self.bandwidth
        self.busy += seconds
        if nbytes <= SMALL:
            return now
        start = max(now, self.free_at)
        self.free_at = start + seconds
        return start


class Desk:
    """The place where a role deals with what has come."""

    __slots__ = ("free_at",)

    def __init__(self) -> None:
        self.free_at = 0.0


class Path:
    """The way from one role to another, and what is on it."""

    __slots__ = (
        "backlog",
        "coming",
        "coming_till",
        "desk",
        "from_host",
        "into",
        "last",
        "leaving",
        "out",
        "source",
        "to",
        "to_host",
    )

    def __init__(
        self, source: int, from_host: int, to: int, to_host: int, out: Line, into: Line | None, desk: Desk
    ) -> None:
        """`into`: None inside a host."""
        self.source, self.from_host, self.to, self.to_host = source, from_host, to, to_host
        self.out, self.into, self.desk = out, into, desk
        self.last = 0.0  # when the last message was delivered
        self.leaving = 0.0  # when the last large message has left the sender's NIC
        self.coming, self.coming_till = 0, 0.0  # how many are on the way to the receiver's NIC, and till when
        self.backlog: deque[Sending] = deque()  # what waits for the sender's NIC


Sending = tuple[int, Callable[..., None], tuple[Any, ...]]  # bytes, and whom to tell that they are there


class Network:
    """The simulated network: NICs that queue, partitions, and slow links."""

    def __init__(self, kernel: Kernel, costs: NetworkCosts, trace: Trace | None = None) -> None:
        self._kernel, self._costs, self._trace = kernel, costs, trace
        self._out: dict[int, Line] = {}  # by host
        self._in: dict[int, Line] = {}
        self._inside: dict[int, Line] = {}  # by the address of the sender
        self._desks: dict[int, Desk] = {}  # by address
        self._paths: dict[tuple[int, int], Path] = {}  # by the addresses of sender and receiver
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
        path = self._paths.get((source, to))
        if path is None:
            path = self._path(source, from_host, to, to_host)
        now, what = self._kernel.now, (nbytes, deliver, args)
        if path.into is None:
            start = path.out.take(now, nbytes) + self._costs.inside_latency
            self._deliver(path, start + nbytes / path.out.bandwidth, what)
        elif path.backlog or (nbytes > SMALL and path.leaving > now):
            self._queue(path, what)
        else:
            self._leave(path, what)

    def _path(self, source: int, from_host: int, to: int, to_host: int) -> Path:
        if from_host == to_host:
            out, into = self._inside.setdefault(source, Line(self._costs.inside_bandwidth)), None
        else:
            out = self._out.setdefault(from_host, Line(self._costs.bandwidth))
            into = self._in.setdefault(to_host, Line(self._costs.bandwidth))
        desk = self._desks.setdefault(to, Desk())
        path = self._paths[source, to] = Path(source, from_host, to, to_host, out, into, desk)
        return path

    def _queue(self, path: Path, what: Sending) -> None:
        """Behind those of the same path, of which one at a time is on the line."""
        if not path.backlog:
            self._kernel.at(path.leaving, self._next, path)
        path.backlog.append(what)

    def _next(self, path: Path) -> None:
        what = path.backlog[0]
        self._leave(path, what)
        path.backlog.popleft()
        if path.backlog:
            self._kernel.at(max(self._kernel.now, path.leaving), self._next, path)

    def _leave(self, path: Path, what: Sending) -> None:
        nbytes, now, line = what[0], self._kernel.now, path.out
        start = line.take(now, nbytes)
        if nbytes > SMALL:
            path.leaving = line.free_at
        if self._trace is not None:
            self._trace.span(path.from_host, OUT, f"to {path.to_host}", start, start + nbytes / line.bandwidth)
        start += self._costs.latency
        if self._held or self._slow:
            start = self._across(path.from_host, path.to_host, start)
            if start == inf:
                return
        if nbytes <= SMALL and not path.coming:
            self._deliver(path, start + nbytes / line.bandwidth, what)
            return
        start = max(start, path.coming_till)
        path.coming, path.coming_till = path.coming + 1, start
        self._kernel.after(start - now, self._arrive, path, what)

    def _arrive(self, path: Path, what: Sending) -> None:
        """The first byte has come."""
        path.coming -= 1
        nbytes, line = what[0], path.into
        assert line is not None
        start = line.take(self._kernel.now, nbytes)
        if self._trace is not None:
            self._trace.span(path.to_host, IN, "arrives", start, start + nbytes / line.bandwidth)
        self._deliver(path, start + nbytes / line.bandwidth, what)

    def _deliver(self, path: Path, when: float, what: Sending) -> None:
        """All of it is there at `when`."""
        nbytes, deliver, args = what
        if path.last > when:
            when = path.last
        if nbytes > TINY and self._costs.handling:
            desk = path.desk
            start = max(when, desk.free_at)
            when = desk.free_at = start + nbytes * self._costs.handling
            if self._trace is not None and path.to >= SERVERS:
                self._trace.span(path.to_host, path.to, f"from {role_name(path.source)}", start, when)
        path.last = when
        self._kernel.at(when, deliver, *args)  # not after a difference, which would be rounded

    # -- faults ---------------------------------------------------------------------------------------------------
    def part(self, side: frozenset[int], seconds: float | None) -> None:
        """Hold back what is sent from one side to the other, until the partition is over."""
        until = inf if seconds is None else self._kernel.now + seconds
        self._held[side] = max(until, self._held.get(side, 0.0))

    def slow(self, side: frozenset[int], delay: float, seconds: float | None = None) -> None:
        """Slow down what is sent from one side to the other, from now on or for so long; several at once add up."""
        link = side, delay
        self._slow.append(link)
        if seconds is not None:
            self._kernel.after(seconds, self._slow.remove, link)

    def _across(self, one: int, other: int, start: float) -> float:
        for side, until in self._held.items():
            if (one in side) != (other in side):
                start = max(start, until)
        return start + sum(delay for side, delay in self._slow if (one in side) != (other in side))
