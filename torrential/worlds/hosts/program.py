"""What the agent of another host than the supervisor's does: join, prepare the job, begin and end processes, go.

It has no torch: the job is made by a process that its nursery forks. When the supervisor is gone or silent, the agent
ends, and its processes with it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import msgspec

from torrential.comm import stream
from torrential.errors import RunFailed
from torrential.worlds.hosts.messages import (
    AskTime,
    Come,
    JobRequest,
    Prepared,
    RunOver,
    RunPlan,
    TimeIs,
    ToAgent,
    versions,
)
from torrential.worlds.hosts.rendezvous import Rendezvous, join, secret_of_run
from torrential.worlds.local.agent import JOB, HostAgent
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.orders import Begin, Born, End, Ended, Surroundings

CLOCK_ROUNDS = 8


def follow(meeting: Rendezvous, launch: Launch, task: str | None, data: str | None = None) -> None:
    """Take part in a run as one of its hosts, until it has ended. `task`: as this host loads it."""
    sock = join(meeting, Come(meeting.host, socket.gethostname(), versions()))
    agent = HostProgram(sock, meeting.secret, launch, task, data)
    try:
        agent.serve()
    finally:
        agent.close()


class HostProgram:
    """One host's part in a run, over a connection to the supervisor that both ends have proved themselves on."""

    def __init__(
        self,
        sock: stream.Connected,
        secret: bytes,
        launch: Launch,
        task: str | None = None,
        data: str | None = None,
        packed: tuple[int, int, int] | None = None,
    ) -> None:
        """`packed`: the supervisor's job, where it was brought here; else it is made of this host's files."""
        self._packed = packed
        self._sock, self._secret, self._launch, self._task, self._data = sock, secret, launch, task, data
        self._connection: stream.Plain[Any] = stream.Plain(sock, ToAgent, ahead=0)
        self._sending = threading.Lock()
        self._job = os.memfd_create("torrential job"), os.memfd_create("torrential job's tensors")
        self._model = os.memfd_create("torrential model"), os.memfd_create("torrential model's tensors")
        self._agent: HostAgent | None = None
        self._alone = False  # the nursery is gone

    def serve(self) -> None:
        try:
            plan = self._connection.receive()
            assert isinstance(plan, RunPlan)
            stream.end_when_silent(self._sock, plan.host_timeout)
            self._prepare(plan)
            while True:
                match self._connection.receive():
                    case Begin() as order:
                        self._nursery.begin(order)
                    case End() as order:
                        self._nursery.end(order)
                    case RunOver(problem):
                        if problem:
                            raise RunFailed(f"the run has ended on host 0: {problem}")
                        return
        except stream.Closed as error:
            gone = "the process that starts workers" if self._alone else "host 0"
            raise RunFailed(f"{gone} is gone; what was recorded is in the run's directory") from error

    @property
    def _nursery(self) -> HostAgent:
        assert self._agent is not None
        return self._agent

    def _prepare(self, plan: RunPlan) -> None:
        """Have the job made; that it is, or what is wrong, is reported when the process that makes it has ended."""
        around = Surroundings(
            (os.getpid(), *self._job),
            plan.address,
            secret_of_run(self._secret, plan.salt),
            plan.transport,
            interface=self._sock.getsockname()[0],
            apart=True,
            clock=self._clock_ahead(),
            host_timeout=plan.host_timeout,
            labelled=self._packed is not None,  # whoever brings the job from one host brings lines back to it
        )
        request = JobRequest(plan, self._task, self._data, (os.getpid(), *self._model), self._packed)
        os.pwrite(self._job[0], msgspec.msgpack.encode(request), 0)
        self._launch.used = True
        self._agent = HostAgent(self._launch.socket, around, self._report)
        self._agent.make_job()

    def _clock_ahead(self) -> float:
        """This host's monotonic clock minus the supervisor's, as the quickest of several answers says."""
        found = []
        for _ in range(CLOCK_ROUNDS):
            asked = time.monotonic()
            self._send(AskTime())
            said = self._connection.receive()
            assert isinstance(said, TimeIs)
            heard = time.monotonic()
            found.append((heard - asked, (asked + heard) / 2 - said.now))
        return min(found)[1]

    def _report(self, said: Born | Ended | None) -> None:
        if said is None:  # the nursery is gone: so is what this host can do
            self._alone = True
            stream.close(self._sock)
        elif said.role != JOB:
            self._send(said)
        elif isinstance(said, Ended):
            self._send(Prepared(self._problem(said.status)))

    def _problem(self, status: int) -> str:
        if not status:
            return ""
        text = os.pread(self._job[0], 4096, 0).decode(errors="replace")
        return text or f"the process that loads the task ended with status {status}"

    def _send(self, message: Any) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except stream.Closed:
                stream.close(self._sock)  # whoever reads is told

    def close(self) -> None:
        self._launch.close()
        if self._agent is not None:
            self._agent.close()
        stream.close(self._sock)
        for fd in (*self._job, *self._model):
            os.close(fd)
