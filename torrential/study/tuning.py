"""Tuning under one rule: every entry tries the same values in as many runs, and the validation set alone decides."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from torrential.study.results import Entry, Run, Study

Tried = tuple[dict[str, str], Sequence[Run]]  # values, and the runs with them


def choose(tried: Sequence[Tried], maximize: bool) -> dict[str, str]:
    """The values with the soonest median run to the target on validation data; if none gets there in half of its
    runs, those with the best validation value on average."""

    def rank(one: Tried) -> tuple[float, float]:
        times = [math.inf if run.time_to_target is None else run.time_to_target for run in one[1]]
        return float(np.median(times)), -statistics.mean(_goodness(run, maximize) for run in one[1])

    return min(tried, key=rank)[0]


def best_value(run: Run, maximize: bool) -> float | None:
    """The best value of the metric on validation data."""
    values = [evaluation.value for evaluation in run.validation if math.isfinite(evaluation.value)]
    return (max if maximize else min)(values, default=None)


def _goodness(run: Run, maximize: bool) -> float:
    """A score by which higher is better, for any metric."""
    value = best_value(run, maximize)
    return -math.inf if run.diverged or value is None else value if maximize else -value


def cost(study: Study) -> tuple[int, float]:
    """The cost of tuning: runs, and worker-seconds."""
    runs = [(entry, run) for entry in study.tuning for run in entry.finished]
    return len(runs), sum(entry.workers * run.seconds for entry, run in runs)


def at_the_edge(study: Study, entry: Entry) -> list[str]:
    """Numbers that were chosen although nothing beyond them was tried."""
    found = []
    for name, value in entry.tuned.items():
        try:
            numbers = sorted({float(tried.options[name]) for tried in study.tuning})
        except ValueError:
            continue  # words have no order
        if len(numbers) > 2 and float(value) in (numbers[0], numbers[-1]):
            found.append(f"{name}={value}")
    return found
