"""The supervisor of a local run: starts the roles, notices deaths, and brings the survivors together again.

A change of members is a new generation, agreed on in two rounds so that all decide alike about the step in flight:

    supervisor ── Regroup(g) ──► members    whatever they wait for ends with Regrouped
    members ── Stopped(g) ─────► supervisor nobody touches shared state any more
    supervisor ── AllStopped ──► members    each looks whether its step was decided, and concludes it if so
    members ── Standing(n) ────► supervisor steps taken so far
    supervisor ── Go ──────────► members    who is in, and whose state those behind shall take

A death at any point starts the next generation. A strategy that is served (worlds/local/servers.py) has one generation
only: deaths are news in the view, and interrupt nobody.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from torrential import shipping
from torrential.errors import RunFailed, WorkerFailed
from torrential.records import Evaluation, Event, Record, Step
from torrential.worlds.base import Job, Listener
from torrential.worlds.failure import failed, last_good, resuming
from torrential.worlds.local import messages as m
from torrential.worlds.local.complaints import Complaints
from torrential.worlds.local.crew import Crew, Member, Report
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.liveness import Liveness
from torrential.worlds.local.mail import ending
from torrential.worlds.local.nursery import Ended
from torrential.worlds.local.observers import Observers
from torrential.worlds.local.registry import Registry
from torrential.worlds.local.servers import Servers

START_SECONDS = 600.0  # until all are built; a task's model may take its time
TICK_SECONDS = 0.1
ABSENT_SECONDS = 1.0  # without a tick: this process itself was stopped
WORKER_LIVES = 100
OWN_STATUSES = (1, 3, 4)  # of children that fail: with a traceback, without a supervisor, with a message
FAILED_STARTS = 3


class LocalWorld:
    """Implements worlds.base.World."""

    def __init__(self, launch: Launch | None = None) -> None:
        self._launch = launch or Launch()

    def run(self, job: Job, write: Callable[[Record], None], listener: Listener) -> None:
        self._launch.used = True
        registry = Registry()
        parcel = shipping.pack(job)
        crew = Crew(self._launch.socket, parcel.fds, job.config.local.transport, job.strategy.served)
        try:
            _Run(job, crew, registry, write, listener).supervise()
        finally:
            self._launch.close()
            crew.close()
            registry.close()
            parcel.close()


class _Run:
    def __init__(
        self, job: Job, crew: Crew, registry: Registry, write: Callable[[Record], None], listener: Listener
    ) -> None:
        self._job, self._crew, self._registry, self._listener = job, crew, registry, listener
        self._write_record = write
        self._settings = job.config.local
        self._workers: dict[int, Member] = {}  # said hello and not lost
        self._served = job.strategy.served
        self._servers = Servers(job.config, crew, registry, self._workers, self._event, self._remedy())
        self._starting: dict[int, Member] = {}
        self._generation = 0
        self._stopped: set[int] = set()
        self._standing: dict[int, int] = {}
        self._forming_since: float | None = None  # a generation is being agreed on
        self._began: float | None = None
        self._failed_starts = 0
        self._started = time.monotonic()
        self._step = job.checkpoint.step if job.checkpoint else 0
        self._evaluated = dict(job.evaluated)
        self._observers = Observers(job.config, crew, self._workers, self._event, self._remedy())
        self._liveness = Liveness(self._settings.timeout, self._event, self._remedy())
        self._complaints = Complaints(self._workers, self._event)
        self._dismissed = False
        self._done = False
        self._statuses: dict[int, int] = {}  # of processes that have ended, by pid
        self._looked = time.monotonic()  # when this process last ran
        self._back = -math.inf  # when it last ran again, after it was stopped, as by Ctrl-Z
        self._handlers: dict[type, Callable[[Member, Any, list[Tensor]], None]] = {
            m.Hello: self._hello,
            m.BufferWanted: self._buffer,
            m.Stopped: self._has_stopped,
            m.Standing: self._stands,
            m.Recorded: self._recorded,
            m.SnapshotTaken: self._observers.snapshot_taken,
            m.OwnBuffers: self._observers.own_buffers,
            m.SnapshotDone: self._observers.snapshot_done,
            m.Suspect: self._suspect,
            m.Ready: self._ready,
            m.Filled: self._servers.filled,
            m.Pong: self._pong,
            m.Delayed: self._delayed,
            m.Left: self._left,
            m.Failed: self._failed,
            m.Stop: self._stop,
        }

    # -- the loop -----------------------------------------------------------------------------------------------
    def supervise(self) -> None:
        self._servers.start()
        for rank in range(self._job.config.workers):
            self._spawn(rank, 0)
        self._observers.start()
        while not self._done:
            try:
                report = self._crew.reports.get(timeout=TICK_SECONDS)
            except queue.Empty:
                self._note_absence()
            else:
                self._note_absence()
                self._deal_with(report)
            self._watch_the_clock()
            self._listener.tick()

    def _note_absence(self) -> None:
        """Notice that this process itself was stopped, before anything is made of what was said meanwhile."""
        now = time.monotonic()
        if now - self._looked > ABSENT_SECONDS:
            self._back = now
            self._forming_since = None if self._forming_since is None else now
        self._looked = now

    def _deal_with(self, report: Report | Ended | None) -> None:
        if report is None:
            raise RunFailed(f"the process that starts workers was ended from outside; {self._remedy()}")
        if isinstance(report, Ended):
            self._ended(report.pid, report.status)
        elif report.message is None:
            self._gone(report.member)
        elif isinstance(report.message, m.Alive):
            report.member.heard_from()
        else:
            report.member.heard_from()
            report.member.heard = time.monotonic()
            self._handlers[type(report.message)](report.member, report.message, report.tensors)

    def _spawn(self, rank: int, life: int) -> None:
        self._registry.forget(ending(rank, life - 2))  # of those that were served; the last one's may still be read
        self._starting[rank] = self._crew.spawn("worker", rank, life)
        self._listener.worker_state(rank, "starting")

    def _watch_the_clock(self) -> None:
        now = time.monotonic()
        starting = [*self._starting.values(), *self._servers.starting()]
        self._observers.look()
        self._liveness.look([*self._workers.values(), *starting, *self._servers.here(), self._observers.current])
        limit = max(START_SECONDS, self._settings.timeout)
        if self._began is None and now - self._started > limit:
            silent = ", ".join(member.name for member in starting)
            raise RunFailed(f"{silent or 'the workers'} did not start within {limit:.0f} s; look for errors above")
        if self._served:
            self._servers.look()
        if self._complaints.look():
            raise RunFailed(f"all workers wait for one another in {self._settings.algorithm}; {self._remedy()}")
        if self._forming_since is not None and now - self._forming_since > self._settings.timeout:
            self._forming_since = now
            told = self._stopped if len(self._stopped) < len(self._workers) else set(self._standing)
            for rank, member in self._workers.items():
                if rank not in told and not member.delayed:
                    self._event("worker_hung", rank, f"did not answer for {self._settings.timeout:.0f} s; ended")
                    member.kill()

    def _now(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _remedy(self) -> str:
        return resuming(self._job.directory)

    # -- records ------------------------------------------------------------------------------------------------
    def _write(self, record: Record) -> None:
        self._write_record(record)
        self._listener.record(record)

    def _event(self, event: str, worker: int | None = None, detail: str = "") -> None:
        self._write(Event(event=event, time=self._now(), step=self._step, worker=worker, detail=detail))

    def _recorded(self, member: Member, message: m.Recorded, _: list[Tensor]) -> None:
        record = message.record
        if isinstance(record, Step):
            self._step = max(self._step, record.step)
            self._listener.worker_state(record.worker, "training")
            self._write(record)
        elif isinstance(record, Evaluation):
            self._step = max(self._step, record.step)
            if (record.split, record.step) not in self._evaluated:
                existed = self._evaluated.get(("validation", record.step), record.time)
                self._evaluated[(record.split, record.step)] = existed
                self._write(msgspec.structs.replace(record, time=existed))
            member.send(m.Noted())
        else:
            self._write(record)

    # -- membership ---------------------------------------------------------------------------------------------
    def _hello(self, member: Member, message: m.Hello, _: list[Tensor]) -> None:
        """It is there; a worker joins when it is built."""

    def _ready(self, member: Member, message: m.Ready, _: list[Tensor]) -> None:
        if member.role == "server":
            self._servers.ready(member, message)
            return self._begin_with_servers()
        if self._starting.get(member.rank) is not member:
            return
        del self._starting[member.rank]
        self._failed_starts = 0
        self._workers[member.rank] = member
        self._observers.tell(m.Back(member.rank))
        self._observers.free_slots(member)
        if member.life:
            self._event("worker_joined", member.rank)
        if self._served:
            self._go_on_with_servers(member)
        elif self._generation or not self._starting:
            self._regroup()

    def _begin_with_servers(self) -> None:
        """Once everybody is there."""
        if self._generation or self._starting or not self._workers or not self._servers.complete:
            return
        self._generation = 1
        self._began = time.monotonic() - self._job.elapsed
        self._servers.begin(self._began, self._step)
        for worker in self._workers:
            self._listener.worker_state(worker, "training")

    def _go_on_with_servers(self, newcomer: Member | None) -> None:
        """Workers have come or gone."""
        if not self._generation:
            return self._begin_with_servers()
        self._servers.workers_changed()
        if newcomer is not None:
            self._servers.let_go(newcomer, self._step)
            self._listener.worker_state(newcomer.rank, "training")
        self._dismiss_if_all_left()

    def _delayed(self, member: Member, message: m.Delayed, _: list[Tensor]) -> None:
        member.delayed = message.waiting

    def _regroup(self) -> None:
        self._generation += 1
        self._stopped, self._standing = set(), {}
        self._complaints.clear()
        self._forming_since = time.monotonic()
        for member in self._workers.values():
            member.left = False
            member.send(m.Regroup(self._generation))

    def _has_stopped(self, member: Member, message: m.Stopped, _: list[Tensor]) -> None:
        if message.generation == self._generation:
            self._stopped.add(member.rank)
            if self._stopped >= set(self._workers):
                for other in self._workers.values():
                    other.send(m.AllStopped(self._generation))

    def _stands(self, member: Member, message: m.Standing, _: list[Tensor]) -> None:
        if message.generation != self._generation:
            return
        self._standing[member.rank] = message.applied
        if set(self._standing) < set(self._workers):
            return
        members = sorted(self._workers)
        furthest = max(self._standing.values())
        source = min(r for r in members if self._standing[r] == furthest)
        if furthest < 0 and (self._step > 0 or self._job.checkpoint is not None):
            raise RunFailed(f"every worker that had the parameters is gone; {self._remedy()}")
        if furthest < 0:
            behind = [r for r in members if r != source]
        else:
            behind = [r for r in members if self._standing[r] < furthest]
        if self._began is None:
            self._began = time.monotonic() - self._job.elapsed
        else:
            self._event("regrouped", None, f"workers {', '.join(map(str, members))}")
        go = m.Go(
            self._generation,
            members,
            [self._workers[r].address for r in members],
            [self._workers[r].life for r in members],
            source,
            furthest,
            behind,
            self._began,
            self._registry.path(f"meeting {self._generation}") if self._settings.algorithm == "native" else "",
        )
        self._forming_since = None
        for rank in members:
            self._workers[rank].send(go)
            self._listener.worker_state(rank, "training")

    def _gone(self, member: Member) -> None:
        """A connection has closed. Whoever had finished may go; anybody else has died."""
        if member.said is not None:
            raise failed(member.name, member.said.failure, self._job.directory)
        if member.role == "observer":
            return None if self._done else self._observers.gone(member, lambda: self._how(member))
        if member.role == "server":
            return None if self._dismissed else self._servers.gone(member)
        if self._starting.get(member.rank) is member:
            return self._did_not_start(member, "")
        if self._dismissed or self._workers.get(member.rank) is not member:
            return
        del self._workers[member.rank]
        self._listener.worker_state(member.rank, "lost")
        self._event("worker_lost", member.rank)
        self._observers.tell(m.Gone(member.rank))
        if not self._workers and (self._generation or not self._starting) and not self._comes_back(member):
            how, saved = self._how(member), last_good(self._job.directory)
            raise RunFailed(f"all workers are gone ({member.name} {how}); {saved}; {self._remedy()}")
        self._replace(member)

    def _did_not_start(self, member: Member, how: str) -> None:
        del self._starting[member.rank]
        self._failed_starts += 1
        self._listener.worker_state(member.rank, "lost")
        self._event("worker_lost", member.rank, f"while starting {how}".rstrip())
        if not self._workers and not self._starting:
            how = how or f"({self._how(member)})"
            raise WorkerFailed(f"no worker came up; {member.name} ended while starting {how}")
        self._replace(member)

    def _replace(self, member: Member) -> None:
        """Go on with those that are there, and start another if asked to."""
        if self._may_be_replaced(member):
            self._spawn(member.rank, member.life + 1)
        if self._served:
            self._go_on_with_servers(None)
        elif self._workers and (self._generation or not self._starting):
            self._regroup()

    def _may_be_replaced(self, member: Member) -> bool:
        return self._settings.restart and member.life < WORKER_LIVES and self._failed_starts < FAILED_STARTS

    def _comes_back(self, member: Member) -> bool:
        """Whether a run without workers may wait for one, because servers have what is needed to go on."""
        return self._served and self._may_be_replaced(member)

    def _how(self, member: Member) -> str:
        """How a process ended. The nursery tells, before its connection closes or shortly after."""
        with contextlib.suppress(queue.Empty):
            while member.pid not in self._statuses:
                report = self._crew.reports.get(timeout=1.0)
                if isinstance(report, Ended):
                    self._statuses[report.pid] = report.status
        return _ending(self._statuses[member.pid]) if member.pid in self._statuses else "ended"

    def _ended(self, pid: int, status: int) -> None:
        """A process has ended. Connections tell of those that had said hello; here come those that never did."""
        self._statuses[pid] = status
        observer = self._observers.current
        if observer.pid == pid and observer.connection is None:
            return self._observers.gone(observer, lambda: _ending(status))
        for member in [*self._starting.values(), *self._servers.starting()]:
            if member.pid == pid and member.connection is None:
                fallen = self._servers.gone if member.role == "server" else self._did_not_start
                fallen(member, f"({_ending(status)})")

    def _suspect(self, member: Member, message: m.Suspect, _: list[Tensor]) -> None:
        if time.monotonic() - self._back < self._settings.timeout:
            return  # members may have waited for this process; whoever still waits will say so again
        if self._served:
            return self._servers.suspect(member, message)
        if message.rank < 0:
            return self._complaints.hear(member, message)
        accused = self._workers.get(message.rank)
        if accused is not None and accused is not member and not accused.delayed:
            self._event("worker_hung", message.rank, f"{member.name} waited {message.seconds:.0f} s for it; ended")
            accused.kill()

    def _pong(self, member: Member, message: m.Pong, tensors: list[Tensor]) -> None:
        if member.role == "observer":
            return  # that it was heard is all there is to it
        if self._served:
            self._servers.pong(member, message, tensors)
        else:
            self._complaints.pong(member)

    # -- other services -----------------------------------------------------------------------------------------
    def _buffer(self, member: Member, message: m.BufferWanted, _: list[Tensor]) -> None:
        granted = self._registry.grant(message.key, message.size)
        if isinstance(granted, str):
            member.send(m.Refused(message.key, granted))
        else:
            member.send(m.Granted(message.key, os.getpid(), granted))

    def _stop(self, member: Member, message: m.Stop, _: list[Tensor]) -> None:
        self._observers.reached()
        self._event("target_reached")
        for worker in self._workers.values():
            worker.send(m.Stop())

    def _left(self, member: Member, message: m.Left, _: list[Tensor]) -> None:
        if member.role == "observer":
            self._done = True
            return
        if message.generation != self._generation:
            return  # it has not heard yet that somebody died
        member.left = True
        self._listener.worker_state(member.rank, "finished")
        if self._served:
            self._servers.left(member, message)
        self._dismiss_if_all_left()

    def _dismiss_if_all_left(self) -> None:
        if self._workers and all(w.left for w in self._workers.values()) and self._forming_since is None:
            if self._served and not self._servers.last_word():
                return
            self._dismissed = True
            self._servers.dismiss()
            for worker in self._workers.values():
                worker.send(m.Dismissed())
            self._observers.dismiss()

    def _failed(self, member: Member, message: m.Failed, _: list[Tensor]) -> None:
        member.said = message
        raise failed(member.name, message.failure, self._job.directory)


def _ending(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}" + ("" if status in OWN_STATUSES else ", as by os._exit in the task's code")
