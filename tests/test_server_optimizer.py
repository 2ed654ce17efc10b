"""A server's optimizer on parts of a vector does what torch's does on tensors made of these parts, bit by bit."""

from typing import Any

import pytest
import torch
from network import Hub, MemoryComm, flat_layout
from torch import Tensor

from torrential.server.optimizer import RangeOptimizer, Store
from torrential.task import OptimizerSpec

SIZES = (40, 7, 53)
NUMEL = sum(SIZES)
SPECS = {
    "adagrad": OptimizerSpec(torch.optim.Adagrad, 0.1),
    "adagrad, all options": OptimizerSpec(
        torch.optim.Adagrad,
        0.1,
        {"lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.5, "eps": 1e-3, "maximize": True},
    ),
    "adagrad, not fused": OptimizerSpec(torch.optim.Adagrad, 0.1, {"foreach": False, "lr_decay": 0.1}),
    "adagrad, some exempt": OptimizerSpec(torch.optim.Adagrad, 0.1, {"weight_decay": 0.1}, frozenset({"p1"})),
    "sgd": OptimizerSpec(torch.optim.SGD, 0.1, {"momentum": 0.9}),
    "adam": OptimizerSpec(torch.optim.Adam, 0.1),
}


class Reference:
    """The elements that are touched are taken out, stepped by an optimizer made for the occasion, and put back."""

    def __init__(self, spec: OptimizerSpec, store: Store) -> None:
        self.spec, self.store = spec, store
        self.parameters = store.parameters.clone()
        self.states = {name: vector.clone() for name, vector in store.states.items()}
        self.steps = [0.0] * len(SIZES)

    def step(self, touched: dict[int, Tensor], gradient: Tensor, lr: float) -> None:
        for number, places in touched.items():
            part = self.parameters[places].clone()
            part.grad = gradient[places].clone()
            optimizer = self.spec.build([part], names=[f"p{number}"])
            state: dict[str, Any] = {name: vector[places].clone() for name, vector in self.states.items()}
            if self.store.counted:
                state["step"] = torch.tensor(self.steps[number])
            optimizer.state[part] = state
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            self.steps[number] += 1
            self.parameters[places] = part
            for name, vector in self.states.items():
                vector[places] = optimizer.state[part][name]


def pieces(places: Tensor) -> dict[int, Tensor]:
    found, start = {}, 0
    for number, size in enumerate(SIZES):
        inside = places[(places >= start) & (places < start + size)]
        if inside.numel():
            found[number] = inside
        start += size
    return found


@pytest.mark.parametrize("name", SPECS)
def test_whole_steps_parts_and_keys_in_any_order(name: str) -> None:
    spec, random = SPECS[name], torch.Generator().manual_seed(0)
    store = Store(MemoryComm(Hub(), 0), flat_layout(NUMEL, sizes=SIZES), spec)
    store.clear(0, NUMEL)
    store.parameters.copy_(torch.randn(NUMEL, generator=random))
    reference, optimizer = Reference(spec, store), RangeOptimizer(store, 0, NUMEL, {})
    everything = torch.arange(NUMEL)
    for number in range(30):
        gradient, lr = torch.randn(NUMEL, generator=random), 0.1 / (1 + number)
        kind = number % 5
        if kind == 0:
            optimizer.step_spans([(0, NUMEL)], [gradient], lr)
            reference.step(pieces(everything), gradient, lr)
        elif kind == 1:  # an end of one tensor, all of the next, a beginning of the last
            optimizer.step_spans([(30, 60)], [gradient[30:60]], lr)
            reference.step(pieces(everything[30:60]), gradient, lr)
        elif kind == 2:
            optimizer.step_spans([(3, 9), (50, 60)], [gradient[3:9], gradient[50:60]], lr)
            reference.step(pieces(torch.cat([everything[3:9], everything[50:60]])), gradient, lr)
        elif kind == 3:
            keys = torch.randperm(NUMEL, generator=random)[:20].sort().values
            optimizer.step_keys(keys, gradient[keys], lr)
            reference.step(pieces(keys), gradient, lr)
        else:
            optimizer.step_spans([(0, NUMEL)], [gradient], lr, used=[0, 2])
            touched = pieces(everything)
            del touched[1]
            reference.step(touched, gradient, lr)
        assert torch.equal(store.parameters, reference.parameters), number
        assert all(torch.equal(store.states[name], vector) for name, vector in reference.states.items())
    counted = [values.get("step", 0.0) for values in optimizer.scalars().values()]
    assert counted == (reference.steps if store.counted else [0.0] * len(SIZES))
