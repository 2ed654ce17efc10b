"""Letters between any two roles, over unix or tcp sockets.

Everybody listens. Whoever writes first dials, shows the run's token and says who it is; the answer goes back on the
same connection. Reading is done by `receive` alone, in the caller's own thread, from all connections at once: no other
thread has a hand in a small letter, there or back. If two roles dial each other at the same moment, each goes on
writing on the connection it has; so letters of one role to another arrive in order.

    caller ── token, Greeting ──► listener     anything else: a stranger, dropped and counted
    caller ── letter ───────────► listener
    caller ◄─────────── letter ── listener

A letter for somebody who is gone is lost without a word: whoever needs an answer hears of the death otherwise.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from torrential.comm import wire
from torrential.comm.admission import Admission
from torrential.comm.frames import Frames, Landing, Memory, frame, nowhere, reader_of
from torrential.comm.outbox import Outbox, Outgoing
from torrential.comm.protocol import Letter
from torrential.errors import WaitedTooLong

DIAL_SECONDS = 5.0
READS = 16  # from one connection before the others have their turn
AN_HOUR = 3600.0
BRISK_SECONDS = 2e-4
LOCAL_QUEUE = 1 << 18  # bytes that the kernel keeps for each direction of a tcp connection inside one host


class Greeting(msgspec.Struct, frozen=True, tag=True):
    address: int
    life: int  # which incarnation of that role is calling


class Contact(NamedTuple):
    """The address and incarnation by which a role is reached."""

    where: str
    life: int


class Posted(Outgoing):
    """The handle of a letter."""

    def __init__(self, to: int, written: threading.Condition) -> None:
        self._to, self._written = to, written

    def lose(self) -> None:
        self.mark()

    def wait(self, timeout: float | None = None) -> None:
        if self.done():
            return
        with self._written:
            over = self._written.wait_for(self.done, timeout)
        if not over:
            assert timeout is not None
            raise WaitedTooLong(f"address {self._to}", timeout, "to take a letter")


class _Line:
    """One connection to another role."""

    def __init__(self, sock: socket.socket, frames: Frames, outbox: Outbox, address: int, life: int) -> None:
        self.sock, self.frames, self.outbox, self.address, self.life = sock, frames, outbox, address, life


class Post:
    """One role's letters. To be used by one thread, except for `know`, `announce` and `stop`."""

    def __init__(self, address: int, life: int, listen: str, token: bytes, messages: Any) -> None:
        self.address, self.life, self._token = address, life, token
        self.memory: Memory | None = None  # what can be shared with others; to be set before the first letter
        self._landing: Landing = nowhere
        self._admission = Admission(listen, token, Greeting)
        self.where = self._admission.address
        self._decoder = reader_of(Greeting | messages)
        self._contacts: Mapping[int, Contact] = {}
        self._lines: dict[int, _Line] = {}  # by descriptor
        self._to: dict[int, _Line] = {}  # whom we write to on which
        self._arrived: deque[Letter] = deque()
        self._stopped = False
        self._spare_core = len(os.sched_getaffinity(0)) > 1
        self._brisk = False  # whether the last letter came within a moment
        self._written = threading.Condition()  # something that was not written at once is by now
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._admission, select.EPOLLIN)
        self._epoll.register(self._news, select.EPOLLIN)

    def understand(self, messages: Any) -> None:
        """Set the kinds of messages that letters may hold, besides greetings. To be called before the first is
        received."""
        self._decoder = reader_of(Greeting | messages)

    # -- what other threads may call --------------------------------------------------------------------------------
    def know(self, contacts: Mapping[int, Contact]) -> None:
        self._contacts = contacts

    def announce(self, message: Any) -> None:
        """Deliver a letter from the world itself."""
        self._arrived.append(Letter(-1, message, []))
        self._wake()

    def stop(self) -> None:
        """Let `receive` return None from now on when there is nothing to read."""
        self._stopped = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._news, 1)

    # -- reading where it is wanted ---------------------------------------------------------------------------------
    @property
    def landing(self) -> Landing:
        return self._landing

    @landing.setter
    def landing(self, where: Landing) -> None:
        """Of letters that come from now on; those that are coming in land nowhere but in fresh memory."""
        self._landing = where
        for line in self._lines.values():
            line.frames.divert()

    # -- writing ----------------------------------------------------------------------------------------------------
    def post(self, to: int, message: Any, tensors: Sequence[Tensor]) -> Posted:
        outgoing = Posted(to, self._written)
        line = self._line_to(to)
        if line is None:
            outgoing.lose()
        else:
            line.outbox.send(*frame(message, tensors, self.memory), outgoing)
        return outgoing

    def _tell(self) -> None:
        with self._written:
            self._written.notify_all()

    def _line_to(self, to: int) -> _Line | None:
        line, contact = self._to.get(to), self._contacts.get(to)
        if line is not None and not line.outbox.lost and (contact is None or contact.life <= line.life):
            return line  # a lost one is still read from, up to its end
        if contact is None:
            return None
        try:
            sock = wire.connect(contact.where, self._token, DIAL_SECONDS)
        except OSError:
            return None
        _tune(sock)
        line = self._add(sock, to, contact.life)
        line.outbox.send(*frame(Greeting(self.address, self.life), (), None), Outgoing())
        self._to[to] = line
        return line

    # -- reading ----------------------------------------------------------------------------------------------------
    def receive(self, timeout: float | None = None) -> Letter | None:
        if self._arrived:
            return self._arrived.popleft()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            ready = self._epoll.poll(0.0) or self._await(deadline)
            for descriptor, _ in ready:
                if (line := self._lines.get(descriptor)) is not None:
                    self._read(line)
                elif descriptor == self._news:
                    os.eventfd_read(self._news)
                else:
                    self._admit()
            if not ready and self._admission.deadline <= time.monotonic():
                self._admit()  # which drops those who have said nothing
            if self._arrived:
                return self._arrived.popleft()
            if (self._stopped and not ready) or time.monotonic() >= deadline:
                return None

    def _await(self, deadline: float) -> list[tuple[int, int]]:
        """Where something is to be read, sooner or later. To be woken up takes longer than a small letter and its
        answer, so where the last letter came quickly, and there is another core for whoever writes the next, it is
        looked for again and again for a moment."""
        began = time.monotonic()
        ready: list[tuple[int, int]] = []
        timeout = min(deadline, self._admission.deadline, began + AN_HOUR) - began
        if self._stopped or timeout <= 0.0:
            return ready
        if self._brisk:
            limit = began + min(timeout, BRISK_SECONDS)
            while not ready and time.monotonic() < limit:
                os.sched_yield()  # to whoever has work to do
                ready = self._epoll.poll(0.0)
        if not ready:
            ready = self._epoll.poll(timeout)
        self._brisk = time.monotonic() - began < BRISK_SECONDS and self._spare_core
        return ready

    def _read(self, line: _Line) -> None:
        frames = line.frames
        try:
            for _ in range(READS):
                room = frames.room()
                got = line.sock.recv_into(room, 0, socket.MSG_DONTWAIT)
                if not got:
                    raise wire.Closed
                for message, tensors in frames.filled(got):
                    self._take(line, message, tensors)
                if got < room.nbytes:
                    return
        except BlockingIOError:
            return
        except (wire.Closed, wire.WireError, OSError) as error:
            self._admission.strangers += isinstance(error, wire.WireError)
            self._drop(line)

    def _take(self, line: _Line, message: Any, tensors: list[Tensor]) -> None:
        if isinstance(message, Greeting):
            raise wire.WireError("a second greeting")
        contact = self._contacts.get(line.address)
        if contact is None or contact.life <= line.life:  # else of one whose place another has taken
            self._arrived.append(Letter(line.address, message, tensors))

    # -- connections ------------------------------------------------------------------------------------------------
    @property
    def strangers(self) -> int:
        """Callers that were dropped, and peers that talked nonsense."""
        return self._admission.strangers

    def _add(self, sock: socket.socket, address: int, life: int) -> _Line:
        frames = Frames(self._decoder, self.memory, lambda message: self._landing(message))
        outbox = Outbox(partial(wire.write, sock), self._tell)
        line = _Line(sock, frames, outbox, address, life)
        self._lines[sock.fileno()] = line
        self._epoll.register(sock, select.EPOLLIN)
        return line

    def _admit(self) -> None:
        for sock, greeting in self._admission.poll():
            _tune(sock)
            line = self._add(sock, greeting.address, greeting.life)
            before = self._to.get(line.address)
            if before is None or before.outbox.lost or before.life < line.life:
                self._to[line.address] = line

    def _drop(self, line: _Line) -> None:
        descriptor = line.sock.fileno()
        if self._lines.pop(descriptor, None) is None:
            return
        if self._to.get(line.address) is line:
            del self._to[line.address]
        self._epoll.unregister(descriptor)
        line.outbox.close()
        wire.close(line.sock)

    def close(self) -> None:
        for line in list(self._lines.values()):
            self._drop(line)
        self._epoll.close()
        self._admission.close()
        os.close(self._news)


def _tune(sock: socket.socket) -> None:
    """Inside a host nothing is lost and nothing far away: short queues, which stay in the cores' caches, and no pacing
    by whatever this system does for networks."""
    with contextlib.suppress(OSError):  # the other side is gone, as reading will say; or this system has it not
        if sock.family == socket.AF_INET and sock.getpeername()[0].startswith("127."):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_QUEUE)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_QUEUE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
