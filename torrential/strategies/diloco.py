"""DiLoCo (Douillard et al. 2023): many steps of AdamW on each worker, then one of Nesterov momentum for all.

    x_i  <- x after `period` steps of the task's optimizer, whose state stays with the worker
    d    <- x - mean of all x_i                      the outer gradient
    v    <- momentum * v + d
    x    <- x - rate * (d + momentum * v)            Nesterov

For workers between which links are slow: a round of 500 steps sends what `allreduce` sends in one. Workers come and go
between rounds.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import msgspec
from torch import nn

from torrential.strategies.averaging import AveragingWorker, OuterStep, within_epoch
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.task import Task


class DiLoCo(Strategy, frozen=True, kw_only=True):
    """DiLoCo: many steps on each worker with an optimizer of its own, then one outer step with Nesterov momentum."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "DiLoCo: many steps on each worker, then an outer one with Nesterov momentum"
    uncompressed: ClassVar[str] = "its workers send parameters, not gradients"

    period: Annotated[int, msgspec.Meta(ge=1)] = 32
    """The number of steps that a worker takes between two outer steps."""
    outer_rate: Annotated[float, msgspec.Meta(gt=0)] = 0.7
    """The learning rate of the outer step; 1 without momentum is an average."""
    outer_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    """The Nesterov momentum of the outer step."""
    half: bool = False
    """Whether workers send the way of a round in bfloat16, which halves the bytes; what a worker's rounding leaves out
    is added to its next way."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.period

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        return msgspec.structs.replace(self, period=within_epoch(self.period, task, workers))

    def worker(self, ctx: Context) -> None:
        outer = OuterStep(self.outer_rate, self.outer_momentum, nesterov=True)
        AveragingWorker(ctx, "keep", outer, lambda: self.period, self.half).run()
