"""What is asked of rows: a statistic of some of them, how two become one, and what is made of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torrential.data.rows import Rows
from torrential.data.statistics import added, flat, not_finite, widened
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
    """What is asked of the rows. It stands in a task where a training step would."""

    rows: Rows
    statistic: Callable[..., Any]
    combine: Callable[[Any, Any], Any] | None
    finish: Callable[..., Any] | None
    start: Any
    portions: int

    def __call__(self, model: nn.Module, positions: Tensor) -> Tensor:
        """Try it on the first rows."""
        last = len(positions) if self.rows.in_place else 1
        found = self.compute(self.rows.read(0, last), self.start)
        self.combined(found, found)
        return next(model.parameters()).sum()

    def span(self, number: int) -> tuple[int, int]:
        """The rows of a portion."""
        total = len(self.rows)
        return number * total // self.portions, (number + 1) * total // self.portions

    def compute(self, rows: Any, estimate: Any) -> Any:
        """The statistic of some rows."""
        with calling("statistic", whose="map_reduce"), torch.no_grad():
            found = self.statistic(rows) if self.start is None else self.statistic(rows, estimate)
        flat(found)
        return widened(found)

    def combined(self, one: Any, other: Any) -> Any:
        """Two statistics as one."""
        if self.combine is None:
            return added(one, other)
        with calling("combine", whose="map_reduce"), torch.no_grad():
            return self.combine(one, other)

    def finished(self, total: Any, estimate: Any) -> Estimate:
        """The estimate that a round ends with."""
        if self.finish is None:
            return Estimate(total)
        with calling("finish", whose="map_reduce"), torch.no_grad():
            found = self.finish(total) if self.start is None else self.finish(total, estimate)
        found = found if isinstance(found, Estimate) else Estimate(found)
        flat(found.value)
        for where in not_finite({"value": found.value, "objective": found.objective}, "estimate"):
            raise RunFailed(
                f"finish returned a number that is not finite (in {where}); shorten the step, or add a ridge"
            )
        return found

    def refuse_shapes(self, one: int, shape: str, other: int, another: str) -> NoReturn:
        """Fail on statistics of two portions that have not the same shape."""
        (first, last), (begin, end) = self.span(one), self.span(other)
        raise BadInput(
            f"the statistic of rows {begin} to {end - 1} has another shape than that of rows {first} to {last - 1} "
            f"({another}, not {shape}); it must not depend on which rows it is given"
        )
