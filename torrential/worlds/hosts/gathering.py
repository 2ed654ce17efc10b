"""The supervisor's side of a rendezvous: it hears the agents of other hosts, checks them, and gives orders to them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from torrential.comm import stream
from torrential.comm.admission import Admission
from torrential.comm.handshake import CHALLENGE_BYTES
from torrential.comm.tls import Tls
from torrential.errors import BadInput, RunFailed
from torrential.records import MANIFEST
from torrential.userfiles import split_spec
from torrential.worlds.base import Job
from torrential.worlds.hosts.messages import (
    AskTime,
    Come,
    FromAgent,
    Prepared,
    RunOver,
    RunPlan,
    TimeIs,
    digest,
    versions,
)
from torrential.worlds.hosts.rendezvous import JOIN_SECONDS, Rendezvous, secret_of_run
from torrential.worlds.local.crew import Crew, HostCame
from torrential.worlds.local.orders import Begin, End

LOOK_SECONDS = 0.1


class RemoteHost:
    """Implements worlds.local.agent.Host for a host whose agent has called."""

    def __init__(self, sock: stream.Connected, come: Come, plan: RunPlan, crew: Crew) -> None:
        self.number, self.name = come.host, f"host {come.host} ({come.name}, {sock.getpeername()[0]})"
        self.problem: str | None = None  # why it cannot take part; None: it is not known yet; "": it is ready
        self.gone = False
        self._connection: stream.Plain[Any] = stream.Plain(sock, FromAgent, ahead=0)
        self._sending = threading.Lock()
        self._crew = crew
        stream.end_when_silent(sock, plan.host_timeout)
        self._send(plan)
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, order: Begin) -> None:
        self._send(order)

    def end(self, order: End) -> None:
        self._send(order)

    def close(self, problem: str) -> None:
        self._send(RunOver(problem))
        self._connection.close()

    def _send(self, message: Any) -> None:
        with self._sending, contextlib.suppress(stream.Closed):  # that it is gone is reported by the thread that reads
            self._connection.send(message)

    def _listen(self) -> None:
        with contextlib.suppress(stream.Closed, stream.WireError):
            while True:
                match self._connection.receive():
                    case AskTime():
                        self._send(TimeIs(time.monotonic()))
                    case Prepared(problem):
                        self.problem = problem
                    case said:
                        self._crew.report(self, said)
        self.gone = True
        self._crew.report(self, None)


class Gathering:
    """The hosts of a run, which call at a rendezvous. Implements worlds.local.supervisor.Meeting."""

    with_own_host = True
    here = "host 0"  # the supervisor's place, as people read of it

    def __init__(self, meeting: Rendezvous) -> None:
        self._meeting, self._salt = meeting, secrets.token_bytes(CHALLENGE_BYTES)
        self.interface = meeting.interface
        self._admission: Admission | None = None
        self._present: dict[int, RemoteHost] = {}  # the newest with that number
        self._awaited: list[RemoteHost] = []  # that load the task
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.secret = secret_of_run(meeting.secret, self._salt)

    def gather(self, job: Job, crew: Crew) -> str:
        meeting, count = self._meeting, job.config.several.hosts
        if meeting.hosts != count:
            raise BadInput(f"the run is one of {count} hosts (given: --hosts {meeting.hosts}); give it the same")
        plan = self._plan(job, crew.address)
        shown = crew.identity("rendezvous")
        tls = None if shown is None else Tls(shown, anybody=True)
        try:
            self._admission = Admission(meeting.address, meeting.secret, Come, tls, says_challenge=True)
        except OSError as error:
            where = meeting.address.removeprefix("tcp:")
            raise BadInput(f"--rendezvous {where}: host 0 cannot listen there ({error.strerror})") from error
        self._begin_agents(job, crew)
        deadline = time.monotonic() + JOIN_SECONDS
        while not crew.hosts.keys() >= {*range(count)}:
            for host in self._ready(plan, crew):
                if host.problem:
                    raise BadInput(f"{host.name} cannot take part: {host.problem}")
                if host.gone:
                    raise RunFailed(f"{host.name} has left before the run began; see what was said there")
                crew.hosts[host.number] = host
            self._check_agents()
            if time.monotonic() > deadline:
                raise RunFailed(self._missing(crew))
        self._thread = threading.Thread(target=self._hear_others, args=(plan, crew), daemon=True)
        self._thread.start()
        own = [f"host 0 ({socket.gethostname()}, {self.interface})"] if self.with_own_host else []
        return ", ".join([*own, *(host.name for _, host in sorted(crew.hosts.items()) if host is not crew.own)])

    def _begin_agents(self, job: Job, crew: Crew) -> None:
        """Begin the agents of other hosts, if that is not left to others; the supervisor listens by now."""

    def _check_agents(self) -> None:
        """Raise what is known of agents that will never call."""

    def _hear_others(self, plan: RunPlan, crew: Crew) -> None:
        """Hosts that come while the run goes on are reported to the crew once they are ready."""
        while not self._ended.is_set():
            for host in self._ready(plan, crew):
                if host.problem:
                    host.close(host.problem)
                elif not host.gone:
                    crew.reports.put(HostCame(host))

    def _ready(self, plan: RunPlan, crew: Crew) -> list[RemoteHost]:
        """Hear who calls; the hosts of which it is now known whether they can take part."""
        assert self._admission is not None
        for sock, come in self._admission.poll(LOOK_SECONDS):
            host = RemoteHost(sock, come, plan, crew)
            if problem := self._objection(come):
                host.problem = problem
                host.close(problem)
            else:
                self._present[host.number] = host
            self._awaited.append(host)
        known = [host for host in self._awaited if host.gone or host.problem is not None]
        self._awaited = [host for host in self._awaited if host not in known]
        return known

    def close(self, problem: str) -> None:
        self._ended.set()
        for host in self._present.values():
            host.close(problem)
        if self._thread is not None:
            self._thread.join(2.0)
        if self._admission is not None:
            self._admission.close()

    def _plan(self, job: Job, address: str) -> RunPlan:
        config, settings = job.config, job.config.several
        sources = {"task": config.source or "", "strategy": config.strategy}
        files = {what: split_spec(source)[0] for what, source in sources.items()}
        return RunPlan(
            msgspec.msgpack.encode(config),
            str(job.directory.absolute()),
            digest(job.directory / MANIFEST),
            {what: digest(Path(file)) for what, file in files.items() if file},
            None if job.checkpoint is None else job.checkpoint.step,
            job.handed is not None,
            self._salt,
            address,
            settings.transport,
            settings.host_timeout,
        )

    def _objection(self, come: Come) -> str:
        """Why a host cannot take part, as far as that is seen at once."""
        there = self._present.get(come.host)
        if (come.host == 0 and self.with_own_host) or (there is not None and not there.gone):
            taken = "host 0" if there is None else there.name
            return f"that number is taken by {taken}; give every host its own --host-rank"
        for name, ours in versions().items():
            if (theirs := come.versions.get(name)) != ours:
                return f"{name} is {theirs} there and {ours} on {self.here}; install the same"
        return ""

    def _missing(self, crew: Crew) -> str:
        absent = [number for number in range(self._meeting.hosts) if number not in crew.hosts]
        slow = ", ".join(self._present[number].name for number in absent if number in self._present)
        if slow:
            return f"{slow} did not load the task within {JOIN_SECONDS:.0f} s"
        missing = ", ".join(map(str, absent))
        return (
            f"not all hosts came within {JOIN_SECONDS:.0f} s (missing: {missing}); run the command there, with "
            "--host-rank"
        )
