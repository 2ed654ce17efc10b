"""The supervisor's processes: hosts that begin them, a connection to each, one queue of what is reported of them."""

from __future__ import annotations

import contextlib
import errno
import math
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from torrential.comm import stream, wire
from torrential.comm.admission import Admission
from torrential.comm.handshake import SECRET_BYTES
from torrential.comm.protocol import address_of, role_name, role_of
from torrential.comm.stream import end_when_silent
from torrential.comm.tls import Tls
from torrential.errors import RunFailed
from torrential.membership.roles import Who
from torrential.worlds.local import messages as m
from torrential.worlds.local.agent import Host
from torrential.worlds.local.identities import Identities, nothing_to_show
from torrential.worlds.local.orders import Begin, Born, End, Ended, OfProcess
from torrential.worlds.placement import Placement

AWAIT_SECONDS = 40.0  # that roles wait for another host in the place of theirs, before they begin elsewhere


@dataclass(eq=False)
class Process:
    """One process of the crew."""

    who: Who
    host: Host  # that it is on
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


@dataclass(frozen=True)
class ProcessMessage:
    """A message of a process; `message` None: its connection is closed."""

    process: Process
    message: Any
    tensors: list[Tensor]


class AwaitedHost:
    """Implements Host in the place of one that is lost, and that another will come for: roles wait for that."""

    number = -1

    def __init__(self, name: str, report: Callable[[Ended], None]) -> None:
        self.name, self._report = name, report
        self.until = time.monotonic() + AWAIT_SECONDS
        self.waiting: list[Who] = []

    def begin(self, order: Begin) -> None:
        self.waiting.append(who_is(order))

    def end(self, order: End) -> None:
        self.waiting.remove(who_is(order))
        self._report(Ended(order.role, order.rank, order.life, -signal.SIGKILL))

    def close(self, problem: str) -> None:
        self.waiting.clear()


class HostCame(NamedTuple):
    """The report that another host is ready to begin processes."""

    host: Host


class HostLost(NamedTuple):
    """The report that a host is gone: it is silent, or its agent or its nursery has ended."""

    host: Host


Report = ProcessMessage | Born | Ended | HostCame | HostLost


class Crew:
    def __init__(
        self,
        loaders: int,
        placement: Placement,
        where: str = "",
        secret: bytes = b"",
        host_timeout: float = 0.0,
        identity: Identities = nothing_to_show,
    ) -> None:
        """`loaders`: of each worker; `where`: the address to listen at, by default one that this host alone knows."""
        self.identity, own = identity, identity("supervisor")
        tls = None if own is None else Tls(own)
        self._loaders, self._placement, self._host_timeout = loaders, placement, host_timeout
        self.secret = secret or secrets.token_bytes(SECRET_BYTES)
        where = where or f"unix:@torrential-{secrets.token_hex(8)}"
        self._admission = Admission(where, self.secret, m.Hello, tls)
        self.address = self._admission.address
        self.hosts: dict[int, Host] = {}  # those that are there, by number
        self.own: Host | None = None  # that of the supervisor, where roles are on it
        self.replace: Callable[[Host], bool] = lambda host: False
        """Begins another host in the place of one that is lost, where that is possible; returns whether it does."""
        self._awaited: dict[int, AwaitedHost] = {}
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        wire.decoder(m.Any)  # its types are known before threads begin to read
        self.processes: dict[Who, Process] = {}  # all that were ever asked for
        self._hearing = threading.Thread(target=self._admit, daemon=True)
        self._hearing.start()

    def report(self, host: Host, said: Born | Ended | None) -> None:
        """What the agent of a host has to say; None: it is gone."""
        self.reports.put(HostLost(host) if said is None else said)

    def spawn(self, who: Who) -> None:
        role, number = role_of(who.address)
        awaited = self._awaited.get(self._placement.meant(who.address))
        if awaited is not None and (role == "worker" or not self.hosts):  # others are needed by those that remain
            self.processes[who] = Process(who, awaited)
            return awaited.begin(Begin(role, number, who.life))
        if not self.hosts:
            raise RunFailed("all hosts are lost")
        seat = self._placement.seat(who.address, self.hosts)
        host = self.hosts[seat.host]
        self.processes[who] = Process(who, host)
        loaders = self._loaders if role == "worker" else 0
        shown = self.identity(role_name(who.address))
        host.begin(Begin(role, number, who.life, loaders, seat.number, seat.beside, shown))

    def kill(self, who: Who) -> None:
        role, number = role_of(who.address)
        self.processes[who].host.end(End(role, number, who.life))

    def lose(self, host: Host) -> list[Process]:
        """A host is gone; returns what was on it. Whatever comes from there later on finds nobody who listens."""
        del self.hosts[host.number]
        host.close(f"host 0 has heard nothing from here for {self._host_timeout:g} s")
        if self.replace(host):
            self._awaited[host.number] = AwaitedHost(host.name, self.reports.put)
        lost = [process for process in self.processes.values() if process.host is host]
        for process in lost:
            process.outbox.put(None)
            if process.connection is not None:
                process.connection.close()
        return lost

    def add(self, host: Host) -> None:
        """A host has come; the roles that waited for it begin there."""
        self.hosts[host.number] = host
        self._begin_those_of(host.number)

    def wait_no_longer(self) -> None:
        """Begin the roles of hosts that have not come in time on those that are there."""
        now = time.monotonic()
        for number in [number for number, awaited in self._awaited.items() if awaited.until <= now]:
            self._begin_those_of(number)

    def _begin_those_of(self, number: int) -> None:
        if (awaited := self._awaited.pop(number, None)) is not None:
            for who in awaited.waiting:
                self.spawn(who)

    def send(self, who: Who, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        self.processes[who].send(message, tensors)

    def _admit(self) -> None:
        while not self._admission.stopped:
            for sock, hello in self._admission.poll(math.inf):
                threading.Thread(target=self._serve, args=(sock, hello), daemon=True).start()

    def _serve(self, sock: stream.Connected, hello: m.Hello) -> None:
        if self._host_timeout:
            end_when_silent(sock, self._host_timeout)
        connection: wire.Connection[Any] = wire.Connection(sock, m.Any)
        process = self.processes.get(who_is(hello))
        if process is None:
            return connection.close()
        process.connection = connection
        self.reports.put(ProcessMessage(process, hello, []))
        threading.Thread(target=process.write, daemon=True).start()
        try:
            while True:
                message, tensors = connection.receive()
                self.reports.put(ProcessMessage(process, message, tensors))
        except (wire.Closed, wire.WireError) as error:
            process.outbox.put(None)
            if is_silence(error):
                self.reports.put(HostLost(process.host))
            self.reports.put(ProcessMessage(process, None, []))

    def close(self, problem: str = "") -> None:
        for host in self.hosts.values():
            host.close(problem)
        self._admission.stop()
        self._hearing.join(1.0)
        self._admission.close()
        for process in self.processes.values():
            process.outbox.put(None)
            if process.connection is not None:
                process.connection.close()


def is_silence(error: Exception) -> bool:
    """Whether a connection has ended because nothing came from the other host, or none leads there."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


def who_is(named: OfProcess | m.Hello) -> Who:
    return Who(address_of(named.role, named.rank), named.life)
