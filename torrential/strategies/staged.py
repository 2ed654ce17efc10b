"""A model that is cut into stages, one for each worker: what pipelines of all kinds share.

With fewer stages than workers there are several pipelines. A worker has the parameters of its own stage and, as a copy,
those of a neighbour's (stages/pipelines.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

import msgspec
from torch import Tensor, nn

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
from torrential.stages.pipelines import copied
from torrential.stages.trace import trace_model
from torrential.stages.traced_part import TracedPart
from torrential.strategies.base import Strategy
from torrential.task import Task


class Staged(Strategy, frozen=True, kw_only=True):
    """Workers that have a stage of the model each."""

    stages: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of stages; 0: as many as there are workers. With fewer there are several pipelines."""
    cuts: str = ""
    """The layers of an nn.Sequential, or the modules of another model by name, at which its pieces begin, as in 2,4 or
    layers.2,layers.4; by default all have about as much to compute."""
    costs: str = ""
    """What these pieces cost, relative to each other, as in 1,2,1; by default counted. Time is simulated by it."""
    copies: bool = True
    """Whether a neighbour keeps the parameters of each stage, too, so that the run outlives its worker."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return self.pipelines(workers) * batch_size

    def pipelines(self, workers: int) -> int:
        """The number of copies of the whole model."""
        return workers // (self.stages or workers)

    def pieces(self) -> int:
        """The number of pieces of the model on each stage."""
        return 1

    def kept(self, rank: int) -> list[int]:
        """The stages whose parameters a worker has: its own, and those that it keeps a copy of."""
        stage = rank % self.stages
        return [stage, *(copied(stage, self.stages) if self.copies else [])]

    # -- the model's parts ------------------------------------------------------------------------------------------
    def refuse(self, task: Task, model: nn.Module) -> None:
        if task.loss is None:
            raise BadInput(
                "a pipeline needs outputs and targets apart; give the task a loss(outputs, targets), no step"
            )
        if len(kinds := {parameter.dtype for parameter in model.parameters()}) > 1:
            raise BadInput(f"a pipeline needs parameters of one dtype (given: {', '.join(sorted(map(str, kinds)))})")
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise BadInput(f"a pipeline has no sparse gradients ({name}); leave out sparse=True")

    def recomputes(self) -> tuple[str, ...]:
        return "none", "stage"

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        stages = self.stages or workers
        if workers % stages:
            raise BadInput(f"stages={stages} does not divide the workers ({workers}); give a multiple of it")
        if stages == 1:  # any model will do
            return msgspec.structs.replace(self, stages=1, cuts="", costs="1")
        found, pieces = layers_for(task, model, self.cuts), self.pieces()
        parts = stages * pieces
        layers = len(row_of(found.model))
        if parts > layers and not self.cuts:
            raise BadInput(
                f"{layers} layers cannot be cut into {parts} parts (stages: {stages}, chunks: {pieces}); use "
                f"fewer workers, or --set stages=K with K up to {layers // pieces}"
            )
        costs = layer_costs(task, found.model)
        cuts = read_cuts(self.cuts, found.names, parts) if self.cuts else balanced_cuts(costs, parts)
        each = [sum(costs[i] for i in span) for span in spans(cuts, layers)]
        given = read_costs(self.costs, parts) if self.costs else [cost / sum(each) for cost in each]
        named = ",".join(found.names[cut - 1] for cut in cuts)
        made = msgspec.structs.replace(self, stages=stages, cuts=named, costs=",".join(f"{cost:.4g}" for cost in given))
        made._check_trained(found.model, list(spans(cuts, layers)))
        return made

    def _check_trained(self, model: nn.Sequential, parts: list[range]) -> None:
        """Raise BadInput if a worker has nothing to train."""
        for stage in range(self.stages):
            row = row_of(model)
            mine = [row[i] for each in self.kept(stage) for part in parts[each :: self.stages] for i in part]
            if not any(parameter.requires_grad for layer in mine for parameter in layer.parameters()):
                raise BadInput(
                    f"the worker of stage {stage} has nothing to train (cuts={self.cuts}); say where to cut, as in "
                    f'--set cuts="{self.cuts}", or use fewer stages'
                )

    def cuttable(self, task: Task, model: nn.Module) -> nn.Module:
        if self.stages > 1 and needs_tracing(model, self.cuts):
            return trace_model(task, model, self.cuts.split(",")).parts
        return model

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        if self.stages == 1:
            return nn.ModuleDict({part_name(0, 0): model})
        found = row_of(model)
        traced = isinstance(found[0], TracedPart)  # then there is one for each cut
        cuts = range(1, len(found)) if traced else [int(each) for each in self.cuts.split(",")]
        parts = list(spans(cuts, len(found)))
        return nn.ModuleDict(
            {
                part_name(each, chunk): nn.Sequential(*(found[i] for i in parts[chunk * self.stages + each]))
                for each in self.kept(rank)
                for chunk in range(self.pieces())
            }
        )

    def fellows(self, rank: int, workers: int) -> range:
        first = rank - rank % self.stages
        return range(first, first + self.stages)

    def assembled(self, parts: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for rank in sorted(parts, reverse=True):  # of several pipelines the first counts
            for name, tensor in parts[rank].items():
                kind, _, inner = name.partition("/")
                if kind in ("parameters", "buffers"):
                    found[inner] = tensor
        return found
