"""Pipeline parallelism (GPipe, Huang et al. 2018; 1F1B, Narayanan et al. 2019): each worker has a stage of the model.

    stage 0   F0 F1 F2       B0 F3    B1 ...     activations go on to the next stage,
    stage 1      F0 F1    B0 F2    B1 F3 ...     their gradients back to the one before:
    stage 2         F0 B0 F1 B1 F2 B2 ...        microbatches of one batch, and one step at its end

What a stage does when is data (stages/schedules); the step is that of plain training on the whole batch, to rounding.
With fewer stages than workers there are several pipelines, which sum the gradients of each stage.

A worker has the parameters and the optimizer's state of its own stage, and of a neighbour's, whose gradients it is sent
before a step is decided: both take the same step, or none. When a worker dies, the microbatches in flight are given up;
a replacement takes its parameters from the neighbour, or else the neighbour runs both stages (stages/pipelines.py).

The norm by which gradients are clipped is that of the whole model: its parts travel with the votes. A parameter that
two stages share has its gradients summed. Batch norm sees a microbatch at a time; what is random is drawn by (epoch,
microbatch, stage).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from torrential.comm.protocol import Handle
from torrential.data.deal import Batch
from torrential.data.nest import mapped
from torrential.errors import BadInput, RunFailed
from torrential.stages.cut import balanced_cuts, layer_costs, layers_of, read_costs, read_cuts, spans
from torrential.stages.pipelines import PipelineCrew, copied, crews
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
    copies: bool = True
    """Whether a neighbour keeps the parameters of each stage, too, so that the run outlives its worker."""
    recompute: bool = False
    """Whether only the inputs of a stage are kept, and its forward is run again before its backward."""

    def roles(self, workers: int, servers: int) -> Roles:
        return (Role("worker", workers, self.worker, "regroup"),)

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return self.pipelines(workers) * batch_size

    def pipelines(self, workers: int) -> int:
        """The number of copies of the whole model."""
        return workers // (self.stages or workers)

    # -- the model's parts ------------------------------------------------------------------------------------------
    def refuse(self, task: Task, model: nn.Module) -> None:
        if task.loss is None:
            raise BadInput("pipeline needs outputs and targets apart; give the task a loss(outputs, targets), no step")
        if len(kinds := {parameter.dtype for parameter in model.parameters()}) > 1:
            raise BadInput(f"pipeline needs parameters of one dtype (given: {', '.join(sorted(map(str, kinds)))})")
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

    def _spans(self, layers: int) -> list[range]:
        return list(spans([int(each) for each in self.cuts.split(",")] if self.cuts else [], layers))

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        found = layers_of(model)
        parts = self._spans(len(found))
        return nn.ModuleDict(
            {
                _name(each, chunk): nn.Sequential(*(found[i][1] for i in parts[chunk * self.stages + each]))
                for each in self.kept(rank)
                for chunk in range(self.chunks)
            }
        )

    def kept(self, rank: int) -> list[int]:
        """The stages whose parameters a worker has: its own, and those that it keeps a copy of."""
        stage = rank % self.stages
        return [stage, *(copied(stage, self.stages) if self.copies else [])]

    def assembled(self, parts: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for rank in sorted(parts, reverse=True):  # of several pipelines the first counts
            for name, tensor in parts[rank].items():
                kind, _, inner = name.partition("/")
                if kind in ("parameters", "buffers"):
                    found[inner] = tensor
        return found

    def worker(self, ctx: Context) -> None:
        worker = _PipelineWorker(self, ctx)
        ctx.rounds(worker.propose, worker.conclude)


def _name(stage: int, chunk: int) -> str:
    return f"stage {stage} chunk {chunk}"


class _PipelineWorker:
    """One worker of a pipeline: runs the stages that it has to on the microbatches of every batch."""

    def __init__(self, strategy: Pipeline, ctx: Context) -> None:
        self._strategy, self._ctx, self._rank = strategy, ctx, ctx.comm.rank
        if any(parameter.device.type != "cpu" for parameter in ctx.replica.model.parameters()):
            raise RunFailed("pipeline computes on CPUs only; give --device cpu")
        self._parameters = ctx.replica.local(own=True)
        self._parameters.clip_norm = None  # which is for the norm of all
        self._kept = [StageParameters(strategy, ctx, stage) for stage in strategy.kept(ctx.comm.rank)]
        self._generation = -1
        self._crews: list[PipelineCrew] = []
        self._passes: StagePasses | None = None  # where this worker's pipeline is complete
        self._shared: dict[str, list[int]] = {}
        self._counted: set[str] = set()

    def propose(self) -> Vote:
        ctx = self._ctx
        if ctx.comm.generation != self._generation:
            self._meet()
            self._generation = ctx.comm.generation
        for parameter in ctx.replica.model.parameters():
            parameter.grad = None
        loss, samples = 0.0, 0
        if self._passes is not None:
            complete = [crew.number for crew in self._crews if crew.complete]
            part = complete.index(self._rank // self._strategy.stages)
            loss, samples = self._passes.run(ctx.data.share(1, part=part, parts=len(complete)).batches)
        else:
            ctx.data.share(1, part=0, parts=sum(crew.complete for crew in self._crews))
        self._sum_gradients()
        return Vote(loss, samples, [self._square()])

    def conclude(self, decision: Decision) -> None:
        ctx = self._ctx
        clip = ctx.task.clip_norm
        if clip is not None:
            norm = math.sqrt(float(decision.numbers[:, 0].sum()))
            for parameter in ctx.replica.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, clip / (norm + 1e-6))
        self._parameters.step(ctx.progress.rate(ctx.data.joined))

    # -- who is there -----------------------------------------------------------------------------------------------
    def _meet(self) -> None:
        """Members have changed: who runs what, and what do they share?"""
        ctx, strategy = self._ctx, self._strategy
        self._crews = crews(ctx.comm.members, strategy.stages, ctx.config.workers, strategy.copies)
        if not any(crew.complete for crew in self._crews):
            lost = next(stage for crew in self._crews for stage, source in enumerate(crew.sources) if source is None)
            kept = ", and neither has the one that kept its copy" if strategy.copies else ""
            raise RunFailed(f"no worker has stage {lost} of the model any more{kept}; resume the run")
        mine = self._crews[self._rank // strategy.stages]
        stages = next((stages for rank, stages in mine.runners if rank == self._rank), []) if mine.complete else []
        self._passes = StagePasses(strategy, ctx, mine.runners) if stages else None
        self._shared, self._counted = self._tell_names([s for s in self._kept if s.stage in stages])

    def _tell_names(self, running: list[StageParameters]) -> tuple[dict[str, list[int]], set[str]]:
        """Of the parameters that this worker computes gradients of: those that others of its pipeline do, too, with
        the workers; and those whose gradients it counts in the norm of all, as the first that has them."""
        comm = self._ctx.comm
        names = {name: _number_of(name) for stage in running for name in stage.parameters}
        mine = torch.tensor(list(names.values()), dtype=torch.int64)
        most = int(comm.all_gather(torch.tensor([len(mine)])).wait().max())
        table = comm.all_gather(torch.cat([mine, torch.full((most - len(mine),), -1)])).wait()
        rows = {rank: set(row) for rank, row in zip(comm.members, table.tolist(), strict=True)}
        count, shared, counted = self._strategy.stages, dict[str, list[int]](), set[str]()
        for name, number in names.items():
            have = sorted(rank for rank, row in rows.items() if number in row)
            near = [rank for rank in have if rank // count == self._rank // count]
            if len(near) > 1:
                shared[name] = near
            if have[0] == self._rank:
                counted.add(name)
        return shared, counted

    # -- gradients --------------------------------------------------------------------------------------------------
    def _sum_gradients(self) -> None:
        """Over workers of a pipeline that share a parameter, then over pipelines; then copies are told."""
        comm, strategy = self._ctx.comm, self._strategy
        parameters = {name: p for stage in self._kept for name, p in stage.parameters.items()}
        for name, ranks in self._shared.items():
            parameter = parameters[name]
            buffer = comm.buffer(f"shared/{name}", parameter.numel() + 1, parameter.dtype)
            buffer[:-1] = 0.0 if parameter.grad is None else parameter.grad.flatten()
            buffer[-1] = 0.0 if parameter.grad is None else 1.0
            comm.group(ranks).all_reduce(buffer).wait()
            parameter.grad = buffer[:-1].view_as(parameter).clone() if buffer[-1] else None
        mine = self._crews[self._rank // strategy.stages]
        sent: list[Handle] = []
        for stage in sorted(self._kept, key=lambda kept: kept.stage):
            if mine.sources[stage.stage] == self._rank:
                stage.collect()
                sources = [crew.sources[stage.stage] for crew in self._crews]
                others = [rank for rank in sources if rank is not None]
                if len(others) > 1:
                    comm.group(others).all_reduce(stage.gradient).wait()
                sent += [h for to in mine.keepers[stage.stage] if to != self._rank for h in stage.send(to)]
        for stage in self._kept:
            source = mine.sources[stage.stage]
            if source != self._rank and source is not None:
                stage.receive(source)
            stage.spread()
        for handle in sent:
            handle.wait()

    def _square(self) -> float:
        """The square of the norm of those gradients that this worker counts."""
        found = {name: p.grad for stage in self._kept for name, p in stage.parameters.items() if name in self._counted}
        return math.fsum(float(grad.double().square().sum()) for grad in found.values() if grad is not None)


class StageParameters:
    """The parameters and buffers of a stage that a worker has, its own or a neighbour's."""

    def __init__(self, strategy: Pipeline, ctx: Context, stage: int) -> None:
        self.stage, self._comm = stage, ctx.comm
        modules = [ctx.replica.model.get_submodule(_name(stage, chunk)) for chunk in range(strategy.chunks)]
        trained = [p for p in reversed(list(ctx.replica.model.parameters())) if p.requires_grad]
        names = {id(p): entry.name for p, entry in zip(trained, ctx.replica.layout.entries, strict=True)}
        self.parameters = {names[id(p)]: p for module in modules for p in module.parameters() if p.requires_grad}
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        sizes = [p.numel() for p in self.parameters.values()]
        kind = next((p.dtype for p in self.parameters.values()), torch.float32)
        self.gradient = ctx.comm.buffer(f"gradient of stage {stage}", max(1, sum(sizes) + len(sizes)), kind)
        self._views = [
            piece.view_as(p)
            for piece, p in zip(self.gradient[: sum(sizes)].split(sizes), self.parameters.values(), strict=True)
        ]
        self._reached = self.gradient[sum(sizes) : sum(sizes) + len(sizes)]  # by parameter: whether there is one

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
        return [self._comm.send(tensor, to, f"copy {self.stage}") for tensor in (self.gradient, *self._buffers)]

    def receive(self, source: int) -> None:
        for tensor in (self.gradient, *self._buffers):
            self._comm.recv(tensor, source, f"copy {self.stage}").wait()


class StagePasses:
    """Forward and backward passes of the stages that one worker runs, as the schedule says."""

    def __init__(self, strategy: Pipeline, ctx: Context, runners: Sequence[tuple[int, list[int]]]) -> None:
        """`runners`: the workers of the pipeline with the stages that each runs."""
        self._strategy, self._ctx = strategy, ctx
        self._ranks = [rank for rank, _ in runners]
        self._count, self._place = len(runners), self._ranks.index(ctx.comm.rank)
        self._last = self._place == self._count - 1
        self._parts = self._parts_of(runners[self._place][1])
        model = ctx.replica.model
        self._modules = [[model.get_submodule(_name(*part)) for part in parts] for parts in self._parts]
        costs = read_costs(strategy.costs, strategy.stages * strategy.chunks)
        total = sum(costs)
        self._shares = [sum(costs[c * strategy.stages + s] for s, c in parts) / total for parts in self._parts]
        self._sender, self._receiver = Sender(ctx.comm), Receiver(ctx.comm)
        self._microbatches: list[Batch] = []
        self._data: list[Any] = []  # each microbatch, where the first or the last layer is here
        self._inputs: dict[tuple[int, int], Any] = {}  # by microbatch and chunk, as are the next two
        self._outputs: dict[tuple[int, int], Any] = {}
        self._slopes: dict[tuple[int, int], list[Tensor]] = {}
        self._losses: list[float] = []

    def _parts_of(self, stages: list[int]) -> list[list[tuple[int, int]]]:
        """The parts of the model, as (stage, chunk), that are run one after the other; in each chunk those of the
        stages here. A worker that runs all stages has no use for chunks."""
        rows = [[(stage, chunk) for stage in stages] for chunk in range(self._strategy.chunks)]
        return rows if self._count > 1 else [[part for row in rows for part in row]]

    def run(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Leave the gradients of these batches at the parameters; returns the mean loss and the number of samples,
        where the last layer is here."""
        self._cut(batches)
        self._inputs, self._outputs, self._slopes, self._losses = {}, {}, {}, []
        pending: list[Handle] = []
        if self._microbatches:
            count = len(self._microbatches)
            for action in schedule(self._strategy.order, self._count, count, self._place, len(self._parts)):
                self._carry_out(action, pending)
        for handle in pending:
            handle.wait()
        samples = sum(map(len, self._microbatches)) if self._last else 0
        return math.fsum(self._losses) / max(1, samples), samples

    def _cut(self, batches: Sequence[Batch]) -> None:
        """The batches as microbatches, with their data where they are needed: at the first and the last stage."""
        self._microbatches, self._data = [], []
        for batch in batches:
            pieces = _pieces(batch, self._strategy.microbatches)
            self._microbatches += pieces
            if self._place == 0 or self._last:
                whole = self._ctx.replica.fetch(batch)
                for piece in pieces:
                    first = piece.first - batch.first
                    self._data.append(_rows(whole, first, first + len(piece), len(batch)))

    def _carry_out(self, action: Action, pending: list[Handle]) -> None:
        match action:
            case ReceiveFrom(source, number, "activation", chunk):
                samples = len(self._microbatches[number])
                self._inputs[number, chunk] = self._receiver.activation(self._ranks[source], samples, chunk)
            case ReceiveFrom(source, number, "gradient", chunk):
                output = self._outputs[number, chunk]
                self._slopes[number, chunk] = self._receiver.gradient(self._ranks[source], output, chunk)
            case Forward(number, chunk):
                self._forward(number, chunk)
            case SendTo(to, number, "activation", chunk):
                output, samples = self._outputs[number, chunk], len(self._microbatches[number])
                after = chunk + 1 if self._last else chunk
                pending += self._sender.activation(self._ranks[to], output, samples, after)
            case Backward(number, chunk):
                self._backward(number, chunk)
            case SendTo(to, number, "gradient", chunk):
                given = self._inputs.pop((number, chunk))
                before = chunk - 1 if self._place == 0 else chunk
                pending += self._sender.gradient(self._ranks[to], given, before)

    def _forward(self, number: int, chunk: int) -> None:
        if self._place == 0 and chunk == 0:
            self._inputs[number, chunk] = pair(self._data[number])[0]
        with torch.set_grad_enabled(not self._strategy.recompute):
            output = self._computed(number, chunk)
        if self._is_end(chunk):
            self._losses.append(float(output.detach()) * len(self._microbatches[number]))
        self._outputs[number, chunk] = output

    def _computed(self, number: int, chunk: int) -> Any:
        """What a chunk makes of a microbatch; of the last layer's output the loss."""
        value = self._inputs[number, chunk]
        if not leaves_alone(self._modules[chunk][0]):
            value = mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
        share = FORWARD * self._shares[chunk] / len(self._modules[chunk])
        for (stage, piece), module in zip(self._parts[chunk], self._modules[chunk], strict=True):
            part = piece * self._strategy.stages + stage
            value = self._timed(number, partial(module, value), share, part)
        if not self._is_end(chunk):
            return value
        assert self._ctx.task.loss is not None
        return self._ctx.task.loss(value, pair(self._data[number])[1])

    def _backward(self, number: int, chunk: int) -> None:
        output = self._outputs.pop((number, chunk))
        if self._strategy.recompute:
            output = self._computed(number, chunk)
        if self._is_end(chunk):
            ends, given = [output * self._microbatches[number].weight], list[Tensor]()
        else:
            slopes = zip(differentiable(output), self._slopes.pop((number, chunk)), strict=True)
            needed = [(tensor, slope) for tensor, slope in slopes if tensor.requires_grad]
            ends, given = [tensor for tensor, _ in needed], [slope for _, slope in needed]
        if ends:
            share = (1 - FORWARD) * self._shares[chunk]
            self._timed(number, lambda: torch.autograd.backward(ends, given or None), share, 0)

    def _timed(self, number: int, work: Callable[[], T], share: float, part: int) -> T:
        return self._ctx.replica.compute(self._microbatches[number], work, share, part)

    def _is_end(self, chunk: int) -> bool:
        return self._last and chunk == len(self._parts) - 1


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def leaves_alone(module: nn.Module) -> bool:
    """Whether a module is known not to change its input in place, which autograd refuses where it is the first."""
    first = next(each for each in module.modules() if not any(each.children()))
    return isinstance(first, nn.Linear | nn.modules.conv._ConvNd | nn.Embedding | nn.LayerNorm)


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
