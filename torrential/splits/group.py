"""What the split layers of a worker say to those of its group: sums and slices of activations, in autograd.

    enter     the same on all workers  →  the same      backward: gradients are summed
    sum       a term on each worker    →  the sum        backward: the same gradient for each
    gather    a slice on each worker   →  the whole      backward: each takes its slice of the gradient

A pair of layers, colwise and rowwise, enters once and sums once: one all-reduce forward, one backward (Megatron-LM,
Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torrential.comm.protocol import Comm

Summed = Callable[[Tensor], Tensor]  # a tensor to the sum of all workers' tensors, in memory of its own


class SplitGroup:
    """A worker's place in its group: all of its split layers have this one object."""

    def __init__(self, place: int, ways: int) -> None:
        self.place, self.ways = place, ways
        self.summed: Summed = _alone

    def enter(self, whole: Tensor) -> Tensor:
        """What is the same on all workers goes to layers of which each has a slice."""
        return _apply(_Enter, whole, self.summed)

    def sum(self, term: Tensor) -> Tensor:
        """The sum of what each worker's slice of a layer gives."""
        return _apply(_Replaced, term, self.summed(term.detach()))

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """The whole activation of which each worker has a slice."""
        dim %= part.dim()
        rows = part.detach().new_zeros(self.ways, *part.shape)
        rows[self.place] = part.detach()
        return _apply(_Gathered, part, torch.cat(list(self.summed(rows)), dim), dim, self.place)

    def whole(self, given: Tensor, dim: int, size: int) -> Tensor:
        """An input of `size` for a layer of which each worker has some outputs: gathered, if it comes in slices."""
        if self.ways > 1 and given.size(dim) * self.ways == size:
            given = self.gather(given, dim)
        return self.enter(given)

    def own(self, given: Tensor, dim: int, size: int) -> Tensor:
        """An input of `size` for a layer of which each worker takes some inputs: its slice, if it comes whole."""
        return self.cut(self.enter(given), dim) if given.size(dim) == size else given

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This worker's slice of a tensor that is the same on all workers."""
        return whole.chunk(self.ways, dim)[self.place]


def _alone(tensor: Tensor) -> Tensor:
    raise AssertionError("split layers were run before their worker met its group")


def group_sum(comm: Comm, ranks: Sequence[int]) -> Summed:
    """Sums over workers, as layers need them in the middle of forward and backward."""
    members = comm.group(ranks)

    def summed(tensor: Tensor) -> Tensor:
        numel = tensor.numel()
        room = 1 << max(0, numel - 1).bit_length()
        buffer = comm.buffer(f"activations {room} {tensor.dtype}", room, tensor.dtype)[:numel]
        buffer.copy_(tensor.reshape(-1))
        comm.within_work(lambda: members.all_reduce(buffer).wait())
        return buffer.clone().view(tensor.shape)

    return summed


def _apply(function: type[torch.autograd.Function], *given: Any) -> Tensor:
    result: Tensor = function.apply(*given)
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, whole: Tensor, summed: Summed) -> Tensor:
        node.summed = summed
        return whole.view_as(whole)

    @staticmethod
    def backward(node: Any, *slopes: Any) -> Any:
        return node.summed(slopes[0]), None


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, term: Tensor, total: Tensor) -> Tensor:
        return total

    @staticmethod
    def backward(node: Any, *slopes: Any) -> Any:
        return slopes[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(node: Any, part: Tensor, whole: Tensor, dim: int, place: int) -> Tensor:
        node.dim, node.first, node.size = dim, place * part.size(dim), part.size(dim)
        return whole

    @staticmethod
    def backward(node: Any, *slopes: Any) -> Any:
        return slopes[0].narrow(node.dim, node.first, node.size), None, None, None
