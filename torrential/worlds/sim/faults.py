"""When the faults of a cluster strike: at a second, at a share of the run, or by chance."""

from __future__ import annotations

from random import Random
from typing import Protocol

import msgspec

from torrential.comm.protocol import COORDINATORS, SERVERS
from torrential.config import RunConfig
from torrential.worlds.sim.cluster import Cluster, Fault
from torrential.worlds.sim.kernel import Kernel


class Stricken(Protocol):
    """The world, as its faults see it."""

    def crash(self, addresses: list[int], lasts: float | None) -> None:
        """Let those of these roles that are at work die at this moment, and come back after `lasts` seconds."""

    def crash_host(self, host: int, lasts: float | None) -> None:
        """All roles of a host die at this moment; none starts there for `lasts` seconds."""

    def disturb(self, fault: Fault) -> None:
        """A partition or a slow link begins."""


class Faults:
    """Has the faults of a cluster strike when their time has come."""

    def __init__(
        self, kernel: Kernel, cluster: Cluster, config: RunConfig, planned: int, seen: int, world: Stricken
    ) -> None:
        """`planned`: samples that the run trains on, all epochs together; `seen`: those that a run that goes on has
        trained on already."""
        self._kernel, self._cluster, self._config, self._world = kernel, cluster, config, world
        self._planned, self._computed = planned, float(seen)
        self._due: list[tuple[float, Fault]] = []  # faults that wait for their share of the run, the next one first

    def plan(self) -> None:
        for fault in self._cluster.faults:
            if fault.share is None:
                self._plan_at(fault)
            else:
                self._plan_share(fault, fault.share * self._planned)
        self._due.sort(key=lambda due: due[0])
        accidents = self._cluster.accidents
        for first, count, mean, kind in (
            (0, self._config.workers, accidents.mean_time_between_crashes, "worker"),
            (SERVERS, self._config.servers, accidents.server_mean_time_between_crashes, "server"),
        ):
            if mean is not None:
                for number in range(count):
                    chance = Random(f"crashes {kind} {number} {self._config.seed}")
                    self._next_accident(first + number, mean, chance)

    def computed(self, samples: float) -> None:
        """A worker has computed the gradients of so many samples."""
        self._computed += samples
        while self._due and self._computed >= self._due[0][0]:
            self._kernel.after(0.0, self._strike, self._due.pop(0)[1])  # the worker itself may be struck

    def _plan_at(self, fault: Fault) -> None:
        assert isinstance(fault.at, float)
        over = max(0.0, self._kernel.now - fault.at)  # of it, where a run goes on
        if not over:
            self._kernel.after(fault.at - self._kernel.now, self._strike, fault)
        elif fault.lasts is None:
            self._kernel.after(0.0, self._strike, fault)
        elif fault.lasts > over:
            self._kernel.after(0.0, self._strike, msgspec.structs.replace(fault, lasts=fault.lasts - over))

    def _plan_share(self, fault: Fault, samples: float) -> None:
        """Plan a fault at a share of the run. In a resumed run that has passed it, a fault that ends is over."""
        if self._computed < samples:
            self._due.append((samples, fault))
        elif not self._computed or fault.lasts is None:
            self._kernel.after(0.0, self._strike, fault)

    def _next_accident(self, address: int, mean: float, chance: Random) -> None:
        after, lasts = chance.expovariate(1 / mean), self._cluster.accidents.restart_after

        def happen() -> None:
            self._world.crash([address], lasts)
            if lasts is not None:
                self._kernel.after(lasts, self._next_accident, address, mean, chance)

        self._kernel.after(after, happen)

    def _strike(self, fault: Fault) -> None:
        if fault.kind != "crash":
            self._world.disturb(fault)
        elif fault.host is not None:
            self._world.crash_host(fault.host, fault.lasts)
        else:
            named = {0: fault.worker, SERVERS: fault.server, COORDINATORS: fault.coordinator}
            address = next((first + number for first, number in named.items() if number is not None), None)
            assert address is not None
            self._world.crash([address], fault.lasts)
