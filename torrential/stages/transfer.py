"""Activations from one stage to the next, and their gradients back.

What a stage puts out may be a tensor, or a tuple, list or dict of them. The first time that it is of so many samples, a
description of it goes ahead; after that the tensors alone travel. Gradients of floating-point tensors come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from torrential.comm.protocol import Comm, Handle
from torrential.comm.wire import DTYPES
from torrential.data.nest import mapped
from torrential.data.statistics import flat, restored, shape_of
from torrential.errors import RunFailed
from torrential.stages.cut import tensors_of

Key = tuple[int, int, int]  # the other stage's worker, samples, chunk


class Description(msgspec.Struct, frozen=True):
    """What travels between two stages."""

    plan: Any  # data/statistics.py
    tensors: list[tuple[list[int], str]]  # shapes and dtypes


class Sender:
    """Sends what a stage has computed."""

    def __init__(self, comm: Comm, room: int) -> None:
        """`room`: the microbatches of one kind that a stage keeps at a time."""
        self._comm, self._room = comm, room
        self._told: dict[Key, tuple[Any, list[tuple[torch.Size, torch.dtype]], str]] = {}

    def activation(self, to: int, value: Any, samples: int, chunk: int) -> list[Handle]:
        """Send the output of this stage for so many samples; `chunk` is the receiver's."""
        plan, tensors = flat(value, "the output of a stage")
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        handles = []
        before = self._told.get((to, samples, chunk))
        if before is None:
            mapped(self._check, value)
            self._told[to, samples, chunk] = plan, kinds, shape_of(value)
            described = Description(plan, [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors])
            said = torch.frombuffer(bytearray(msgspec.msgpack.encode(described)), dtype=torch.uint8)
            handles += [self._comm.send(each, to, f"about {chunk}") for each in (torch.tensor([len(said)]), said)]
        elif before[:2] != (plan, kinds):
            mapped(self._check, value)
            raise RunFailed(
                f"the output of worker {self._comm.rank}'s stage changes its shape between microbatches of {samples} "
                f"samples ({before[2]}, then {shape_of(value)}); stages need the same shapes every time"
            )
        return handles + self._pass_on(tensors, to, f"activation {chunk}", samples)

    @staticmethod
    def _check(leaf: Any) -> None:
        if not isinstance(leaf, Tensor) and leaf is not None:
            raise RunFailed(f"the output of a stage has a {type(leaf).__name__} in it ({leaf!r}); pass tensors on")

    def gradient(self, to: int, inputs: Any, samples: int, chunk: int) -> list[Handle]:
        """Send the gradients of what this stage was given; `chunk` is the receiver's."""
        slopes = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in differentiable(inputs)]
        return self._pass_on(slopes, to, f"gradient {chunk}", samples)

    def _pass_on(self, tensors: Sequence[Tensor], to: int, what: str, samples: int) -> list[Handle]:
        return [
            self._comm.pass_on(tensor, to, _tag(what, samples, place), self._room)
            for place, tensor in enumerate(tensors)
        ]


class Receiver:
    """Receives what the stages beside this one have computed."""

    def __init__(self, comm: Comm, room: int) -> None:
        """`room`: as for `Sender`."""
        self._comm, self._room = comm, room
        self._known: dict[Key, Description] = {}

    def activation(self, source: int, samples: int, chunk: int) -> Any:
        """The input of this stage's chunk, for so many samples; gradients are wanted of it."""
        described = self._known.get((source, samples, chunk))
        if described is None:
            size = self._comm.recv(torch.empty(1, dtype=torch.int64), source, f"about {chunk}").wait()
            said = self._comm.recv(torch.empty(int(size), dtype=torch.uint8), source, f"about {chunk}").wait()
            described = msgspec.msgpack.decode(said.numpy().tobytes(), type=Description)
            self._known[source, samples, chunk] = described
        kinds = [(shape, DTYPES[dtype]) for shape, dtype in described.tensors]
        tensors = self._take(kinds, source, f"activation {chunk}", samples)
        for tensor in tensors:
            tensor.requires_grad_(tensor.is_floating_point())
        return restored(described.plan, tensors, copy=False)

    def gradient(self, source: int, outputs: Any, samples: int, chunk: int) -> list[Tensor]:
        """The gradients of what this stage's chunk has put out."""
        kinds = [(leaf.shape, leaf.dtype) for leaf in differentiable(outputs)]
        return self._take(kinds, source, f"gradient {chunk}", samples)

    def _take(
        self, kinds: Sequence[tuple[Sequence[int], torch.dtype]], source: int, what: str, samples: int
    ) -> list[Tensor]:
        return [
            self._comm.take(sizes, kind, source, _tag(what, samples, place), self._room).wait()
            for place, (sizes, kind) in enumerate(kinds)
        ]


def _tag(what: str, samples: int, place: int) -> str:
    """The tag of tensors that are of one size."""
    return f"{what} of {samples} ({place})"


def differentiable(value: Any) -> list[Tensor]:
    """The tensors in a nest of which gradients are sent."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]
