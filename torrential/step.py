"""One step on a batch, the task's own or model and loss on (inputs, targets); and what evaluation makes of many."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torrential.errors import BadInput
from torrential.task import Task, is_metric_object
from torrential.usercode import calling

FOR_METRICS = ("outputs", "targets")  # what a step returns that is no figure


class StepResult(NamedTuple):
    """What one step gives: the loss, figures by name, and what metrics are computed from."""

    loss: Tensor
    figures: Mapping[str, Any]
    outputs: Any = None
    targets: Any = None

    def numbers(self) -> dict[str, float]:
        """The loss and the figures as plain numbers."""
        return {name: _number(value) for name, value in (("loss", self.loss), *self.figures.items())}


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def run_step(task: Task, model: nn.Module, batch: Any, on: str = "") -> StepResult:
    """Run the task's step on a batch. `on`, as in " on test data", is for messages."""
    if task.step is not None:
        with calling(f"step{on}"):
            returned = task.step(model, batch)
        return _checked(returned)
    assert task.loss is not None
    inputs, targets = pair(batch)
    with calling(f"forward pass{on}", task.model):
        outputs = model(inputs)
    with calling(f"loss{on}"):
        return StepResult(task.loss(outputs, targets), {}, outputs, targets)


def pair(batch: Any) -> tuple[Any, Any]:
    """The inputs and targets of a batch."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    got = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
    raise BadInput(
        f"with a loss(outputs, targets), batches must be (input, target) pairs (the training data gives a {got}); let "
        "items be pairs, or give the task a step(model, batch) in the place of the loss"
    )


def _checked(returned: Any) -> StepResult:
    """What a task's own step has returned, if that is a loss, or a dict with one."""
    about = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    if "loss" not in about:
        raise BadInput(
            f"the task's step must return the loss, or a dict with 'loss' (its keys: {', '.join(map(str, about))})"
        )
    loss = about.pop("loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        remedy = "end with .mean()" if isinstance(loss, Tensor) else "return the tensor itself, as in return loss"
        raise BadInput(
            f"the loss that the task's step returns must be a tensor of one number, the mean over the batch (it is "
            f"{_kind(loss)}); {remedy}"
        )
    outputs, targets = (about.pop(name, None) for name in FOR_METRICS)
    for name, value in about.items():
        if not (isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)):
            raise BadInput(
                f"the figure {name!r} of the task's step must be one number, the mean over the batch (it is "
                f"{_kind(value)}); return values for metrics as 'outputs' and 'targets'"
            )
    return StepResult(loss, about, outputs, targets)


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"


class Means:
    """Means of figures over samples, from their means over batches."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._samples: dict[str, int] = {}

    def add(self, figures: Mapping[str, float], samples: int) -> None:
        for name, value in figures.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * samples
            self._samples[name] = self._samples.get(name, 0) + samples

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return ((name, total / max(1, self._samples[name])) for name, total in self._sums.items())


class Score:
    """The loss, the figures and the metric over a whole split, from the results of its batches."""

    def __init__(self, task: Task, device: torch.device, on: str = "") -> None:
        self._task, self._on, self._means, self._value = task, on, Means(), Means()
        self._object: Any = None
        if is_metric_object(task.metric):
            with calling(f"metric{on}"):
                self._object = task.metric() if isinstance(task.metric, type) else copy.deepcopy(task.metric)
                if hasattr(self._object, "reset"):
                    self._object.reset()
                if isinstance(self._object, nn.Module):
                    self._object.to(device)

    def add(self, result: StepResult, samples: int) -> None:
        self._means.add(result.numbers(), samples)
        if isinstance(self._task.metric, str):
            return
        given = (result.outputs,) if result.targets is None else (result.outputs, result.targets)
        with calling(f"metric{self._on}"):
            if self._object is not None:
                self._object.update(*given)
            else:
                self._value.add({"value": float(self._task.metric(*given))}, samples)

    def figures(self) -> dict[str, float]:
        """The means over all samples; the loss among them."""
        return dict(self._means)

    def value(self) -> float:
        """The metric."""
        if isinstance(self._task.metric, str):
            return self.figures()[self._task.metric]
        if self._object is None:
            return dict(self._value)["value"]
        with calling(f"metric{self._on}"):
            found = self._object.compute()
            if isinstance(found, Mapping):
                raise BadInput(
                    f"the metric's compute() returned several numbers ({', '.join(map(str, found))}), and a run is "
                    "judged by one; return that one"
                )
            return float(found)


def check_metric(task: Task, result: StepResult) -> None:
    """Refuse a metric that cannot be computed from what a step gives."""
    metric = task.metric
    if isinstance(metric, str):
        known = ["loss", *result.figures]
        if metric not in known:
            raise BadInput(f"the task's step gives no figure {metric!r} (it gives: {', '.join(known)}); return one")
    elif task.step is not None and result.outputs is None:
        raise BadInput(
            f"the metric {task.metric_name} is computed from outputs and targets, which the task's step does not "
            "return; add 'outputs' and 'targets' to what it returns, or name one of its figures as the metric"
        )
