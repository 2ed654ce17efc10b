"""The world of a Ray cluster: the agents of all hosts are begun by Ray, and the supervisor is in the driver."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from torrential import shipping
from torrential.comm.handshake import SECRET_BYTES
from torrential.comm.stream import tcp_address
from torrential.config import RaySettings
from torrential.records import Record
from torrential.worlds.base import Job, RunWatcher
from torrential.worlds.hosts.gathering import Gathering
from torrential.worlds.hosts.messages import RunPlan
from torrential.worlds.hosts.rendezvous import Rendezvous
from torrential.worlds.local.agent import Host
from torrential.worlds.local.crew import Crew
from torrential.worlds.local.supervisor import LocalWorld
from torrential.worlds.ray.agents import Agents


class RayWorld:
    """Implements worlds.base.World. `agents`: those that were begun before; they end with the run unless kept."""

    def __init__(self, agents: Agents | None = None) -> None:
        self._agents = agents

    def run(
        self,
        job: Job,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        settings = job.config.settings
        assert isinstance(settings, RaySettings)
        agents = self._agents or Agents(settings, job.config.workers)
        try:
            LocalWorld(None, RayMeeting(agents)).run(job, write, watcher, stop_reason)
        finally:
            if not agents.kept:
                agents.close()


class RayMeeting(Gathering):
    """The hosts of a run, whose agents call the supervisor; all of them are begun by Ray. The secret of the run is made
    here, and the agents are told by Ray."""

    with_own_host = False
    here = "the driver's host"

    def __init__(self, agents: Agents) -> None:
        where = tcp_address(agents.interface, 0)
        super().__init__(Rendezvous(where, -1, agents.hosts, secrets.token_bytes(SECRET_BYTES)))
        self._agents = agents
        self._called: Rendezvous | None = None  # as agents are told
        self._packed: list[Any] = []  # the job, in Ray's object store

    def _begin_agents(self, job: Job, crew: Crew) -> None:
        assert self._admission is not None
        self._agents.await_begun()
        self._called = self._meeting._replace(address=self._admission.address.partition("?")[0])
        self._packed = _in_object_store(job)
        if job.config.local.restart:
            crew.replace = self._replace
        for number in range(self._agents.hosts):
            self._agents.follow(number, self._called, self._packed)

    def _replace(self, host: Host) -> bool:
        assert self._called is not None
        self._agents.replace(host.number, self._called, self._packed)
        return True

    def _check_agents(self) -> None:
        self._agents.check()

    def _plan(self, job: Job, address: str) -> RunPlan:
        plan = super()._plan(job, address)
        return msgspec.structs.replace(plan, cut=not job.strategy.has_whole_model())

    def _missing(self, crew: Crew) -> str:
        absent = [number for number in range(self._agents.hosts) if number not in crew.hosts]
        return f"the agents of the hosts {', '.join(map(str, absent))} did not join the run; see Ray's logs"


def _in_object_store(job: Job) -> list[Any]:
    """References to the two parts of the packed job. A host fetches them once, for all of its processes."""
    import ray

    with shipping.pack(job) as parcel:
        return [ray.put(_contents(fd)) for fd in parcel.fds]


def _contents(fd: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a file, which pickle does not copy."""
    try:
        return np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint8)
    except ValueError:  # nothing is in it
        return np.empty(0, np.uint8)
