"""The gradients of a worker's parameters as one registered vector, to be summed with those of other workers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from torrential.comm.protocol import Comm


class GradientVector:
    """All gradients, and for each parameter whether the loss depends on it."""

    def __init__(self, comm: Comm, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        self.data = comm.buffer("gradients", sum(sizes) + len(sizes), parameters[0].dtype)
        pieces = self.data[: sum(sizes)].split(sizes)
        self._views: list[Tensor] = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self._reached = self.data[sum(sizes) :]

    def collect(self) -> None:
        """Write what autograd has left into the vector."""
        for place, (view, parameter) in enumerate(zip(self._views, self._parameters, strict=True)):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            self._reached[place] = 0.0 if parameter.grad is None else 1.0

    def spread(self) -> None:
        """Make the vector the gradients of the parameters, of those that the loss of some worker depends on."""
        for view, parameter, reached in zip(self._views, self._parameters, self._reached.tolist(), strict=True):
            parameter.grad = view if reached else None
