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
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import msgspec
import torch
from torch import Tensor, nn

from torrential.comm.protocol import Handle
from torrential.errors import BadInput, RunFailed
from torrential.stages.cut import balanced_cuts, layer_costs, layers_of, read_costs, read_cuts, spans
from torrential.stages.parameters import StageParameters, part_name
from torrential.stages.passes import PassPlan, StagePasses
from torrential.stages.pipelines import PipelineCrew, copied, crews
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.strategies.roles import Role, Roles
from torrential.task import Task


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
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise BadInput(f"pipeline has no sparse gradients ({name}); leave out sparse=True")
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
        if stages == 1 and self.chunks > 1:
            raise BadInput(f"chunks={self.chunks} needs several stages (given: 1); leave out chunks")
        if stages == 1:  # any model will do
            return msgspec.structs.replace(self, stages=1, cuts="", costs="1")
        layers, parts = len(layers_of(model)), stages * self.chunks
        if parts > layers:
            raise BadInput(
                f"{layers} layers cannot be cut into {parts} parts (stages: {stages}, chunks: {self.chunks}); use "
                f"fewer workers, or --set stages=K with K up to {layers // self.chunks}"
            )
        costs = layer_costs(task, model)
        cuts = read_cuts(self.cuts, layers, parts) if self.cuts else balanced_cuts(costs, parts)
        each = [sum(costs[i] for i in span) for span in spans(cuts, layers)]
        given = read_costs(self.costs, parts) if self.costs else [cost / sum(each) for cost in each]
        made = msgspec.structs.replace(
            self, stages=stages, cuts=",".join(map(str, cuts)), costs=",".join(f"{cost:.4g}" for cost in given)
        )
        for stage in range(stages):
            if not any(parameter.requires_grad for parameter in made.part(model, stage, workers).parameters()):
                raise BadInput(
                    f"the worker of stage {stage} has nothing to train (cuts={made.cuts}); say where to cut, as in "
                    '--set cuts="2,4", or use fewer stages'
                )
        return made

    def _spans(self, layers: int) -> list[range]:
        return list(spans([int(each) for each in self.cuts.split(",")] if self.cuts else [], layers))

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        if self.stages == 1:
            return nn.ModuleDict({part_name(0, 0): model})
        found = layers_of(model)
        parts = self._spans(len(found))
        return nn.ModuleDict(
            {
                part_name(each, chunk): nn.Sequential(*(found[i][1] for i in parts[chunk * self.stages + each]))
                for each in self.kept(rank)
                for chunk in range(self.chunks)
            }
        )

    def kept(self, rank: int) -> list[int]:
        """The stages whose parameters a worker has: its own, and those that it keeps a copy of."""
        stage = rank % self.stages
        return [stage, *(copied(stage, self.stages) if self.copies else [])]

    def plan(self) -> PassPlan:
        """How batches pass through the model."""
        costs = read_costs(self.costs, self.stages * self.chunks)
        return PassPlan(self.order, self.microbatches, self.stages, self.chunks, costs, self.recompute)

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


class _PipelineWorker:
    """One worker of a pipeline: runs the stages that it has to on the microbatches of every batch."""

    def __init__(self, strategy: Pipeline, ctx: Context) -> None:
        self._strategy, self._ctx, self._rank = strategy, ctx, ctx.comm.rank
        if any(parameter.device.type != "cpu" for parameter in ctx.replica.model.parameters()):
            raise RunFailed("pipeline computes on CPUs only; give --device cpu")
        self._parameters = ctx.replica.local(own=True)
        self._parameters.clip_norm = None  # which is for the norm of all
        model, layout = ctx.replica.model, ctx.replica.layout
        self._kept = [
            StageParameters(ctx.comm, model, layout, stage, strategy.chunks) for stage in strategy.kept(self._rank)
        ]
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
        self._passes = None
        if stages:
            assert ctx.task.loss is not None
            self._passes = StagePasses(ctx.comm, ctx.replica, ctx.task.loss, strategy.plan(), mine.runners)
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


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
