"""A run in the simulated world: every role a greenlet, every second virtual, every gradient real."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from torrential import shipping
from torrential.comm.protocol import SERVERS, role_name, role_of
from torrential.errors import RunFailed
from torrential.membership.machine import Membership
from torrential.membership.messages import Filled, Ready
from torrential.membership.roles import Who
from torrential.membership.roll import Rules
from torrential.optim.schedule import schedule_of
from torrential.records import Evaluation, Event, Record, Step
from torrential.server.server import Server
from torrential.strategies.base import needs_servers
from torrential.strategies.roles import Role
from torrential.trainer.context import RoleContext
from torrential.trainer.handed import handed_over
from torrential.trainer.observer import Observer
from torrential.trainer.server_plan import ServerPlan
from torrential.usercode import is_interrupt
from torrential.worlds.base import RETURNED, Job, RunWatcher, going_on_from
from torrential.worlds.failure import attributed, describe, failed, going_on
from torrential.worlds.population import population
from torrential.worlds.sim.cluster import Cluster, Fault
from torrential.worlds.sim.comm import SimComm
from torrential.worlds.sim.compute_time import measure_seconds_per_sample
from torrential.worlds.sim.faults import Faults
from torrential.worlds.sim.gradient_pool import GradientPool
from torrential.worlds.sim.group import SimMembership
from torrential.worlds.sim.kernel import Kernel, SimRole
from torrential.worlds.sim.mail import Hub, SimMail
from torrential.worlds.sim.outlet import SimObserving, SimOutlet
from torrential.worlds.sim.timed import TimedMail, TimedParameters, TimedServer
from torrential.worlds.trace import Trace

TICK_SECONDS = 0.1  # real ones, between two looks of whoever watches
YOUNG = 10_000  # objects before the youngest of them are looked through for garbage: messages are no garbage in cycles
YOUNG_AND_EMPTY = 1_000_000  # the same where none of them can keep a tensor's memory


class SimulationWatch(Protocol):
    """An observer of a simulation from outside of its time, as torrential/testing has one."""

    def begin(self, kernel: Kernel, hub: Hub, membership: Membership) -> None:
        """Called before anything happens."""

    def role(self, address: int, role: RoleContext | Server) -> None:
        """Called when a role has just been built."""

    def end(self) -> None:
        """Called when all workers are finished; servers are still there."""


class SimWorld:
    """Implements worlds.base.World."""

    def __init__(
        self, cluster: Cluster, observer: Callable[..., Observer] = Observer, watch: SimulationWatch | None = None
    ) -> None:
        self._cluster, self._observer, self._watch = cluster, observer, watch

    def run(
        self,
        job: Job,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        threads, thresholds = torch.get_num_threads(), gc.get_threshold()
        torch.set_num_threads(job.config.settings.threads or 1)
        dry = job.config.sim.gradients == "off"
        gc.set_threshold(YOUNG_AND_EMPTY if dry else YOUNG, *thresholds[1:])
        try:
            with handed_over(job.task, job.config, job.strategy, write) as handed:
                job = replace(job, handed=handed)
                run = _Simulation(job, self._cluster, write, watcher, stop_reason, self._observer, self._watch)
                try:
                    run.simulate()
                finally:
                    run.close()
        finally:
            torch.set_num_threads(threads)
            gc.set_threshold(*thresholds)


def rules_of(job: Job) -> Rules:
    """The rules of a simulated run. The cluster's faults say who comes back after a death, and when."""
    settings = job.config.settings
    return Rules(
        timeout=settings.timeout,
        replicas=settings.replicas,
        resumed=job.checkpoint is not None,
        elapsed=job.elapsed,
        going_on=lambda: going_on(job.directory),
    )


class _Simulation:
    """Implements worlds.sim.group.Stage and worlds.sim.faults.Stricken."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None],
        make_observer: Callable[..., Observer],
        watch: SimulationWatch | None,
    ) -> None:
        self._job, self._cluster, self._write_record, self._watch = job, cluster, write, watch
        self._watcher, self._stop_reason = watcher, stop_reason
        config = self._config = job.config
        self._kernel = Kernel()
        self._kernel.now = job.elapsed
        self._trace = Trace() if config.sim.trace else None
        dry = config.sim.gradients == "off"
        self._hub = Hub(self._kernel, cluster, config.seed, self._trace, "meta" if dry else "cpu")
        roles = job.strategy.roles(config.workers, config.servers)
        self._programs: dict[str, Role] = {r.name: r for r in roles if isinstance(r, Role)}
        self._membership = Membership(population(job), rules_of(job))
        self._group = SimMembership(self._hub, self._membership, self)
        real = torch.device(config.device)
        self._device = torch.device("meta") if dry else real
        with attributed("observer", job.directory):
            observer = make_observer(job.task, config, job.strategy, real, job.directory)
        self._observing = SimObserving(
            observer, self._write, job.evaluated, lambda error: self._kernel.failures.append(("observer", error))
        )
        self._observing.group = self._group
        given = cluster.compute.seconds_per_sample
        with attributed("worker 0", job.directory):  # which would come to it first
            self._seconds_per_sample = (
                measure_seconds_per_sample(job.task, config.batch_size, real, config.settings.threads or 1)
                if isinstance(given, str)
                else given
            )
        self._roles: dict[int, SimRole] = {}  # by address
        self._contexts: dict[str, RoleContext] = {}  # of programs that are built, by the role's name
        self._step = job.checkpoint.step if job.checkpoint else 0
        self._membership.stepped(self._step)
        self._running = 0  # workers whose program has not come to its end
        self._down_until: dict[int, float] = {}  # hosts that died, and when roles may start there again
        planned = schedule_of(config, job.strategy.samples_per_update(config.workers, config.batch_size)).total
        seen = job.checkpoint.samples if job.checkpoint else 0
        self._faults = Faults(self._kernel, cluster, config, planned, seen, self)
        self._hub.computed = self._faults.computed
        self._ticked = time.monotonic()
        if needs_servers(job.strategy):
            with attributed("server 0", job.directory):
                self._plan = ServerPlan(job.task, config, job.strategy, job.checkpoint)

    def simulate(self) -> None:
        if self._cluster.compute.seconds_per_sample == "measure":
            detail = f"{self._seconds_per_sample:g} s per sample here; another time it may be another"
            self.event("measured", None, detail)
        if self._config.sim.processes:
            self._hub.pool = GradientPool(self._config.sim.processes, self._job.task, self._config)
        if self._watch is not None:
            self._watch.begin(self._kernel, self._hub, self._membership)
        self._group.start()
        self._faults.plan()
        self._kernel.run()
        self._raise_failure()
        self._check_dismissed()
        if self._watch is not None:
            self._watch.end()
        self._observing.end()
        self._raise_failure()

    def close(self) -> None:
        if self._trace is not None:
            self._trace.write(self._job.directory / "trace.json")
        for role in self._roles.values():
            role.kill()
        if self._hub.pool is not None:
            self._hub.pool.close()

    def _raise_failure(self) -> None:
        """The run fails with the first role that did."""
        if not self._kernel.failures:
            return
        role, error = self._kernel.failures[0]
        if is_interrupt(error):  # it came while this role was at work
            raise error
        step = self._contexts[role].step + 1 if role in self._contexts else None
        raise failed(role, describe(error, step), self._job.directory) from error

    def _check_dismissed(self) -> None:
        if not self._membership.dismissed:
            waiting = ", ".join(map(str, self._membership.workers))
            raise RunFailed(
                f"no role can go on: {waiting} wait, and nothing is under way (at {self._kernel.now:.1f} s)"
            )

    # -- what worlds.sim.group.SimMembership asks for -------------------------------------------------------------
    def start(self, who: Who) -> Ready | None:
        role, _ = role_of(who.address)
        if role == "observer":
            return None  # it is beside time
        if role == "server":
            self._start_server(who)
            bounds = self._plan.bounds
            return Ready(self._plan.numel, None if bounds is None else list(bounds), list(self._plan.shares.starts))
        self._start_program(who)
        return Ready()

    def observe(self, message: Any, tensors: Sequence[Tensor]) -> None:
        self._observing.take(message, tensors)

    def event(self, event: str, worker: int | None, detail: str) -> None:
        step = max([self._step, *(ctx.step for ctx in self._contexts.values())])  # records are rarer than steps
        self._write(Event(event=event, time=self._kernel.now, step=step, worker=worker, detail=detail))

    def state(self, worker: int, state: str) -> None:
        self._watcher.worker_state(worker, state)

    # -- roles ----------------------------------------------------------------------------------------------------
    def _start_program(self, who: Who) -> None:
        """A worker, or a coordinator."""
        config, strategy = self._config, self._job.strategy
        address, life = who
        role = self._programs[role_of(address)[0]]
        self._contexts.pop(role_name(address), None)
        self._running += 1
        comm = SimComm(self._hub, self._group, config, address, self._seconds_per_sample, life, self._host_of(address))
        outlet = SimOutlet(who, self._group, self._write)

        def program() -> None:
            host = self._device if self._device.type == "meta" else torch.device("cpu")
            timed = (lambda common: TimedParameters(common, comm)) if self._hub.shared else (lambda common: common)
            ctx = RoleContext(
                self._job.task,
                config,
                strategy,
                comm,
                outlet,
                self._device,
                host,
                going_on_from(self._job, role.death, life),
                life,
                timed,
                handed=None if self._job.handed is None else partial(shipping.unpack_from, *self._job.handed),
            )
            self._built(address, ctx)
            if role.death == "view" or role.name != "worker":
                comm.begin()
            role.program(ctx)
            if not self._membership.dismissed:
                raise RunFailed(RETURNED.format(name=role_name(address)))
            self._finished()

        computes = self._device.type != "meta"
        comm.role = self._roles[address] = self._kernel.role(role_name(address), program, uses_torch=computes)

    def _built(self, address: int, role: RoleContext | Server) -> None:
        if not isinstance(role, Server):
            self._contexts[role_name(address)] = role
        if self._watch is not None:
            self._watch.role(address, role)

    def _finished(self) -> None:
        """The program of a worker or coordinator has come to its end."""
        self._running -= 1
        self._kernel.over = not self._running and self._membership.dismissed

    def _start_server(self, who: Who) -> None:
        address, life = who
        timed, plan = self._hub.timed, self._plan
        mail = (TimedMail if timed else SimMail)(self._hub, address, self._host_of(address), life)
        initial = plan.initial() if life == 0 else None  # else the others have all there is

        def program() -> None:
            mail.begin()
            server = (TimedServer if timed else Server)(
                mail,
                plan.layout,
                plan.spec,
                plan.consistency,
                initial=initial,
                handlers=plan.handlers,
                vectors=plan.servers.vectors,
                shares=plan.shares,
                filled=lambda version: self._group.tell(who, Filled(version)),
            )
            self._built(address, server)
            server.run()

        mail.role = self._roles[address] = self._kernel.role(role_name(address), program, uses_torch=False)

    def _host_of(self, address: int) -> int:
        role, _ = role_of(address)
        if role == "coordinator":
            return 0
        if role == "worker":
            return self._cluster.host_of_worker(address)
        return self._cluster.host_of_server(address - SERVERS, self._config.workers, self._config.servers)

    # -- faults: what worlds.sim.faults.Faults asks for -----------------------------------------------------------
    def disturb(self, fault: Fault) -> None:
        side = frozenset(fault.hosts)
        self.event(fault.kind, None, f"hosts {', '.join(map(str, fault.hosts))}")
        if fault.kind == "partition":
            self._hub.network.part(side, fault.lasts)
        else:
            self._hub.network.slow(side, fault.delay, fault.lasts)

    def crash_host(self, host: int, lasts: float | None) -> None:
        here = sorted(address for address, mail in self._hub.mails.items() if mail.host == host)
        self._down_until[host] = math.inf if lasts is None else self._kernel.now + lasts
        self.event("host_lost", None, f"host {host}: {', '.join(map(role_name, here)) or 'nobody was there'}")
        self.crash(here, lasts)

    def crash(self, addresses: list[int], lasts: float | None) -> None:
        """Let roles die that have not finished, and come back after `lasts` seconds."""
        finished = self._membership.finished if not self._membership.dismissed else addresses
        struck = [a for a in addresses if a in self._hub.mails and a not in finished]
        for address in struck:
            who = self._hub.mails.pop(address).who
            self._roles[address].kill()
            self._running -= role_of(address)[0] != "server"
            self._kernel.after(self._cluster.detection, self._group.lost, who, "crashed")
        for address in struck if lasts is not None else ():
            assert lasts is not None
            self._kernel.after(max(lasts, self._cluster.detection), self._restart, address)

    def _restart(self, address: int) -> None:
        if self._membership.dismissed:
            return
        until = self._down_until.get(self._host_of(address), 0.0)
        if until > self._kernel.now:
            if until < math.inf:
                self._kernel.at(until, self._restart, address)
            return
        self._group.revive(address)

    # -- records --------------------------------------------------------------------------------------------------
    def _write(self, record: Record) -> None:
        if isinstance(record, Step | Evaluation):
            self._step = max(self._step, record.step)
            self._membership.stepped(self._step)
        self._write_record(record)
        self._watcher.record(record)
        if (why := self._stop_reason()) is not None:
            self._kernel.after(0.0, self._group.stop, why)
