"""Tasks and optimizer specifications: what they refuse, and what they build."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from torrential.errors import BadInput, UnknownName
from torrential.optimizers import OptimizerSpec, optimizer
from torrential.task import Task, accuracy, with_validation


def data(samples: int = 20) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 3), torch.arange(samples) % 2)


def make(**changes: Any) -> Task:
    given: dict[str, Any] = dict(model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, train=data(), test=data(5))
    return Task(**{**given, **changes})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield 1


class SizedStream(Stream):
    def __len__(self) -> int:
        return 1


def test_defaults() -> None:
    task = make()
    assert (task.batch_size, task.epochs, task.target, task.maximize, task.name) == (32, 10, None, True, "task")
    assert task.optimizer.describe() == {"kind": "SGD", "lr": 0.1, "momentum": 0.9}
    assert task.metric is accuracy


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": nn.Linear(3, 2)}, "model=lambda: Linear"),
        ({"model": 3}, "model must be a function (got 3)"),
        ({"loss": None}, "loss must be a function (got None)"),
        ({"metric": "accuracy"}, "metric must be a function (got 'accuracy')"),
        ({"optimizer": "sgd"}, "optimizer must come from optimizer() or be a function of the model (got 'sgd')"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1 (got 0)"),
        ({"batch_size": 2.5}, "(got 2.5)"),
        ({"epochs": -1}, "epochs must be a whole number of at least 1 (got -1)"),
        ({"epochs": True}, "(got True)"),
        ({"clip_norm": 0.0}, "clip_norm must be a positive number or None (got 0.0)"),
        ({"target": float("nan")}, "target must be a finite number or None (got nan)"),
        ({"name": ""}, "name must be a non-empty string (got '')"),
        ({"train": data(0)}, "train is empty (TensorDataset of 0 samples)"),
        ({"test": []}, "test is empty (list of 0 samples)"),
        ({"validation": data(0)}, "validation is empty"),
        ({"train": Stream()}, "train cannot be indexed (Stream)"),
        ({"train": SizedStream()}, "train cannot be indexed (SizedStream)"),
        ({"test": None}, "test cannot be indexed (NoneType)"),
    ],
)
def test_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        make(**changes)
    assert says in str(caught.value)


def test_metric_name() -> None:
    def error_rate(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1 - accuracy(outputs, targets)

    assert make().metric_name == "accuracy"
    assert make(metric=error_rate).metric_name == "error_rate"
    assert make(metric=functools.partial(error_rate)).metric_name == "error_rate"
    assert make(metric=lambda o, t: accuracy(o, t)).metric_name == "metric"
    assert make(metric=nn.MSELoss()).metric_name == "MSELoss"


def test_accuracy() -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 2.0], [0.0, 5.0]])
    assert accuracy(outputs, torch.tensor([0, 1, 1, 1])).item() == 0.75


@pytest.mark.parametrize(("name", "cls"), [("sgd", torch.optim.SGD), ("AdamW", torch.optim.AdamW)])
def test_optimizers_by_name(name: str, cls: type) -> None:
    assert optimizer(name, lr=0.5).kind is cls
    assert optimizer(cls, lr=0.5) == optimizer(name, lr=0.5)


def test_optimizer_refuses() -> None:
    with pytest.raises(UnknownName, match="did you mean 'adam'"):
        optimizer("adamq", lr=0.1)
    with pytest.raises(BadInput, match=r"refuses SGD\(lr=0.1, momentun=0.9\).*unexpected keyword"):
        optimizer("sgd", lr=0.1, momentun=0.9)
    with pytest.raises(BadInput, match="Invalid momentum value: -1"):
        optimizer("sgd", lr=0.1, momentum=-1)
    with pytest.raises(BadInput, match="cannot be `True` together"):
        optimizer("adam", lr=0.1, fused=True, foreach=True)
    with pytest.raises(BadInput, match=r"class of torch\.optim"):
        optimizer(nn.Linear, lr=0.1)  # type: ignore[arg-type]
    for lr in (0, -1, float("nan"), float("inf"), "fast", None):
        with pytest.raises(BadInput, match="learning rate must be a positive number"):
            optimizer("sgd", lr=lr)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="lr: -3"):
        optimizer("sgd", lr=1).with_lr(-3)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad"])
def test_fused_where_only_speed_changes(kind: str) -> None:
    def stepped(spec: OptimizerSpec) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        param = nn.Parameter(torch.ones(7))
        built = spec.build(iter([param]))
        for step in range(3):
            param.grad = torch.arange(7.0) - step
            built.step()
        return built, param.detach()

    fused, fast = stepped(optimizer(kind, lr=0.1, weight_decay=0.01))
    plain, slow = stepped(optimizer(kind, lr=0.1, weight_decay=0.01, foreach=False))
    assert fused.defaults["fused"] is True and not plain.defaults["fused"]
    torch.testing.assert_close(fast, slow)


def test_not_fused_elsewhere() -> None:
    param = nn.Parameter(torch.ones(2))
    assert not optimizer("sgd", lr=0.1).build([param], "meta").defaults["fused"]
    assert not optimizer("adagrad", lr=0.1).build([param], "cuda").defaults["fused"]
    assert not optimizer("sgd", lr=0.1, differentiable=True).build([param]).defaults["fused"]
    assert not optimizer("sgd", lr=0.1).build([nn.Parameter(torch.ones(2, dtype=torch.cfloat))]).defaults["fused"]
    assert "fused" not in optimizer("rprop", lr=0.1).build([param]).defaults


def test_describe_is_json() -> None:
    spec = optimizer("adam", lr=0.1, betas=(0.8, 0.9), amsgrad=True).with_lr(0.2)
    assert json.loads(json.dumps(spec.describe())) == {"kind": "Adam", "lr": 0.2, "betas": [0.8, 0.9], "amsgrad": True}


def test_with_validation_splits_train() -> None:
    task = make(train=data(25))
    split = with_validation(task, seed=3)
    kept, held = split.train.indices, split.validation.indices  # type: ignore[attr-defined, union-attr]
    assert len(held) == 2 and sorted(kept + held) == list(range(25))
    assert with_validation(task, seed=3).validation.indices == held  # type: ignore[union-attr]
    assert any(with_validation(task, seed=s).validation.indices != held for s in range(5))  # type: ignore[union-attr]
    assert with_validation(split, seed=9) is split
    assert len(with_validation(make(train=data(2)), 0).validation) == 1  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="samples: 1"):
        with_validation(make(train=data(1)), 0)


@pytest.mark.parametrize(
    ("right", "of", "target"), [(135, 150, 0.9), (144, 150, 0.96), (147, 150, 0.98), (87, 100, 0.87)]
)
def test_a_target_that_is_met_exactly_is_reached(right: int, of: int, target: float) -> None:
    value = float(torch.tensor([1.0] * right + [0.0] * (of - right)).mean())
    short = float(torch.tensor([1.0] * (right - 1) + [0.0] * (of - right + 1)).mean())
    more, less = make(), make(maximize=False)
    assert more.reaches(target, value) and not more.reaches(target, short)
    assert less.reaches(target, value) and less.reaches(target, short) and not less.reaches(target, value + 1 / of)
