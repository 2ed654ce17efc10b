"""A tcp connection in TLS 1.3, with certificates on both sides, used as the socket that it is made of.

    frame ─► cipher ─► outgoing ─► kernel ══► kernel ─► incoming ─► cipher ─► where it belongs

Python's SSLSocket cannot write several pieces at once, and no epoll tells of what it has read ahead. Here OpenSSL works
on memory alone. One thread may read while another writes: a lock is held while something is enciphered or deciphered,
never while a thread waits for the network. A connection that ends without TLS's goodbye has ended: frames say how
long they are, and processes that are killed say none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

import msgspec

RECORD = 1 << 14  # bytes of contents in one record of TLS at most
OVERHEAD = 22  # bytes that a record adds to its contents
PIECE = 1 << 17  # bytes that are enciphered or deciphered while the lock is held
HANDSHAKE_READ = 1 << 14
PATIENCE_SECONDS = 600.0  # for a listener that computes, and does not look at its callers meanwhile
NOTHING = memoryview(b"")


class Identity(msgspec.Struct, frozen=True):
    """How a process shows that it is of a run: PEM files' contents."""

    certificate: bytes  # its own, and those between it and the authority
    key: bytes  # of its own certificate
    authority: bytes  # the certificates by whose signature others are known


class Tls:
    """Both ends' rules: TLS 1.3, and a certificate that the authority has signed. Names in it are not looked at."""

    def __init__(self, identity: Identity, anybody: bool = False) -> None:
        """`anybody`: callers need not show a certificate (comm/handshake.py says how they are known then)."""
        self._calling = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
        self._listening = _context(ssl.PROTOCOL_TLS_SERVER, identity)
        self._listening.num_tickets = 0  # nothing follows the handshake that nobody has asked for
        if anybody:
            self._listening.verify_mode = ssl.CERT_NONE
        self.digest = hashlib.sha256(_first(identity.certificate)).digest()

    def call(self, sock: socket.socket) -> TlsSocket:
        """The caller's end of a connection."""
        return TlsSocket(sock, self._calling, False)

    def answer(self, sock: socket.socket) -> TlsSocket:
        """The listener's end of a connection."""
        return TlsSocket(sock, self._listening, True)

    def try_itself(self) -> None:
        """Shake hands with one that has the same certificate, in memory; raises ssl.SSLError if that is refused."""
        forth, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [self._calling.wrap_bio(back, forth), self._listening.wrap_bio(forth, back, server_side=True)]
        for end in (ends[0], ends[1], ends[0], ends[1]):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def _first(certificates: bytes) -> bytes:
    """The first certificate of a PEM file, its owner's, as it is shown."""
    text = certificates.decode("ascii", "replace")
    end = text.find(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
    return ssl.PEM_cert_to_DER_cert(text[text.find(ssl.PEM_HEADER) : end])


def call_unknown(sock: socket.socket) -> TlsSocket:
    """The caller's end of a connection to a listener whose certificate nobody vouches for. It is no better than one in
    clear until both ends have proved which certificate they mean (`TlsSocket.digest`, comm/handshake.py)."""
    context = _bare_context(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_NONE
    return TlsSocket(sock, context, False)


def _bare_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    return context


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = _bare_context(protocol)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=identity.authority.decode("ascii"))
    file = os.memfd_create("torrential certificate", os.MFD_CLOEXEC)  # OpenSSL's interface here takes files only
    try:
        with open(file, "wb", closefd=False) as contents:
            contents.write(identity.certificate + b"\n" + identity.key)
        context.load_cert_chain(f"/proc/self/fd/{file}", password=_refuse_to_ask)
    finally:
        os.close(file)
    return context


def _refuse_to_ask() -> str:
    raise ValueError("the key is protected by a password")


class TlsSocket:
    """One end of a connection. No data is written before the handshake: the first write that may block performs it, and
    then calls `on_shaken`, also if it has failed; only the listener reads before that."""

    family = socket.AF_INET  # or AF_INET6: not a Unix socket, which needs no cipher

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, listens: bool) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._cipher = context.wrap_bio(self._incoming, self._outgoing, server_side=listens)
        self._lock = threading.Lock()  # of the cipher and what it reads and writes
        self._unsent = NOTHING  # enciphered, and not taken by the kernel yet
        self._room = NOTHING  # for what comes, once hands are shaken
        self._failure: OSError | None = None  # that of the handshake
        self._ended = False  # the other side has said goodbye
        self.shaken = False
        self.on_shaken: Callable[[], None] = lambda: None

    # -- as of any socket -------------------------------------------------------------------------------------------
    def fileno(self) -> int:
        return self._sock.fileno()

    def getpeername(self) -> tuple[str, int]:
        name: tuple[str, int] = self._sock.getpeername()
        return name

    def getsockname(self) -> tuple[str, int]:
        name: tuple[str, int] = self._sock.getsockname()
        return name

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._sock.setsockopt(level, option, value)

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def digest(self) -> bytes:
        """That of the certificate that the other side has shown, once hands are shaken."""
        shown = self._cipher.getpeercert(binary_form=True)
        return b"" if shown is None else hashlib.sha256(shown).digest()

    # -- shaking hands ----------------------------------------------------------------------------------------------
    def shake_hands(self, seconds: float) -> None:
        """The caller's part, within so many seconds."""
        deadline = time.monotonic() + seconds
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        while not self._advance():
            if not readable.poll(1e3 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no handshake within {seconds:.0f} s")
            if not self._hear(socket.MSG_DONTWAIT):
                raise ConnectionResetError("the connection was closed before hands were shaken")

    def _advance(self) -> bool:
        """Get on with the handshake as far as possible; whether it is over."""
        try:
            self._cipher.do_handshake()
            self._room, self.shaken = memoryview(bytearray(PIECE)), True
        except ssl.SSLWantReadError:
            pass
        finally:
            if said := self._outgoing.read():
                self._sock.sendall(said)  # so little that the kernel takes it at once; it says what is wrong, too
        return self.shaken

    def _hear(self, flags: int) -> bool:
        """Take in a piece of the handshake; False if the connection was closed."""
        said = self._sock.recv(HANDSHAKE_READ, flags)
        self._incoming.write(said)
        return bool(said)

    # -- reading ----------------------------------------------------------------------------------------------------
    def recv(self, count: int, flags: int = 0) -> bytes:
        data = bytearray(count)
        return bytes(data[: self.recv_into(memoryview(data), 0, flags)])

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        """As of a socket: what there is, at least a byte; with MSG_WAITALL as much as there is room for, unless the
        kernel gives up waiting. 0 at the end."""
        if self._failure is not None:
            raise self._failure
        while not self.shaken:
            if not self._hear(flags & socket.MSG_DONTWAIT):
                return 0
            self._advance()
        patient = bool(flags & socket.MSG_WAITALL)
        got = self._decipher(view)
        while not self._ended and (not got or (patient and got < view.nbytes)):
            surely = view.nbytes - got - RECORD - OVERHEAD  # must still come, whatever part of a record is here already
            if patient and surely > 0:
                room, how = self._room[:surely], flags
            else:
                room, how = self._room, flags & ~socket.MSG_WAITALL
            try:
                count = self._sock.recv_into(room, 0, how)
            except (BlockingIOError, TimeoutError):
                if not got:
                    raise
                break
            if not count:
                break
            patient &= how != flags or count == room.nbytes
            with self._lock:
                self._incoming.write(room[:count])
            got += self._decipher(view[got:])
        return got

    def _decipher(self, view: memoryview) -> int:
        got = 0
        with self._lock, contextlib.suppress(ssl.SSLWantReadError):
            while got < view.nbytes and not self._ended:
                count = self._cipher.read(view.nbytes - got, view[got:])
                self._ended = not count
                got += count  # type: ignore[operator]
        return got

    def pending(self) -> bool:
        """Whether some of what the kernel has given may not have been read yet."""
        return self._cipher.pending() > 0 or self._incoming.pending > 0

    # -- writing ----------------------------------------------------------------------------------------------------
    def sendall(self, data: bytes) -> None:
        self.write([memoryview(data)], True)

    def write(self, frame: list[memoryview], block: bool) -> list[memoryview]:
        """Write a frame; returns what is left of it because it would block: at least an empty piece while anything
        has not been taken by the kernel."""
        if not self.shaken:
            if not block:
                return frame
            self._open()
        try:
            while self._unsent or frame:
                if not self._unsent:
                    self._encipher(frame)
                sent = self._sock.send(self._unsent, 0 if block else socket.MSG_DONTWAIT)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return frame or [NOTHING]
        return frame

    def _open(self) -> None:
        try:
            self.shake_hands(PATIENCE_SECONDS)
        except OSError as error:
            self._failure = type(error)(*error.args)  # without a traceback, which would keep this connection in memory
            with contextlib.suppress(OSError):  # it is not connected any more
                self._sock.shutdown(socket.SHUT_RDWR)  # so that whoever reads finds out
            raise
        finally:
            self.on_shaken()

    def _encipher(self, frame: list[memoryview]) -> None:
        """Take a piece of a frame off its beginning and encipher it."""
        room = PIECE
        with self._lock:
            while frame and room:
                part = frame[0][:room]
                if part.nbytes:
                    self._cipher.write(part)
                room -= part.nbytes
                frame[0] = frame[0][part.nbytes :]
                if not frame[0].nbytes:
                    del frame[0]
            self._unsent = memoryview(self._outgoing.read())
