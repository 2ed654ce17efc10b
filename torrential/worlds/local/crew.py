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
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torrential.comm import wire
from torrential.comm.admission import Admission
from torrential.errors import RunFailed
from torrential.worlds.local import messages as m
from torrential.worlds.local.nursery import Born, Ended, Message, Spawn


@dataclass
class Member:
    """One process of the crew."""

    role: str
    rank: int
    life: int
    pid: int = 0
    address: str = ""
    letters: str = ""  # where letters reach it
    connection: wire.Connection[Any] | None = None
    left: bool = False
    last: bool = False  # whether it can give the last snapshot
    delayed: bool = False
    heard: float = field(default_factory=time.monotonic)  # when it last said something from where it works
    quiet: float = 0.0  # seconds without any sign of it
    probed: bool = False  # whether it was asked for one since
    said: m.Failed | None = None
    outbox: queue.SimpleQueue[tuple[Any, Sequence[Tensor]] | None] = field(default_factory=queue.SimpleQueue)

    @property
    def name(self) -> str:
        return "observer" if self.role == "observer" else f"{self.role} {self.rank}"

    def send(self, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        """Never blocks: a stopped process must not stop the supervisor. What a dead one is sent is dropped."""
        self.outbox.put((message, tensors))

    def heard_from(self) -> None:
        """It has given a sign of life."""
        self.quiet, self.probed = 0.0, False

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
class Report:
    """Something a member said; `message` None: its connection is closed."""

    member: Member
    message: Any
    tensors: list[Tensor]


class Crew:
    def __init__(self, nursery: socket.socket, parcel: tuple[int, int], transport: str, letters: bool) -> None:
        self._nursery: wire.Connection[Message] = wire.Connection(nursery, Message)
        self._parcel, self._transport, self._letters = parcel, transport, letters
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._admission = Admission(f"unix:@torrential-{secrets.token_hex(8)}", self._token, m.Hello)
        self.reports: queue.SimpleQueue[Report | Ended | None] = queue.SimpleQueue()
        wire.decoder(m.Any)  # its types are known before threads begin to read
        self._expected: dict[tuple[str, int, int], Member] = {}
        threading.Thread(target=self._watch_nursery, daemon=True).start()
        self._hearing = threading.Thread(target=self._admit, daemon=True)
        self._hearing.start()

    def spawn(self, role: str, rank: int, life: int) -> Member:
        member = Member(role, rank, life)
        self._expected[(role, rank, life)] = member
        parcel = (os.getpid(), *self._parcel)
        spawn = Spawn(role, rank, life, self._admission.address, self._token, parcel, self._transport, self._letters)
        try:
            self._nursery.send(spawn)
        except wire.Closed as error:
            raise RunFailed("the process that starts workers is gone; run again, or go on with --resume") from error
        return member

    def _watch_nursery(self) -> None:
        try:
            while True:
                message, _ = self._nursery.receive()
                if isinstance(message, Born):
                    self._expected[(message.role, message.rank, message.life)].pid = message.pid
                elif isinstance(message, Ended):
                    self.reports.put(message)
        except (wire.Closed, wire.WireError):
            self.reports.put(None)

    def _admit(self) -> None:
        while not self._admission.stopped:
            for sock, hello in self._admission.poll(math.inf):
                threading.Thread(target=self._serve, args=(sock, hello), daemon=True).start()

    def _serve(self, sock: socket.socket, hello: m.Hello) -> None:
        connection: wire.Connection[Any] = wire.Connection(sock, m.Any)
        member = self._expected.get((hello.role, hello.rank, hello.life))
        if member is None:
            return connection.close()
        member.pid, member.address, member.letters = hello.pid, hello.address, hello.letters
        member.connection = connection
        self.reports.put(Report(member, hello, []))
        threading.Thread(target=member.write, daemon=True).start()
        try:
            while True:
                message, tensors = connection.receive()
                self.reports.put(Report(member, message, tensors))
        except (wire.Closed, wire.WireError):
            member.outbox.put(None)
            self.reports.put(Report(member, None, []))

    def close(self) -> None:
        self._admission.stop()
        self._hearing.join(1.0)
        self._admission.close()
        for member in self._expected.values():
            member.outbox.put(None)
            if member.connection is not None:
                member.connection.close()
