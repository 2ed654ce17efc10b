"""Forward and backward passes of a worker's stages over the microbatches of a batch, as a schedule lists them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Comm, Handle
from torrential.data.deal import Batch
from torrential.data.nest import mapped
from torrential.errors import RunFailed
from torrential.stages.parameters import part_name
from torrential.stages.schedules import SCHEDULES, schedule
from torrential.stages.schedules.base import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    ReceiveFrom,
    SendTo,
)
from torrential.stages.spans import span_of
from torrential.stages.split_backward import DeferredGradient, NotedCall, backward_input, backward_weight, noting
from torrential.stages.traced_part import TracedPart
from torrential.stages.transfer import Receiver, Sender, differentiable
from torrential.stages.whole_backward import backward, most_inputs
from torrential.step import pair

T = TypeVar("T")

_schedule = lru_cache(schedule)
FORWARD = 1 / 3  # the share of forward in the time of a batch


class StageReplica(Protocol):
    """What passes need of a worker's model: strategies.context.Replica has it."""

    model: nn.Module

    def fetch(self, batch: Batch) -> Any: ...

    def compute(self, batch: Batch, work: Callable[[], T], share: float = 1.0, part: int | None = 0) -> T: ...


@dataclass(frozen=True)
class PassPlan:
    """How batches pass through a model."""

    order: str  # the name of a schedule
    microbatches: int
    stages: int
    chunks: int  # parts of the model on each stage
    costs: Sequence[float]  # of all parts, relative to each other
    recompute: bool  # whether forward is run again before backward

    @property
    def room(self) -> int:
        """Inputs of one part of the model that a worker has at a time, at most, and one that is on its way."""
        most = self.microbatches if self.order == "gpipe" else min(self.microbatches, 2 * self.stages * self.chunks)
        return most + 1


class StagePasses:
    """Forward and backward passes of the stages that one worker runs, as the schedule says."""

    def __init__(
        self,
        comm: Comm,
        replica: StageReplica,
        loss: Callable[[Any, Any], Tensor],
        plan: PassPlan,
        runners: Sequence[tuple[int, list[int]]],
    ) -> None:
        """`runners`: the workers of the pipeline with the stages that each runs."""
        self._comm, self._replica, self._loss, self._plan = comm, replica, loss, plan
        self._ranks = [rank for rank, _ in runners]
        self._count, self._place = len(runners), self._ranks.index(comm.rank)
        self._last = self._place == self._count - 1
        self._parts = self._parts_of(runners[self._place][1])
        model, costs = replica.model, plan.costs
        self._modules = [[model.get_submodule(part_name(*part)) for part in parts] for parts in self._parts]
        self._leaves_alone = [leaves_alone(modules[0]) for modules in self._modules]
        self._most_inputs = [most_inputs(modules) for modules in self._modules]
        self._shares = [sum(costs[c * plan.stages + s] for s, c in parts) / sum(costs) for parts in self._parts]
        self._sender, self._receiver = Sender(comm, plan.room), Receiver(comm, plan.room)
        self._microbatches: list[Batch] = []
        self._given: list[Any] = []  # by microbatch: the model's inputs, where the first layer is here
        self._targets: list[Any] = []  # by microbatch, where the last layer is here
        self._inputs: dict[tuple[int, int], Any] = {}  # by microbatch and chunk, as are the next two
        self._outputs: dict[tuple[int, int], Any] = {}
        self._slopes: dict[tuple[int, int], list[Tensor]] = {}
        self._calls: dict[tuple[int, int], list[NotedCall]] = {}  # where backward comes in two halves, as the next
        self._deferred: dict[tuple[int, int], list[DeferredGradient]] = {}
        self._losses: list[float] = []

    def _parts_of(self, stages: list[int]) -> list[list[tuple[int, int]]]:
        """The parts of the model, as (stage, chunk), that are run one after the other; in each chunk those of the
        stages here. A worker that runs all stages has no use for chunks."""
        rows = [[(stage, chunk) for stage in stages] for chunk in range(self._plan.chunks)]
        return rows if self._count > 1 else [[part for row in rows for part in row]]

    def run(self, batches: Sequence[Batch], meanwhile: Callable[[], None] | None = None) -> tuple[float, int]:
        """Leave the gradients of these batches at the parameters; returns the mean loss and the number of samples,
        where the last layer is here. `meanwhile`: what is to be done while another stage is first waited for."""
        self._cut(batches)
        self._inputs, self._outputs, self._slopes, self._losses = {}, {}, {}, []
        self._calls, self._deferred = {}, {}
        pending: list[Handle] = []
        if self._microbatches:
            count = len(self._microbatches)
            carry_out = self._carry_out_traced if self._comm.traced else self._carry_out
            for action in _schedule(self._plan.order, self._count, count, self._place, len(self._parts)):
                if meanwhile is not None and isinstance(action, ReceiveFrom):
                    meanwhile()
                    meanwhile = None
                carry_out(action, pending)
        for handle in pending:
            if not handle.done():
                handle.wait()
        samples = sum(map(len, self._microbatches)) if self._last else 0
        return math.fsum(self._losses) / max(1, samples), samples

    def _cut(self, batches: Sequence[Batch]) -> None:
        """The batches as microbatches, with inputs at the first stage and targets at the last."""
        self._microbatches, self._given, self._targets = [], [], []
        for batch in batches:
            pieces = _pieces(batch, self._plan.microbatches)
            self._microbatches += pieces
            if self._place > 0 and not self._last:
                continue
            inputs, targets = pair(self._replica.fetch(batch))
            for piece in pieces:
                first = piece.first - batch.first
                place = first, first + len(piece), len(batch)
                if self._place == 0:
                    self._given.append(_rows(inputs, *place))
                if self._last:
                    self._targets.append(_rows(targets, *place))

    def _carry_out_traced(self, action: Action, pending: list[Handle]) -> None:
        if isinstance(action, OptimizerStep) and not SCHEDULES[self._plan.order].asynchronous:
            return  # which is taken when the step is decided
        began, waited = self._comm.now(), self._comm.meter.wait
        self._carry_out(action, pending)
        name, about = span_of(action)
        self._comm.span(name, began, about | {"waited": self._comm.meter.wait - waited})

    def _carry_out(self, action: Action, pending: list[Handle]) -> None:
        match action:
            case ReceiveFrom(source, number, "activation", chunk):
                samples = len(self._microbatches[number])
                self._inputs[number, chunk] = self._receiver.activation(self._ranks[source], samples, chunk)
            case ReceiveFrom(source, number, "gradient", chunk):
                output, samples = self._outputs[number, chunk], len(self._microbatches[number])
                self._slopes[number, chunk] = self._receiver.gradient(self._ranks[source], output, samples, chunk)
            case Forward(number, chunk):
                self._forward(number, chunk)
            case SendTo(to, number, "activation", chunk):
                output, samples = self._outputs[number, chunk], len(self._microbatches[number])
                after = chunk + 1 if self._last else chunk
                pending += self._sender.activation(self._ranks[to], output, samples, after)
            case Backward(number, chunk):
                self._backward(number, chunk)
            case BackwardInput(number, chunk):
                self._backward_input(number, chunk)
            case BackwardWeight(number, chunk):
                work = partial(backward_weight, self._deferred.pop((number, chunk)))
                self._timed(number, work, (1 - FORWARD) / 2 * self._shares[chunk], None)
            case OptimizerStep():
                self._step()
            case SendTo(to, number, "gradient", chunk):
                given, samples = self._inputs.pop((number, chunk)), len(self._microbatches[number])
                before = chunk - 1 if self._place == 0 else chunk
                pending += self._sender.gradient(self._ranks[to], given, samples, before)

    def _forward(self, number: int, chunk: int) -> None:
        if self._place == 0 and chunk == 0:
            self._inputs[number, chunk] = self._given[number]
        output = self._computed(number, chunk, with_gradients=not self._plan.recompute)
        if self._is_end(chunk):
            self._losses.append(float(output.detach()) * len(self._microbatches[number]))
        self._outputs[number, chunk] = output

    def _computed(self, number: int, chunk: int, with_gradients: bool = True) -> Any:
        """What a chunk makes of a microbatch; of the last layer's output the loss."""
        value = self._inputs[number, chunk]
        if not self._leaves_alone[chunk]:
            value = mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
        share = FORWARD * self._shares[chunk] / len(self._modules[chunk])
        for (stage, piece), module in zip(self._parts[chunk], self._modules[chunk], strict=True):
            part = piece * self._plan.stages + stage
            work = partial(_run, self._runnable(number, chunk, module), value, with_gradients)
            value = self._timed(number, work, share, part)
        if not self._is_end(chunk):
            return value
        return _run(self._loss, value, with_gradients, self._targets[number])

    def _runnable(self, number: int, chunk: int, module: nn.Module) -> Callable[[Any], Any]:
        """What a microbatch passes through: a part of the model with the weights that are meant for it."""
        if self._plan.order != "zero-bubble":
            return module
        return noting(module, self._calls.setdefault((number, chunk), []))

    def _step(self) -> None:
        """Update parameters at the end of a list; a synchronous pipeline does it when all have voted."""

    def _ends(self, number: int, chunk: int) -> tuple[list[Tensor], list[Tensor]]:
        """What backward begins with: outputs with their gradients, or the loss."""
        output = self._outputs.pop((number, chunk))
        if self._plan.recompute:
            self._calls.pop((number, chunk), None)
            output = self._computed(number, chunk)
        if self._is_end(chunk):
            return [output], [torch.full_like(output, self._microbatches[number].weight)]
        slopes = zip(differentiable(output), self._slopes.pop((number, chunk)), strict=True)
        needed = [(tensor, slope) for tensor, slope in slopes if tensor.requires_grad]
        return [tensor for tensor, _ in needed], [slope for _, slope in needed]

    def _backward(self, number: int, chunk: int) -> None:
        ends, given = self._ends(number, chunk)
        if ends:
            in_place = len(self._microbatches[number]) <= self._most_inputs[chunk]
            work = partial(backward if in_place else torch.autograd.backward, ends, given)
            self._timed(number, work, (1 - FORWARD) * self._shares[chunk], None)

    def _backward_input(self, number: int, chunk: int) -> None:
        ends, given = self._ends(number, chunk)
        inputs = [leaf for leaf in differentiable(self._inputs[number, chunk]) if leaf.requires_grad]
        parameters = {id(p): p for module in self._modules[chunk] for p in module.parameters() if p.requires_grad}
        calls = self._calls.pop((number, chunk), [])
        work = partial(backward_input, ends, given, inputs, parameters.values(), calls)
        share = (1 - FORWARD) / 2 * self._shares[chunk]
        self._deferred[number, chunk] = self._timed(number, work, share, None) if ends else []

    def _timed(self, number: int, work: Callable[[], T], share: float, part: int | None) -> T:
        return self._replica.compute(self._microbatches[number], work, share, part)

    def _is_end(self, chunk: int) -> bool:
        return self._last and chunk == len(self._parts) - 1


def _run(function: Callable[..., Any], value: Any, with_gradients: bool, *more: Any) -> Any:
    """Grad mode is a thread's: it must not be set while others may have their turn. It is on unless it is set."""
    if with_gradients:
        return function(value, *more)
    with torch.no_grad():
        return function(value, *more)


def leaves_alone(module: nn.Module) -> bool:
    """Whether the first layer of a part is known not to change its input in place: autograd refuses that at the
    beginning of a stage, and what is computed again needs it as it was."""
    first = next(module.children(), module)
    if isinstance(first, TracedPart):
        return not first.code.changes_inputs
    return isinstance(first, nn.Linear | nn.modules.conv._ConvNd | nn.Embedding | nn.LayerNorm)


def _pieces(batch: Batch, count: int) -> list[Batch]:
    """A batch in so many microbatches of near-equal sizes, as far as there are samples."""
    pieces, first, samples = [], batch.first, len(batch)
    for indices in batch.indices.tensor_split(min(count, samples)):
        rows = indices.numel()
        weight = batch.weight * rows / samples
        pieces.append(Batch(batch.epoch, first, indices, batch.total, weight, batch.lease))
        first += rows
    return pieces


def _rows(whole: Any, first: int, last: int, samples: int) -> Any:
    """Some samples of a batch, of whose tensors the first dimension is the samples."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        if leaf.shape[0] != samples:
            raise RunFailed(
                f"a tensor of the batch has {len(leaf)} rows where the batch has {samples} samples, and cannot be cut "
                "into microbatches; put samples first in collate"
            )
        return leaf[first:last]

    return mapped(cut, whole)
