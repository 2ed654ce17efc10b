"""PowerSGD (Vogels, Karimireddy and Jaggi, NeurIPS 2019): every matrix as the product of two thin ones.

    M = g + e                       every worker: its gradient as a matrix, and what stayed behind
    P = sum of M orthogonal(Q)      all-reduce, n x r
    P = orthogonal(P)               everybody the same
    Q = sum of M' P                 all-reduce, m x r;  the start of the next step: one step of power iteration each
    the sum of all M is about P Q'
    e = M - P Q' / N                what stays behind; those of N workers add up to what the product lacks

A tensor of more dimensions is a matrix with a row for each of the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class LowRank:
    """The matrices of one worker."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], rank: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        """`seed`: all workers begin with the same factors."""
        self.shapes = [(shape[0], math.prod(shape[1:])) for shape in shapes]
        self.ranks = [min(rank, *shape) for shape in self.shapes]
        self.sizes = [rows * columns for rows, columns in self.shapes]
        self.left_sizes = [rows * r for (rows, _), r in zip(self.shapes, self.ranks, strict=True)]
        self.right_sizes = [columns * r for (_, columns), r in zip(self.shapes, self.ranks, strict=True)]
        self.error = torch.zeros(sum(self.sizes), dtype=dtype, device=device)
        self._sum = torch.zeros_like(self.error)  # M, then what will stay behind
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(sum(self.right_sizes), generator=generator)
        self.right = start.to(device, dtype)  # Q
        self._right = self.right.clone()  # of the coming step
        self._left: list[Tensor] = []  # P
        self._reached: list[bool] = []

    def begin_with(self, right: Tensor) -> None:
        """Begin the next step with another's Q."""
        self.right.copy_(right)

    def project(self, gradients: Sequence[Tensor | None], scale: float) -> Tensor:
        """This worker's part of P, of all matrices in one vector. None: backward has not reached it, so that what
        stayed behind stays there."""
        self._reached = [gradient is not None for gradient in gradients]
        kept, sums = self.error.split(self.sizes), self._sum.split(self.sizes)
        for total, error, gradient in zip(sums, kept, gradients, strict=True):
            total.zero_() if gradient is None else torch.add(error, gradient, alpha=scale, out=total)
        starts = [torch.linalg.qr(q).Q for q in self._rights(self.right)]  # so that P is as large as a gradient
        products = [m @ q for m, q in zip(self._matrices(self._sum), starts, strict=True)]
        return torch.cat([product.view(-1) for product in products])

    def fit(self, left: Tensor) -> Tensor:
        """This worker's part of Q, given P as all workers have added it up."""
        self._left = [
            torch.linalg.qr(part.view(rows, r).to(self.error.dtype)).Q
            for part, (rows, _), r in zip(left.split(self.left_sizes), self.shapes, self.ranks, strict=True)
        ]
        products = [m.t() @ p for m, p in zip(self._matrices(self._sum), self._left, strict=True)]
        return torch.cat([product.reshape(-1) for product in products])

    def approximate(self, right: Tensor, sums: Sequence[Tensor], workers: int) -> None:
        """Leave in `sums` (flat) what the product makes of the sum of all workers' matrices, given Q as they have added
        it up."""
        self._right = right.to(self.error.dtype)
        for total, m, p, q in zip(sums, self._matrices(self._sum), self._left, self._rights(self._right), strict=True):
            product = p @ q.t()
            m.sub_(product, alpha=1 / workers)
            total.copy_(product.view(-1))
        for reached, m, error in zip(
            self._reached, self._sum.split(self.sizes), self.error.split(self.sizes), strict=True
        ):
            if not reached:
                m += error

    def commit(self) -> None:
        """The step is taken: its error stays behind, and the next one begins with its Q."""
        self.error, self._sum = self._sum, self.error
        self.right.copy_(self._right)

    def _matrices(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _rights(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split(self.right_sizes)
        return [part.view(columns, r) for part, (_, columns), r in zip(parts, self.shapes, self.ranks, strict=True)]


def saves(shape: Sequence[int], rank: int) -> bool:
    """Whether the factors of a tensor are smaller than it is."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return min(rank, rows, columns) * (rows + columns) < rows * columns
