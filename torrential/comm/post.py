"""Letters between any two roles, over unix or tcp sockets: the one transport, which collectives use, too.

Every role listens. The role that writes first dials, proves that it knows the run's secret and names itself; the answer
goes back on the same connection. If two roles dial each other at the same moment, each goes on writing on its own
connection; so letters of one role to another arrive in order.

Reading is done in the owner's own thread, from all connections at once, whenever it waits for something: no other
thread has a hand in a small letter, there or back. While the owner computes, a thread may read in its place
(`read_meanwhile`), so that an all-reduce gets on during backward; the owner takes over again when it next waits.

    caller ── proof, Greeting ──► listener     anything else: a stranger, dropped and counted
    caller ◄──────────── proof ── listener     anything else: an impostor, whose letters are not read
    caller ── letter ───────────► listener
    caller ◄─────────── letter ── listener

A letter to a role that is gone is lost without a report: a role that needs an answer learns of the death from the view.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from torrential.comm import stream, wire
from torrential.comm.admission import Admission
from torrential.comm.frames import AT_ONCE, Frames, Landing, Memory, frame, nowhere, reader_of
from torrential.comm.outbox import Outbox, Outgoing
from torrential.comm.protocol import SERVERS, Letter, role_name
from torrential.comm.tls import Tls, TlsSocket
from torrential.errors import WaitedTooLong

DIAL_SECONDS = 5.0
READS = 16  # from one connection before the others have their turn
ASLEEP = 1 << 22  # bytes of a collective's payload that one read may ask for, and sleep until they have come
ASLEEP_SECONDS = 1e-3  # for as long as this at most
AN_HOUR = 3600.0
BRISK_SECONDS = 2e-4
LOCAL_QUEUE = 1 << 18  # bytes that the kernel keeps for each direction of a tcp connection inside one host
MEMBERS_QUEUE = 1 << 21  # the same between workers: it keeps a slow link busy until one of them has a core to read with


class Greeting(msgspec.Struct, frozen=True, tag=True):
    address: int
    life: int  # which incarnation of that role is calling


class Contact(NamedTuple):
    """The address and incarnation by which a role is reached."""

    where: str
    life: int
    home: str = ""  # names its host, where roles are on several


class Posted(Outgoing):
    """The handle of a letter."""

    def __init__(self, to: int, post: Post) -> None:
        self._to, self._post = to, post

    def lose(self) -> None:
        self.mark()

    def wait(self, timeout: float | None = None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done():
            self._post.pause(min(AN_HOUR, deadline - time.monotonic()))
            if not self.done() and time.monotonic() >= deadline:
                assert timeout is not None
                raise WaitedTooLong(role_name(self._to), timeout, "to take a letter")


class _Route(NamedTuple):
    """The functions that the reading thread calls for letters of one kind, given the sender."""

    deliver: Callable[[int, Any, list[Tensor]], None]
    landing: Callable[[int, Any], Sequence[Tensor] | None]


class _Line:
    """One connection to another role."""

    frames: Frames
    piece, flags = AT_ONCE, socket.MSG_DONTWAIT  # how a large payload is read: so many bytes at once, and how

    def __init__(self, sock: stream.Connected, outbox: Outbox, address: int, life: int, answer: bytes) -> None:
        self.sock, self.outbox, self.address, self.life = sock, outbox, address, life
        self.answer = answer  # what the other side has yet to say before it is believed

    def hear_answer(self) -> None:
        said = self.sock.recv(len(self.answer), socket.MSG_DONTWAIT)
        if not said:
            raise wire.Closed
        if not hmac.compare_digest(said, self.answer[: len(said)]):
            raise wire.WireError("wrong answer")
        self.answer = self.answer[len(said) :]


class Post:
    """One role's letters. To be used by one thread, its owner, except for `know`, `announce` and `stop`."""

    def __init__(
        self, address: int, life: int, listen: str, secret: bytes, messages: Any, tls: Tls | None = None
    ) -> None:
        self.address, self.life, self._secret, self._tls = address, life, secret, tls
        self.memory: Memory | None = None  # what others at home can read; to be set before the first letter
        self.home = ""
        self._landing: Landing = nowhere
        self._admission = Admission(listen, secret, Greeting, tls)
        self.where = self._admission.address
        self._decoder = reader_of(messages)
        self._contacts: Mapping[int, Contact] = {}
        self._lines: dict[int, _Line] = {}  # by descriptor
        self._to: dict[int, _Line] = {}  # whom we write to on which
        self._unread: list[_Line] = []  # with more to be read, of which the kernel knows nothing
        self._arrived: deque[Letter] = deque()
        self._routes: dict[type, _Route] = {}
        self._events = self._seen = 0  # letters that have come, and news; of these, until the last pause
        self._stopped = self._closed = False
        self._spare_core = len(os.sched_getaffinity(0)) > 1
        self._brisk = False  # whether the last letter came within a moment
        self._substitute: threading.Thread | None = None  # reads while the owner computes
        self._away = threading.Event()  # the owner computes; it alone sets and clears this
        self._reading = threading.Lock()  # held by the substitute while it reads
        self._table = threading.Lock()  # of `_to`
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._admission, select.EPOLLIN)
        self._epoll.register(self._news, select.EPOLLIN)

    def understand(self, messages: Any) -> None:
        """Set the kinds of messages that letters may hold. To be called before the first is received."""
        self._decoder = reader_of(messages)

    def route(
        self,
        kind: type,
        deliver: Callable[[int, Any, list[Tensor]], None],
        landing: Callable[[int, Any], Sequence[Tensor] | None],
    ) -> None:
        """Have letters of this kind given to `deliver(source, message, tensors)` instead of `receive`, as soon as they
        are read; their tensors land where `landing(source, message)` says. The substitute may call both."""
        self._routes[kind] = _Route(deliver, landing)

    def beside(self, listen: str, messages: Any) -> Post:
        """Another post of this role, for letters of other kinds."""
        return Post(self.address, self.life, listen, self._secret, messages, self._tls)

    # -- what other threads may call --------------------------------------------------------------------------------
    def know(self, contacts: Mapping[int, Contact]) -> None:
        self._contacts = contacts

    def home_of(self, address: int) -> str:
        """The host that a role is on, as far as is known."""
        contact = self._contacts.get(address)
        return self.home if address == self.address else "" if contact is None else contact.home

    def near(self, address: int) -> bool:
        """Whether a role is on this host."""
        return self.home_of(address) == self.home

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
        """Set where tensors of letters land from now on; letters that are being received land in fresh memory."""
        self.divert()
        self._landing = where

    def divert(self) -> None:
        """Let all that is coming in now land in fresh memory; and read no more until the owner reads again."""
        self._take_over()
        for line in self._lines.values():
            line.frames.divert()

    # -- writing ----------------------------------------------------------------------------------------------------
    def post(self, to: int, message: Any, tensors: Sequence[Tensor], by_reference: bool = True) -> Posted:
        """Send a letter. Where it may not be `by_reference`, tensors travel as bytes even if the other role could read
        them where they lie: they may change once the letter is written."""
        outgoing = Posted(to, self)
        line = self._line_to(to)
        if line is None:
            outgoing.lose()
        else:
            memory = self.memory if by_reference and self.near(to) else None
            line.outbox.send(*frame(message, tensors, memory), outgoing)
            self._brisk &= outgoing.done()  # else the thread that writes it needs the core
        return outgoing

    def _line_to(self, to: int) -> _Line | None:
        line, contact = self._to.get(to), self._contacts.get(to)
        if line is not None and not line.outbox.lost and (contact is None or contact.life <= line.life):
            return line  # a lost one is still read from, up to its end
        if contact is None:
            return None
        try:
            sock = stream.connect(contact.where, DIAL_SECONDS, wait=False, tls=self._tls)
        except OSError:
            return None
        words, answer = stream.opening(contact.where, self._secret, Greeting(self.address, self.life))
        line = self._add(sock, to, contact.life, answer)
        line.outbox.send([memoryview(words)], 0, Outgoing())
        with self._table:
            self._to[to] = line
        return line

    # -- reading ----------------------------------------------------------------------------------------------------
    def receive(self, timeout: float | None = None) -> Letter | None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._take_over()
        while not self._arrived:
            ready = self._read_until(0.0 if self._stopped else deadline)
            if not self._arrived and ((self._stopped and not ready) or time.monotonic() >= deadline):
                return None
        return self._arrived.popleft()

    def pause(self, seconds: float) -> None:
        """Read until a letter has arrived or left since the last pause, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        self._take_over()
        while self._events == self._seen and self._read_until(deadline):
            pass
        self._seen = self._events

    def poll(self) -> None:
        """Read what has come, unless the substitute does."""
        if not self._away.is_set():
            self._read_ready(self._epoll.poll(0.0))

    def _read_until(self, deadline: float) -> bool:
        """Read what has come, or else what comes next; whether there was anything."""
        ready = self._epoll.poll(0.0) or self._await(deadline)
        self._read_ready(ready)
        return bool(ready)

    def _read_ready(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, _ in ready:
            if (line := self._lines.get(descriptor)) is not None:
                self._read(line)
            elif descriptor == self._news:
                os.eventfd_read(self._news)
                self._events += 1
                unread, self._unread = self._unread, []
                for line in unread:
                    self._read(line)
            else:
                self._admit()
        if not ready and self._admission.deadline <= time.monotonic():
            self._admit()  # which drops those who have said nothing

    def _await(self, deadline: float) -> list[tuple[int, int]]:
        """Wait until there is something to read. To be woken up takes longer than a small letter and its answer; so if
        the last letter came quickly, and there is another core for the writer of the next one, this polls for a
        moment."""
        began = time.monotonic()
        ready: list[tuple[int, int]] = []
        timeout = min(deadline - began, self._patience(began))
        if timeout <= 0.0:
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

    def _patience(self, now: float) -> float:
        return min(self._admission.deadline - now, AN_HOUR)

    def _read(self, line: _Line) -> None:
        frames = line.frames
        try:
            while line.answer:
                line.hear_answer()
            for _ in range(READS):
                room = frames.room(line.piece)
                got = line.sock.recv_into(room, 0, line.flags if frames.straight else socket.MSG_DONTWAIT)
                if not got:
                    raise wire.Closed
                for message, tensors in frames.filled(got):
                    self._take(line, message, tensors)
                if got < room.nbytes:
                    return
            self._read_again(line)
        except BlockingIOError:
            return
        except (wire.Closed, wire.WireError, OSError) as error:
            self._admission.strangers += isinstance(error, wire.WireError | ssl.SSLError)
            self._drop(line)

    def _read_again(self, line: _Line) -> None:
        """Read from a connection once more before sleeping, if there may be something that has been taken from the
        kernel."""
        if isinstance(line.sock, TlsSocket) and line.sock.pending():
            self._unread.append(line)
            self._wake()

    def _take(self, line: _Line, message: Any, tensors: list[Tensor]) -> None:
        contact = self._contacts.get(line.address)
        if contact is not None and contact.life > line.life:
            return  # from one whose place another has taken
        route = self._routes.get(type(message))
        if route is None:
            self._arrived.append(Letter(line.address, message, tensors))
        else:
            route.deliver(line.address, message, tensors)
        self._events += 1

    def _lands(self, line: _Line, message: Any) -> Sequence[Tensor] | None:
        """Where the tensors of a letter land that begins to come in. Members of a collective write while they read, so
        cores are better slept on than spent on looking what has come; a server or its worker only reads."""
        route = self._routes.get(type(message))
        if route is None:
            line.piece, line.flags = AT_ONCE, socket.MSG_DONTWAIT
            return self._landing(message)
        line.piece, line.flags = ASLEEP, socket.MSG_WAITALL
        return route.landing(line.address, message)

    # -- reading while the owner computes ---------------------------------------------------------------------------
    def read_meanwhile(self) -> None:
        """Let the substitute read what comes, until the owner reads again."""
        if self._substitute is None:
            self._substitute = threading.Thread(target=self._stand_in, daemon=True)
            self._substitute.start()
        self._away.set()

    def _take_over(self) -> None:
        if self._away.is_set():
            self._away.clear()
            self._wake()
            with self._reading:  # it has let go, and does not read again before it is asked to
                pass

    def _stand_in(self) -> None:
        while self._away.wait() and not self._closed:
            with self._reading:
                while self._away.is_set() and not self._closed:
                    self._read_ready(self._epoll.poll(max(0.0, self._patience(time.monotonic()))))

    # -- connections ------------------------------------------------------------------------------------------------
    @property
    def strangers(self) -> int:
        """The number of callers that were dropped, and of peers that broke the protocol."""
        return self._admission.strangers

    def _add(self, sock: stream.Connected, address: int, life: int, answer: bytes = b"") -> _Line:
        line = _Line(sock, Outbox(partial(wire.write, sock), self._wake), address, life, answer)
        line.frames = Frames(self._decoder, self.memory, partial(self._lands, line))
        _tune(sock, MEMBERS_QUEUE if max(self.address, address) < SERVERS else LOCAL_QUEUE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(1e6 * ASLEEP_SECONDS)))
        self._lines[sock.fileno()] = line
        if isinstance(sock, TlsSocket) and not sock.shaken:
            sock.on_shaken = partial(self._watch, sock)
        else:
            self._epoll.register(sock, select.EPOLLIN)
            self._read_again(line)
        return line

    def _watch(self, sock: TlsSocket) -> None:
        """Read from a connection from now on. Called by the thread that has shaken hands."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._epoll.register(sock, select.EPOLLIN)

    def _admit(self) -> None:
        for sock, greeting in self._admission.poll():
            line = self._add(sock, greeting.address, greeting.life)
            with self._table:
                before = self._to.get(line.address)
                if before is None or before.outbox.lost or before.life < line.life:
                    self._to[line.address] = line

    def _drop(self, line: _Line) -> None:
        descriptor = line.sock.fileno()
        if self._lines.pop(descriptor, None) is None:
            return
        with self._table:
            if self._to.get(line.address) is line:
                del self._to[line.address]
        with contextlib.suppress(FileNotFoundError):  # it was not read from yet
            self._epoll.unregister(descriptor)
        line.outbox.close()
        wire.close(line.sock)

    def close(self) -> None:
        self._take_over()
        if self._substitute is not None:
            self._closed = True
            self._away.set()
            self._substitute.join(DIAL_SECONDS)
        for line in list(self._lines.values()):
            self._drop(line)
        self._epoll.close()
        self._admission.close()
        os.close(self._news)


def _tune(sock: stream.Connected, queue: int) -> None:
    """Set up a connection inside a host, where nothing is lost and nothing is far away: short queues, which stay in the
    cores' caches, and no pacing by the system's default congestion control."""
    with contextlib.suppress(OSError):  # the other side is gone, as reading will say; or this system has it not
        if sock.family != socket.AF_UNIX and stream.near(sock.getpeername()[0]):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, queue)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, queue)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
