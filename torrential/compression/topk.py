"""Top-k with error feedback: of every tensor the largest elements are sent, the others are added to the next gradient.

    v = v + g ;  send the k largest of |v| ;  v[sent] = v - sent

Without error feedback the small ones would never be sent (Stich et al. 2018, "Sparsified SGD with memory"; Aji and
Heafield 2017, "gradient dropping"). The optimizer's momentum comes after the sum, as ever: what was kept back for a
while lacks the momentum of that while, which is what `dgc` corrects.

    g    the gradient, weighted as it is summed        v    what stays behind
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torrential.compression.sparse import Selected, Values, largest


class TopK:
    """The tensors of one worker, one after the other in one vector. Nothing changes before `commit`."""

    states: tuple[str, ...] = ("residual",)
    """The names of what stays behind, the residual last."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """`sizes`: elements of each tensor; `dtype`: of what stays behind."""
        self.sizes = sizes
        starts = [0, *accumulate(sizes)]
        self._parts = [slice(*edges) for edges in pairwise(starts)]
        self._kept = [torch.zeros(starts[-1], dtype=dtype, device=device) for _ in self.states]
        self._gradients: Sequence[Tensor | None] = ()
        self._scale, self._sent = 1.0, Selected(torch.empty(0, dtype=torch.int64), torch.empty(0))

    def select(self, gradients: Sequence[Tensor | None], counts: Sequence[int], scale: float, step: int) -> Selected:
        """Choose what is sent, of each tensor so many elements, given flat gradients and their factor. None: backward
        has not reached it, so that it stays as it is and nothing is sent."""
        self._gradients, self._scale = gradients, scale
        places, values = list[Tensor](), list[Tensor]()
        for number, (gradient, count) in enumerate(zip(gradients, counts, strict=True)):
            if gradient is not None:
                ahead = self._ahead(number, gradient, scale)
                found = largest(ahead, self.sizes[number], count, step)
                places.append(found + self._parts[number].start)
                values.append(ahead(found))
        if not places:
            return Selected(torch.empty(0, dtype=torch.int64), self._kept[-1][:0])
        return Selected(torch.cat(places), torch.cat(values))

    def sent(self, selected: Selected) -> None:
        """Note what was sent, as precisely as it was."""
        self._sent = selected

    def commit(self) -> None:
        """The step is taken, and what was not sent stays behind for the next."""
        for number, gradient in enumerate(self._gradients):
            if gradient is not None:
                self._add(number, gradient, self._scale)
        self._take_off(self._sent)
        self._gradients = ()

    def _ahead(self, number: int, gradient: Tensor, scale: float) -> Values:
        """What there is to send of a tensor."""
        v = self._kept[-1][self._parts[number]]
        return lambda where: torch.add(v[where], gradient[where], alpha=scale)

    def _add(self, number: int, gradient: Tensor, scale: float) -> None:
        self._kept[-1][self._parts[number]].add_(gradient, alpha=scale)

    def _take_off(self, sent: Selected) -> None:
        self._kept[-1][sent.places] -= sent.values

    def save(self) -> dict[str, Tensor]:
        """What stays behind, by name."""
        return dict(zip(self.states, self._kept, strict=True))
