"""Deep Gradient Compression (Lin, Han, Mao, Wang and Dally, ICLR 2018): top-k, and four tricks that keep its accuracy.

    g = g min(1, c / (sqrt(N) |g|))     local clipping; c: the usual threshold for the sum of N workers
    u = m u + g                         momentum correction: momentum is each worker's own,
    v = v + u                           so what waits gathers the momentum of the time it waits
    send the k largest of |v|           a share that shrinks in the first epochs: warm-up of sparsity
    u[sent] = 0                         momentum masking: what is sent late does not go on in an old direction
    v[sent] = v - sent

with Nesterov's momentum u = m (u + g), v = v + u + g. The optimizer that takes the step applies no further momentum to
the sum (optim/corrected.py). Without momentum, or without its correction, there is no u: that is `topk`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torrential.compression.sparse import Selected, Values
from torrential.compression.topk import TopK

WARMUP = (1 / 4, 1 / 16, 1 / 64, 1 / 256)  # shares of elements, each for as long
PIECE = 1 << 16  # elements at a time: both vectors and the gradient stay in the cache


class DeepGradientCompression(TopK):
    """The tensors of one worker with momentum of their own."""

    states = ("momentum", "residual")

    def __init__(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        momenta: Sequence[float],
        nesterov: Sequence[bool],
        masking: bool,
    ) -> None:
        """`momenta`: SGD's momentum of each tensor, and whether it is Nesterov's; `masking`: whether what is sent loses
        it."""
        super().__init__(sizes, dtype, device)
        self._momenta, self._nesterov, self._masking = momenta, nesterov, masking

    def _ahead(self, number: int, gradient: Tensor, scale: float) -> Values:
        u, v = (kept[self._parts[number]] for kept in self._kept)
        m, nesterov = self._momenta[number], self._nesterov[number]

        def at(where: Any) -> Tensor:
            g = gradient[where] if scale == 1.0 else gradient[where] * scale
            if nesterov:
                return torch.add(u[where], g).mul_(m).add_(v[where]).add_(g)
            return torch.add(g, u[where], alpha=m).add_(v[where])

        return at

    def _add(self, number: int, gradient: Tensor, scale: float) -> None:
        m, nesterov = self._momenta[number], self._nesterov[number]
        vectors = [kept[self._parts[number]].split(PIECE) for kept in self._kept]
        for g, u, v in zip(gradient.split(PIECE), *vectors, strict=True):
            if nesterov:
                v.add_(u.add_(g, alpha=scale).mul_(m)).add_(g, alpha=scale)
            else:
                v.add_(u.mul_(m).add_(g, alpha=scale))

    def _take_off(self, sent: Selected) -> None:
        super()._take_off(sent)
        if self._masking:
            self._kept[0][sent.places] = 0.0


def clipping(norm: float, threshold: float, workers: int) -> float:
    """The factor of a worker's gradient of that norm, which is part of a sum over workers."""
    return min(1.0, threshold / (math.sqrt(workers) * (norm + 1e-6)))


def share_sent(epoch: float, warmup: float, ratio: float) -> float:
    """The share of elements that is sent when so many epochs are done: warm-up takes `warmup` of them."""
    if epoch >= warmup:
        return ratio
    return max(ratio, WARMUP[int(epoch / warmup * len(WARMUP))])


def warmup_epochs(given: float | None, epochs: float) -> float:
    """The epochs that warm-up of sparsity takes in a run of so many."""
    return min(4.0, epochs / 10) if given is None else given
