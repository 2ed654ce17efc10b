"""What the figures show, computed from records: plain arrays and numbers, nothing about how they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from torrential.records import Step
from torrential.study.results import Run

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]

PARTS = ("compute", "communicate", "wait")
MOST_ROWS = 64  # of a timeline; more workers share rows
PRESENT = 0.1  # of a bin must be on record for a worker to have been there


def column(steps: list[Step], name: str) -> Floats:
    return np.fromiter(map(attrgetter(name), steps), np.float64, len(steps))


def metric_curve(run: Run, against: str) -> Curve:
    """The metric over "time" or "samples": on validation data, which decides about the target, else on test data."""
    splits = {evaluation.split for evaluation in run.evaluations}
    split = "validation" if "validation" in splits else "test"
    chosen = [evaluation for evaluation in run.evaluations if evaluation.split == split]
    x = np.array([getattr(evaluation, against) for evaluation in chosen], np.float64)
    y = np.array([evaluation.value for evaluation in chosen], np.float64)
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def thin(curve: Curve, most: int) -> Curve:
    """At most about `most` points: of each stretch its ends, its lowest and its highest, so that no spike is lost."""
    x, y = curve
    if len(x) <= most:
        return curve
    keep = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), max(1, most // 4)):
        values = np.where(np.isfinite(y[stretch]), y[stretch], 0.0)
        keep |= {int(stretch[i]) for i in (0, -1, int(values.argmin()), int(values.argmax()))}
    chosen = sorted(keep)
    return x[chosen], y[chosen]


def band(curves: Sequence[Curve], points: int = 200) -> tuple[Floats, Floats, Floats] | None:
    """Grid, mean and standard deviation over curves, where all of them have values; None where they never do.

    Outside that span the mean would be over whichever trials happened to last longest.
    """
    curves = [curve for curve in curves if len(curve[0])]
    if len(curves) < 2:
        return None
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if not start < end:
        return None
    grid = np.linspace(start, end, points)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(axis=0), values.std(axis=0, ddof=1)


def seconds_spent(run: Run) -> dict[str, float]:
    """Computing, communicating and waiting, of the average worker."""
    workers = len(set(map(attrgetter("worker"), run.steps))) or 1
    return {part: float(column(run.steps, part).sum()) / workers for part in PARTS}


@dataclass(frozen=True)
class Updates:
    """What became of the workers' updates, over the whole run."""

    staleness: Counter[int]
    by_worker: Counter[int]
    dropped: int


def updates(run: Run) -> Updates:
    """Workers count since they began; one that was replaced, or resumed, began anew, and its counts add up."""
    staleness, by_worker, dropped = Counter[int](), Counter[int](), 0
    last: dict[int, tuple[int, Step]] = {}
    finished: list[Step] = []
    for step in run.steps:
        total = sum(step.staleness.values()) if step.staleness else 0
        before = last.get(step.worker)
        if before is not None and (total < before[0] or step.dropped < before[1].dropped):
            finished.append(before[1])
        last[step.worker] = total, step
    for step in [*finished, *(step for _, step in last.values())]:
        staleness.update(step.staleness)
        by_worker[step.worker] += sum(step.staleness.values())
        dropped += step.dropped
    return Updates(staleness, by_worker, dropped)


def shares_at_most(staleness: Counter[int]) -> Curve:
    """For each staleness on record the share of updates that were at most as stale."""
    values = np.array(sorted(staleness), np.float64)
    counts = np.array([staleness[int(value)] for value in values], np.float64)
    return values, counts.cumsum() / counts.sum()


def slowness(run: Run, updates_by_worker: Counter[int]) -> dict[int, float]:
    """How many times as long as the median worker's each one's computation of an update took.

    Where updates are not counted by worker all take the same ones, so the share of time spent computing tells.
    """
    compute, total = Counter[int](), Counter[int]()
    for worker, seconds, length in zip(
        map(attrgetter("worker"), run.steps), column(run.steps, "compute"), _lengths(run.steps), strict=True
    ):
        compute[worker] += seconds
        total[worker] += length
    units = updates_by_worker if updates_by_worker.total() else total
    each = {worker: compute[worker] / units[worker] for worker in compute if units[worker] > 0}
    typical = median_low(each.values()) if each else 0.0
    return {worker: value / typical for worker, value in each.items()} if typical > 0 else {}


@dataclass(frozen=True)
class Activity:
    """Workers' doings over time, in bins of equal length; NaN where a worker was not there."""

    rows: list[range]  # the workers of each row
    edges: Floats  # (bins + 1,) seconds
    compute: Floats  # (rows, bins) share of the time on record, as are the next
    communicate: Floats

    def row_of(self, worker: int) -> int | None:
        return next((i for i, workers in enumerate(self.rows) if worker in workers), None)


def activity(steps: list[Step], bins: int) -> Activity:
    """A record tells of the seconds before it, which are spread over the bins they lie in."""
    worker = column(steps, "worker").astype(np.int64)
    end, length = column(steps, "time"), _lengths(steps)
    edges = np.linspace(0.0, float(end.max()), bins + 1)
    count = int(worker.max()) + 1
    size = -(-count // MOST_ROWS)
    rows = [range(first, min(first + size, count)) for first in range(0, count, size)]
    seconds = {part: np.zeros((len(rows), bins)) for part in PARTS}
    values = {part: column(steps, part) for part in PARTS}
    order = np.argsort(worker, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(worker[order])) + 1):
        knots = np.maximum.accumulate(np.column_stack([end[own] - length[own], end[own]]).ravel())
        for part in PARTS:
            sums = np.concatenate([[0.0], values[part][own].cumsum()])
            reached = np.interp(edges, knots, np.column_stack([sums[:-1], sums[1:]]).ravel())
            seconds[part][worker[own[0]] // size] += np.diff(reached)
    total = np.sum(list(seconds.values()), axis=0)
    width = edges[1] * np.array([[len(workers)] for workers in rows])
    there = np.where(total > PRESENT * width, total, np.nan)
    return Activity(rows, edges, seconds["compute"] / there, seconds["communicate"] / there)


def _lengths(steps: list[Step]) -> Floats:
    return column(steps, "compute") + column(steps, "communicate") + column(steps, "wait")
