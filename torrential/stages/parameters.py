"""The parameters of a stage as a worker has them, its own or a copy: their gradients travel as one vector."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Comm, Handle
from torrential.params.layout import Layout


def part_name(stage: int, chunk: int) -> str:
    """The name of a part of the model in the module that a worker has."""
    return f"stage {stage} chunk {chunk}"


class StageParameters:
    """The parameters and buffers of a stage that a worker has, its own or a neighbour's."""

    def __init__(self, comm: Comm, model: nn.Module, layout: Layout, stage: int, chunks: int, turns: int = 1) -> None:
        """`model`: the parts that the worker has, by `part_name`; `layout`: of their parameters; `turns`: the number of
        vectors, which take turns, so that others may read one of them where it lies while the next is written."""
        self.stage, self._comm, self._turns = stage, comm, turns
        modules = [model.get_submodule(part_name(stage, chunk)) for chunk in range(chunks)]
        trained = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        names = {id(p): entry.name for p, entry in zip(trained, layout.entries, strict=True)}
        self.parameters = {names[id(p)]: p for module in modules for p in module.parameters() if p.requires_grad}
        self._modules = modules
        self.joined = True
        """Whether others have a part in the gradient; else it may stay where backward leaves it."""
        self.use(comm.rank)

    def use(self, rank: int) -> None:
        """From now on the vectors are those of this worker, and not to be written to if that is another one."""
        sizes = [p.numel() for p in self.parameters.values()]
        kind = next((p.dtype for p in self.parameters.values()), torch.float32)
        self._all: list[tuple[Tensor, list[Tensor], Tensor]] = []  # by turn: a vector, its views and its last numbers
        for turn in range(self._turns):
            name = f"gradient of stage {self.stage}, {turn}"
            vector = self._comm.buffer(name, max(1, sum(sizes) + len(sizes)), kind, rank=rank)
            pieces = zip(vector[: sum(sizes)].split(sizes), self.parameters.values(), strict=True)
            views = [piece.view_as(p) for piece, p in pieces]
            self._all.append((vector, views, vector[sum(sizes) : sum(sizes) + len(sizes)]))
        self._own = rank == self._comm.rank
        self.turn(0)

    def turn(self, number: int) -> None:
        """Go on to the vector of this round: the views of it by parameter, and whether each has a gradient."""
        self.gradient, self._views, self._reached = self._all[number % self._turns]

    def buffers(self) -> list[Tensor]:
        """The buffers as they are now: a layer may give them other tensors."""
        return [buffer for module in self._modules for buffer in module.buffers()]

    def take_gradients(self) -> None:
        """Have backward leave each gradient in the vector, as soon as it is there: they are never held twice."""
        for place, parameter in enumerate(self.parameters.values()):
            parameter.register_post_accumulate_grad_hook(GradientPlace(partial(self._place, place)))

    def _place(self, index: int) -> Tensor | None:
        return self._views[index] if self.joined and self._own else None

    def collect(self) -> None:
        """Write what autograd has left into one vector."""
        for place, (view, parameter) in enumerate(zip(self._views, self.parameters.values(), strict=True)):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            self._reached[place] = 0.0 if parameter.grad is None else 1.0

    def found(self) -> dict[nn.Parameter, Tensor]:
        """The gradients in the vector, of those parameters that the loss depends on."""
        rows = zip(self.parameters.values(), self._views, self._reached.tolist(), strict=True)
        return {parameter: view for parameter, view, reached in rows if reached}

    def spread(self) -> None:
        """Make the vector the gradients of the parameters."""
        found = self.found()
        for parameter in self.parameters.values():
            parameter.grad = found.get(parameter)

    def send(self, to: int) -> list[Handle]:
        return [self._comm.send(tensor, to, f"copy {self.stage}") for tensor in self._told()]

    def receive(self, source: int) -> None:
        for tensor in self._told():
            self._comm.recv(tensor, source, f"copy {self.stage}").wait()

    def _told(self) -> list[Tensor]:
        """What whoever keeps a copy is told: the gradient, unless it is read where it lies."""
        return [*([self.gradient] if self._turns == 1 else []), *self.buffers()]


class GradientPlace:
    """A hook that moves a parameter's first gradient to where it belongs; more is added to it there."""

    def __init__(self, place: Callable[[], Tensor | None]) -> None:
        self.place = place  # None: where it is

    def __call__(self, parameter: Tensor) -> None:
        view = self.place()
        if view is not None and parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(parameter.grad)
