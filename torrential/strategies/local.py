"""Local SGD, or periodic averaging (PASGD; Wang and Joshi 2019): workers train apart, and average from time to time.

    x_i <- x_i - rate * g_i(x_i)      `period` times, on every worker by itself
    x   <- mean of all x_i            and everybody goes on from there

A round costs one all-reduce of the parameters, where `allreduce` pays one for every step. Workers drift apart between
two averages: the longer the period, the quicker the steps, and the higher the loss that they end with. With period=1
and an optimizer without state these are the steps of `allreduce`. Gradients are clipped by each worker alone.

With `outer_momentum` the way of a round is taken as a gradient, whose momentum goes on over rounds: block momentum
(Chen and Huo 2016), SlowMo (Wang et al. 2020).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import msgspec
from torch import nn

from torrential.strategies.averaging import AveragingWorker, OuterStep, within_epoch
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.task import Task


class Local(Strategy, frozen=True, kw_only=True):
    """Local SGD: every worker takes steps of its own, and all average their parameters every few steps."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "local SGD: workers take steps of their own, and average every few steps"
    uncompressed: ClassVar[str] = "its workers send parameters, not gradients"

    period: Annotated[int, msgspec.Meta(ge=1)] = 8
    """The number of steps that a worker takes between two averages."""
    inner: Literal["keep", "average", "reset"] = "average"
    """The fate of each worker's momentum, or other state of its optimizer, at an average: it is kept as it is, averaged
    as the parameters are (which sends as many bytes again), or begun anew."""
    outer_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """The momentum of whole rounds: how much of the last round's way is gone again in the next."""
    outer_rate: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """How much of a round's way is gone: 1 is to the average."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.period

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        return msgspec.structs.replace(self, period=within_epoch(self.period, task, workers))

    def worker(self, ctx: Context) -> None:
        outer = OuterStep(self.outer_rate, self.outer_momentum, by_rate=True)
        AveragingWorker(ctx, self.inner, outer, lambda: self.period).run()
