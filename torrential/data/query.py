"""A query on rows: a statistic of some rows, how two statistics become one, and the estimate made of the sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torrential.data.rows import Rows
from torrential.data.statistics import (
    added,
    checksum,
    flat,
    frozen,
    not_addable,
    not_finite,
    restored,
    versions,
    widened,
)
from torrential.errors import BadInput, RunFailed
from torrential.usercode import calling


@dataclass(frozen=True)
class Estimate:
    """What `finish` may return in the place of a plain value: `objective` goes on record, `done` ends the rounds."""

    value: Any
    objective: float | None = None
    done: bool = False


@dataclass(frozen=True)
class Query:
    """A query on rows. It stands in a task in the place of a training step."""

    rows: Rows
    statistic: Callable[..., Any]
    combine: Callable[[Any, Any], Any] | None
    finish: Callable[..., Any] | None
    start: Any
    portions: int

    def __call__(self, model: nn.Module, positions: Tensor) -> Tensor:
        """Try it on the first rows."""
        last = len(positions) if self.rows.in_place else 1
        found = self.compute(self.rows.read(0, last), self.first(), watched=True)
        self.combined(found, found)
        return next(model.parameters()).sum()

    def first(self) -> Any:
        """The estimate that the first round begins with, as a copy."""
        return restored(*flat(self.start))

    def span(self, number: int) -> tuple[int, int]:
        """The rows of a portion."""
        total = len(self.rows)
        return number * total // self.portions, (number + 1) * total // self.portions

    def compute(self, rows: Any, estimate: Any, watched: bool = False) -> Any:
        """The statistic of some rows. `watched`: look for writes by a checksum, too, as some leave no other trace."""
        lent = [rows] if self.start is None else [rows, estimate]
        before = versions(lent), checksum(lent) if watched else 0
        with calling("statistic", whose="map_reduce"), torch.no_grad():
            found = self.statistic(*map(frozen, lent))
        if found is None:
            raise BadInput("the statistic returned None; return a sum over the rows that it was given")
        if (versions(lent), checksum(lent) if watched else 0) != before:
            raise BadInput("the statistic changes its argument in place; other portions need it unchanged: copy it")
        flat(found := widened(found))
        if self.combine is None:
            for odd in not_addable(found):
                raise BadInput(f"the statistic has {odd}, which cannot be added; leave it out, or give a combine")
        return found

    def combined(self, one: Any, other: Any) -> Any:
        """Two statistics as one."""
        with calling("combine", whose="map_reduce"), torch.no_grad():
            found = added(one, other) if self.combine is None else self.combine(one, other)
        if found is None:
            raise BadInput("combine returned None; return one statistic for the two that it was given")
        return found

    def finished(self, total: Any, estimate: Any) -> Estimate:
        """The estimate that a round ends with."""
        found = total
        if self.finish is not None:
            with calling("finish", whose="map_reduce"), torch.no_grad():
                found = self.finish(total) if self.start is None else self.finish(total, estimate)
        if found is None:
            raise BadInput("finish returned None; return the estimate that it makes of the total")
        found = found if isinstance(found, Estimate) else Estimate(found)
        with calling("objective", whose="map_reduce"):
            objective = None if found.objective is None else float(found.objective)
        flat(found.value)
        for where in not_finite({"value": found.value, "objective": objective}, "estimate"):
            raise RunFailed(
                f"the round ended with a number that is not finite (in {where}); look for such numbers in the data, "
                "take a shorter step, or a ridge"
            )
        return Estimate(found.value, objective, bool(found.done))

    def refuse_shapes(self, one: int, shape: str, other: int, another: str) -> NoReturn:
        """Fail on statistics of two portions that have not the same shape."""
        (first, last), (begin, end) = self.span(one), self.span(other)
        raise BadInput(
            f"the statistic of rows {begin} to {end - 1} has another shape than that of rows {first} to {last - 1} "
            f"({another}, not {shape}); it must not depend on which rows it is given"
        )
