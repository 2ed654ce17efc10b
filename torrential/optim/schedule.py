"""The learning rate, and the growth of the batch, as functions of samples seen.

    rate
    peak        ┌────────┐           linear scaling: peak = base × joined batch / base batch
              ╱          │           gradual warm-up: up by the same amount at every step, from base
    base    ╱            └────────┐
                                  └───────
           0  warm-up   1/3      2/3   8/9   of the run

Indexed by samples, not steps, so that a batch that grows, or a worker that dies, leaves the shape as it is.
(Goyal et al. 2017, sections 2.1 and 2.2; Smith et al. 2018 for the growing batch.)
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torrential.config import Recipe, RunConfig
from torrential.errors import BadInput
from torrential.optim.own_schedule import Given, OwnSchedule, SteppedSchedule, own_schedule
from torrential.schedulers import Scheduler


@dataclass(frozen=True)
class Schedule:
    recipe: Recipe
    base: float  # the task's own rate
    base_batch: int  # the joined batch it is meant for
    samples: int  # in the training set
    total: int  # to be seen in the run
    own: OwnSchedule | None = None  # the task's

    def __post_init__(self) -> None:
        recipe = self.recipe
        if self.own is not None and recipe.schedule != "constant":
            raise BadInput(
                f"the task has a schedule of its own, and schedule={recipe.schedule} would be another; use --set "
                "schedule=constant, or leave out the task's"
            )
        epochs = self.total / self.samples
        if self.warmup < 0:
            raise BadInput(f"warm-up cannot be negative (warmup: {recipe.warmup:g} epochs); use --set warmup=0")
        if self.warmup > self.total:
            raise BadInput(
                f"warm-up is longer than the run (warmup: {recipe.warmup:g} epochs, run: {epochs:.3g}); "
                f"use --set warmup={epochs / 10:.1g}"
            )
        if not all(0 < m <= 1 for m in recipe.milestones) or list(recipe.milestones) != sorted(recipe.milestones):
            raise BadInput(f"milestones are rising fractions of the run (given: {recipe.milestones}); try 0.5,0.75")
        if recipe.schedule == "step" and recipe.milestones and recipe.milestones[0] * self.total < self.warmup:
            first = recipe.milestones[0] * epochs
            raise BadInput(
                f"the rate would fall before warm-up is over (warmup: {self.warmup / self.samples:.3g} epochs, "
                f"first milestone at {first:.3g}); use --set warmup={min(epochs / 10, first / 2):.1g}"
            )
        if not 1e-9 <= recipe.factor < 1:
            raise BadInput(f"factor must be between 1e-9 and 1 (given: {recipe.factor}); try --set factor=0.1")
        if recipe.power <= 0:
            raise BadInput(f"power must be above zero (given: {recipe.power})")
        if recipe.grow and recipe.schedule != "step":
            raise BadInput(
                f"grow needs a schedule with steps (given: schedule={recipe.schedule}); add --set schedule=step"
            )
        if recipe.grow and abs(1 / recipe.factor - round(1 / recipe.factor)) > 1e-9:
            raise BadInput(
                f"a batch can only grow by a whole number (1 / factor: {1 / recipe.factor:g}); try --set factor=0.2"
            )

    @property
    def warmup(self) -> float:
        """The length of warm-up in samples."""
        if self.recipe.warmup is None:
            return min(5 * self.samples, self.total / 10) if self.recipe.recipe == "goyal" else 0.0
        return self.recipe.warmup * self.samples

    def scale(self, joined: int) -> float:
        """The factor by which the joined batch scales the rate."""
        k = joined / self.base_batch
        return {"linear": k, "sqrt": math.sqrt(k)}.get(self.recipe.scaling, 1.0)

    def loss_scale(self, joined: int) -> float:
        return joined / self.base_batch if self.recipe.scaling == "loss" else 1.0

    def rate(self, seen: int, joined: int) -> float:
        """The learning rate of the step that begins after `seen` samples, when all members together take `joined`
        (before growth). The task's own schedule applies on top of scaling and warm-up."""
        rate = self._rate(seen, joined)
        return rate if self.own is None else self.own.rate(seen, rate)

    def _rate(self, seen: int, joined: int) -> float:
        peak = self.base * self.scale(joined)
        if seen < self.warmup:
            if self.recipe.warmup_kind == "constant":
                return self.base
            return self.base + (peak - self.base) * seen / self.warmup
        return peak * self._decay(seen) * self.growth(seen, joined)

    def constant(self, joined: int) -> bool:
        """Whether the rate is the task's own all the time."""
        constant = self.own is None and self.recipe.schedule == "constant"
        return constant and not self.warmup and self.scale(joined) == 1.0

    def _decay(self, seen: int) -> float:
        recipe = self.recipe
        after = min(1.0, (seen - self.warmup) / max(1.0, self.total - self.warmup))
        match recipe.schedule:
            case "step":
                return float(recipe.factor ** self._drops(seen))
            case "cosine":
                return (1 + math.cos(math.pi * after)) / 2
            case "poly":
                return float((1 - after) ** recipe.power)
        return 1.0

    def _drops(self, seen: int) -> int:
        return sum(seen >= m * self.total for m in self.recipe.milestones)

    def growth(self, seen: int, joined: int) -> int:
        """The number of joined batches that make one step, in the place of drops of the rate."""
        return int(self._times ** min(self._drops(seen), self.growths(joined)))

    def growths(self, joined: int) -> int:
        """The number of milestones at which the batch grows, until once more would make it larger than a tenth of the
        data."""
        if not self.recipe.grow:
            return 0
        return sum(
            joined * self._times**count <= self.samples / 10 for count in range(1, len(self.recipe.milestones) + 1)
        )

    @property
    def _times(self) -> int:
        return round(1 / self.recipe.factor)

    def remedy(self, seen: int, rate: float) -> str:
        """The advice after a loss that is no number, after so many samples and with this rate."""
        if seen < self.warmup:
            return (
                f"the rate had come to {rate:.3g} in warm-up; lengthen warmup, lower --lr or use fewer samples a step"
            )
        return f"the rate was {rate:.3g}; lower --lr, clip with clip_norm, or look for nan in the data"


def examine_schedule(config: RunConfig, joined: int, given: Given | None) -> tuple[Given | None, dict[str, Any] | None]:
    """The task's own schedule with the options that it moves, and its course in plain values. Raises BadInput where a
    run cannot follow it."""
    if given is None:
        return None, None
    own, again = (schedule_of(config, joined, given).own for _ in range(2))
    assert own is not None and again is not None
    described = own.describe()
    if again.describe() != described:
        raise BadInput(
            "the task's schedule gives other rates when it is asked again, so workers would not have the same; let it "
            "depend on nothing but the share of the run, or its steps"
        )
    if isinstance(own, SteppedSchedule) and isinstance(given, Scheduler):
        given = dataclasses.replace(given, moves=own.moving())
    return given, described


def schedule_of(config: RunConfig, joined: int, own: Given | None = None) -> Schedule:
    """The schedule of a run whose steps take `joined` samples. `own`: the task's, if it has one."""
    total = config.epochs * config.samples
    if config.steps is not None:
        epochs, more = divmod(config.steps, -(-config.samples // joined))  # an epoch's last step may be a short one
        total = min(total, epochs * config.samples + more * joined)
    batch = config.base_batch or config.batch_size
    given = own_schedule(own, config.samples, batch, total)
    return Schedule(config.recipe, config.lr, batch, config.samples, total, given)
