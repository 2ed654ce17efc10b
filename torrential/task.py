"""What to learn: a model, a loss, data, a metric and an optimizer. A task knows nothing of workers.

task = Task(model=make_model, loss=F.cross_entropy, train=train_set, test=test_set,
            optimizer=optimizer("sgd", lr=0.1, momentum=0.9), batch_size=32, epochs=10)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from torrential.errors import BadInput
from torrential.optimizers import OptimizerSpec, default_optimizer
from torrential.schedulers import Scheduler
from torrential.usercode import calling, name_of_file

ROUNDING = 1e-6  # relative: 135 of 150 are 0.8999999761581421 in float32, and have reached 0.9


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose largest output is at the target class."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to learn: model, loss, data and metric, in plain PyTorch."""

    model: Callable[[], nn.Module]
    """Builds the model, freshly initialised from torch's random state."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) to a scalar: the mean over the batch."""
    train: Dataset[Any]
    """Items are (input, target) pairs, here and below."""
    test: Dataset[Any]
    validation: Dataset[Any] | None = None
    """Decides when the target is reached; without one, `with_validation` cuts it from train."""
    metric: Callable[[Tensor, Tensor], Tensor] = accuracy
    """(outputs, targets) to a scalar: the mean over the batch."""
    maximize: bool = True
    """Whether a bigger metric is better."""
    optimizer: OptimizerSpec | Callable[[nn.Module], torch.optim.Optimizer] = field(default_factory=default_optimizer)
    """From `optimizer()`, or a function that builds one of torch's over the model."""
    schedule: Scheduler | Callable[[float], float] | None = None
    """The course of the learning rate: a function of the share of the run that is done (0 to 1), whose value is the
    factor of the rate; or a schedule of torch's, from `scheduler()`."""
    batch_size: int = 32
    """Samples per worker and step."""
    epochs: int = 10
    clip_norm: float | None = None
    """Gradients are scaled down to this norm when theirs is larger."""
    target: float | None = None
    """The metric's value to reach."""
    name: str = field(default_factory=name_of_file)
    """The task's name in reports and run directories; by default that of the file that makes it."""

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            kind = type(self.model).__name__
            raise BadInput(
                f"model is a built module ({kind}); give a function that builds one: model=lambda: {kind}(...)"
            )
        for role in ("model", "loss", "metric"):
            if not callable(getattr(self, role)):
                raise BadInput(f"{role} must be a function (got {getattr(self, role)!r})")
        if not isinstance(self.optimizer, OptimizerSpec) and not _is_function(self.optimizer):
            raise BadInput(
                f"optimizer must come from optimizer() or be a function of the model (got {self.optimizer!r}); try "
                "optimizer('sgd', lr=0.1)"
            )
        if not (self.schedule is None or isinstance(self.schedule, Scheduler) or _is_function(self.schedule)):
            raise BadInput(
                "schedule must be a function of the share of the run that is done, or one of torch's by "
                f"scheduler(lambda optimizer: ..., every='epoch') (got {self.schedule!r})"
            )
        for role in ("batch_size", "epochs"):
            value = getattr(self, role)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"{role} must be a whole number of at least 1 (got {value!r})")
        if self.clip_norm is not None and not (_is_number(self.clip_norm) and self.clip_norm > 0):
            raise BadInput(f"clip_norm must be a positive number or None (got {self.clip_norm!r})")
        if self.target is not None and not _is_number(self.target):
            raise BadInput(f"target must be a finite number or None (got {self.target!r})")
        if not (isinstance(self.name, str) and self.name):
            raise BadInput(f"name must be a non-empty string (got {self.name!r})")
        for role in ("train", "test", "validation"):
            if role != "validation" or self.validation is not None:
                _check_dataset(role, getattr(self, role))

    def reaches(self, target: float | None, value: float) -> bool:
        """Whether a value of the metric is as good as a target, or is a float32 that would be."""
        if target is None:
            return False
        slack = abs(target) * ROUNDING
        return value >= target - slack if self.maximize else value <= target + slack

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer, where it needs no model to be known, or has been made over it (resolve.py)."""
        assert isinstance(self.optimizer, OptimizerSpec)
        return self.optimizer

    @property
    def metric_name(self) -> str:
        function = getattr(self.metric, "func", self.metric)  # a functools.partial is named after its function
        name = str(getattr(function, "__name__", type(function).__name__))
        return "metric" if name == "<lambda>" else name


def _is_function(given: object) -> bool:
    return callable(given) and not isinstance(given, type)


def build_model(task: Task) -> nn.Module:
    """A new model from the task's factory; TaskFailed if that raises."""
    with calling("model factory"):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise BadInput(f"the task's model factory must return a torch.nn.Module (it returned {model!r})")
    return model


def with_validation(task: Task, seed: int) -> Task:
    """The task itself, or one whose validation set is a tenth of train (at least one sample), chosen by `seed`."""
    if task.validation is not None:
        return task
    samples = len(task.train)  # type: ignore[arg-type]
    if samples < 2:
        raise BadInput(f"no validation set can be cut from train (samples: {samples}); give the task a validation set")
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    held = max(1, samples // 10)
    kept, cut = order[held:].sort().values.tolist(), order[:held].sort().values.tolist()
    return dataclasses.replace(task, train=Subset(task.train, kept), validation=Subset(task.train, cut))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_dataset(role: str, dataset: Any) -> None:
    kind = type(dataset).__name__
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not sized or isinstance(dataset, IterableDataset):
        raise BadInput(f"{role} cannot be indexed ({kind}); give a data set with __len__ and __getitem__, not a stream")
    if len(dataset) == 0:
        raise BadInput(f"{role} is empty ({kind} of 0 samples); give it at least one sample")
