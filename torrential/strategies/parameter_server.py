"""What all strategies with servers have in common: a replica of the model may be of several workers (Dean et al. 2012).

    servers      | parameters of stage 1 | parameters of stage 0 |
                     ▲           ▲            ▲           ▲
    replica 0     worker 1 ◄── activations ──► worker 0   │           --workers 4 --set stages=2
    replica 1                worker 3 ◄── activations ──► worker 2

Each worker of a replica has one stage of the model. The microbatches of the replica's batch pass through its stages, as
in `pipeline`, and every worker pushes and pulls the parameters of its own stage alone. To the strategy a replica is
what a worker is otherwise: one takes one batch at a time, and clocks count replicas.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import msgspec
from torch import nn

from torrential.errors import BadInput
from torrential.stages.cut import (
    balanced_cuts,
    layer_costs,
    layers_for,
    needs_tracing,
    read_costs,
    read_cuts,
    row_of,
    spans,
)
from torrential.stages.parameters import part_name
from torrential.stages.passes import PassPlan
from torrential.stages.trace import trace_model
from torrential.stages.traced_part import TracedPart
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.strategies.roles import Role
from torrential.task import Task


class ParameterServerStrategy(Strategy, frozen=True, kw_only=True):
    """A strategy with servers, whose replicas may be of several workers."""

    uncompressed: ClassVar[str] = ""

    stages: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of workers that each replica of the model is of: it is cut into so many stages."""
    microbatches: Annotated[int, msgspec.Meta(ge=1)] = 8
    """The number of pieces in which a batch passes through the stages, with stages=2 and more."""
    cuts: str = ""
    """The layers at which stages begin, as in 2,4; by default all have about as much to compute."""
    costs: str = ""
    """What the stages cost, relative to each other, as in 1,2,1; by default counted. Time is simulated by it."""

    def replicas(self, workers: int) -> int:
        """The number of replicas of the model."""
        return workers // self.stages

    def worker_role(self, workers: int) -> Role:
        """The role of a worker: it runs the strategy's program, alone or as one of its replica."""
        return Role("worker", workers, self.worker if self.stages == 1 else self._worker_of_stage, "view")

    def _worker_of_stage(self, ctx: Context) -> None:
        ctx.as_replica(self.worker)

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return self.replicas(workers) * batch_size

    # -- the model's stages -----------------------------------------------------------------------------------------
    def refuse(self, task: Task, model: nn.Module) -> None:
        if self.stages == 1:
            return
        if task.loss is None:
            raise BadInput("stages need outputs and targets apart; give the task a loss(outputs, targets), no step")
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise BadInput(f"stages have no sparse gradients ({name}); leave out sparse=True")

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        if self.stages == 1:
            if given := [name for name in ("cuts", "costs") if getattr(self, name)]:
                raise BadInput(f"{given[0]} is for replicas of several stages (stages: 1); use --set stages=2")
            return self
        if workers % self.stages:
            raise BadInput(f"stages={self.stages} does not divide the workers ({workers}); give a multiple of it")
        found = layers_for(task, model, self.cuts)
        layers = len(row_of(found.model))
        if self.stages > layers and not self.cuts:
            raise BadInput(f"{layers} layers cannot be cut into {self.stages} stages; use --set stages={layers}")
        costs = layer_costs(task, found.model)
        cuts = read_cuts(self.cuts, found.names, self.stages) if self.cuts else balanced_cuts(costs, self.stages)
        each = [sum(costs[i] for i in span) for span in spans(cuts, layers)]
        given_costs = read_costs(self.costs, self.stages) if self.costs else [cost / sum(each) for cost in each]
        made = msgspec.structs.replace(
            self,
            cuts=",".join(found.names[cut - 1] for cut in cuts),
            costs=",".join(f"{cost:.4g}" for cost in given_costs),
        )
        owned = set[int]()
        for stage in range(self.stages):
            span = list(spans(cuts, layers))[stage]
            tensors = [p for i in span for p in row_of(found.model)[i].parameters()]
            mine = {id(p) for p in tensors if p.requires_grad} - owned
            if not mine:
                raise BadInput(
                    f"stage {stage} has nothing of its own to train (cuts={made.cuts}); say where to cut, as in "
                    '--set cuts="2,4", or use fewer stages'
                )
            owned |= mine
        return made

    def has_whole_model(self) -> bool:
        return self.stages == 1

    def recomputes(self) -> tuple[str, ...]:
        return super().recomputes() if self.stages == 1 else ("none", "stage")

    def cuttable(self, task: Task, model: nn.Module) -> nn.Module:
        if self.stages > 1 and needs_tracing(model, self.cuts):
            return trace_model(task, model, self.cuts.split(",")).parts
        return model

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        if self.stages == 1:
            return model
        found, stage = row_of(model), rank % self.stages
        traced = isinstance(found[0], TracedPart)  # then there is one for each cut
        cuts = range(1, len(found)) if traced else [int(each) for each in self.cuts.split(",")]
        span = list(spans(cuts, len(found)))[stage]
        return nn.ModuleDict({part_name(stage, 0): nn.Sequential(*(found[i] for i in span))})

    def plan(self, recompute: bool) -> PassPlan:
        """How batches pass through the stages of a replica."""
        return PassPlan("1f1b", self.microbatches, self.stages, 1, read_costs(self.costs, self.stages), recompute)
