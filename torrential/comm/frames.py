"""Letters as bytes: frames as in comm/wire.py, but read as far as they have come, and with tensors by reference.

    | header length, u32 | header: msgpack of Sealed | payload of tensor 0 | payload of tensor 2 | ...

A tensor that lies in memory which the other side can map has no payload: its `TensorHeader` says where it is. Whatever
comes in, the reader gives frames or raises WireError; it never takes more memory than a frame that has begun asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from torch import Tensor

from torrential.comm import wire

AT_ONCE = 1 << 17  # bytes of a payload that the kernel is asked for at once: while they come they stay in the cache
STRAIGHT = 1 << 14  # bytes; as much of a payload as this is read straight to where it belongs
MOST_VIEWS = 4096  # of others' memory, kept because the same pieces come again and again
_NAMES = {dtype: name for name, dtype in wire.DTYPES.items()}

M = TypeVar("M")


class Memory(Protocol):
    """The registered buffers of all roles on this host."""

    def locate(self, tensor: Tensor) -> tuple[str, int] | None:
        """The buffer that a contiguous tensor lies in, and its first byte there."""

    def whole(self, key: str) -> Tensor:
        """The bytes of a buffer that somebody has registered."""


Landing = Callable[[Any], Sequence[Tensor] | None]
"""Given a message, where its tensors shall lie, if they come as bytes."""


def nowhere(message: Any) -> Sequence[Tensor] | None:
    return None


class TensorHeader(wire.Shape, frozen=True, array_like=True):
    """The shape of a tensor in a frame, and where its bytes are."""

    key: str = ""  # the key of the registered buffer that it lies in; "": its bytes follow
    offset: int = 0  # the place of its first byte there


class Sealed(msgspec.Struct, Generic[M], array_like=True, frozen=True):
    message: M
    pieces: list[TensorHeader]


def reader_of(messages: Any) -> Any:
    """A decoder of headers; one serves all connections of a thread."""
    return wire.decoder_of(Sealed[messages])


def frame(message: Any, tensors: Sequence[Tensor], memory: Memory | None) -> tuple[list[memoryview], int]:
    """A letter's bytes, and how many of them are payload."""
    pieces, payload, nbytes = [], [], 0
    for tensor in tensors:
        place = memory.locate(tensor) if memory is not None else None
        key, offset = place or ("", 0)
        pieces.append(TensorHeader(_NAMES[tensor.dtype], list(tensor.shape), key, offset))
        if place is None and tensor.numel():
            payload.append(wire.raw(tensor.contiguous()))
            nbytes += tensor.nbytes
    header = _encoder.encode(Sealed(message, pieces))
    return [memoryview(wire.LENGTH.pack(len(header)) + header), *payload], nbytes


_encoder = msgspec.msgpack.Encoder()


class Frames:
    """The frames that come on one connection. Give `room` to the kernel, tell `filled` how much it wrote there."""

    def __init__(self, decoder: Any, memory: Memory | None, landing: Landing = nowhere) -> None:
        self._decoder, self._memory, self._landing = decoder, memory, landing
        self._ahead = memoryview(bytearray(wire.AHEAD))
        self._read = self._held = 0  # of what lies in `ahead`: up to where it has been read, and how far it goes
        self._letter: tuple[Any, list[Tensor]] | None = None  # the header has come
        self._missing: list[memoryview] = []  # of its payload
        self._views: dict[tuple[object, ...], Tensor] = {}
        self._landed = False
        self.straight = False  # whether `room` is the place of a payload itself

    def room(self, most: int = AT_ONCE) -> memoryview:
        """The memory that is to be filled next, of a large payload `most` bytes."""
        self.straight = bool(self._missing) and self._missing[0].nbytes >= STRAIGHT
        return self._missing[0][:most] if self.straight else self._ahead[self._held :]

    def filled(self, count: int) -> Iterator[tuple[Any, list[Tensor]]]:
        """The letters that are complete by now."""
        if self.straight:
            self._missing[0] = self._missing[0][count:]
        else:
            self._held += count
        while (self._letter is not None or self._header()) and (not self._missing or self._payload()):
            letter, self._letter = self._letter, None
            assert letter is not None
            yield letter
            if self._read == self._held:
                break
        if self._read == self._held:
            self._read = self._held = 0
        elif self._held == self._ahead.nbytes:
            self._make_room(self._held - self._read)

    def divert(self) -> None:
        """Put the letter that is being received into fresh memory instead of its place, with the bytes that have come
        already."""
        if self._letter is None or not self._landed:
            return
        message, tensors = self._letter
        tensors = [tensor.clone() for tensor in tensors]
        wholes = [wire.raw(tensor) for tensor in tensors if tensor.numel()]
        count = len(self._missing)
        self._missing = [
            whole[whole.nbytes - rest.nbytes :]
            for whole, rest in zip(wholes[len(wholes) - count :], self._missing, strict=True)
        ]
        self._letter, self._landed = (message, tensors), False

    def _header(self) -> bool:
        held = self._held - self._read
        if held < wire.LENGTH.size:
            return False
        (length,) = wire.LENGTH.unpack_from(self._ahead, self._read)
        if not 0 < length <= wire.MAX_HEADER:
            raise wire.WireError(f"header of {length} bytes (limit: {wire.MAX_HEADER})")
        if held < wire.LENGTH.size + length:
            self._make_room(wire.LENGTH.size + length)
            return False
        start = self._read + wire.LENGTH.size
        self._read = start + length
        try:
            sealed = self._decoder.decode(self._ahead[start : self._read])
            tensors = self._places(sealed)
        except Exception as error:  # of bytes, types, sizes or memory: there are many ways not to make sense
            raise wire.WireError(f"unreadable header: {type(error).__name__}: {error}") from error
        self._letter = (sealed.message, tensors)
        return True

    def _payload(self) -> bool:
        """Move what has been read ahead; whether nothing is missing."""
        while self._missing:
            part = self._missing[0]
            count = min(part.nbytes, self._held - self._read)
            part[:count] = self._ahead[self._read : self._read + count]
            self._read += count
            if count < part.nbytes:
                self._missing[0] = part[count:]
                return False
            del self._missing[0]
        return True

    def _make_room(self, needed: int) -> None:
        """See to it that so many bytes fit in from what has not been read yet, and one more."""
        if self._read + needed < self._ahead.nbytes:
            return
        kept = bytes(self._ahead[self._read : self._held])
        if needed >= self._ahead.nbytes:
            self._ahead = memoryview(bytearray(2 * needed))
        self._read, self._held = 0, len(kept)
        self._ahead[: len(kept)] = kept

    def _places(self, sealed: Sealed[Any]) -> list[Tensor]:
        """The memory for a frame's tensors: another role's; where they are wanted, if they fit; or fresh memory."""
        pieces = sealed.pieces
        tensors: list[Tensor] = []
        for piece in pieces:
            known = self._views.get((piece.key, piece.offset, piece.dtype, *piece.sizes))
            if known is None:
                break
            tensors.append(known)
        else:
            return tensors
        inline = [piece for piece in pieces if not piece.key]
        if not inline:
            return [self._view(piece) for piece in pieces]
        wanted = self._landing(sealed.message) if len(inline) == len(pieces) else None
        self._landed = wanted is not None and _fit(wanted, pieces)
        if wanted is not None and self._landed:
            tensors = list(wanted)
        else:
            tensors = [self._view(piece) if piece.key else _fresh(piece) for piece in pieces]
        both = zip(tensors, pieces, strict=True)
        self._missing = [wire.raw(tensor) for tensor, piece in both if not piece.key and tensor.numel()]
        return tensors

    def _view(self, piece: TensorHeader) -> Tensor:
        """A tensor that lies in another role's memory."""
        key = (piece.key, piece.offset, piece.dtype, *piece.sizes)
        view = self._views.get(key)
        if view is None:
            wire.check(piece)
            if self._memory is None:
                raise wire.WireError("memory is not shared here")
            dtype = wire.DTYPES[piece.dtype]
            stop = piece.offset + math.prod(piece.sizes) * dtype.itemsize
            whole = self._memory.whole(piece.key)
            if not 0 <= piece.offset <= stop <= whole.nbytes:
                raise wire.WireError(f"{piece} is outside its buffer of {whole.nbytes} bytes")
            view = whole[piece.offset : stop].view(dtype).view(piece.sizes)
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view


def _fit(tensors: Sequence[Tensor], pieces: Sequence[TensorHeader]) -> bool:
    return len(tensors) == len(pieces) and all(
        p.sizes == list(t.shape) and p.dtype == _NAMES[t.dtype] and t.is_contiguous()
        for t, p in zip(tensors, pieces, strict=True)
    )


def _fresh(piece: TensorHeader) -> Tensor:
    wire.check(piece)
    return wire.empty(piece)
