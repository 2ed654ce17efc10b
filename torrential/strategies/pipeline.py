"""Pipeline parallelism (GPipe, Huang et al. 2018; 1F1B, Narayanan et al. 2019): each worker has a stage of the model.

    stage 0   F0 F1 F2       B0 F3    B1 ...     activations go on to the next stage,
    stage 1      F0 F1    B0 F2    B1 F3 ...     their gradients back to the one before:
    stage 2         F0 B0 F1 B1 F2 B2 ...        microbatches of one batch, and one step at its end

What a stage does when is data (stages/schedules); the step is that of plain training on the whole batch, to rounding.
With fewer stages than workers there are several pipelines, which sum the gradients of each stage over its copies.

A worker keeps the parameters and the optimizer's state of its own layers alone. The norm by which gradients are clipped
is that of the whole model: its parts travel with the votes. A parameter that two stages share has its gradients summed.
Batch norm sees a microbatch at a time; what is random is drawn by (epoch, microbatch, stage).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from torrential.comm.protocol import Handle
from torrential.data.deal import Batch
from torrential.data.nest import mapped
from torrential.errors import BadInput
from torrential.stages.cut import balanced_cuts, layer_costs, layers_of, read_costs, read_cuts, spans
from torrential.stages.schedules import schedule
from torrential.stages.schedules.base import Action, Backward, Forward, ReceiveFrom, SendTo
from torrential.stages.transfer import Receiver, Sender, differentiable
from torrential.step import pair
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.strategies.roles import Role, Roles
from torrential.task import Task

T = TypeVar("T")

FORWARD = 1 / 3  # the share of forward in the time of a batch


class Pipeline(Strategy, frozen=True, kw_only=True):
    """A model cut into stages, one for each worker; microbatches of every batch pass through them."""

    name: ClassVar[str] = "pipeline"
    summary: ClassVar[str] = "stages of the model on different workers, microbatches passing through them"

    stages: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of stages; 0: as many as there are workers. With fewer there are several pipelines."""
    microbatches: Annotated[int, msgspec.Meta(ge=1)] = 8
    """The number of pieces that a worker's batch is cut into."""
    order: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """The order of forwards and backwards: 1f1b keeps fewer activations than gpipe; interleaved idles less."""
    chunks: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of pieces of the model on each stage, for interleaved."""
    cuts: str = ""
    """The layers at which the pieces of the model begin, as in 2,4; by default all have about as much to compute."""
    costs: str = ""
    """What these pieces cost, relative to each other, as in 1,2,1; by default counted. Time is simulated by it."""
    recompute: bool = False
    """Whether only the inputs of a stage are kept, and its forward is run again before its backward."""

    def roles(self, workers: int, servers: int) -> Roles:
        return (Role("worker", workers, self.worker, "fail"),)

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return self.pipelines(workers) * batch_size

    def pipelines(self, workers: int) -> int:
        """The number of copies of the whole model."""
        return workers // (self.stages or workers)

    # -- the model's parts ------------------------------------------------------------------------------------------
    def refuse(self, task: Task, model: nn.Module) -> None:
        if task.loss is None:
            raise BadInput("pipeline needs outputs and targets apart; give the task a loss(outputs, targets), no step")
        if self.chunks > 1 and self.order != "interleaved":
            raise BadInput(f"chunks={self.chunks} is for order=interleaved (given: {self.order})")
        if self.recompute:
            for name, module in model.named_modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                    raise BadInput(
                        f"recompute would count every batch twice in the running statistics of {name}; use group norm, "
                        "or leave out recompute"
                    )

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        stages = self.stages or workers
        if workers % stages:
            raise BadInput(f"stages={stages} does not divide the workers ({workers}); give a multiple of it")
        layers, parts = len(layers_of(model)), stages * self.chunks
        if stages == 1 and self.chunks > 1:
            raise BadInput(f"chunks={self.chunks} needs several stages (given: 1); leave out chunks")
        if parts > layers:
            raise BadInput(f"{layers} layers cannot be cut into {parts} parts; use fewer stages")
        costs = layer_costs(task, model)
        cuts = read_cuts(self.cuts, layers, parts) if self.cuts else balanced_cuts(costs, parts)
        each = [sum(costs[i] for i in span) for span in spans(cuts, layers)]
        given = read_costs(self.costs, parts) if self.costs else [cost / sum(each) for cost in each]
        return msgspec.structs.replace(
            self, stages=stages, cuts=",".join(map(str, cuts)), costs=",".join(f"{cost:.4g}" for cost in given)
        )

    def layers(self, model: nn.Module, stage: int) -> list[list[tuple[str, nn.Module]]]:
        """The layers of each chunk of a stage."""
        found = layers_of(model)
        parts = self._spans(len(found))
        return [[found[i] for i in parts[chunk * self.stages + stage]] for chunk in range(self.chunks)]

    def _spans(self, layers: int) -> list[range]:
        return list(spans([int(each) for each in self.cuts.split(",")] if self.cuts else [], layers))

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        return nn.ModuleList(
            nn.Sequential(*(layer for _, layer in chunk)) for chunk in self.layers(model, rank % self.stages)
        )

    def assembled(self, parts: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for rank in sorted(parts, reverse=True):  # of several pipelines the first counts
            for name, tensor in parts[rank].items():
                kind, _, inner = name.partition("/")
                if kind in ("parameters", "buffers"):
                    found[inner] = tensor
        return found

    def worker(self, ctx: Context) -> None:
        stage = _StageWorker(self, ctx)
        ctx.rounds(stage.propose, stage.conclude)


class _StageWorker:
    """One worker's stage: runs its list of actions on the microbatches of every batch."""

    def __init__(self, strategy: Pipeline, ctx: Context) -> None:
        self._strategy, self._ctx, self._count = strategy, ctx, strategy.stages
        self._parameters = ctx.replica.local(own=True)
        self._pipeline, self._stage = divmod(ctx.comm.rank, strategy.stages)
        self._pipelines = strategy.pipelines(ctx.config.workers)
        self._chunks = list(ctx.replica.model.children())
        self._last = self._stage == self._count - 1
        costs = read_costs(strategy.costs, self._count * strategy.chunks)
        self._shares = [cost / sum(costs) for cost in costs]
        self._trained = [p for p in reversed(list(ctx.replica.model.parameters())) if p.requires_grad]
        self._names = [entry.name for entry in ctx.replica.layout.entries]
        self._shared: dict[str, list[int]] = {}
        self._known = False  # whether stages have told each other what they share
        self._sender, self._receiver = Sender(ctx.comm), Receiver(ctx.comm)
        self._microbatches: list[Batch] = []
        self._data: list[Any] = []  # each microbatch, where the first or the last layer is here
        self._inputs: dict[tuple[int, int], Any] = {}  # by microbatch and chunk, as are the next two
        self._outputs: dict[tuple[int, int], Any] = {}
        self._slopes: dict[tuple[int, int], list[Tensor]] = {}
        self._losses: list[float] = []
        self._square = 0.0

    def propose(self) -> Vote:
        ctx = self._ctx
        share = ctx.data.share(1, part=self._pipeline, parts=self._pipelines)
        self._cut(share.batches)
        self._inputs, self._outputs, self._slopes, self._losses = {}, {}, {}, []
        for parameter in ctx.replica.model.parameters():
            parameter.grad = None
        pending: list[Handle] = []
        for action in self._actions():
            self._carry_out(action, pending)
        for handle in pending:
            handle.wait()
        self._sum_gradients()
        if not self._last:
            return Vote(0.0, 0, [self._square])
        samples = sum(map(len, self._microbatches))
        return Vote(math.fsum(self._losses) / max(1, samples), samples, [self._square])

    def conclude(self, decision: Decision) -> None:
        ctx = self._ctx
        clip = ctx.task.clip_norm
        if clip is not None:
            norm = math.sqrt(float(decision.numbers[:, 0].sum()) / self._pipelines)
            for parameter in ctx.replica.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, clip / (norm + 1e-6))
        self._parameters.step(ctx.progress.rate(ctx.data.joined))

    # -- microbatches -----------------------------------------------------------------------------------------------
    def _cut(self, batches: Sequence[Batch]) -> None:
        """The batches as microbatches, with their data where they are needed: at the first and the last stage."""
        self._microbatches, self._data = [], []
        for batch in batches:
            pieces = _pieces(batch, self._strategy.microbatches)
            self._microbatches += pieces
            if self._stage == 0 or self._last:
                whole = self._ctx.replica.fetch(batch)
                for piece in pieces:
                    first = piece.first - batch.first
                    self._data.append(_rows(whole, first, first + len(piece), len(batch)))

    def _actions(self) -> list[Action]:
        strategy = self._strategy
        if not self._microbatches:
            return []
        return schedule(strategy.order, self._count, len(self._microbatches), self._stage, strategy.chunks)

    # -- actions ----------------------------------------------------------------------------------------------------
    def _carry_out(self, action: Action, pending: list[Handle]) -> None:
        rank = self._pipeline * self._count
        match action:
            case ReceiveFrom(source, number, "activation", chunk):
                samples = len(self._microbatches[number])
                self._inputs[number, chunk] = self._receiver.activation(rank + source, samples, chunk)
            case ReceiveFrom(source, number, "gradient", chunk):
                output = self._outputs[number, chunk]
                self._slopes[number, chunk] = self._receiver.gradient(rank + source, output, chunk)
            case Forward(number, chunk):
                self._forward(number, chunk)
            case SendTo(to, number, "activation", chunk):
                output, samples = self._outputs[number, chunk], len(self._microbatches[number])
                pending += self._sender.activation(rank + to, output, samples, self._chunk_after(chunk))
            case Backward(number, chunk):
                self._backward(number, chunk)
            case SendTo(to, number, "gradient", chunk):
                given = self._inputs.pop((number, chunk))
                pending += self._sender.gradient(rank + to, given, self._chunk_before(chunk))

    def _chunk_after(self, chunk: int) -> int:
        return chunk + 1 if self._last else chunk

    def _chunk_before(self, chunk: int) -> int:
        return chunk - 1 if self._stage == 0 else chunk

    def _forward(self, number: int, chunk: int) -> None:
        if self._stage == 0 and chunk == 0:
            self._inputs[number, chunk] = pair(self._data[number])[0]
        with torch.set_grad_enabled(not self._strategy.recompute):
            output = self._computed(number, chunk)
        if self._is_end(chunk):
            self._losses.append(float(output.detach()) * len(self._microbatches[number]))
        self._outputs[number, chunk] = output

    def _computed(self, number: int, chunk: int) -> Any:
        """What a chunk makes of a microbatch; of the last layer's output the loss."""
        given, module = self._inputs[number, chunk], self._chunks[chunk]

        def work() -> Any:
            output = module(given)
            if not self._is_end(chunk):
                return output
            assert self._ctx.task.loss is not None
            return self._ctx.task.loss(output, pair(self._data[number])[1])

        return self._timed(number, chunk, work, FORWARD)

    def _backward(self, number: int, chunk: int) -> None:
        output = self._outputs.pop((number, chunk))
        if self._strategy.recompute:
            output = self._computed(number, chunk)
        if self._is_end(chunk):
            weight = self._microbatches[number].weight
            self._timed(number, chunk, lambda: (output * weight).backward(), 1 - FORWARD)
            return
        slopes = zip(differentiable(output), self._slopes.pop((number, chunk)), strict=True)
        needed = [(tensor, slope) for tensor, slope in slopes if tensor.requires_grad]
        ends, given = [tensor for tensor, _ in needed], [slope for _, slope in needed]
        if ends:
            self._timed(number, chunk, lambda: torch.autograd.backward(ends, given), 1 - FORWARD)

    def _timed(self, number: int, chunk: int, work: Callable[[], T], share: float) -> T:
        part = chunk * self._count + self._stage
        return self._ctx.replica.compute(self._microbatches[number], work, share * self._shares[part], part)

    def _is_end(self, chunk: int) -> bool:
        return self._last and chunk == self._strategy.chunks - 1

    # -- gradients --------------------------------------------------------------------------------------------------
    def _sum_gradients(self) -> None:
        """Over the stages that share a parameter, and over the pipelines."""
        ctx, parameters = self._ctx, dict(zip(self._names, self._trained, strict=True))
        for name, stages in self._shared_parameters().items():
            buffer = ctx.comm.buffer(f"shared/{name}", parameters[name].numel(), parameters[name].dtype)
            grad = parameters[name].grad
            buffer.zero_() if grad is None else buffer.copy_(grad.flatten())
            ctx.comm.group([self._pipeline * self._count + stage for stage in stages]).all_reduce(buffer).wait()
            parameters[name].grad = buffer.view_as(parameters[name]).clone()
        if self._pipelines > 1:
            flat = ctx.replica.collected()
            ranks = [pipeline * self._count + self._stage for pipeline in range(self._pipelines)]
            ctx.comm.group(ranks).all_reduce(flat).wait()
            for entry, parameter in zip(ctx.replica.layout.entries, self._trained, strict=True):
                parameter.grad = entry.view(flat)
        mine = (p.grad for name, p in parameters.items() if self._stage == min(self._shared.get(name, [self._stage])))
        self._square = math.fsum(float(grad.double().square().sum()) for grad in mine if grad is not None)

    def _shared_parameters(self) -> dict[str, list[int]]:
        """The parameters that other stages have, too, by name, and which stages these are."""
        if self._known:
            return self._shared
        comm = self._ctx.comm
        mine = torch.tensor([_number_of(name) for name in self._names], dtype=torch.int64)
        most = int(comm.all_gather(torch.tensor([len(mine)])).wait().max())
        table = comm.all_gather(torch.cat([mine, torch.full((most - len(mine),), -1)])).wait()
        rows = dict(zip(comm.members, table.tolist(), strict=True))
        own = range(self._pipeline * self._count, (self._pipeline + 1) * self._count)
        for name, number in zip(self._names, mine.tolist(), strict=True):
            stages = [rank % self._count for rank in own if number in rows[rank]]
            if len(stages) > 1:
                self._shared[name] = stages
        self._known = True
        return self._shared


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _pieces(batch: Batch, count: int) -> list[Batch]:
    """A batch in so many microbatches of near-equal sizes, as far as there are samples."""
    pieces, first = [], batch.first
    for indices in batch.indices.tensor_split(min(count, len(batch))):
        weight = batch.weight * len(indices) / len(batch)
        pieces.append(replace(batch, first=first, indices=indices, weight=weight))
        first += len(indices)
    return pieces


def _rows(whole: Any, first: int, last: int, samples: int) -> Any:
    """Some samples of a batch."""

    def cut(leaf: Any) -> Any:
        has_rows = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == samples
        return leaf[first:last] if has_rows else leaf

    return mapped(cut, whole)
