"""What a simulation shares with a process that computes gradients for it (worlds/sim/gradient_pool.py): memory for
models, and what makes the last bits of a gradient the same in both.

    slot   | parameters | buffers | gradients |     two for each helper
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn

from torrential.config import RunConfig
from torrential.errors import RunFailed

SLOTS = 2
ALIGNMENT = 64  # bytes


class Slots:
    """Memory for models and their gradients, seen by two processes."""

    def __init__(self, model: nn.Module, fd: int) -> None:
        grads: list[Tensor] = list(model.parameters())
        like = grads + list(model.buffers())
        places, end = [], 0
        for tensor in like + grads:
            places.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        size = max(end, ALIGNMENT)
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, SLOTS * size)
        memory = torch.frombuffer(mmap.mmap(fd, SLOTS * size), dtype=torch.uint8)

        def view(tensor: Tensor, start: int) -> Tensor:
            raw = memory[start : start + tensor.numel() * tensor.element_size()]
            return raw.view(tensor.dtype).view(tensor.shape) if tensor.numel() else torch.empty_like(tensor)

        self.states, self.buffers, self.grads = [], [], []
        for slot in range(SLOTS):
            views = [view(t, slot * size + start) for t, start in zip(like + grads, places, strict=True)]
            self.states.append(views[: len(like)])
            self.buffers.append(views[len(grads) : len(like)])
            self.grads.append(views[len(like) :])


def copied(into: list[Tensor], tensors: list[Tensor]) -> bool:
    """Copy the tensors if shapes and dtypes match; returns whether they did. A module may have replaced a buffer."""
    if len(into) != len(tensors):
        return False
    for one, other in zip(into, tensors, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
    if into:
        torch._foreach_copy_(into, tensors)
    return True


# -- the form of a model: with it, the last bits are the same elsewhere -----------------------------------------------
class TensorForm(msgspec.Struct):
    """The form of a tensor in memory, down to its alignment."""

    shape: list[int]
    dtype: str
    strides: list[int]
    place: int  # its address modulo ALIGNMENT


class Flags(msgspec.Struct):
    """Torch's, of the whole process."""

    dtype: str
    matmul: str
    deterministic: bool
    mkldnn: bool

    @classmethod
    def here(cls) -> Flags:
        return cls(
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            bool(torch.backends.mkldnn.enabled),
        )

    def adopt(self) -> None:
        torch.set_default_dtype(getattr(torch, self.dtype.removeprefix("torch.")))
        torch.set_float32_matmul_precision(self.matmul)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.backends.mkldnn.enabled = self.mkldnn  # type: ignore[assignment]


class Welcome(msgspec.Struct):
    """The first message to a helper."""

    config: RunConfig
    form: list[TensorForm]
    flags: Flags


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*(p.detach() for p in model.parameters()), *(b.detach() for b in model.buffers())]


def form_of(model: nn.Module) -> list[TensorForm]:
    tensors = tensors_of(model)
    spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t.shape, t.stride()) * t.element_size()) for t in tensors)
    if any(after < end for (_, end), (after, _) in itertools.pairwise(spans)):
        raise RunFailed("processes are for models whose parameters and buffers share no memory; leave processes out")
    return [TensorForm(list(t.shape), str(t.dtype), list(t.stride()), t.data_ptr() % ALIGNMENT) for t in tensors]


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def formed(tensor: Tensor, form: TensorForm) -> Tensor:
    """Memory like the tensor's, but of this form."""
    if list(tensor.shape) != form.shape or str(tensor.dtype) != form.dtype:
        raise ValueError(
            f"its model is another one there ({tensor.dtype} {list(tensor.shape)}, not {form.dtype} {form.shape})"
        )
    if not tensor.numel():
        return tensor.data
    nbytes = _extent(form.shape, form.strides) * tensor.element_size()
    raw = torch.zeros(nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    start = (form.place - raw.data_ptr()) % ALIGNMENT
    return raw[start : start + nbytes].view(tensor.dtype).as_strided(form.shape, form.strides)
