"""The task of a run as its configuration says: when the run goes on, or on another host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from torrential.config import RunConfig
from torrential.errors import BadInput
from torrential.optim.built import over_model
from torrential.optim.own_schedule import bound
from torrential.optim.schedule import examine_schedule
from torrential.task import Task, with_validation


def configured(config: RunConfig, task: Task, model: nn.Module, evaluated: bool) -> tuple[Task, Any]:
    """A task that was loaded again, with the run's figures in the place of its own; and its schedule as it was given,
    made over the model. `evaluated`: whether the run evaluates it on validation data."""
    spec = over_model(task.optimizer, model)
    sized = task.samples is not None or hasattr(task.train, "__len__")
    task = replace(
        with_validation(task, config.seed) if evaluated else task,
        samples=task.samples if sized else config.samples,
        batch_size=config.batch_size,
        epochs=config.epochs,
        optimizer=spec.with_lr(config.lr),
    )
    given = bound(task.schedule, spec)
    schedule, described = examine_schedule(config, config.samples_per_step, given)
    if described != config.schedule:
        raise BadInput(f"the task's schedule has changed ({config.schedule} then, {described} now); start another run")
    return replace(task, schedule=schedule), given
