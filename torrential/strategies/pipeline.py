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
two stages share has its gradients summed. Batch norm sees a microbatch at a time; what is random in forward is drawn
by (epoch, microbatch, stage).
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Annotated, ClassVar, Literal, Self

import msgspec
import torch
from torch import Tensor, nn

from torrential.comm.protocol import Handle
from torrential.errors import BadInput, RunFailed
from torrential.stages.cut import read_costs
from torrential.stages.parameters import StageParameters
from torrential.stages.passes import PassPlan, StagePasses
from torrential.stages.pipelines import PipelineCrew, complete_crews, crews
from torrential.stages.spans import STEP
from torrential.strategies.context import Context, Decision, Vote
from torrential.strategies.roles import Role, Roles
from torrential.strategies.staged import Staged
from torrential.task import Task


class Pipeline(Staged, frozen=True, kw_only=True):
    """A model cut into stages, one for each worker; microbatches of every batch pass through them."""

    name: ClassVar[str] = "pipeline"
    summary: ClassVar[str] = "stages of the model on different workers, microbatches passing through them"
    uncompressed: ClassVar[str] = "its workers send activations"

    microbatches: Annotated[int, msgspec.Meta(ge=1)] = 8
    """The number of pieces that a worker's batch is cut into."""
    order: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """The order of forwards and backwards: 1f1b keeps fewer activations than gpipe; interleaved and zero-bubble idle
    less."""
    chunks: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of pieces of the model on each stage, for interleaved."""

    def roles(self, workers: int, servers: int) -> Roles:
        return (Role("worker", workers, self.worker, "regroup"),)

    def pieces(self) -> int:
        return self.chunks

    def refuse(self, task: Task, model: nn.Module) -> None:
        super().refuse(task, model)
        if self.chunks > 1 and self.order != "interleaved":
            raise BadInput(f"chunks={self.chunks} is for order=interleaved (given: {self.order})")

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        if self.chunks > 1 and (self.stages or workers) == 1:
            raise BadInput(f"chunks={self.chunks} needs several stages (given: 1); leave out chunks")
        return super().fitted(task, model, workers)

    def plan(self, recompute: bool) -> PassPlan:
        """How batches pass through the model."""
        costs = read_costs(self.costs, self.stages * self.chunks)
        return PassPlan(self.order, self.microbatches, self.stages, self.chunks, costs, recompute)

    def worker(self, ctx: Context) -> None:
        worker = _PipelineWorker(self, ctx)
        ctx.rounds(worker.propose, worker.conclude)


class _PipelineWorker:
    """One worker of a pipeline: runs the stages that it has to on the microbatches of every batch."""

    def __init__(self, strategy: Pipeline, ctx: Context) -> None:
        self._strategy, self._ctx, self._rank = strategy, ctx, ctx.comm.rank
        if any(parameter.device.type != "cpu" for parameter in ctx.replica.model.parameters()):
            raise RunFailed("pipeline computes on CPUs only; give --device cpu")
        self._parameters = ctx.replica.local(own=True, undo=False)
        self._parameters.clip_norm = None  # which is for the norm of all
        model, layout = ctx.replica.model, ctx.replica.layout
        self._by_reference = ctx.comm.shares_memory and self._parameters.elementwise  # are gradients told to copies?
        turns = 2 if self._by_reference else 1
        self._held = list(model.parameters())
        self._kept = [
            StageParameters(ctx.comm, model, layout, stage, strategy.chunks, turns)
            for stage in strategy.kept(self._rank)
        ]
        for kept in self._kept:
            kept.take_gradients()
        self._generation, self._began = -1, 0.0
        self._crews: list[PipelineCrew] = []
        self._copies: list[StageParameters] = []  # whose gradients are read where their owners have them
        self._passes: StagePasses | None = None  # where this worker's pipeline is complete
        self._shared: dict[str, list[int]] = {}
        self._counted: set[str] = set()

    def propose(self) -> Vote:
        ctx = self._ctx
        if ctx.comm.generation != self._generation:
            self._meet()
            self._generation = ctx.comm.generation
        self._began = ctx.comm.now()
        for kept in self._kept:
            kept.turn(ctx.progress.step)
        for parameter in self._held:
            parameter.grad = None
        loss, samples = 0.0, 0
        if self._passes is not None:
            complete = [crew.number for crew in self._crews if crew.complete]
            part = complete.index(self._rank // self._strategy.stages)
            batches = ctx.data.share(1, part=part, parts=len(complete)).batches
            loss, samples = self._passes.run(batches, self._parameters.catch_up)
        else:
            ctx.data.share(1, part=0, parts=sum(crew.complete for crew in self._crews))
        self._parameters.catch_up()
        began = ctx.comm.now()
        self._sum_gradients()
        ctx.comm.span("gradients", began)
        return Vote(loss, samples, [self._square()])

    def conclude(self, decision: Decision) -> None:
        ctx, scale = self._ctx, 1.0
        rate = ctx.progress.rate(ctx.data.joined)
        if (clip := ctx.task.clip_norm) is not None:
            scale = min(1.0, clip / (math.sqrt(float(decision.numbers[:, 0].sum())) + 1e-6))
        began = ctx.comm.now()
        mine = {p: p.grad for p in self._held if p.grad is not None}
        theirs = {p: gradient for stage in self._copies for p, gradient in stage.found().items()}
        own = {p for stage in self._kept if stage not in self._copies for p in stage.parameters.values()}
        self._step(rate, scale, mine)
        if late := {p: gradient for p, gradient in theirs.items() if p not in own}:
            self._parameters.put_off(partial(self._step, rate, scale, late))
        ctx.comm.span("update", began)
        ctx.comm.span(STEP, self._began, {"number": ctx.progress.step + 1})

    def _step(self, rate: float, scale: float, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Step some parameters; other parameters may have gradients that are still being added up."""
        before = {p: p.grad for p in self._held}
        for parameter in before:
            gradient = gradients.get(parameter)
            parameter.grad = gradient if gradient is None or scale == 1.0 else gradient * scale
        self._parameters.step(rate)
        for parameter, gradient in before.items():
            parameter.grad = gradient

    # -- who is there -----------------------------------------------------------------------------------------------
    def _meet(self) -> None:
        """Members have changed: who runs what, and what do they share?"""
        ctx, strategy = self._ctx, self._strategy
        self._parameters.catch_up()
        self._crews = crews(ctx.comm.members, strategy.stages, ctx.config.workers, strategy.copies)
        complete_crews(self._crews, strategy.copies)
        mine = self._crews[self._rank // strategy.stages]
        stages = next((stages for rank, stages in mine.runners if rank == self._rank), []) if mine.complete else []
        for stage in self._kept:
            sources = [crew.sources[stage.stage] for crew in self._crews]
            stage.joined = len(mine.keepers[stage.stage]) > 1 or sources.count(None) < len(sources) - 1
        self._copies = [s for s in self._kept if self._by_reference and mine.sources[s.stage] != self._rank]
        for stage in self._kept:
            source = mine.sources[stage.stage]
            stage.use(self._rank if source is None or not self._by_reference else source)
        self._passes = None
        if stages:
            assert ctx.task.loss is not None
            self._passes = StagePasses(
                ctx.comm,
                ctx.replica,
                ctx.task.loss,
                strategy.plan(ctx.config.settings.recompute == "stage"),
                mine.runners,
            )
        self._shared, self._counted = self._tell_names([s for s in self._kept if s.stage in stages])

    def _tell_names(self, running: list[StageParameters]) -> tuple[dict[str, list[int]], set[str]]:
        """The parameters that other workers of this pipeline compute gradients of, too, each with these workers; and
        the parameters whose gradients this worker counts in the norm of all gradients, as the first worker that has
        them."""
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
        """Sum gradients over workers of a pipeline that share a parameter, then over pipelines; then send them to
        copies."""
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
            if mine.sources[stage.stage] == self._rank and stage.joined:
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
            if stage.joined and stage not in self._copies:
                stage.spread()
        for handle in sent:
            handle.wait()

    def _square(self) -> float:
        """The squared norm of the gradients that this worker counts; 0 if nothing is clipped."""
        if self._ctx.task.clip_norm is None:
            return 0.0
        found = {name: p.grad for stage in self._kept for name, p in stage.parameters.items() if name in self._counted}
        return math.fsum(float(grad.double().square().sum()) for grad in found.values() if grad is not None)


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
