"""A fused kernel of torch is used only where it gives the numbers of the ordinary one: class, dtype and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from network import Hub, MemoryComm, flat_layout

from torrential import fused
from torrential.errors import BadInput
from torrential.optimizers import OptimizerSpec, ParameterGroup, optimizer
from torrential.server.optimizer import RangeOptimizer, Store

HALVES = [torch.bfloat16, torch.float16]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("sgd", {"maximize": True}),
    ("adam", {}),
    ("adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("adamw", {"maximize": True}),
    ("adagrad", {}),
    ("adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
]


def stepped(spec: OptimizerSpec, dtype: torch.dtype) -> torch.Tensor:
    parameter = torch.ones(70, dtype=dtype)
    built = spec.build([parameter])
    for step in range(3):
        parameter.grad = torch.linspace(0.5, 1.0, 70).add(step).to(dtype)
        built.step()
    return parameter


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), OPTIONS)
def test_what_is_built_gives_the_ordinary_numbers(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = stepped(optimizer(kind, lr=0.1, **options), dtype)
    ordinary = stepped(optimizer(kind, lr=0.1, foreach=False, **options), dtype)
    assert (ordinary - 1).abs().min() > 0.1
    far = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, ordinary, rtol=far, atol=far)


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_of_half_precision_move(dtype: torch.dtype) -> None:
    """Found by a user: torch's fused SGD leaves them where they are on the CPU, and nothing says so."""
    parameter = torch.ones(16, dtype=dtype)
    built = optimizer("sgd", lr=0.1).build([parameter])
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        built.step()
    torch.testing.assert_close(parameter, torch.full_like(parameter, 0.7), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["adam", "adamw", "adagrad"])
def test_half_precision_does_not_drift_from_the_ordinary_numbers(kind: str, dtype: torch.dtype) -> None:
    """The fused kernels compute in wider numbers: close after a few steps, elsewhere after hundreds."""

    def trained(**options: Any) -> torch.Tensor:
        parameter = torch.linspace(0.5, 1.5, 64).to(dtype)
        built = optimizer(kind, lr=0.05, weight_decay=0.1, **options).build([parameter])
        for step in range(300):
            parameter.grad = torch.linspace(-1.0, 1.0, 64).mul(1 + step % 7).to(dtype)
            built.step()
        return parameter

    assert torch.equal(trained(), trained(foreach=False))


def test_the_usual_classes_stay_fused() -> None:
    for kind in ("sgd", "adam", "adamw", "adagrad"):
        assert optimizer(kind, lr=0.1).build([torch.ones(2)]).defaults["fused"]


def test_a_kernel_is_tried_once_for_every_class_dtype_and_set_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[Any, ...]] = []

    def refuse(*what: Any) -> bool:
        tried.append(what)
        return False

    monkeypatch.setattr(fused, "_found", {})
    monkeypatch.setattr(fused, "_try", refuse)
    wide, narrow = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    for _ in range(2):
        for spec in (optimizer("sgd", lr=0.1), optimizer("sgd", lr=0.2), optimizer("sgd", lr=0.1, momentum=0.9)):
            assert not spec.build([wide]).defaults["fused"]
            assert not spec.build([wide, narrow]).defaults["fused"]
    assert [(dtype, options) for _, dtype, _, options in tried] == [
        (torch.float32, {}),
        (torch.float32, {"momentum": 0.9}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"momentum": 0.9}),
    ]


def test_groups_without_weight_decay_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_found", {})
    monkeypatch.setattr(fused, "_try", lambda kind, dtype, device_type, options: bool(options["weight_decay"]))
    whole = OptimizerSpec(torch.optim.SGD, 0.1, {"weight_decay": 0.1})
    group = ParameterGroup(frozenset({"bias"}), {"weight_decay": 0.0})
    partly = OptimizerSpec(torch.optim.SGD, 0.1, {"weight_decay": 0.1}, (group,))
    assert whole.build([torch.ones(2)]).defaults["fused"]
    assert not partly.build([torch.ones(2)], names=["bias"]).defaults["fused"]


def test_a_kernel_that_is_wrong_is_refused_where_it_was_asked_for() -> None:
    spec = optimizer("sgd", lr=0.1, fused=True)
    with pytest.raises(BadInput, match=r"fused SGD does not give the numbers .* bfloat16 on cpu; leave out fused=True"):
        spec.build([torch.ones(2, dtype=torch.bfloat16)])


def test_a_servers_short_cut_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    def shortcut() -> bool:
        store = Store(MemoryComm(Hub(), 0), flat_layout(4), optimizer("adagrad", lr=0.1))
        whole = RangeOptimizer(store, 0, 4, {})._whole
        assert whole is not None
        return whole.fused is not None

    assert shortcut()
    monkeypatch.setattr(fused, "_found", {})
    monkeypatch.setattr(fused, "_try", lambda *what: False)
    assert not shortcut()
