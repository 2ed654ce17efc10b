"""What to learn: a model, a loss, data, a metric and an optimizer. A task knows nothing of workers.

task = Task(model=make_model, loss=F.cross_entropy, train=train_set, test=test_set,
            optimizer=optimizer("sgd", lr=0.1, momentum=0.9), batch_size=32, epochs=10)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from torrential.errors import BadInput
from torrential.optimizers import OptimizerSpec, default_optimizer
from torrential.partitions import PartitionRule, check_partition, restricted
from torrential.schedulers import Scheduler
from torrential.usercode import calling, name_of_file

ROUNDING = 1e-6  # relative: 135 of 150 are 0.8999999761581421 in float32, and have reached 0.9


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose largest output is at the target class."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to learn: model, loss, data and metric, in plain PyTorch."""

    model: Callable[[], nn.Module] = None  # type: ignore[assignment]  # which __post_init__ makes of stages
    """Builds the model, freshly initialised from torch's random state."""
    stages: Sequence[Callable[[], nn.Module]] | None = None
    """In the place of `model`: functions that build its pieces, each of which is given what the one before returns. The
    model is an nn.Sequential of them, which a pipeline cuts between any two."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """(outputs, targets) to a scalar: the mean over the batch. With it, batches are (input, target) pairs."""
    step: Callable[[nn.Module, Any], Any] | None = None
    """In the place of `loss`: (model, batch) to the loss, or to a dict with "loss" and figures by name, means over the
    batch like the loss. "outputs" and "targets" among them are for `metric`. It is also what evaluates."""
    train: Dataset[Any]
    """Items may be any nest of tensors, numbers, dicts, tuples, lists and dataclasses, here and below."""
    test: Dataset[Any]
    validation: Dataset[Any] | None = None
    """Decides when the target is reached; without one, `with_validation` cuts it from train."""
    collate: Callable[[list[Any]], Any] | None = None
    """Joins items into a batch; by default as torch's default_collate does."""
    length: Callable[[Any], int] | Sequence[int] | None = None
    """The length of each training item, or a function that gives it: batches are then made of items of like length."""
    samples: int | None = None
    """The number of samples that an epoch takes from `train`, where that is a stream without a length."""
    shuffle_buffer: int = 0
    """The number of neighbours in a stream that are shuffled among themselves; 0 keeps the stream's order."""
    metric: Callable[[Any, Any], Any] | str | Any = None
    """A function of (outputs, targets), the mean over the batch; the name of a figure of `step`; or an object (or its
    class) with `update(outputs, targets)` and `compute()`, as torchmetrics has them. By default `accuracy`, with `step`
    the loss."""
    maximize: bool = True
    """Whether a bigger metric is better; the loss is always minimised."""
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
    split: Mapping[str, str] | None = None
    """How layers are split over workers by the strategy `tensor`, as in {"0": "colwise", "2": "rowwise"}; names of
    layers may be patterns."""
    partition: PartitionRule | Sequence[Sequence[int]] | None = None
    """The clients that have the training data, for strategies such as `fedavg`: from `partition()`, or the samples of
    each client by index."""
    name: str = field(default_factory=name_of_file)
    """The task's name in reports and run directories; by default that of the file that makes it."""

    def __post_init__(self) -> None:
        self._check_stages()
        if isinstance(self.model, nn.Module):
            kind = type(self.model).__name__
            raise BadInput(
                f"model is a built module ({kind}); give a function that builds one: model=lambda: {kind}(...)"
            )
        self._check_functions()
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
        if self.split is not None and not _is_texts(self.split):
            raise BadInput(
                f"split must be a dict of layers' names to ways (got {self.split!r}); try "
                'split={"0": "colwise", "2": "rowwise"}'
            )
        if not (isinstance(self.name, str) and self.name):
            raise BadInput(f"name must be a non-empty string (got {self.name!r})")
        for role in ("train", "test", "validation"):
            if role != "validation" or self.validation is not None:
                _check_dataset(role, getattr(self, role))
        self._check_order()
        check_partition(self.partition, None if is_stream(self.train) else len(self.train))  # type: ignore[arg-type]

    def _check_stages(self) -> None:
        """Make a model of the stages, if they are given in its place."""
        if self.stages is None and self.model is not None:
            return
        made = None if self.stages is None else StagesInRow(tuple(self.stages))
        if made is None or self.model not in (None, made):  # a copy of a task has both
            given = "neither is given" if made is None else "both are given"
            raise BadInput(f"a task has a model or stages ({given}); give one")
        if not made.stages or not all(map(callable, made.stages)):
            raise BadInput(f"stages must be a list of functions that build modules (got {self.stages!r})")
        for place, stage in enumerate(made.stages):
            if isinstance(stage, nn.Module):
                kind = type(stage).__name__
                raise BadInput(
                    f"stages[{place}] is a built module ({kind}); give a function that builds one: lambda: {kind}(...)"
                )
        object.__setattr__(self, "model", made)

    def _check_functions(self) -> None:
        if (self.loss is None) == (self.step is None):
            given = "neither is given" if self.loss is None else "both are given"
            raise BadInput(
                f"a task has a loss(outputs, targets) or a step(model, batch) of its own ({given}); give one"
            )
        if self.metric is None:
            object.__setattr__(self, "metric", accuracy if self.step is None else "loss")
        named = isinstance(self.metric, str)
        if named and self.metric == "loss":
            object.__setattr__(self, "maximize", False)
        elif named and self.step is None:
            raise BadInput(
                f"metric must be a function (got {self.metric!r}); names are those of figures, which a step of the "
                "task's own gives"
            )
        for role in ("model", "loss", "step", "collate"):
            value = getattr(self, role)
            if not callable(value) and (value is not None or role == "model"):
                raise BadInput(f"{role} must be a function (got {value!r})")
        if not (named or callable(self.metric) or is_metric_object(self.metric)):
            raise BadInput(
                f"metric must be a function, the name of a figure, or have update and compute (got {self.metric!r})"
            )

    def _check_order(self) -> None:
        """Whether what is said about the order of the training data suits it."""
        stream = is_stream(self.train)
        for role, least in (("samples", 1), ("shuffle_buffer", 0)):
            value = getattr(self, role)
            if value == type(self).__dataclass_fields__[role].default:
                continue
            if not stream:
                raise BadInput(f"{role} is for streams ({type(self.train).__name__} can be indexed); leave it out")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"{role} must be a whole number of at least {least} (got {value!r})")
        if self.length is None:
            return
        if stream:
            raise BadInput("a stream cannot be grouped by length, since it is read in its own order; leave out length")
        if not callable(self.length) and len(self.length) != len(self.train):  # type: ignore[arg-type]
            raise BadInput(
                f"length must have a number for each sample of train (lengths: {len(self.length)}, samples: "
                f"{len(self.train)})"  # type: ignore[arg-type]
            )

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
        if isinstance(self.metric, str):
            return self.metric
        function = getattr(self.metric, "func", self.metric)  # a functools.partial is named after its function
        name = str(getattr(function, "__name__", type(function).__name__))
        return "metric" if name == "<lambda>" else name


@dataclass(frozen=True)
class StagesInRow:
    """A model factory: pieces of a model, one after the other."""

    stages: tuple[Callable[[], nn.Module], ...]

    def __call__(self) -> nn.Module:
        return nn.Sequential(*(stage() for stage in self.stages))


def _is_function(given: object) -> bool:
    return callable(given) and not isinstance(given, type)


def build_model(task: Task) -> nn.Module:
    """A new model from the task's factory; TaskFailed if that raises."""
    with calling("model factory"):
        model = task.model()
    if not isinstance(model, nn.Module):
        raise BadInput(f"the task's model factory must return a torch.nn.Module (it returned {model!r})")
    return model


class Lengths(Sequence[int]):
    """The lengths of all training items; one object per run, equal only to itself."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = torch.tensor(values, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        return self.values[index].tolist()


def _measured(task: Task) -> Task:
    """The task with the lengths of its items, where batches are grouped by them."""
    if task.length is None or isinstance(task.length, Lengths):
        return task
    with calling("length"):
        if callable(task.length):
            lengths = [int(task.length(task.train[i])) for i in range(training_samples(task))]
        else:
            lengths = [int(each) for each in task.length]
    return dataclasses.replace(task, length=Lengths(lengths))


def training_samples(task: Task) -> int:
    """The number of samples in an epoch."""
    return len(task.train) if task.samples is None else task.samples  # type: ignore[arg-type]


def with_validation(task: Task, seed: int) -> Task:
    """The task with a validation set, which is a tenth of train (at least one sample), chosen by `seed`, unless it has
    one; and with the lengths of its items, where batches are grouped by them."""
    task = _measured(task)
    if task.validation is not None:
        return task
    if is_stream(task.train):
        raise BadInput("no validation set can be cut from a stream; give the task a validation set")
    samples = training_samples(task)
    if samples < 2:
        raise BadInput(f"no validation set can be cut from train (samples: {samples}); give the task a validation set")
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    held = max(1, samples // 10)
    kept, cut = order[held:].sort().values.tolist(), order[:held].sort().values.tolist()
    lengths = Lengths(task.length[kept]) if isinstance(task.length, Lengths) else None
    return dataclasses.replace(
        task,
        train=Subset(task.train, kept),
        validation=Subset(task.train, cut),
        length=lengths,
        partition=restricted(task.partition, kept),
    )


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be read from its beginning."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def is_metric_object(metric: Any) -> bool:
    """Whether a metric is collected over batches, as torchmetrics does it, in the place of a mean of theirs."""
    return hasattr(metric, "update") and hasattr(metric, "compute")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for item in value.items() for text in item)


def _check_dataset(role: str, dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise BadInput(f"{role} is a DataLoader, which makes batches; give its data set: {role}=loader.dataset")
    if is_stream(dataset) and not hasattr(dataset, "__iter__"):
        raise BadInput(f"{role} is no data set ({kind}); give one with __len__ and __getitem__, or a stream")
    if hasattr(dataset, "__len__"):
        if len(dataset) == 0:
            raise BadInput(f"{role} is empty ({kind} of 0 samples); give it at least one sample")
    elif not is_stream(dataset):
        raise BadInput(f"{role} has no length ({kind}); give a data set with __len__ and __getitem__")
    elif role != "train":
        raise BadInput(f"{role} is a stream without a length ({kind}); give it __len__, or list(...) of its samples")
