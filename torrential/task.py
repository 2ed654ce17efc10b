"""What to learn: a model, a loss, data, a metric and an optimizer. A task knows nothing of workers.

task = Task(model=make_model, loss=F.cross_entropy, train=train_set, test=test_set,
            optimizer=optimizer("sgd", lr=0.1, momentum=0.9), batch_size=32, epochs=10)
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

from torrential.errors import BadInput, UnknownName
from torrential.fused import agrees, has_fused_kernel
from torrential.usercode import calling, name_of_file


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer yet to be built: its class, learning rate and other options. Made by `optimizer()`."""

    kind: type[torch.optim.Optimizer]
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    exempt: frozenset[str] = frozenset()  # parameters that weight decay and layer-wise rates leave alone

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, int | float) and math.isfinite(self.lr) and self.lr > 0):
            raise BadInput(f"the learning rate must be a positive number (lr: {self.lr!r}); try lr=0.1")

    def build(
        self, params: Iterable[Tensor], device_type: str = "cpu", names: Iterable[str] = ()
    ) -> torch.optim.Optimizer:
        """The optimizer over `params`, with torch's fused kernel wherever that is only a matter of speed."""
        params = list(params)
        options = dict(self.options)
        kind = self.kind if options.get("differentiable") else _without_compiler(self.kind)  # type: ignore[arg-type]
        # torch refuses fused with foreach or differentiable, and for parameters that are not floating point;
        # it also has no fused kernel for sparse gradients: a task with those sets fused=False.
        # SGD's kernel also refuses a parameter that is first used later than others; we start momentum from zero to
        # avoid that, which is the same unless there is dampening.
        chosen = {"fused", "foreach", "differentiable"} & options.keys() or options.get("dampening")
        may = has_fused_kernel(self.kind, device_type) and all(p.is_floating_point() for p in params)
        if may and not chosen and not self._wrongly_fused(kind, params, device_type):
            options["fused"] = True
        built = kind(self._groups(params, list(names)), lr=self.lr, **options)  # type: ignore[call-arg]
        if may and self.options.get("fused") and (wrong := self._wrongly_fused(kind, params, device_type)):
            raise BadInput(
                f"torch's fused {kind.__name__} does not give the numbers of the ordinary one for parameters of "
                f"{', '.join(wrong)} on {device_type}; leave out fused=True"
            )
        return built

    def _wrongly_fused(self, kind: type[torch.optim.Optimizer], params: list[Tensor], device_type: str) -> list[str]:
        """The dtypes for which the fused kernel is not to be trusted."""
        options = {name: value for name, value in self.options.items() if name != "fused"}
        groups = [options, *([{**options, "weight_decay": 0.0}] if self.exempt else [])]
        dtypes = {str(p.dtype).removeprefix("torch."): p.dtype for p in params}
        return [n for n, dtype in dtypes.items() if not all(agrees(kind, dtype, device_type, g) for g in groups)]

    def _groups(self, params: list[Tensor], names: list[str]) -> list[Any]:
        spared = [p for p, name in zip(params, names, strict=bool(names)) if name in self.exempt]
        if not spared:
            return params
        ids = {id(p) for p in spared}
        others = [p for p in params if id(p) not in ids]
        different = {"weight_decay": 0.0, "layerwise": False}  # optimizers ignore what they do not know
        return [{"params": spared, **different}] + ([{"params": others}] if others else [])

    def with_lr(self, lr: float) -> OptimizerSpec:
        return dataclasses.replace(self, lr=lr)

    def describe(self) -> dict[str, Any]:
        """Plain JSON values, for manifests."""
        return {"kind": self.kind.__name__, "lr": self.lr, **{name: _plain(v) for name, v in self.options.items()}}


def optimizer(kind: str | type[torch.optim.Optimizer], *, lr: float, **options: Any) -> OptimizerSpec:
    """An optimizer by its class or its name in torch.optim (any case), tried once so that a bad option shows here."""
    cls = _named_optimizer(kind) if isinstance(kind, str) else kind
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise BadInput(f"an optimizer is a name or a class of torch.optim (got {cls!r}); try optimizer('sgd', lr=0.1)")
    spec = OptimizerSpec(cls, lr, options)
    try:
        built = spec.build([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in {"lr": lr, **options}.items())
        raise BadInput(f"torch.optim refuses {cls.__name__}({given}): {error}; correct the option") from error
    if _has_own_zero_grad(built):
        raise BadInput(
            f"{cls.__name__} has a zero_grad of its own, which no run calls, since gradients are new in every step; do "
            "in step what it does, and leave zero_grad as it is in torch.optim.Optimizer"
        )
    return spec


def _has_own_zero_grad(built: torch.optim.Optimizer) -> bool:
    method = getattr(built.zero_grad, "__func__", built.zero_grad)
    return inspect.unwrap(method) is not inspect.unwrap(torch.optim.Optimizer.zero_grad)


@functools.cache
def _without_compiler(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class with torch's marks for its compiler taken off three methods.

    The marks load the compiler on first use, which costs every process more than a second and a hundred megabytes.
    Outside of compiled code they do nothing else but switch gradients off during `step`.
    """
    if not cls.__module__.startswith(("torch.optim", "torrential.optim")):
        return cls
    bare = {n: getattr(cls, n).__wrapped__ for n in ("add_param_group", "zero_grad") if _marked(getattr(cls, n))}
    if _marked(cls.step):
        bare["step"] = torch.no_grad()(cls.step.__wrapped__)  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), bare)


def _marked(method: Any) -> bool:
    return hasattr(method, "__wrapped__")


def _named_optimizer(name: str) -> type[torch.optim.Optimizer]:
    known = {
        attr.lower(): cls
        for attr, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise UnknownName("optimizer", name.lower(), known)
    return known[name.lower()]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return repr(value)


ROUNDING = 1e-6  # relative: 135 of 150 are 0.8999999761581421 in float32, and have reached 0.9


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose largest output is at the target class."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


def _default_optimizer() -> OptimizerSpec:
    return OptimizerSpec(torch.optim.SGD, 0.1, {"momentum": 0.9})


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
    optimizer: OptimizerSpec = field(default_factory=_default_optimizer)
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
        if not isinstance(self.optimizer, OptimizerSpec):
            raise BadInput(
                f"optimizer must come from optimizer() (got {self.optimizer!r}); try optimizer('sgd', lr=0.1)"
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
    def metric_name(self) -> str:
        function = getattr(self.metric, "func", self.metric)  # a functools.partial is named after its function
        name = str(getattr(function, "__name__", type(function).__name__))
        return "metric" if name == "<lambda>" else name


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
