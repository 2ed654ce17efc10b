"""The supervisor's processes: a nursery that forks them, a connection to each, one queue of what they report."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torrential.comm import wire
from torrential.comm.admission import Admission
from torrential.comm.protocol import address_of, role_name, role_of
from torrential.config import LocalSettings
from torrential.errors import RunFailed
from torrential.membership.roles import Who
from torrential.worlds.local import messages as m
from torrential.worlds.local.nursery import Born, Ended, Message, Spawn


@dataclass(eq=False)
class Process:
    """One process of the crew."""

    who: Who
    pid: int = 0
    connection: wire.Connection[Any] | None = None
    outbox: queue.SimpleQueue[tuple[Any, Sequence[Tensor]] | None] = field(default_factory=queue.SimpleQueue)

    @property
    def name(self) -> str:
        return role_name(self.who.address)

    def send(self, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Never blocks: a stopped process must not stop the supervisor. What a dead one is sent is dropped."""
        self.outbox.put((message, tensors))

    def write(self) -> None:
        """The thread that empties the outbox."""
        assert self.connection is not None
        with contextlib.suppress(wire.Closed):
            while (item := self.outbox.get()) is not None:
                self.connection.send(*item)

    def kill(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class ProcessMessage:
    """A message of a process; `message` None: its connection is closed."""

    process: Process
    message: Any
    tensors: list[Tensor]


class Crew:
    def __init__(self, nursery: socket.socket, parcel: tuple[int, int], settings: LocalSettings) -> None:
        self._nursery: wire.Connection[Message] = wire.Connection(nursery, Message)
        self._parcel, self._settings = parcel, settings
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._admission = Admission(f"unix:@torrential-{secrets.token_hex(8)}", self._token, m.Hello)
        self.reports: queue.SimpleQueue[ProcessMessage | Born | Ended | None] = queue.SimpleQueue()
        wire.decoder(m.Any)  # its types are known before threads begin to read
        self.processes: dict[Who, Process] = {}  # all that were ever asked for
        threading.Thread(target=self._watch_nursery, daemon=True).start()
        self._hearing = threading.Thread(target=self._admit, daemon=True)
        self._hearing.start()

    def spawn(self, who: Who) -> None:
        self.processes[who] = Process(who)
        parcel = (os.getpid(), *self._parcel)
        role, number = role_of(who.address)
        spawn = Spawn(
            role,
            number,
            who.life,
            self._admission.address,
            self._token,
            parcel,
            self._settings.transport,
            self._settings.loaders if role == "worker" else 0,
        )
        try:
            self._nursery.send(spawn)
        except wire.Closed as error:
            raise RunFailed("the process that starts workers is gone; run again, or go on with --resume") from error

    def send(self, who: Who, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        self.processes[who].send(message, tensors)

    def _watch_nursery(self) -> None:
        try:
            while True:
                message, _ = self._nursery.receive()
                if isinstance(message, Born):
                    self.processes[who_is(message)].pid = message.pid
                if isinstance(message, Born | Ended):
                    self.reports.put(message)
        except (wire.Closed, wire.WireError):
            self.reports.put(None)

    def _admit(self) -> None:
        while not self._admission.stopped:
            for sock, hello in self._admission.poll(math.inf):
                threading.Thread(target=self._serve, args=(sock, hello), daemon=True).start()

    def _serve(self, sock: socket.socket, hello: m.Hello) -> None:
        connection: wire.Connection[Any] = wire.Connection(sock, m.Any)
        process = self.processes.get(who_is(hello))
        if process is None:
            return connection.close()
        process.pid, process.connection = hello.pid, connection
        self.reports.put(ProcessMessage(process, hello, []))
        threading.Thread(target=process.write, daemon=True).start()
        try:
            while True:
                message, tensors = connection.receive()
                self.reports.put(ProcessMessage(process, message, tensors))
        except (wire.Closed, wire.WireError):
            process.outbox.put(None)
            self.reports.put(ProcessMessage(process, None, []))

    def close(self) -> None:
        self._admission.stop()
        self._hearing.join(1.0)
        self._admission.close()
        for process in self.processes.values():
            process.outbox.put(None)
            if process.connection is not None:
                process.connection.close()


def who_is(named: Born | m.Hello) -> Who:
    return Who(address_of(named.role, named.rank), named.life)
