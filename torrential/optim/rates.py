"""The learning rates of an optimizer's groups: the run's schedule sets them before every step, and no other code may.

A group that was given a rate of its own when the optimizer was built keeps its ratio to the base rate, unless the rate
says what each group is to have. An optimizer that changes a rate by itself, as with a schedule of its own, is found out
after the step in which it does: the next step would undo the change. So is one that makes new groups: the schedule
would not set their rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torrential.errors import BadInput, RunFailed
from torrential.optimizers import NUMBER, OptimizerSpec

Option = float | tuple[float, ...]
Moved = Mapping[str, Option]  # options of one group that a schedule moves: its rate, and perhaps momentum or betas


class Rate(float):
    """A learning rate; where a schedule moves groups apart, or other options than rates, with those of each group.

    A strategy uses it as the number that it is, and hands it on to where steps are taken."""

    groups: tuple[Moved, ...]

    def __new__(cls, value: float, groups: tuple[Moved, ...] = ()) -> Rate:
        rate = super().__new__(cls, value)
        rate.groups = groups
        return rate

    def __reduce__(self) -> tuple[type[Rate], tuple[float, tuple[Moved, ...]]]:
        return Rate, (float(self), self.groups)


def groups_of(rate: float) -> tuple[Moved, ...]:
    """What a rate says of single groups; nothing where it is a plain number."""
    return rate.groups if isinstance(rate, Rate) else ()


def rate_of(groups: Iterable[Mapping[str, Any]], options: Iterable[str] = ("lr",)) -> Rate:
    """The rate that hands on some options of a built optimizer's `param_groups`, as they are now."""
    moved = tuple({name: plain(group[name]) for name in options} for group in groups)
    first = moved[0]["lr"]
    assert isinstance(first, float)
    return Rate(first, moved)


def plain(value: Any) -> Option:
    """An option of a group as numbers that can be sent."""
    return tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)


class Rates:
    """The rates of an optimizer that was built from `spec`."""

    def __init__(self, optimizer: torch.optim.Optimizer, spec: OptimizerSpec) -> None:
        self._optimizer, self._groups = optimizer, list(optimizer.param_groups)
        self._base = spec.lr
        self._built = [float(group.get("lr", spec.lr)) for group in self._groups]
        self._ratios = [built / spec.lr for built in self._built]
        own = {group.number: float(group.options.get("lr", spec.lr)) for group in spec.groups}
        if len(own) > 1 and any(NUMBER not in group for group in self._groups):
            raise BadInput(
                f"{spec.kind.__name__} makes parameter groups of its own, so the run does not know which rate each is "
                "to have; have it keep the groups that it is given, or give the task an optimizer without groups"
            )
        self._numbers = [int(group.get(NUMBER, 0)) for group in self._groups]
        # a class may divide a group that it is given, and give the parts rates of their own
        bases = [own.get(number, spec.lr) for number in self._numbers]
        self._within = [built / base if base else 1.0 for built, base in zip(self._built, bases, strict=True)]
        self._rate, self._moved = math.nan, tuple[Moved, ...]()
        self._given: list[float] = []

    def set(self, rate: float) -> None:
        """Give every group its options. To be called before a step."""
        moved = groups_of(rate)
        if rate == self._rate and (moved is self._moved or moved == self._moved):
            return  # the last step has left it so
        self._rate, self._moved = rate, moved
        if moved:
            self._given = self._move(moved)
        elif rate == self._base:
            self._given = self._built  # to the bit
        else:
            self._given = [float(rate) * ratio for ratio in self._ratios]
        for group, given in zip(self._groups, self._given, strict=True):
            group["lr"] = given

    def _move(self, moved: tuple[Moved, ...]) -> list[float]:
        """Give every group the options that are moved but its rate; returns the rates."""
        given = []
        for group, number, within in zip(self._groups, self._numbers, self._within, strict=True):
            for name, value in moved[number].items():
                if name != "lr":
                    group[name] = value
            lr = moved[number]["lr"]
            assert isinstance(lr, float)
            given.append(lr * within)
        return given

    def check(self) -> None:
        """Raise RunFailed if a group has another rate than it was given, or is another one. To be called after a
        step."""
        now = self._optimizer.param_groups
        if len(now) != len(self._groups) or any(a is not b for a, b in zip(now, self._groups, strict=True)):
            raise RunFailed(
                f"{type(self._optimizer).__name__} replaces groups of its param_groups in a step, where the run's "
                "schedule would not reach them; change the groups that it was built with, in place"
            )
        for group, given in zip(self._groups, self._given, strict=True):
            if group["lr"] != given:
                found = _listed([group["lr"] for group in self._groups])
                raise RunFailed(
                    f"{type(self._optimizer).__name__} changes its learning rate by itself (set: "
                    f"{_listed(self._given)}, after the step: {found}), which the run's schedule would undo; take the "
                    "schedule out of the optimizer, and give it to the task (schedule=tt.scheduler(...)) or use --set "
                    "schedule=cosine, step or poly, or leave the rate alone"
                )


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{float(rate):.6g}" for rate in rates)
