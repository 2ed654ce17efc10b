"""Frames on a stream: a small typed header (msgspec), then raw tensor bytes. Nothing is ever unpickled.

    | header length, u32 | header: msgpack of Envelope | payload of tensor 0 | payload of tensor 1 | ...

A connection opens with a proof that the caller knows the run's secret, which is looked at before anything else is read
(comm/admission.py), and an answer that proves the same of the listener (comm/handshake.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from torrential.comm.stream import AHEAD as AHEAD
from torrential.comm.stream import LENGTH as LENGTH
from torrential.comm.stream import MAX_HEADER as MAX_HEADER
from torrential.comm.stream import Closed as Closed
from torrential.comm.stream import Connected as Connected
from torrential.comm.stream import Stream
from torrential.comm.stream import WireError as WireError
from torrential.comm.stream import close as close
from torrential.comm.stream import decoder_of as decoder_of
from torrential.comm.stream import write as write

MAX_PAYLOAD = 1 << 40
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}

M = TypeVar("M")


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


def decoder(messages: Any) -> Any:
    return decoder_of(Envelope[messages])


class Connection(Stream, Generic[M]):
    """One stream, frames both ways."""

    def __init__(self, sock: Connected, messages: Any, ahead: int = AHEAD) -> None:
        super().__init__(sock, ahead)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder(messages)

    def frame(self, message: M, tensors: Sequence[Tensor] = ()) -> list[memoryview]:
        """A frame's bytes, the tensors' as they are when it is written."""
        shapes = [Shape(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
        header = self._encoder.encode(Envelope(message, shapes))
        return [memoryview(LENGTH.pack(len(header)) + header), *(raw(t) for t in tensors if t.numel())]

    def send(self, message: M, tensors: Sequence[Tensor] = ()) -> int:
        """Write one frame; returns the payload's bytes."""
        self.write(self.frame(message, tensors))
        return sum(t.nbytes for t in tensors)

    def receive(self) -> tuple[M, list[Tensor]]:
        """Read one frame."""
        envelope = self._header(self._decoder)
        for shape in envelope.tensors:
            check(shape)
        tensors = [empty(shape) for shape in envelope.tensors]
        for tensor in tensors:
            if tensor.numel():
                self._fill(raw(tensor))
        return envelope.message, tensors
