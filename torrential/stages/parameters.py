"""The parameters of a stage as a worker has them, its own or a copy: their gradients travel as one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Comm, Handle
from torrential.params.layout import Layout


def part_name(stage: int, chunk: int) -> str:
    """The name of a part of the model in the module that a worker has."""
    return f"stage {stage} chunk {chunk}"


class StageParameters:
    """The parameters and buffers of a stage that a worker has, its own or a neighbour's."""

    def __init__(self, comm: Comm, model: nn.Module, layout: Layout, stage: int, chunks: int) -> None:
        """`model`: the parts that the worker has, by `part_name`; `layout`: of their parameters."""
        self.stage, self._comm = stage, comm
        modules = [model.get_submodule(part_name(stage, chunk)) for chunk in range(chunks)]
        trained = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        names = {id(p): entry.name for p, entry in zip(trained, layout.entries, strict=True)}
        self.parameters = {names[id(p)]: p for module in modules for p in module.parameters() if p.requires_grad}
        self._modules = modules
        sizes = [p.numel() for p in self.parameters.values()]
        kind = next((p.dtype for p in self.parameters.values()), torch.float32)
        self.gradient = comm.buffer(f"gradient of stage {stage}", max(1, sum(sizes) + len(sizes)), kind)
        self._views = [
            piece.view_as(p)
            for piece, p in zip(self.gradient[: sum(sizes)].split(sizes), self.parameters.values(), strict=True)
        ]
        self._reached = self.gradient[sum(sizes) : sum(sizes) + len(sizes)]  # by parameter: whether there is one

    def _buffers(self) -> list[Tensor]:
        """The buffers as they are now: a layer may give them other tensors."""
        return [buffer for module in self._modules for buffer in module.buffers()]

    def collect(self) -> None:
        """Write what autograd has left into one vector."""
        for place, (view, parameter) in enumerate(zip(self._views, self.parameters.values(), strict=True)):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
            self._reached[place] = 0.0 if parameter.grad is None else 1.0

    def spread(self) -> None:
        """Make the vector the gradients of the parameters, of those that the loss depends on."""
        for view, parameter, reached in zip(self._views, self.parameters.values(), self._reached.tolist(), strict=True):
            parameter.grad = view if reached else None

    def send(self, to: int) -> list[Handle]:
        return [self._comm.send(tensor, to, f"copy {self.stage}") for tensor in (self.gradient, *self._buffers())]

    def receive(self, source: int) -> None:
        for tensor in (self.gradient, *self._buffers()):
            self._comm.recv(tensor, source, f"copy {self.stage}").wait()
