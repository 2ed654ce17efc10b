"""Frames on a stream: a small typed header (msgspec), then raw tensor bytes. Nothing is ever unpickled.

    | header length, u32 | header: msgpack of Envelope | payload of tensor 0 | payload of tensor 1 | ...

A connection opens with the run's 32-byte token, which is compared before anything else is read (comm/admission.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

TOKEN_BYTES = 32
HANDSHAKE_SECONDS = 5.0
MAX_HEADER = 1 << 20
MAX_PAYLOAD = 1 << 40
MOST_PIECES = 1000  # in one call of sendmsg; the kernel takes 1024
AHEAD = 1 << 16  # bytes read at once where several small things may follow one another
LENGTH = struct.Struct("<I")
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}

M = TypeVar("M")


class WireError(Exception):
    """The other side did not speak our protocol."""


class Closed(Exception):
    """The other side closed the connection."""


class Shape(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    sizes: list[int]


class Envelope(msgspec.Struct, Generic[M], array_like=True, frozen=True):
    message: M
    tensors: list[Shape]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without copying."""
    try:
        return tensor.detach().numpy().reshape(-1).view(np.uint8).data
    except TypeError:  # a type that numpy does not have; slower
        return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def empty(shape: Shape) -> Tensor:
    return torch.empty(shape.sizes, dtype=DTYPES[shape.dtype])


def check(shape: Shape) -> None:
    if shape.dtype not in DTYPES or min(shape.sizes, default=0) < 0 or math.prod(shape.sizes) > MAX_PAYLOAD:
        raise WireError(f"impossible tensor {shape}")


def write(sock: socket.socket, frame: list[memoryview], block: bool = True) -> list[memoryview]:
    """Write a frame; returns what is left of it because it would block."""
    flags = 0 if block else socket.MSG_DONTWAIT
    try:
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


def close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was quicker
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


_building = threading.Lock()


def decoder(messages: Any) -> Any:
    return decoder_of(Envelope[messages])


def decoder_of(header: Any) -> Any:
    """A decoder of headers. msgspec looks types up when it makes one and must not be entered twice meanwhile."""
    with _building:
        return msgspec.msgpack.Decoder(header)


class Connection(Generic[M]):
    """One stream, frames both ways. Reading and writing may each be done by one thread at a time.

    `ahead` bytes may be read before they are asked for; whoever sleeps on the socket itself must have none.
    """

    def __init__(self, sock: socket.socket, messages: Any, ahead: int = AHEAD) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder(messages)
        self._ahead = memoryview(bytearray(ahead))
        self._read = self._held = 0  # of what lies in `ahead`: up to where it has been read, and how far it goes

    def frame(self, message: M, tensors: Sequence[Tensor] = ()) -> list[memoryview]:
        """A frame's bytes, the tensors' as they are when it is written."""
        shapes = [Shape(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
        header = self._encoder.encode(Envelope(message, shapes))
        return [memoryview(LENGTH.pack(len(header)) + header), *(raw(t) for t in tensors if t.numel())]

    def write(self, frame: list[memoryview], block: bool = True) -> list[memoryview]:
        return write(self._sock, frame, block)

    def send(self, message: M, tensors: Sequence[Tensor] = ()) -> int:
        """Write one frame; returns the payload's bytes."""
        self.write(self.frame(message, tensors))
        return sum(t.nbytes for t in tensors)

    def receive(self) -> tuple[M, list[Tensor]]:
        """Read one frame."""
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if not 0 < length <= MAX_HEADER:
            raise WireError(f"header of {length} bytes (limit: {MAX_HEADER})")
        try:
            envelope = self._decoder.decode(self._exactly(length))
        except msgspec.MsgspecError as error:
            raise WireError(f"unreadable header: {error}") from error
        for shape in envelope.tensors:
            check(shape)
        tensors = [empty(shape) for shape in envelope.tensors]
        for tensor in tensors:
            if tensor.numel():
                self._fill(raw(tensor))
        return envelope.message, tensors

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


def parse(address: str) -> tuple[socket.AddressFamily, Any]:
    """`unix:@name` is Linux's abstract namespace: it has no file, so nothing can be left behind."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return socket.AF_UNIX, "\0" + rest[1:] if rest.startswith("@") else rest
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        return socket.AF_INET, (host, int(port))
    raise ValueError(f"address {address!r} is neither unix: nor tcp:")


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address that others should dial (a tcp port of 0 is chosen here)."""
    family, where = parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    if family == socket.AF_INET:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(where)
    sock.listen(1024)
    if family == socket.AF_INET:
        host, port = sock.getsockname()
        address = f"tcp:{host}:{port}"
    return sock, address


def dial(address: str, token: bytes, messages: Any, timeout: float) -> Connection[Any]:
    return Connection(connect(address, token, timeout), messages)


def connect(address: str, token: bytes, timeout: float) -> socket.socket:
    family, where = parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(where)
        sock.settimeout(None)
        tune(sock)
        sock.sendall(token)
    except OSError:
        sock.close()
        raise
    return sock


def check_user(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            raise WireError("another user")


def tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
