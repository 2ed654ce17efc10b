"""The learning rates of an optimizer's groups: the run's schedule sets them before every step, and nobody else may.

A group that was given a rate of its own when the optimizer was built keeps its ratio to the base rate. An optimizer
that changes a rate by itself, as with a schedule of its own, is found out after the step in which it does: the next
step would undo the change. So is one that makes new groups: their rates would be nobody's.
"""

from __future__ import annotations

import math

import torch

from torrential.errors import RunFailed


class Rates:
    """The rates of one optimizer. `base` is the rate that it was built with."""

    def __init__(self, optimizer: torch.optim.Optimizer, base: float) -> None:
        self._optimizer, self._groups = optimizer, list(optimizer.param_groups)
        self._ratios = [float(group.get("lr", base)) / base for group in self._groups]
        self._rate = math.nan
        self._given: list[float] = []

    def set(self, rate: float) -> None:
        """Give every group its share of the base rate. To be called before a step."""
        if rate == self._rate:
            return  # the last step has left it so
        self._rate, self._given = rate, [rate * ratio for ratio in self._ratios]
        for group, given in zip(self._groups, self._given, strict=True):
            group["lr"] = given

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
                    "schedule out of the optimizer and use --set schedule=cosine, step or poly, or leave the rate alone"
                )


def _listed(rates: list[float]) -> str:
    return ", ".join(f"{float(rate):.6g}" for rate in rates)
