"""The supervisor of a local run: starts processes, notices deaths, and has the membership decide what follows.

    processes ── messages, closed connections ──► supervisor ──► Membership (membership/machine.py)
    processes ◄── messages, starts, kills ─────── supervisor ◄── actions

It deals with hosts, of which its own is the first, unless others begin all agents (worlds/ray): the agent of a host
(agent.py) begins processes there and keeps their memory. Here are how processes ended, and records.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import msgspec

from torrential import shipping
from torrential.comm.stream import tcp_address
from torrential.errors import BY_THE_SCRIPT, BY_THE_TASK, RunFailed, TorrentialError
from torrential.membership.actions import Action, Kill, Note, Show, Start, Tell
from torrential.membership.machine import Membership
from torrential.membership.roles import Who
from torrential.membership.roll import How, Rules
from torrential.records import Evaluation, Event, Record, Step
from torrential.trainer.handed import handed_over
from torrential.worlds.base import Job, RunWatcher
from torrential.worlds.failure import failed, going_on
from torrential.worlds.local import messages as m
from torrential.worlds.local.agent import Host, HostAgent
from torrential.worlds.local.crew import Crew, HostCame, HostLost, Process, ProcessMessage, Report, who_is
from torrential.worlds.local.identities import identities
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.orders import Born, Ended, Surroundings
from torrential.worlds.local.outlet import SLOTS
from torrential.worlds.placement import Placement, read_wishes
from torrential.worlds.population import population
from torrential.worlds.trace import clear_parts, join_parts

TICK_SECONDS = 0.1
ENDING_SECONDS = 1.0
LOST = 1 << 16  # in the place of an exit status, where the host is gone
OWN_STATUSES = (1, 3, 4)  # of children that fail: with a traceback, without a supervisor, with a message


class Meeting(Protocol):
    """The way in which other hosts come to take part. How their agents are begun is its matter alone."""

    interface: str
    """The address at which other hosts reach this one."""
    secret: bytes
    """The run's secret, which those hosts know as well."""
    with_own_host: bool
    """Whether roles are on the supervisor's own host, too, by an agent in the supervisor's process."""

    def gather(self, job: Job, crew: Crew) -> str:
        """Add all hosts to the crew, once they are ready to begin processes; returns who they are, in words. Those that
        come later on are reported to it."""

    def close(self, problem: str) -> None:
        """No host can come any more; those that came and are not in the crew are told why."""


class LocalWorld:
    """Implements worlds.base.World: roles are processes, on this host and on those of a meeting."""

    def __init__(self, launch: Launch | None = None, meeting: Meeting | None = None) -> None:
        self._meeting = meeting
        self._launch = launch or (Launch() if meeting is None or meeting.with_own_host else None)

    def run(
        self,
        job: Job,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        if self._launch is None:
            return self._supervise(job, write, watcher, stop_reason)
        self._launch.used = True
        with handed_over(job.task, job.config, job.strategy, write) as handed:
            self._supervise(replace(job, handed=handed), write, watcher, stop_reason)

    def _supervise(
        self,
        job: Job,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None],
    ) -> None:
        parcel = shipping.pack(job) if self._launch is not None else shipping.empty_parcel()
        crew = self._crew(job, (os.getpid(), *parcel.fds))
        clear_parts(job.directory)
        problem = "it was interrupted"
        try:
            if self._meeting is not None:
                event = Event(event="hosts_met", time=job.elapsed, detail=self._meeting.gather(job, crew))
                write(event)
                watcher.record(event)
            _Supervision(job, crew, write, watcher, stop_reason).supervise()
            problem = ""
        except TorrentialError as error:
            problem = str(error)
            raise
        finally:
            if self._meeting is not None:
                self._meeting.close(problem)
            if self._launch is not None:
                self._launch.close()
            crew.close(problem)
            if job.config.settings.trace:
                join_parts(job.directory)
            parcel.close()

    def _crew(self, job: Job, parcel: tuple[int, int, int]) -> Crew:
        """The crew with this host as its first, if roles are here."""
        settings, meeting = job.config.local, self._meeting
        nursery = None if self._launch is None else self._launch.socket
        identity = identities(settings)  # before anything listens
        counts = {members.name: members.count for members in population(job)}
        if meeting is None:
            crew = Crew(settings.loaders, Placement(1, counts), identity=identity)
            around = Surroundings(parcel, crew.address, crew.secret, settings.transport)
        else:
            several = job.config.several
            wishes = read_wishes(several.placement, several.hosts, counts)
            placement = Placement(several.hosts, counts, wishes)
            where = tcp_address(meeting.interface, 0)
            crew = Crew(settings.loaders, placement, where, meeting.secret, several.host_timeout, identity)
            around = Surroundings(
                parcel, crew.address, crew.secret, settings.transport, interface=meeting.interface, apart=True
            )
        if nursery is not None:
            own: HostAgent = HostAgent(nursery, around, lambda said: crew.report(own, said))
            crew.hosts[0] = crew.own = own
        return crew


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
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None],
    ) -> None:
        self._job, self._crew = job, crew
        self._watcher, self._stop_reason = watcher, stop_reason
        self._write_record = write
        self._membership = Membership(population(job), rules_of(job))
        self._step = job.checkpoint.step if job.checkpoint else 0
        self._membership.stepped(self._step)
        self._evaluated = dict(job.evaluated)
        self._reports: set[int] = set()  # numbers of a script's reports
        self._statuses: dict[Who, int] = {}  # exit statuses of processes that have ended
        self._closed: dict[Who, float] = {}  # roles of other hosts whose connection has ended, and until when to wait
        self._unheard: deque[Report] = deque()  # reports that came while one was awaited
        self._handlers: dict[type, Callable[[Process, Any], None]] = {
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
            self._end_unexplained()
            self._crew.wait_no_longer()
            self._tell(membership.tick)
            if (why := self._stop_reason()) is not None:
                self._tell(partial(membership.stop, why))
            self._watcher.tick()

    def _patience(self) -> float:
        """Seconds until the membership is to be told that time has passed."""
        due = self._membership.deadline
        return TICK_SECONDS if due is None else min(TICK_SECONDS, max(0.0, due - time.monotonic()))

    def _deal_with(self, report: Report) -> None:
        membership = self._membership
        if isinstance(report, HostLost):
            self._host_lost(report.host)
        elif isinstance(report, HostCame):
            self._host_came(report.host)
        elif isinstance(report, Born):
            who = who_is(report)
            self._tell(lambda now: membership.exists(who, now))
        elif isinstance(report, Ended):
            self._ended(who_is(report), report.status)
        elif report.message is None:
            process = report.process
            if process.host is self._crew.own:
                self._lost(process, lambda: self._how(process))
            else:
                self._closed_elsewhere(process)
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
                self._crew.send(who, message, tensors)
            case Start(who):
                self._crew.spawn(who)
            case Kill(who):
                self._crew.kill(who)
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

    # -- hosts --------------------------------------------------------------------------------------------------
    def _host_came(self, host: Host) -> None:
        self._crew.add(host)
        self._event("host_joined", None, host.name)

    def _host_lost(self, host: Host) -> None:
        """All that was on a host is gone with it: one event for the membership."""
        if host is self._crew.own:
            raise RunFailed(f"the process that starts workers was ended from outside; {going_on(self._job.directory)}")
        if self._crew.hosts.get(host.number) is not host:
            return
        lost = [process for process in self._crew.lose(host) if process.who not in self._statuses]
        names = ", ".join(process.name for process in lost)
        self._event("host_lost", None, f"{host.name}: {names or 'no role was there'}")
        for process in lost:
            self._statuses[process.who] = LOST
            self._closed.pop(process.who, None)
        whos = [process.who for process in lost]
        self._tell(lambda now: self._membership.lost_together(whos, f"was lost with {host.name}", now))

    def _closed_elsewhere(self, process: Process) -> None:
        """The connection of a role on another host has ended: what has become of it is known when its agent, or the
        silence of its host, says so."""
        if process.who in self._statuses:
            if self._statuses[process.who] != LOST:
                self._lost(process, self._ending(self._statuses[process.who]))
        else:
            self._closed[process.who] = time.monotonic() + ENDING_SECONDS + self._job.config.several.host_timeout

    def _end_unexplained(self) -> None:
        """A role whose connection has ended, and whose agent says nothing of that, is ended and taken for dead."""
        now = time.monotonic()
        for who in [who for who, due in self._closed.items() if due <= now]:
            del self._closed[who]
            self._crew.kill(who)
            self._lost(self._crew.processes[who], "ended")

    # -- processes ----------------------------------------------------------------------------------------------
    def _lost(self, process: Process, how: How) -> None:
        self._tell(lambda now: self._membership.lost(process.who, how, now))

    def _how(self, process: Process) -> str:
        """The way a process ended. The nursery tells, before its connection closes or shortly after."""
        with contextlib.suppress(queue.Empty):
            while process.who not in self._statuses:
                report = self._crew.reports.get(timeout=1.0)
                self._unheard.append(report)  # whatever else is said meanwhile has its turn afterwards
                if isinstance(report, Ended):
                    self._statuses[who_is(report)] = report.status
        return self._ending(self._statuses[process.who]) if process.who in self._statuses else "ended"

    def _ended(self, who: Who, status: int) -> None:
        """A process has ended. Connections tell of those that had said hello; here come those that never did."""
        self._statuses[who] = status
        process = self._crew.processes[who]
        if process.connection is None or self._closed.pop(who, None) is not None:
            self._lost(process, self._ending(status))

    def _ending(self, status: int) -> str:
        """An exit status in words."""
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        cause = BY_THE_TASK if self._job.loop is None else BY_THE_SCRIPT
        return f"exited with status {status}" + ("" if status in OWN_STATUSES else f", {cause}")

    def _failed(self, process: Process, message: m.Failed) -> None:
        raise failed(process.name, message.failure, self._job.directory)
