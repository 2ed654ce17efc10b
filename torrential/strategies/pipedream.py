"""PipeDream (Narayanan et al. 2019): a pipeline that does not wait for the end of a batch. Every minibatch goes through
whole, and each stage takes a step after each of its backwards.

    stage 0   F0 F1 F2       B0 F3 B1 F4 B2 F5 B3 ...      once it is full, nobody waits
    stage 1      F0 F1    B0 F2 B1 F3 B2 F4 B3 ...
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3 ...

A minibatch goes back with the weights that it went forward with (weight stashing), so its gradient is one of weights
that once were; it is applied to the newest. On stage k of n (from 1) n - k steps lie between. With vertical=true all
stages use the version that the minibatch entered with, and n - 1 steps lie between on all of them.

The pipeline is drained after `window` minibatches, and before an evaluation, a checkpoint or the end of an epoch. With
W minibatches in a row n - 1 of W + n - 1 turns are idle, and the first ones of each window have less delay. A window is
taken by all workers or by none: whoever keeps a copy of a stage is sent its state at its end, and a worker's death
costs the window at hand. With fewer stages than workers there are several pipelines, which sum the gradients of each
stage at every step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Self

import msgspec
from torch import nn

from torrential.comm.protocol import Handle
from torrential.data.deal import Batch, part
from torrential.errors import BadInput, RunFailed
from torrential.stages.copies import receive_state, send_state
from torrential.stages.cut import read_costs
from torrential.stages.parameters import StageParameters
from torrential.stages.passes import PassPlan
from torrential.stages.pipelines import PipelineCrew, complete_crews, crews
from torrential.stages.spans import STEP
from torrential.stages.stashing import StashedPasses
from torrential.strategies.context import Context, Decision, Vote
from torrential.strategies.roles import Role, Roles
from torrential.strategies.staged import Staged
from torrential.task import Task


class PipeDream(Staged, frozen=True, kw_only=True):
    """A pipeline of stages in which every minibatch has a step of its own, with weights that are some steps old."""

    name: ClassVar[str] = "pipedream"
    summary: ClassVar[str] = "stages of the model on different workers, a step for every minibatch, no stage waits"
    uncompressed: ClassVar[str] = "its workers send activations"

    window: Annotated[int, msgspec.Meta(ge=1)] = 32
    """The number of minibatches after which the pipeline is drained."""
    vertical: bool = False
    """Whether all stages use the version of the weights that a minibatch entered the pipeline with."""

    def roles(self, workers: int, servers: int) -> Roles:
        return (Role("worker", workers, self.worker, "regroup"),)

    def refuse(self, task: Task, model: nn.Module) -> None:
        super().refuse(task, model)
        if task.clip_norm is not None:
            raise BadInput(
                f"pipedream cannot clip gradients (clip_norm: {task.clip_norm:g}): a stage takes its step before "
                "others know theirs; leave out clip_norm, or use --strategy pipeline"
            )

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        made = super().fitted(task, model, workers)
        alone = msgspec.structs.replace(made, copies=False)
        cut, had = alone.cuttable(task, model), dict[int, int]()
        for stage in range(made.stages):
            for name, parameter in alone.part(cut, stage, workers).named_parameters():
                if had.setdefault(id(parameter), stage) != stage:
                    raise BadInput(
                        f"stages {had[id(parameter)]} and {stage} share a parameter ({name.rpartition('.')[-1]} of "
                        f"{name.rpartition('.')[0]}), which pipedream would step apart; use --strategy pipeline"
                    )
        return made

    def plan(self, recompute: bool) -> PassPlan:
        """How minibatches pass through the model."""
        return PassPlan("pipedream", 1, self.stages, 1, read_costs(self.costs, self.stages), recompute)

    def worker(self, ctx: Context) -> None:
        worker = _PipeDreamWorker(self, ctx)
        ctx.rounds(worker.propose, worker.conclude)


class _PipeDreamWorker:
    """One worker: streams windows of minibatches through the stages that it has to run."""

    def __init__(self, strategy: PipeDream, ctx: Context) -> None:
        self._strategy, self._ctx, self._rank = strategy, ctx, ctx.comm.rank
        if any(parameter.device.type != "cpu" for parameter in ctx.replica.model.parameters()):
            raise RunFailed("pipedream computes on CPUs only; give --device cpu")
        self._parameters = ctx.replica.local(own=True)
        self._plan = strategy.plan(ctx.config.settings.recompute == "stage")
        model, layout = ctx.replica.model, ctx.replica.layout
        self._kept = {stage: StageParameters(ctx.comm, model, layout, stage, 1) for stage in strategy.kept(self._rank)}
        self._generation, self._began = -1, 0.0
        self._crews: list[PipelineCrew] = []
        self._complete: list[PipelineCrew] = []
        self._running: list[StageParameters] = []  # the stages that this worker runs
        self._passes: StashedPasses | None = None  # where it runs any
        self._rates: list[float] = []  # by minibatch of the window

    def propose(self) -> Vote:
        if self._ctx.comm.generation != self._generation:
            self._meet()
            self._generation = self._ctx.comm.generation
        self._began = self._ctx.comm.now()
        joint, mine = self._minibatches()
        loss, samples = 0.0, 0
        if self._passes is not None:
            loss, samples = self._passes.run([batch for batch in mine if len(batch)])
            for number, batch in enumerate(mine):
                if not len(batch):  # another pipeline has the last samples of the epoch
                    self._step(number)
        self._tell_copies()
        return Vote(loss, samples, updates=len(joint))

    def conclude(self, decision: Decision) -> None:
        """Put the delays on record; the steps themselves have been taken."""
        ctx = self._ctx
        for delay in [] if self._passes is None else self._passes.delays:
            ctx.progress.delayed(delay)
        ctx.comm.span(STEP, self._began, {"number": ctx.progress.step + len(self._rates)})

    # -- who is there -----------------------------------------------------------------------------------------------
    def _meet(self) -> None:
        """Members have changed: who runs what?"""
        ctx, strategy = self._ctx, self._strategy
        self._crews = crews(ctx.comm.members, strategy.stages, ctx.config.workers, strategy.copies)
        self._complete = complete_crews(self._crews, strategy.copies)
        mine = self._crews[self._rank // strategy.stages]
        stages = next((stages for rank, stages in mine.runners if rank == self._rank), []) if mine.complete else []
        self._running = [self._kept[stage] for stage in stages]
        self._passes = None
        if stages:
            assert ctx.task.loss is not None
            self._passes = StashedPasses(
                ctx.comm, ctx.replica, ctx.task.loss, self._plan, mine.runners, strategy.vertical, self._step
            )

    # -- a window of minibatches ------------------------------------------------------------------------------------
    def _minibatches(self) -> tuple[list[Batch], list[Batch]]:
        """The next minibatches of all pipelines together, and this one's parts of them."""
        ctx, count = self._ctx, len(self._complete)
        size = ctx.config.batch_size
        joined = count * size
        share = ctx.data.share(self._updates(joined) * count, part=0, parts=1)
        place = self._crews[self._rank // self._strategy.stages]
        number = self._complete.index(place) if place.complete else 0
        joint = replace(share.batches[0], indices=share.indices).split(joined)
        mine = []
        for batch in joint:
            first, last = part(len(batch), number, count, size)
            weight = (last - first) / len(batch)
            mine.append(replace(batch, first=batch.first + first, indices=batch.indices[first:last], weight=weight))
        self._rates = [ctx.progress.rate(joined, batch) for batch in joint]
        return joint, mine

    def _updates(self, joined: int) -> int:
        """The number of minibatches until the pipeline is to be drained."""
        config, progress = self._ctx.config, self._ctx.progress
        left = config.samples - progress.samples % config.samples
        most = [self._strategy.window, -(-left // joined)]
        if config.steps is not None:
            most.append(config.steps - progress.step)
        if (every := config.settings.evaluate_every) is not None:
            most.append(every - progress.step % every)
        return min(most)

    def _step(self, number: int) -> None:
        """Step the stages of this worker by the gradients of a minibatch, summed over all pipelines."""
        if len(self._complete) > 1:
            for stage in self._running:
                stage.collect()
                sources = [crew.sources[stage.stage] for crew in self._complete]
                self._ctx.comm.group([rank for rank in sources if rank is not None]).all_reduce(stage.gradient).wait()
                stage.spread()
        self._parameters.step(self._rates[number])

    # -- copies -----------------------------------------------------------------------------------------------------
    def _tell_copies(self) -> None:
        """Send the state of the stages to the workers that keep copies and do not run them."""
        comm, sent = self._ctx.comm, list[Handle]()
        for source, to, stage in self._deliveries():
            if source == self._rank:
                sent += send_state(comm, self._kept[stage], self._parameters, to)
        for source, to, stage in self._deliveries():
            if to == self._rank:
                receive_state(comm, self._kept[stage], self._parameters, source)
        for handle in sent:
            handle.wait()

    def _deliveries(self) -> list[tuple[int, int, int]]:
        """(sender, receiver, stage) for each copy of a stage: the sender is the worker that runs the stage in the same
        pipeline, or in the first complete one."""
        found = []
        for crew in self._crews:
            near = crew if crew.complete else self._complete[0]
            for stage, keepers in enumerate(crew.keepers):
                source = near.sources[stage]
                assert source is not None
                found += [(source, to, stage) for to in keepers if to != source]
        return found
