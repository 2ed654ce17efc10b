"""Gradients of all members, summed: as they are, or in the precision of the wire, bucket by bucket during backward.

params/replicated.py takes the step. A compressor in the place of this is params/compressed.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Comm, Handle
from torrential.compression.wire import wire_dtype
from torrential.params.base import Finished, dtype_name, flat_gradient
from torrential.params.layout import Bucket, Layout, ParameterEntry


class GradientSums(Protocol):
    """The sums of all members' gradients."""

    def reduce(self, bucket: Bucket) -> Handle:
        """Start summing a bucket whose gradients are complete on this member."""

    def of(self, entry: ParameterEntry) -> Tensor | None:
        """The sum for a parameter, in its shape; None: this member is alone, and its gradient is where autograd left
        it."""

    def square_norm(self) -> float:
        """The squared norm of the sum of all gradients."""

    def commit(self) -> None:
        """Note that the step is taken: what was not sent becomes the residual."""


class DenseSums:
    """Implements GradientSums with all-reduces of registered buffers."""

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        reduce_device: torch.device,
        wire: str = "float32",
    ) -> None:
        """`reduce_device`: where gradients are summed; `wire`: the precision in which they are sent."""
        self._comm, self._parameters, self._device = comm, parameters, device
        self._staged = reduce_device.type != device.type  # gradients travel to the host and back
        self._summed: dict[torch.dtype, Tensor] = {}
        for dtype, numel in layout.sizes.items():
            sent = wire_dtype(wire, dtype)
            if reduce_device.type == "cpu":
                self._summed[dtype] = comm.buffer(f"gradients/{dtype_name(dtype)}", numel, sent)
            else:
                self._summed[dtype] = torch.zeros(numel, dtype=sent, device=reduce_device)
            if self._staged:
                _pin(self._summed[dtype])
        self._sums = [entry.view(self._summed[entry.dtype]) for entry in layout.entries]

    def reduce(self, bucket: Bucket) -> Handle:
        if len(self._comm.members) == 1:
            return Finished()
        for entry in bucket.entries:
            target, grad = self._sums[entry.index], self._parameters[entry.index].grad
            target.zero_() if grad is None else target.copy_(dense(grad), non_blocking=self._staged)
        region = self._summed[bucket.dtype][bucket.start : bucket.stop]
        if self._staged:
            return _AfterCopy(self._comm, region)
        return self._comm.all_reduce(region)

    def of(self, entry: ParameterEntry) -> Tensor | None:
        if len(self._comm.members) == 1:
            return None
        summed = self._sums[entry.index]
        if self._staged:
            summed = summed.to(self._device, non_blocking=True)
        return summed.to(entry.dtype)

    def square_norm(self) -> float:
        if len(self._comm.members) > 1:
            return square_norm(self._sums)
        return square_norm(g for g in map(flat_gradient, self._parameters) if g is not None)

    def commit(self) -> None:
        """Everything was sent."""


def square_norm(tensors: Iterable[Tensor]) -> float:
    """The squared norm of all tensors together."""
    return sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)


def dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


class _AfterCopy:
    """All-reduce of a region once the device has finished copying into it; waits come in order on every member."""

    def __init__(self, comm: Comm, region: Tensor) -> None:
        self._comm, self._region = comm, region
        self._copied = torch.cuda.Event()
        self._copied.record()

    def done(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> None:
        self._copied.synchronize()
        self._comm.all_reduce(self._region).wait(timeout)


def _pin(tensor: Tensor) -> None:
    """Register host memory with CUDA, so that copies to and from it run beside computation."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
