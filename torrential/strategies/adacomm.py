"""AdaComm (Wang and Joshi 2019): local SGD that averages seldom at first, and more often as the loss falls.

    tau_l = ceil( sqrt( rate_0 / rate_l * F_l / F_0 ) * tau_0 )      at the end of every interval l
    tau_l = max(1, ceil(tau_{l-1} / 2))                              if that is not less than tau_{l-1}

F is the training loss, a mean over all workers: F_0 of the first round, F_l of the interval; rate_0 is the highest rate
so far, so that a warm-up does not count as a rate that rises. Long periods make quick
steps, and are the better the further there is to go; short ones end with a lower loss. The paper's intervals are of a
minute; these are of samples, so that a run can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import msgspec
import torch
from torch import Tensor, nn

from torrential.errors import BadInput
from torrential.strategies.averaging import AveragingWorker, OuterStep, within_epoch
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision
from torrential.task import Task


class AdaComm(Strategy, frozen=True, kw_only=True):
    """AdaComm: local SGD whose period shrinks as the training loss falls."""

    name: ClassVar[str] = "adacomm"
    summary: ClassVar[str] = "local SGD whose period shrinks as the training loss falls"
    uncompressed: ClassVar[str] = "its workers send parameters, not gradients"

    period: Annotated[int, msgspec.Meta(ge=1)] = 16
    """The number of steps between two averages at the beginning of the run."""
    interval: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """The number of epochs after which the period is chosen anew."""
    inner: Literal["keep", "average", "reset"] = "average"
    """The fate of each worker's momentum at an average, as with local."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.period

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        return msgspec.structs.replace(self, period=within_epoch(self.period, task, workers))

    def worker(self, ctx: Context) -> None:
        choice = PeriodChoice(self.period, self.interval * ctx.config.samples)
        ctx.state.everybody("period", choice.saved, choice.load)
        worker = AveragingWorker(ctx, self.inner, OuterStep(), lambda: choice.period)

        def conclude(decision: Decision) -> None:
            before = choice.period
            changed = choice.add(decision.loss, decision.samples, worker.rate)
            if changed and ctx.comm.rank == ctx.comm.members[0]:
                ctx.progress.note("period", f"{before} to {choice.period} local steps between averages")

        worker.run(conclude)


class PeriodChoice:
    """The rule by which the period follows the loss. It is the same on all workers, which tell it the same."""

    def __init__(self, period: int, interval: float) -> None:
        """`interval`: in samples."""
        self.period = self._first = period
        self._interval = interval
        self._loss_0 = self._rate_0 = math.nan
        self._sum, self._samples = 0.0, 0

    def add(self, loss: float, samples: int, rate: float) -> bool:
        """Hear of a round; returns whether the period was chosen anew and has changed."""
        if math.isnan(self._loss_0):
            self._loss_0, self._rate_0 = loss, rate
            if loss <= 0:
                raise BadInput(
                    f"adacomm adapts to the training loss, which has to be positive (first round: {loss:g}); "
                    "add a constant to the loss, or use local"
                )
        self._rate_0 = max(self._rate_0, rate)
        self._sum, self._samples = self._sum + loss * samples, self._samples + samples
        if self._samples < self._interval:
            return False
        before, mean = self.period, self._sum / self._samples
        self.period = next_period(before, self._first, mean / self._loss_0, rate / (self._rate_0 or 1.0))
        self._sum, self._samples = 0.0, 0
        return self.period != before

    def saved(self) -> dict[str, Tensor]:
        numbers = [self.period, self._loss_0, self._rate_0, self._sum, self._samples]
        return {"numbers": torch.tensor(numbers, dtype=torch.float64)}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        period, self._loss_0, self._rate_0, self._sum, samples = saved["numbers"].tolist()
        self.period, self._samples = int(period), int(samples)


def next_period(now: int, first: int, loss: float, rate: float) -> int:
    """The period of the next interval. `loss` and `rate`: as shares of those that the run began with."""
    wished = math.ceil(math.sqrt(max(0.0, loss) / rate) * first) if rate > 0 else now
    return max(1, wished if wished < now else math.ceil(now / 2))
