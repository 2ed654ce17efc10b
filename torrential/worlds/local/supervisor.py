"""The supervisor of a local run: starts processes, notices deaths, and has the membership decide what follows.

    processes ── messages, closed connections ──► supervisor ──► Membership (membership/machine.py)
    processes ◄── messages, starts, kills ─────── supervisor ◄── actions

What is of this host is dealt with here: pids and how processes ended, registered buffers, records.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from torrential import shipping
from torrential.errors import BY_THE_SCRIPT, BY_THE_TASK, RunFailed
from torrential.membership.actions import Action, Kill, Note, Show, Start, Tell
from torrential.membership.machine import Membership
from torrential.membership.roll import How, Rules
from torrential.records import Evaluation, Event, Record, Step
from torrential.worlds.base import Job, RunWatcher
from torrential.worlds.failure import failed, going_on
from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Crew, Process, ProcessMessage, who_is
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.mail import ending
from torrential.worlds.local.nursery import Born, Ended
from torrential.worlds.local.outlet import SLOTS
from torrential.worlds.local.registry import Registry
from torrential.worlds.population import population

TICK_SECONDS = 0.1
OWN_STATUSES = (1, 3, 4)  # of children that fail: with a traceback, without a supervisor, with a message


class LocalWorld:
    """Implements worlds.base.World."""

    def __init__(self, launch: Launch | None = None) -> None:
        self._launch = launch or Launch()

    def run(
        self,
        job: Job,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._launch.used = True
        registry = Registry()
        parcel = shipping.pack(job)
        crew = Crew(self._launch.socket, parcel.fds, job.config.local)
        try:
            _Supervision(job, crew, registry, write, watcher, stop_reason).supervise()
        finally:
            self._launch.close()
            crew.close()
            registry.close()
            parcel.close()


def rules_of(job: Job) -> Rules:
    settings = job.config.local
    wanted = {"worker": settings.restart, "server": settings.restart_servers}
    return Rules(
        timeout=settings.timeout,
        replaced=frozenset(role for role, wish in wanted.items() if wish),
        replicas=settings.replicas,
        resumed=job.checkpoint is not None,
        elapsed=job.elapsed,
        slots=SLOTS,
        going_on=lambda: going_on(job.directory),
    )


class _Supervision:
    def __init__(
        self,
        job: Job,
        crew: Crew,
        registry: Registry,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None],
    ) -> None:
        self._job, self._crew, self._registry = job, crew, registry
        self._watcher, self._stop_reason = watcher, stop_reason
        self._write_record = write
        self._native = job.config.local.algorithm == "native"
        self._membership = Membership(population(job), rules_of(job))
        self._step = job.checkpoint.step if job.checkpoint else 0
        self._membership.stepped(self._step)
        self._evaluated = dict(job.evaluated)
        self._reports: set[int] = set()  # numbers of a script's reports
        self._statuses: dict[int, int] = {}  # exit statuses of processes that have ended, by pid
        self._unheard: deque[ProcessMessage | Born | Ended | None] = deque()  # reports that came while one was awaited
        self._handlers: dict[type, Callable[[Process, Any], None]] = {
            m.BufferWanted: self._buffer,
            m.Recorded: self._recorded,
            m.StopAsked: self._stop_asked,
            m.Failed: self._failed,
        }

    # -- the loop -----------------------------------------------------------------------------------------------
    def supervise(self) -> None:
        membership = self._membership
        self._tell(membership.start)
        while not membership.done:
            with contextlib.suppress(queue.Empty):
                unheard = self._unheard
                report = unheard.popleft() if unheard else self._crew.reports.get(timeout=self._patience())
                self._deal_with(report)
            self._tell(membership.tick)
            if (why := self._stop_reason()) is not None:
                self._tell(partial(membership.stop, why))
            self._watcher.tick()

    def _patience(self) -> float:
        """Seconds until the membership is to be told that time has passed."""
        due = self._membership.deadline
        return TICK_SECONDS if due is None else min(TICK_SECONDS, max(0.0, due - time.monotonic()))

    def _deal_with(self, report: ProcessMessage | Born | Ended | None) -> None:
        membership = self._membership
        if report is None:
            raise RunFailed(f"the process that starts workers was ended from outside; {going_on(self._job.directory)}")
        if isinstance(report, Born):
            who = who_is(report)
            self._tell(lambda now: membership.exists(who, now))
        elif isinstance(report, Ended):
            self._ended(report.pid, report.status)
        elif report.message is None:
            process = report.process
            self._lost(process, lambda: self._how(process))
        else:
            self._hear(report)

    def _hear(self, report: ProcessMessage) -> None:
        membership, who, message = self._membership, report.process.who, report.message
        if isinstance(message, m.Hello):
            self._tell(lambda now: membership.greeted(who, message.contact, now))
        elif isinstance(message, m.SnapshotTaken):
            self._tell(lambda now: membership.snapshot_taken(who, message, now, report.tensors))
        else:
            self._tell(lambda now: membership.hear(who, message, now, report.tensors))
            if type(message) in self._handlers:
                self._handlers[type(message)](report.process, message)

    def _tell(self, happened: Callable[[float], None]) -> None:
        """Tell the membership what happened, and do what it wants done."""
        try:
            happened(time.monotonic())
        finally:
            for action in self._membership.actions():
                self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Tell(who, message, tensors):
                if isinstance(message, m.Go) and self._native:
                    rendezvous = self._registry.path(f"rendezvous {message.generation}")
                    message = msgspec.structs.replace(message, rendezvous=rendezvous)
                self._crew.send(who, message, tensors)
            case Start(who):
                self._registry.forget(ending(who.address, who.life - 2))  # the last one's may still be read
                self._crew.spawn(who)
            case Kill(who):
                self._crew.processes[who].kill()
            case Note(event, worker, detail):
                self._event(event, worker, detail)
            case Show(worker, state):
                self._watcher.worker_state(worker, state)

    # -- records ------------------------------------------------------------------------------------------------
    def _now(self) -> float:
        began = self._membership.began
        return 0.0 if began is None else time.monotonic() - began

    def _write(self, record: Record) -> None:
        self._write_record(record)
        self._watcher.record(record)

    def _event(self, event: str, worker: int | None, detail: str) -> None:
        self._write(Event(event=event, time=self._now(), step=self._step, worker=worker, detail=detail))

    def _recorded(self, process: Process, message: m.Recorded) -> None:
        record = message.record
        if isinstance(record, Step | Evaluation):
            self._step = max(self._step, record.step)
            self._membership.stepped(self._step)
        if isinstance(record, Evaluation):
            known = message.report in self._reports or (record.split, record.step) in self._evaluated
            if not known:
                existed = self._evaluated.get(("validation", record.step), record.time)
                self._evaluated[(record.split, record.step)] = existed
                self._write(msgspec.structs.replace(record, time=existed))
            if message.report:
                self._reports.add(message.report)
            if message.report and not known and self._job.task.reaches(self._job.config.target, record.value):
                self._tell(lambda now: self._membership.hear(process.who, m.Stop(), now))
            process.send(m.Noted())
        else:
            if isinstance(record, Step):
                self._watcher.worker_state(record.worker, "training")
            self._write(record)

    def _stop_asked(self, process: Process, message: m.StopAsked) -> None:
        self._tell(partial(self._membership.stop, f"{process.name} has called run.stop()"))

    # -- processes ----------------------------------------------------------------------------------------------
    def _lost(self, process: Process, how: How) -> None:
        self._tell(lambda now: self._membership.lost(process.who, how, now))

    def _how(self, process: Process) -> str:
        """The way a process ended. The nursery tells, before its connection closes or shortly after."""
        with contextlib.suppress(queue.Empty):
            while process.pid not in self._statuses:
                report = self._crew.reports.get(timeout=1.0)
                self._unheard.append(report)  # whatever else is said meanwhile has its turn afterwards
                if isinstance(report, Ended):
                    self._statuses[report.pid] = report.status
        return self._ending(self._statuses[process.pid]) if process.pid in self._statuses else "ended"

    def _ended(self, pid: int, status: int) -> None:
        """A process has ended. Connections tell of those that had said hello; here come those that never did."""
        self._statuses[pid] = status
        for process in list(self._crew.processes.values()):  # a replacement may join them
            if process.pid == pid and process.connection is None:
                self._lost(process, self._ending(status))

    def _ending(self, status: int) -> str:
        """An exit status in words."""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        cause = BY_THE_TASK if self._job.loop is None else BY_THE_SCRIPT
        return f"exited with status {status}" + ("" if status in OWN_STATUSES else f", {cause}")

    def _buffer(self, process: Process, message: m.BufferWanted) -> None:
        granted = self._registry.grant(message.key, message.size)
        if isinstance(granted, str):
            process.send(m.BufferRefused(message.key, granted))
        else:
            process.send(m.Granted(message.key, os.getpid(), granted))

    def _failed(self, process: Process, message: m.Failed) -> None:
        raise failed(process.name, message.failure, self._job.directory)
