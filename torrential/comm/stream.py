"""Streams between processes: addresses, connecting, and frames of one small typed message each. It needs no torch, so
that the processes that start and end others need none.

    | length, u32 | msgpack of a message |

comm/wire.py adds tensors, in frames of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import ssl
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from torrential.comm import handshake
from torrential.comm.tls import Tls, TlsSocket

HANDSHAKE_SECONDS = 5.0
MAX_HEADER = 1 << 20
MOST_PIECES = 1000  # in one call of sendmsg; the kernel takes 1024
AHEAD = 1 << 16  # bytes read at once where several small things may follow one another
LENGTH = struct.Struct("<I")
SILENT_SECONDS = 30  # without a sign of life from another host's kernel, after which a connection has ended
PROBE_SECONDS = 5

M = TypeVar("M")
Connected = socket.socket | TlsSocket


class WireError(Exception):
    """Raised when the other side does not speak our protocol."""


class Closed(Exception):
    """Raised when the other side has closed the connection."""


def write(sock: Connected, frame: list[memoryview], block: bool = True) -> list[memoryview]:
    """Write a frame; returns what is left of it because it would block."""
    flags = 0 if block else socket.MSG_DONTWAIT
    try:
        if isinstance(sock, TlsSocket):
            return sock.write(frame, block)
        while frame:
            sent = sock.send(frame[0], flags) if len(frame) == 1 else sock.sendmsg(frame[:MOST_PIECES], (), flags)
            while frame and sent >= frame[0].nbytes:
                sent -= frame.pop(0).nbytes
            if sent:
                frame[0] = frame[0][sent:]
    except BlockingIOError:
        pass
    except OSError as error:
        raise Closed from error
    return frame


def close(sock: Connected) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


_building = threading.Lock()


def decoder_of(header: Any) -> Any:
    """A decoder of headers. msgspec looks types up when it makes one and must not be entered twice meanwhile."""
    with _building:
        return msgspec.msgpack.Decoder(header)


class Stream:
    """One stream, from which whole pieces are read. Reading and writing may each be done by one thread at a time.

    `ahead` bytes may be read before they are asked for; a caller that sleeps on the socket itself must allow none.
    """

    def __init__(self, sock: Connected, ahead: int = AHEAD) -> None:
        self._sock = sock
        self._ahead = memoryview(bytearray(ahead))
        self._read = self._held = 0  # of what lies in `ahead`: up to where it has been read, and how far it goes

    def write(self, frame: list[memoryview], block: bool = True) -> list[memoryview]:
        return write(self._sock, frame, block)

    def _header(self, decoder: Any) -> Any:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if not 0 < length <= MAX_HEADER:
            raise WireError(f"header of {length} bytes (limit: {MAX_HEADER})")
        try:
            return decoder.decode(self._exactly(length))
        except msgspec.MsgspecError as error:
            raise WireError(f"unreadable header: {error}") from error

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        """Small things through the bytes read ahead, large ones straight to where they belong."""
        while view.nbytes:
            if self._read == self._held and view.nbytes < self._ahead.nbytes:
                self._read, self._held = 0, self._receive(self._ahead, 0)
            if self._read < self._held:
                count = min(view.nbytes, self._held - self._read)
                view[:count] = self._ahead[self._read : self._read + count]
                self._read += count
            else:
                count = self._receive(view, socket.MSG_WAITALL)
            view = view[count:]

    def _receive(self, view: memoryview, flags: int) -> int:
        try:
            got = self._sock.recv_into(view, 0, flags)
        except OSError as error:
            raise Closed from error
        if not got:
            raise Closed
        return got

    def close(self) -> None:
        close(self._sock)


class Plain(Stream, Generic[M]):
    """Frames without tensors."""

    def __init__(self, sock: Connected, messages: Any, ahead: int = AHEAD) -> None:
        super().__init__(sock, ahead)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), decoder_of(messages)

    def send(self, message: M) -> None:
        header = self._encoder.encode(message)
        self.write([memoryview(LENGTH.pack(len(header)) + header)])

    def receive(self) -> M:
        message: M = self._header(self._decoder)
        return message


def parse(address: str) -> tuple[socket.AddressFamily, Any]:
    """`unix:@name` is Linux's abstract namespace: it has no file, so nothing can be left behind."""
    kind, _, rest = address.partition("?")[0].partition(":")
    if kind == "unix":
        return socket.AF_UNIX, "\0" + rest[1:] if rest.startswith("@") else rest
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        if host.startswith("["):
            return socket.AF_INET6, (host[1:-1], int(port))
        return socket.AF_INET, (host, int(port))
    raise ValueError(f"address {address!r} is neither unix: nor tcp:")


def challenging(address: str, challenge: bytes) -> str:
    """The address of a listener together with its challenge: all that a caller needs to know."""
    return f"{address}?{challenge.hex()}"


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address that others should dial (a tcp port of 0 is chosen here)."""
    family, where = parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(where)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    if family != socket.AF_UNIX:
        address = tcp_address(*sock.getsockname()[:2])
    return sock, address


def tcp_address(host: str, port: int) -> str:
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def near(host: str) -> bool:
    """Whether the address of a host is of the loopback interface."""
    return host.startswith("127.") or host == "::1"


def opening(address: str, secret: bytes, greeting: Any) -> handshake.Opening:
    """What to say first to the listener at an address, and what it must answer."""
    return handshake.opening(secret, bytes.fromhex(address.partition("?")[2]), msgspec.msgpack.encode(greeting))


def dial(address: str, secret: bytes, greeting: Any, timeout: float, tls: Tls | None = None) -> Connected:
    """A connection to a listener that has proved to know the secret, too."""
    sock = connect(address, timeout, tls=tls)
    try:
        sock.settimeout(timeout)
        if isinstance(sock, TlsSocket):
            sock.shake_hands(timeout)
        prove(sock, address, secret, greeting)
        sock.settimeout(None)
    except ssl.SSLError as error:
        sock.close()
        raise WireError(f"{address} and this process do not know each other's certificates: {error}") from error
    except (OSError, WireError):
        sock.close()
        raise
    return sock


def prove(sock: Connected, address: str, secret: bytes, greeting: Any) -> None:
    """Greet the listener at the other end, and have it prove that it knows the secret, too."""
    words, answer = opening(address, secret, greeting)
    sock.sendall(words)
    said = sock.recv(len(answer), socket.MSG_WAITALL)
    if not hmac.compare_digest(said, answer):
        raise WireError(f"the listener at {address} does not know the secret of this run")


def connect(address: str, timeout: float, wait: bool = True, tls: Tls | None = None) -> Connected:
    """A connected socket; without `wait` one that is being connected to another host, if it takes time: whoever writes
    waits then, and reading tells whether it fails. With `tls` it is enciphered, unless it is a Unix socket."""
    family, where = parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX or wait:
            sock.settimeout(timeout)
            sock.connect(where)
        else:
            sock.setblocking(False)
            if (number := sock.connect_ex(where)) not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
        sock.settimeout(None)
        if family != socket.AF_UNIX:
            tune(sock, where[0])
    except OSError:
        sock.close()
        raise
    return sock if tls is None or family == socket.AF_UNIX else tls.call(sock)


def check_user(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise WireError("another user")


def tune(sock: socket.socket, host: str) -> None:
    """Let small letters leave at once, and notice when the other host has gone without a word."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not near(host):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_SECONDS)


def end_when_silent(sock: Connected, seconds: float) -> None:
    """Have a connection to another host end when that host's kernel has been silent for so long."""
    if sock.family != socket.AF_UNIX:
        often = max(1, int(seconds / 3))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, often)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, often)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
