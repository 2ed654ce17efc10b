"""When a run ends: its epochs and steps, target and patience; and what a resumed run may be given in their place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from torrential.checkpoint import Checkpoint
from torrential.config import NO_LIMIT, RunConfig
from torrential.data.query import Query
from torrential.data.resize import Resize
from torrential.errors import BadInput
from torrential.optim.own_schedule import Given
from torrential.optim.schedule import schedule_of
from torrential.options import make
from torrential.records import Evaluation, Record
from torrential.task import Task

OF_THE_RUN = ("epochs", "steps", "target")
OF_SETTINGS = ("patience", "min_delta", "keep_best")


class Patience:
    """Counts evaluations on validation data that are no improvement, and has enough of them at some time."""

    def __init__(self, config: RunConfig, maximize: bool, history: Iterable[Record] = ()) -> None:
        self._patience, self._min_delta = config.settings.patience, config.settings.min_delta
        self._sign = 1.0 if maximize else -1.0
        self._best, self._best_step, self._without = -math.inf, 0, 0
        for record in history:
            self.record(record)

    def record(self, record: Record) -> None:
        if not isinstance(record, Evaluation) or record.split != "validation":
            return
        value = self._sign * record.value
        if value > self._best + self._min_delta:
            self._best, self._best_step, self._without = value, record.step, 0
        else:  # a value that is no number is no improvement, either
            self._without += 1

    def stop_reason(self) -> str | None:
        """The reason for which the run is to stop, in words; None while it is to go on."""
        if self._patience is None or self._without < self._patience:
            return None
        best = "no evaluation gave a number" if math.isinf(self._best) else f"the best was at step {self._best_step}"
        return f"{self._without} evaluations without improvement (patience={self._patience}); {best}"


def idle_patience(config: RunConfig) -> list[str]:
    """A warning if patience cannot end the run any sooner."""
    patience, every = config.settings.patience, config.settings.evaluate_every
    total = schedule_of(config, config.samples_per_step).total
    evaluations = math.ceil(total / (config.samples if every is None else every * config.samples_per_step))
    if patience is None or evaluations > patience + 1:
        return []
    return [
        f"patience={patience} has no effect: it takes {patience + 1} evaluations, and this run has no more than "
        f"{evaluations}; use a smaller one, more epochs, or --set evaluate_every"
    ]


def check_target(target: float | None, task: Task) -> None:
    if target is not None and task.metric_name == "accuracy" and not 0 <= target <= 1:
        raise BadInput(f"an accuracy is between 0 and 1 (target: {target}); try --target 0.97")


# -- a run that goes on -----------------------------------------------------------------------------------------------
def extended(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """The configuration with other limits, which are all that a resumed run may be given."""
    wrong = [name for name in given if name not in OF_THE_RUN + OF_SETTINGS]
    if wrong:
        kept = f"a resumed run keeps its options; leave out {', '.join(wrong)}"
        raise BadInput(f"{kept} (what may change: {', '.join(OF_THE_RUN + OF_SETTINGS)})")
    for name in ("epochs", "steps"):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{name} must be a whole number of at least 1 (given: {value!r})")
    target = given.get("target", 0.0)
    if isinstance(target, bool) or not isinstance(target, int | float) or not math.isfinite(target):
        raise BadInput(f"target must be a finite number (given: {target!r})")
    settings = make(type(config.settings), {name: given[name] for name in OF_SETTINGS if name in given})
    changed = {name: getattr(settings, name) for name in OF_SETTINGS if name in given}
    return msgspec.structs.replace(
        config,
        settings=msgspec.structs.replace(config.settings, **changed),
        **{name: given[name] for name in OF_THE_RUN if name in given},
    )


def reached(config: RunConfig, task: Task, at: Checkpoint, history: Iterable[Record]) -> list[str]:
    """The limits that a run has come to at a checkpoint, a sentence each."""
    history = list(history)
    found = []
    if at.epoch >= config.epochs and not (at.dealer and at.dealer.returned):
        is_map_reduce = isinstance(task.step, Query)
        done = f"come to round {at.epoch} (rounds=" if is_map_reduce else f"trained {at.epoch} epochs (--epochs "
        found.append(f"it has {done}{config.epochs})")
    if config.steps is not None and at.step >= config.steps:
        found.append(f"it has taken {at.step} steps (--steps {config.steps})")
    evaluations = [r for r in history if isinstance(r, Evaluation) and r.split == "validation"]
    if any(task.reaches(config.target, evaluation.value) for evaluation in evaluations):
        found.append(f"it has reached its target (--target {config.target:g})")
    if why := Patience(config, task.maximize, history).stop_reason():
        found.append(f"it had {why}")
    return found


def differences(then: RunConfig, now: RunConfig) -> str:
    """The limits that have changed, in words; empty if none has."""
    pairs = [(name, getattr(then, name), getattr(now, name)) for name in OF_THE_RUN]
    pairs += [(name, getattr(then.settings, name), getattr(now.settings, name)) for name in OF_SETTINGS]
    return ", ".join(f"{name}: {_limit(new)}, before: {_limit(old)}" for name, old, new in pairs if old != new)


def _limit(value: Any) -> str:
    return "no limit" if value == NO_LIMIT else str(value)


def jumps(then: RunConfig, now: RunConfig, at: Checkpoint, own: Given | None = None) -> list[str]:
    """A line for each thing that follows the run's length and is not where it was, now that the length is another.
    `own`: the task's own schedule."""
    joined = now.samples_per_step
    old, new = schedule_of(then, joined, own), schedule_of(now, joined, own)
    length = f"it follows the length of the run, which was {old.total:,} samples and is {new.total:,} now"
    found = []
    before, after = old.rate(at.samples, joined), new.rate(at.samples, joined)
    if not math.isclose(before, after, rel_tol=1e-9):
        found.append(f"the learning rate goes on at {after:.4g}, and had come to {before:.4g}; {length}")
    before, after = old.growth(at.samples, joined), new.growth(at.samples, joined)
    if before != after:
        found.append(f"the batch goes on at {after} times its size, and had come to {before} times; {length}")
    if now.recipe.resize is not None:
        resize = Resize.parse(now.recipe.resize)
        before, after = (resize.at(at.samples / total) for total in (old.total, new.total))
        if before != after:
            found.append(f"images go on at {after:g} of their size, and had come to {before:g}; {length}")
    return found
