"""The cores of one host: each role that works there gets an equal share of them, and one core at the most.

    worker 0   |== compute ==|      |== compute ==|
    worker 1   |=== compute ===|     |=== compute ===|        three at work on two cores: each at two thirds of
    server            |= update =|= update =|                 the speed, until one of them is done

All that work have the same speed, so one number says how much each has done: a piece of work that began when that was
at s is done when it has come to s + its seconds.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from torrential.worlds.sim.cluster import Inside
from torrential.worlds.sim.kernel import Event, Kernel, SimRole


class Cores:
    def __init__(self, kernel: Kernel, inside: Inside) -> None:
        self._kernel, self._inside = kernel, inside
        self._done = 0.0  # seconds of work, by anybody who has worked all the time
        self._since = 0.0  # when that was so
        self._jobs: list[tuple[float, int, SimRole]] = []  # a heap: where it will be done, order, whose it is
        self._began = 0
        self._next: Event | None = None

    def work(self, role: SimRole, seconds: float) -> None:
        """Returns when the role has had a core for so long."""
        self._catch_up()
        self._began += 1
        job = self._done + seconds, self._began, role
        heappush(self._jobs, job)
        self._plan()
        try:
            role.halt()
        except BaseException:  # it was killed at work
            self._catch_up()
            self._jobs.remove(job)
            heapify(self._jobs)
            self._plan()
            raise

    def _speed(self) -> float:
        """The speed of each role that works."""
        cores = self._inside.cores or len(self._jobs)
        running = min(cores, len(self._jobs))
        return running / len(self._jobs) / (1 + self._inside.contention * (running > 1))

    def _catch_up(self) -> None:
        if self._jobs:
            self._done += (self._kernel.now - self._since) * self._speed()
        self._since = self._kernel.now

    def _plan(self) -> None:
        if self._next is not None:
            self._kernel.cancel(self._next)
        self._next = None
        if self._jobs:
            left = max(0.0, self._jobs[0][0] - self._done)
            self._next = self._kernel.after(left / self._speed(), self._finish)

    def _finish(self) -> None:
        self._next = None
        self._catch_up()
        done, _, role = heappop(self._jobs)
        self._done = max(self._done, done)  # rounding
        self._plan()
        role.go_on(role.turn)
