"""What a message takes: latency, and the time of its bytes on the sender's and on the receiver's NIC.

    sender's NIC     |== a ==|== b ==|                one message after the other
    latency                  ·········
    receiver's NIC            |== a ==|== c ==|        first come, first served, whoever sent it
                                      ^ a is delivered

So what many send to one queues there. Small messages do not queue: on a real line they pass between the packets of
large ones. Messages of one role to another never overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from torrential.worlds.sim.cluster import Network as Costs
from torrential.worlds.sim.kernel import Kernel

SMALL = 16_384  # bytes


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
    def __init__(self, kernel: Kernel, costs: Costs) -> None:
        self._kernel, self._costs = kernel, costs
        self._out: dict[int, Line] = {}  # by host
        self._in: dict[int, Line] = {}
        self._inside: dict[int, Line] = {}  # by the address of the sender
        self._last: dict[tuple[int, int], float] = {}  # by pair of addresses: when the last message was delivered
        self._held: dict[frozenset[int], float] = {}  # sides of partitions: until when
        self._slow: dict[frozenset[int], float] = {}  # sides of slow links: what they add
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
            start = line.take(now, nbytes)
            self._deliver(source, to, start + costs.inside_latency + nbytes / line.bandwidth, deliver, args)
            return
        line = self._out.get(from_host) or self._out.setdefault(from_host, Line(costs.bandwidth))
        start = line.take(now, nbytes) + costs.latency
        if self._held or self._slow:
            start = self._across(from_host, to_host, start)
            if start == inf:
                return
        if nbytes <= SMALL:
            self._deliver(source, to, start + nbytes / line.bandwidth, deliver, args)
        else:
            self._kernel.after(start - now, self._arrive, source, to, to_host, nbytes, deliver, args)

    def _arrive(
        self, source: int, to: int, to_host: int, nbytes: int, deliver: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        """The first byte has come."""
        line = self._in.get(to_host) or self._in.setdefault(to_host, Line(self._costs.bandwidth))
        start = line.take(self._kernel.now, nbytes)
        self._deliver(source, to, start + nbytes / line.bandwidth, deliver, args)

    def _deliver(self, source: int, to: int, when: float, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        pair = source, to
        when = max(when, self._last.get(pair, 0.0))
        self._last[pair] = when
        self._kernel.after(when - self._kernel.now, deliver, *args)

    # -- faults ---------------------------------------------------------------------------------------------------
    def part(self, side: frozenset[int], seconds: float | None) -> None:
        """What is sent across waits until it is over."""
        self._held[side] = inf if seconds is None else self._kernel.now + seconds

    def slow(self, side: frozenset[int], delay: float) -> None:
        self._slow[side] = delay

    def mend(self, side: frozenset[int]) -> None:
        self._slow.pop(side, None)

    def _across(self, one: int, other: int, start: float) -> float:
        for side, until in self._held.items():
            if (one in side) != (other in side):
                start = max(start, until)
        return start + sum(delay for side, delay in self._slow.items() if (one in side) != (other in side))
