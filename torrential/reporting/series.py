"""What the figures show, computed from records: plain arrays and numbers, nothing about how they are drawn."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
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
PERIOD = re.compile(r"(\d+) to (\d+) local steps")  # how a change of the period is on record
PRESENT = 0.1  # of a bin must be on record for a worker to have been there


@dataclass(frozen=True)
class StepColumns:
    """A run's step records by column, each made once, and what became of its updates."""

    worker: NDArray[np.int64]  # (records,) as are the next
    time: Floats
    parts: dict[str, Floats]  # seconds of each of PARTS
    updates: Updates
    read: int = 0  # records of the run so far, those of coordinators among them

    @property
    def length(self) -> Floats:
        """The seconds that a record tells of: those before it."""
        return self.parts["compute"] + self.parts["communicate"] + self.parts["wait"]

    @property
    def seconds(self) -> float:
        return float(self.time.max(initial=0.0))


@dataclass(frozen=True)
class Updates:
    """Over the whole run. Workers count since they began; one that was replaced, or resumed, began anew, and its counts
    add up."""

    newest: dict[int, Step]  # by worker
    ended: list[Step]  # the last records of workers that another one took the place of

    @functools.cached_property
    def staleness(self) -> Counter[int]:
        total = Counter[int]()
        for step in (*self.ended, *self.newest.values()):
            total.update(step.staleness)
        return total

    @functools.cached_property
    def by_worker(self) -> Counter[int]:
        total = Counter[int]()
        for step in (*self.ended, *self.newest.values()):
            total[step.worker] += sum(step.staleness.values())
        return total

    @property
    def dropped(self) -> int:
        return sum(step.dropped for step in (*self.ended, *self.newest.values()))


def work(run: Run, before: StepColumns | None = None) -> StepColumns:
    """The columns of a run; `before` are those of the same run when it had fewer records."""
    old = before or StepColumns(np.zeros(0, np.int64), np.zeros(0), dict.fromkeys(PARTS, np.zeros(0)), Updates({}, []))
    steps = [step for step in run.steps[old.read :] if step.of_worker]
    names = ("worker", "dropped", "time", *PARTS)
    values = chain.from_iterable(map(attrgetter(*names), steps))  # in one pass: there may be millions
    table = np.fromiter(values, np.float64, len(names) * len(steps)).reshape(-1, len(names))
    columns = dict(zip(names, np.ascontiguousarray(table.T), strict=True))
    worker, dropped = columns["worker"].astype(np.int64), columns["dropped"]
    return StepColumns(
        np.concatenate([old.worker, worker]),
        np.concatenate([old.time, columns["time"]]),
        {part: np.concatenate([old.parts[part], columns[part]]) for part in PARTS},
        _updates(old.updates, steps, worker, dropped),
        len(run.steps),
    )


def _updates(before: Updates, steps: list[Step], worker: NDArray[np.int64], dropped: Floats) -> Updates:
    totals = np.fromiter(map(sum, map(dict.values, map(attrgetter("staleness"), steps))), np.float64, len(steps))
    newest, ended = dict(before.newest), list(before.ended)
    for own in _by_worker(worker):
        first, last = steps[own[0]], steps[own[-1]]
        if (old := newest.get(first.worker)) is not None and _began_anew(old, first):
            ended.append(old)
        anew = (np.diff(totals[own]) < 0) | (np.diff(dropped[own]) < 0)
        ended += [steps[i] for i in own[:-1][anew]]
        newest[last.worker] = last
    return Updates(newest, ended)


def _began_anew(old: Step, step: Step) -> bool:
    return sum(step.staleness.values()) < sum(old.staleness.values()) or step.dropped < old.dropped


def _by_worker(worker: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The records of each worker that has any, in order."""
    order = np.argsort(worker, kind="stable")
    return [own for own in np.split(order, np.flatnonzero(np.diff(worker[order])) + 1) if len(own)]


def metric_curve(run: Run, against: str, figure: str | None = None) -> Curve:
    """The metric, or a figure of the task's own, over "time" or "samples": on validation data, which decides about the
    target, else on test data."""
    splits = {evaluation.split for evaluation in run.evaluations}
    split = "validation" if "validation" in splits else "test"
    chosen = [evaluation for evaluation in run.evaluations if evaluation.split == split]
    x = np.array([getattr(evaluation, against) for evaluation in chosen], np.float64)
    values = [e.value if figure is None else e.figures.get(figure, np.nan) for e in chosen]
    y = np.array(values, np.float64)
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def figure_names(runs: Iterable[Run], metric: str) -> list[str]:
    """The figures of the task's own that are on record, besides the one that is the metric."""
    return sorted({name for run in runs for evaluation in run.evaluations for name in evaluation.figures} - {metric})


def thin(curve: Curve, most: int) -> Curve:
    """A thinner curve of at most about `most` points: the ends, the lowest and the highest of each stretch, so that no
    spike is lost."""
    x, y = curve
    if len(x) <= most:
        return curve
    keep = {0, len(x) - 1}
    for stretch in np.array_split(np.arange(len(x)), max(1, most // 4)):
        values = np.where(np.isfinite(y[stretch]), y[stretch], 0.0)
        keep |= {int(stretch[i]) for i in (0, -1, int(values.argmin()), int(values.argmax()))}
    chosen = sorted(keep)
    return x[chosen], y[chosen]


def band(
    curves: Sequence[Curve], arrived: Sequence[bool], points: int = 200
) -> tuple[Floats, Floats, Floats, Floats] | None:
    """Grid, median and quartiles (the lower, the upper) over curves, where all of them have values; None where they
    never do.

    A trial that has arrived at the target stops there, and keeps its last value; so the median comes to the target when
    half of the trials have, as the median time says. Outside of the span it would be over whichever trials happened to
    last longest.
    """
    if len(curves) < 2:
        return None
    ends = [x[-1] for (x, _), there in zip(curves, arrived, strict=True) if not there]
    start, end = max(x[0] for x, _ in curves), min(ends, default=max(x[-1] for x, _ in curves))
    if not start < end:
        return None
    grid = np.linspace(start, end, points)
    with np.errstate(over="ignore", invalid="ignore"):  # what is no number then is not drawn
        values = np.stack([np.interp(grid, x, y) for x, y in curves])
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
    return grid, middle, low, high


def seconds_spent(work: StepColumns) -> dict[str, float]:
    """Computing, communicating and waiting, of the average worker."""
    workers = len(np.unique(work.worker)) or 1
    return {part: float(values.sum()) / workers for part, values in work.parts.items()}


def shares_at_most(staleness: Counter[int]) -> Curve:
    """The share of updates that were at most as stale, for each staleness on record."""
    values = np.array(sorted(staleness), np.float64)
    counts = np.array([staleness[int(value)] for value in values], np.float64)
    return values, counts.cumsum() / counts.sum()


def periods(run: Run) -> Curve:
    """The local steps between two averages over time, where a run has changed them: each lasts until the next."""
    found = [(e.time, PERIOD.match(e.detail)) for e in run.events if e.event == "period"]
    changes = [(time, int(match[1]), int(match[2])) for time, match in found if match]
    if not changes:
        return np.zeros(0), np.zeros(0)
    end = max([step.time for step in run.steps], default=changes[-1][0])
    times = [0.0, *(time for time, _, _ in changes), max(end, changes[-1][0])]
    values = [changes[0][1], *(after for _, _, after in changes), changes[-1][2]]
    return np.array(times, np.float64), np.array(values, np.float64)


def slowness(work: StepColumns) -> dict[int, float]:
    """The factor by which each worker's computation of an update took longer than the median worker's.

    Where updates are not counted by worker all take the same ones, so the share of time spent computing tells.
    """
    compute = np.bincount(work.worker, work.parts["compute"])
    total = np.bincount(work.worker, work.length)
    counted = work.updates.by_worker
    seen = np.unique(work.worker).tolist()
    by_updates = counted.total() > 0
    units = {worker: counted[worker] if by_updates else float(total[worker]) for worker in seen}
    each = {worker: float(compute[worker]) / unit for worker, unit in units.items() if unit > 0}
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


def activity(work: StepColumns, bins: int) -> Activity:
    """The seconds that a record tells of are spread over the bins they lie in."""
    edges = np.linspace(0.0, work.seconds, bins + 1)
    count = int(work.worker.max()) + 1
    size = -(-count // MOST_ROWS)
    rows = [range(first, min(first + size, count)) for first in range(0, count, size)]
    seconds = {part: np.zeros((len(rows), bins)) for part in PARTS}
    begin = work.time - work.length
    for own in _by_worker(work.worker):
        knots = np.maximum.accumulate(np.column_stack([begin[own], work.time[own]]).ravel())
        for part, values in work.parts.items():
            sums = np.concatenate([[0.0], values[own].cumsum()])
            reached = np.interp(edges, knots, np.column_stack([sums[:-1], sums[1:]]).ravel())
            seconds[part][work.worker[own[0]] // size] += np.diff(reached)
    total = np.sum(list(seconds.values()), axis=0)
    width = edges[1] * np.array([[len(workers)] for workers in rows])
    there = np.where(total > PRESENT * width, total, np.nan)
    return Activity(rows, edges, seconds["compute"] / there, seconds["communicate"] / there)
