"""A task's own schedule, as a function of samples seen and of nothing else.

    a function of progress      rate × factor(share of the run that is done)
    a schedule of torch's       built over groups like the task's, and stepped as often as samples seen ask for

Every worker, and a resumed run, steps a schedule of its own from the beginning to the same place, so nothing has to be
saved, and no two schedules can differ. Other options that a schedule changes (momentum, betas) go along. Another base
rate than the task's (--lr, the recipe's scaling and warm-up, a strategy's optimizer) multiplies all rates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from torrential.errors import BadInput
from torrential.optim.rates import Moved, Rate, plain
from torrential.optimizers import OptimizerSpec
from torrential.schedulers import Every, Scheduler
from torrential.usercode import calling

KEPT = 4096  # steps of a schedule that are remembered: workers ask for places close to one another
SHOWN = 8  # parts of the run between the places whose rates a manifest has

Given = Scheduler | Callable[[float], float]


class OwnSchedule(Protocol):
    def rate(self, seen: int, rate: float) -> float:
        """The rate after so many samples, where without a schedule it would be `rate`."""

    def in_words(self) -> str:
        """The schedule in a few words."""

    def describe(self) -> dict[str, Any]:
        """Plain values by which a resumed run sees whether the schedule is still the same."""


def own_schedule(given: Given | None, samples: int, batch: int, total: int) -> OwnSchedule | None:
    """The schedule of a run over `total` samples. `batch`: samples of a batch that the task's rate is meant for."""
    if given is None:
        return None
    if isinstance(given, Scheduler):
        return SteppedSchedule(given, samples, batch, total)
    return FactorSchedule(given, total)


class FactorSchedule:
    """Implements OwnSchedule by a function of the share of the run that is done."""

    def __init__(self, factor: Callable[[float], float], total: int) -> None:
        self._factor, self._total = factor, total

    def rate(self, seen: int, rate: float) -> float:
        return rate * self._at(min(1.0, seen / self._total))

    def _at(self, share: float) -> float:
        with calling(f"schedule ({share:g} of the run done; one of torch's is given by tt.scheduler)"):
            found: Any = self._factor(share)
        if torch.is_tensor(found) and found.numel() == 1:
            found = found.item()
        if isinstance(found, bool) or not (isinstance(found, int | float) and math.isfinite(found) and found >= 0):
            raise BadInput(
                f"the task's schedule must give the factor of the rate, a number that is not negative (after {share:g} "
                f"of the run: {found!r}); for one of torch's give tt.scheduler(lambda optimizer: ..., every='epoch')"
            )
        return float(found)

    def in_words(self) -> str:
        return "the task's own schedule"

    def describe(self) -> dict[str, Any]:
        return {"factors": [self._at(place / SHOWN) for place in range(SHOWN + 1)]}


class SteppedSchedule:
    """Implements OwnSchedule by a schedule of torch's."""

    def __init__(self, given: Scheduler, samples: int, batch: int, total: int) -> None:
        self._given, self._samples, self._total = given, samples, total
        units: dict[Every, int] = {"epoch": samples, "batch": batch}
        self.every = int(units.get(given.every, given.every))
        self._base = float(given.defaults["lr"])
        self._begin()
        self._last: tuple[int, float, Rate] | None = None

    # -- the schedule itself ----------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Build the schedule over groups that have the options of the task's optimizer, and nothing to train."""
        self._optimizer = _Unmoved(self._given.groups, dict(self._given.defaults))
        with calling("schedule"):
            self._scheduler = self._given.make(self._optimizer)
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise BadInput(
                "ReduceLROnPlateau lowers the rate by evaluations, which are made beside training and come to workers "
                "at no certain step; use a schedule of samples seen, such as CosineAnnealingLR"
            )
        if not isinstance(self._scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise BadInput(f"the task's scheduler must be one of torch.optim.lr_scheduler (got {self._scheduler!r})")
        if self._scheduler.optimizer is not self._optimizer:
            raise BadInput("the task's scheduler is built over another optimizer; build it over the one it is given")
        self._taken = 0
        self._known: dict[int, tuple[Mapping[str, Any], ...]] = {0: self._options()}

    def _options(self) -> tuple[Mapping[str, Any], ...]:
        """The options of each group that the task's optimizer has, as the schedule has left them."""
        return tuple({name: group[name] for name in self._given.defaults} for group in self._optimizer.param_groups)

    def _at(self, step: int) -> tuple[Mapping[str, Any], ...]:
        if step < self._taken and step not in self._known:
            self._begin()
        while self._taken < step:
            self._advance()
        return self._known[step]

    def _advance(self) -> None:
        self._optimizer.step()
        with calling(f"schedule, at step {self._taken + 1} of every {self.every} samples,"):
            self._scheduler.step()
        self._taken += 1
        self._known[self._taken] = self._options()
        self._known.pop(self._taken - KEPT, None)

    def _step(self, seen: int) -> int:
        """The steps that a plain loop with batches of `every` samples has taken after so many samples: the last batch
        of an epoch may be a short one."""
        epoch, place = divmod(seen, self._samples)
        if self.every > self._samples:
            return seen // self.every
        return epoch * -(-self._samples // self.every) + place // self.every

    # -- what it comes to -------------------------------------------------------------------------------------------
    def moving(self) -> tuple[str, ...]:
        """The options besides the rate that the schedule moves in this run; refuses what cannot be honoured."""
        moves: set[str] = set()
        for step in range(self._step(max(0, self._total - 1)) + 1):
            for begun, group in zip(self._given.groups, self._at(step), strict=True):
                self._check_rate(step, float(group["lr"]))
                moved = [name for name, value in group.items() if name != "lr" and value != begun[name]]
                for name in moved:
                    self._check_option(name, begun[name], group[name])
                moves.update(moved)
        return tuple(sorted(moves))

    def _check_rate(self, step: int, lr: float) -> None:
        if not (math.isfinite(lr) and lr >= 0):
            name = type(self._scheduler).__name__
            raise BadInput(f"{name} makes the learning rate {lr} at its step {step}; correct its options")

    def _check_option(self, name: str, begun: Any, value: Any) -> None:
        values = value if isinstance(value, list | tuple) else (value,)
        if not (all(isinstance(each, int | float) for each in values) and bool(begun) == bool(value)):
            raise BadInput(
                f"{type(self._scheduler).__name__} moves {name} from {begun!r} to {value!r}, with which the optimizer "
                f"keeps another state; give the optimizer another {name} to begin with, or leave {name} alone"
            )

    def rate(self, seen: int, rate: float) -> float:
        step = self._step(seen)
        if self._last is None or self._last[:2] != (step, rate):
            self._last = step, rate, self._rate(step, rate / self._base)
        return self._last[2]

    def _rate(self, step: int, ratio: float) -> Rate:
        groups = self._at(step)
        moved: list[Moved] = [
            {"lr": float(group["lr"]) * ratio, **{option: plain(group[option]) for option in self._given.moves}}
            for group in groups
        ]
        first = moved[0]["lr"]
        assert isinstance(first, float)
        return Rate(first, tuple(moved))

    def in_words(self) -> str:
        return f"{type(self._scheduler).__name__}, stepped every {self.every} samples"

    def describe(self) -> dict[str, Any]:
        places = [self._step(self._total * place // SHOWN - (place == SHOWN)) for place in range(SHOWN + 1)]
        rates = [[float(group["lr"]) for group in self._at(step)] for step in places]
        return {"scheduler": type(self._scheduler).__name__, "every": self.every, "rates": rates}


class _Unmoved(torch.optim.Optimizer):
    """An optimizer that only schedules see: its groups have options, and its steps do nothing."""

    def __init__(self, groups: tuple[Mapping[str, Any], ...], defaults: dict[str, Any]) -> None:
        super().__init__([{"params": [torch.zeros(1)], **group} for group in groups], defaults)

    def step(self, closure: Any = None) -> Any:
        pass


def bound(given: Given | None, spec: OptimizerSpec) -> Given | None:
    """A schedule that knows the options of the task's optimizer and its groups."""
    if not isinstance(given, Scheduler):
        return given
    defaults = {**spec.defaults(), "lr": spec.lr}
    own = {group.number: group.options for group in spec.groups} or {0: {}}
    groups = tuple({**defaults, **own[number]} for number in range(len(own)))
    return dataclasses.replace(given, defaults=defaults, groups=groups)
