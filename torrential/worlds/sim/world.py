"""A run in the simulated world: every role a greenlet, every second virtual, every gradient real."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

from torrential.comm.protocol import SERVERS, role_name
from torrential.errors import INTERRUPTS, RunFailed
from torrential.optim.schedule import schedule_of
from torrential.records import Event, Record, Step
from torrential.server.role import Server
from torrential.trainer.observer import Observer
from torrential.trainer.served import ServedWorker
from torrential.trainer.serving import ServerPlan
from torrential.trainer.worker import Worker
from torrential.worlds.base import Job, Listener
from torrential.worlds.failure import attributed, describe, failed
from torrential.worlds.sim.cluster import Cluster, Fault
from torrential.worlds.sim.comm import SimComm
from torrential.worlds.sim.compute_time import measure_seconds_per_sample
from torrential.worlds.sim.faults import Faults
from torrential.worlds.sim.group import Group
from torrential.worlds.sim.hands import Hands
from torrential.worlds.sim.kernel import Kernel, Role
from torrential.worlds.sim.mail import Hub, SimMail
from torrential.worlds.sim.outlet import Observing, SimOutlet
from torrential.worlds.sim.timed import TimedHome, TimedMail, TimedServer
from torrential.worlds.sim.trace import Trace
from torrential.worlds.sim.views import Views

TICK_SECONDS = 0.1  # real ones, between two looks of whoever watches
YOUNG = 10_000  # objects before the youngest of them are looked through for garbage: messages are no garbage in cycles
YOUNG_AND_EMPTY = 1_000_000  # the same where none of them can keep a tensor's memory


class Watch(Protocol):
    """Somebody who looks at a simulation from outside of its time; torrential/testing does."""

    def begin(self, kernel: Kernel, hub: Hub, group: Group, views: Views | None) -> None:
        """Before anything happens."""

    def role(self, address: int, role: Worker | ServedWorker | Server) -> None:
        """It has just been built."""

    def end(self) -> None:
        """All workers are finished; servers are still there."""


class SimWorld:
    """Implements worlds.base.World."""

    def __init__(
        self, cluster: Cluster, observer: Callable[..., Observer] = Observer, watch: Watch | None = None
    ) -> None:
        self._cluster, self._observer, self._watch = cluster, observer, watch

    def run(self, job: Job, write: Callable[[Record], None], listener: Listener) -> None:
        threads, thresholds = torch.get_num_threads(), gc.get_threshold()
        torch.set_num_threads(job.config.settings.threads or 1)
        dry = job.config.settings.gradients == "off"
        gc.set_threshold(YOUNG_AND_EMPTY if dry else YOUNG, *thresholds[1:])
        run = _Run(job, self._cluster, write, listener, self._observer, self._watch)
        try:
            run.simulate()
        finally:
            run.close()
            torch.set_num_threads(threads)
            gc.set_threshold(*thresholds)


class _Run:
    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        write: Callable[[Record], None],
        listener: Listener,
        make_observer: Callable[..., Observer],
        watch: Watch | None,
    ) -> None:
        self._job, self._cluster, self._write_record, self._listener = job, cluster, write, listener
        self._watch = watch
        config = self._config = job.config
        self._kernel = Kernel()
        self._kernel.now = job.elapsed
        self._trace = Trace() if config.settings.trace else None
        dry = config.settings.gradients == "off"
        self._hub = Hub(self._kernel, cluster, config.seed, self._trace, "meta" if dry else "cpu")
        self._served = job.strategy.served
        self._group = Group(self._hub, self._served)
        self._group.regrouped = self._regrouped
        real = torch.device(config.device)
        self._device = torch.device("meta") if dry else real
        with attributed("observer", job.directory):
            observer = make_observer(job.task, config, job.strategy, real, job.directory)
        self._observing = Observing(
            observer, self._write, job.evaluated, lambda error: self._kernel.failures.append(("observer", error))
        )
        told = cluster.compute.seconds_per_sample
        with attributed("worker 0", job.directory):
            self._seconds_per_sample = (
                measure_seconds_per_sample(job.task, config.batch_size, real, config.settings.threads or 1)
                if isinstance(told, str)
                else told
            )
        self._roles: dict[int, Role] = {}  # by address
        self._contexts: dict[str, Worker | ServedWorker] = {}  # of workers that are built, by the role's name
        self._lives: dict[int, int] = {}
        self._step = job.checkpoint.step if job.checkpoint else 0
        self._running = 0  # workers whose program has not come to its end
        self._down_until: dict[int, float] = {}  # hosts that died, and when roles may start there again
        planned = schedule_of(config, job.strategy.joined(config.workers, config.batch_size)).total
        seen = job.checkpoint.samples if job.checkpoint else 0
        self._faults = Faults(self._kernel, cluster, config, planned, seen, self)
        self._hub.computed = self._faults.computed
        self._ticked = time.monotonic()
        self._views: Views | None = None
        if self._served:
            with attributed("server 0", job.directory):
                self._plan = ServerPlan(job.task, config, job.strategy, job.checkpoint)
            self._views = Views(self._hub, self._group, config, self._plan.numel, self._plan.bounds, self._event)

    def simulate(self) -> None:
        if self._cluster.compute.seconds_per_sample == "measure":
            detail = f"{self._seconds_per_sample:g} s per sample here; another time it may be another"
            self._event("measured", None, detail)
        if self._config.settings.processes:
            self._hub.hands = Hands(self._config.settings.processes, self._job.task, self._config)
        if self._watch is not None:
            self._watch.begin(self._kernel, self._hub, self._group, self._views)
        if self._views is not None:
            for number in range(self._config.servers):
                self._start_server(number, begins=True)
        comms = [self._start_worker(rank) for rank in range(self._config.workers)]
        if self._views is None:
            self._group.join(*comms)
        else:
            self._group.here = {comm.rank: comm for comm in comms}
        self._faults.plan()
        self._kernel.run()
        self._raise_failure()
        self._check_dismissed()
        if self._watch is not None:
            self._watch.end()
        self._observing.close()
        self._raise_failure()

    def close(self) -> None:
        if self._trace is not None:
            self._trace.write(self._job.directory / "trace.json")
        for role in self._roles.values():
            role.kill()
        if self._hub.hands is not None:
            self._hub.hands.close()

    def _raise_failure(self) -> None:
        """The run fails with the first role that did."""
        if not self._kernel.failures:
            return
        role, error = self._kernel.failures[0]
        if isinstance(error, INTERRUPTS):  # it came while this role was at work
            raise error
        step = self._contexts[role].step + 1 if role in self._contexts else None
        raise failed(role, describe(error, step), self._job.directory) from error

    def _check_dismissed(self) -> None:
        if not self._group.dismissed:
            waiting = ", ".join(self._roles[rank].name for rank in sorted(self._group.here))
            raise RunFailed(f"nobody can go on: {waiting} wait, and nothing is under way (at {self._kernel.now:.1f} s)")

    # -- roles ----------------------------------------------------------------------------------------------------
    def _start_worker(self, rank: int) -> SimComm:
        config, strategy = self._config, self._job.strategy
        life = self._lives[rank] = self._lives.get(rank, -1) + 1
        self._contexts.pop(f"worker {rank}", None)
        self._running += 1
        comm = SimComm(self._hub, self._group, config, rank, self._seconds_per_sample)
        if self._views is not None:
            comm.view, comm.members = self._views.view, tuple(range(config.workers))
        outlet = SimOutlet(rank, self._observing, self._write)

        def program() -> None:
            if self._served:
                served = ServedWorker(
                    self._job.task, config, strategy, comm, outlet, self._device, self._job.checkpoint, life > 0
                )
                self._built(rank, served)
                strategy.worker(served)  # type: ignore[arg-type]
            else:
                first = self._job.checkpoint if life == 0 else None
                host = self._device if self._device.type == "meta" else torch.device("cpu")
                worker = Worker(self._job.task, config, strategy, comm, outlet, self._device, host, first)
                if self._hub.shared:
                    worker.home = TimedHome(worker.home, comm)
                self._built(rank, worker)
                strategy.worker(worker)
            self._finished()

        computes = self._device.type != "meta"
        comm.role = self._roles[rank] = self._kernel.role(f"worker {rank}", program, uses_torch=computes)
        self._listener.worker_state(rank, "training")
        return comm

    def _built(self, address: int, role: Worker | ServedWorker | Server) -> None:
        if not isinstance(role, Server):
            self._contexts[f"worker {address}"] = role
        if self._watch is not None:
            self._watch.role(address, role)

    def _finished(self) -> None:
        """A worker's program has come to its end."""
        self._running -= 1
        self._kernel.over = not self._running and self._group.dismissed

    def _start_server(self, number: int, begins: bool) -> None:
        assert self._views is not None
        address = SERVERS + number
        timed = self._hub.timed
        mail = (TimedMail if timed else SimMail)(self._hub, address, self._host_of(address))
        mail.view = self._views.view
        views, plan = self._views, self._plan
        initial = plan.initial() if begins else None

        def program() -> None:
            filled = lambda version: views.filled(number, version)  # noqa: E731
            server = (TimedServer if timed else Server)(
                mail, plan.layout, plan.spec, plan.consistency, initial=initial, handlers=plan.handlers, filled=filled
            )
            self._built(address, server)
            server.run()

        mail.role = self._roles[address] = self._kernel.role(f"server {number}", program, uses_torch=False)

    def _host_of(self, address: int) -> int:
        if address < SERVERS:
            return self._cluster.host_of_worker(address)
        return self._cluster.host_of_server(address - SERVERS, self._config.workers, self._config.servers)

    # -- faults: what worlds.sim.faults.Faults asks for -----------------------------------------------------------
    def disturb(self, fault: Fault) -> None:
        side = frozenset(fault.hosts)
        self._event(fault.kind, None, f"hosts {', '.join(map(str, fault.hosts))}")
        if fault.kind == "partition":
            self._hub.network.part(side, fault.lasts)
        else:
            self._hub.network.slow(side, fault.delay, fault.lasts)

    def crash_host(self, host: int, lasts: float | None) -> None:
        here = sorted(address for address, mail in self._hub.mails.items() if mail.host == host)
        self._down_until[host] = math.inf if lasts is None else self._kernel.now + lasts
        self._event("host_lost", None, f"host {host}: {', '.join(map(role_name, here)) or 'nobody was there'}")
        self.crash(here, lasts)

    def crash(self, addresses: list[int], lasts: float | None) -> None:
        """Whoever has finished is left alone."""
        finished = self._group.left if not self._group.dismissed else addresses
        struck = [a for a in addresses if a in self._hub.mails and a not in finished]
        for address in struck:
            del self._hub.mails[address]
            self._roles[address].kill()
            self._running -= address < SERVERS
            self._kernel.after(self._cluster.detection, self._noticed, address)
        for address in struck if lasts is not None else ():
            assert lasts is not None
            self._kernel.after(max(lasts, self._cluster.detection), self._restart, address)

    def _noticed(self, address: int) -> None:
        if address >= SERVERS:
            assert self._views is not None
            self._views.lose(address - SERVERS)
            return
        self._event("worker_lost", address, "it crashed")
        self._listener.worker_state(address, "lost")
        self._observing.gone(address)
        self._group.lose(address)

    def _restart(self, address: int) -> None:
        if self._group.dismissed:
            return
        until = self._down_until.get(self._host_of(address), 0.0)
        if until > self._kernel.now:
            if until < math.inf:
                self._kernel.at(until, self._restart, address)
            return
        if address >= SERVERS:
            assert self._views is not None
            self._start_server(address - SERVERS, begins=False)
            self._views.join(address - SERVERS)
            self._hub.mails[address].view = self._views.view  # the first it hears of has it in
            return
        self._observing.back(address)
        self._event("worker_joined", address, "")
        comm = self._start_worker(address)
        self._group.join(comm)
        if self._views is not None:
            comm.view = self._views.view  # the first it hears of has it in

    # -- records --------------------------------------------------------------------------------------------------
    def _regrouped(self, members: tuple[int, ...]) -> None:
        if self._group.generation > 1:
            self._event("regrouped", None, f"workers {', '.join(map(str, members))}")

    def _event(self, event: str, worker: int | None, detail: str) -> None:
        self._write(Event(event=event, time=self._kernel.now, step=self._step, worker=worker, detail=detail))

    def _write(self, record: Record) -> None:
        if isinstance(record, Step):
            self._step = max(self._step, record.step)
        self._write_record(record)
        self._listener.record(record)
        if self._observing.reached and not self._hub.stop:
            self._hub.stop = True
            self._event("target_reached", None, "")
