"""A server's optimizer on parts of a vector does what torch's does on tensors made of these parts, bit by bit."""

from typing import Any

import pytest
import torch
from network import Hub, MemoryComm, flat_layout
from torch import Tensor

from torrential.errors import BadInput, RunFailed
from torrential.optimizers import OptimizerSpec, ParameterGroup
from torrential.params.layout import Bucket, Layout, ParameterEntry
from torrential.server.optimizer import RangeOptimizer, Store, bounds
from torrential.server.whole import optimizer_of

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
    "adagrad, some exempt": OptimizerSpec(
        torch.optim.Adagrad,
        0.1,
        {"weight_decay": 0.1},
        (ParameterGroup(frozenset({"p1"}), {"weight_decay": 0.0}), ParameterGroup(frozenset({"p0", "p2"}))),
    ),
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


# -- classes that are not known to treat all elements alike ------------------------------------------------------------
SHAPES = [(3, 4), (5,), (2, 3, 2)]


class Counted(torch.optim.Optimizer):
    """By shape and by a count of Python's; its state is made anew at every step, and it changes its gradients."""

    per_parameter = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["taken"] = state.get("taken", 0) + 1
                parameter.grad.mul_(parameter.ndim)
                state["mean"] = state.get("mean", torch.ones_like(parameter)) * 0.5 + parameter.grad
                parameter.sub_(state["mean"], alpha=group["lr"] / state["taken"])


def shaped_layout() -> Layout:
    entries, start = [], 0
    for number, shape in enumerate(SHAPES):
        entries.append(ParameterEntry(number, f"p{number}", torch.Size(shape), torch.float32, start))
        start += entries[-1].shape.numel()
    return Layout(tuple(entries), (Bucket(0, torch.float32, tuple(entries)),), {torch.float32: start})


def whole_store(kind: type[torch.optim.Optimizer] = Counted, **options: Any) -> Store:
    layout = shaped_layout()
    store = Store(MemoryComm(Hub(), 0), layout, OptimizerSpec(kind, 0.1, options))
    store.clear(0, store.numel)
    store.parameters.copy_(torch.randn(store.numel, generator=torch.Generator().manual_seed(0)))
    return store


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Counted, {}), (torch.optim.Rprop, {}), (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5})],
)
def test_whole_tensors_in_their_shapes_and_after_a_cut(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """Three steps, a cut between two tensors, two steps more; the middle tensor has no gradient at first."""
    store, random = whole_store(kind, **options), torch.Generator().manual_seed(1)
    assert bounds(store.layout, store.spec) == [0, 12, 17]
    plain = [torch.nn.Parameter(e.view(store.parameters).clone()) for e in store.layout.entries]
    torchs = kind(plain, lr=0.1, **options)  # type: ignore[call-arg]
    parts: list[Any] = [optimizer_of(store, 0, store.numel, {})]
    spans = [(0, store.numel)]
    for number in range(5):
        if number == 3:
            scalars, spans = parts[0].scalars(), [(0, 17), (17, store.numel)]
            parts = [optimizer_of(store, *span, scalars) for span in spans]
        gradient = torch.randn(store.numel, generator=random)
        used = [0, 2] if number < 2 else None
        for entry, parameter in zip(store.layout.entries, plain, strict=True):
            parameter.grad = entry.view(gradient).clone() if used is None or entry.index in used else None
        for group in torchs.param_groups:
            group["lr"] = 0.1 / (1 + number)
        torchs.step()
        before = gradient.clone()
        for part, span in zip(parts, spans, strict=True):
            part.step_spans([span], [gradient[slice(*span)]], 0.1 / (1 + number), used)
        assert torch.equal(gradient, before), "the gradients are the worker's"
        for entry, parameter in zip(store.layout.entries, plain, strict=True):
            torch.testing.assert_close(entry.view(store.parameters), parameter.detach(), rtol=0, atol=1e-6)


def test_parts_of_tensors_are_refused_where_tensors_are_needed_whole() -> None:
    optimizer = optimizer_of(whole_store(), 0, 29, {})
    assert optimizer.objection([(0, 29)], keys=False) is None
    assert optimizer.objection([(0, 12), (17, 29)], keys=False) is None  # whole tensors, if not all
    assert "a part of the gradient of p1, which Counted needs whole" in str(optimizer.objection([(0, 14)], keys=False))
    assert "single keys, where Counted needs whole tensors" in str(optimizer.objection([(0, 29)], keys=True))
    assert (
        RangeOptimizer(Store(MemoryComm(Hub(), 0), flat_layout(4), SPECS["sgd"]), 0, 4, {}).objection([(0, 2)], True)
        is None
    )


def test_state_that_appears_later_than_it_was_tried_ends_the_run() -> None:
    class Averaging(Counted):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for parameter, state in self.state.items():
                if state["taken"] == 6:
                    state["slow"] = parameter.detach().clone()

    store = whole_store(Averaging)
    optimizer = optimizer_of(store, 0, store.numel, {})
    for _ in range(5):
        optimizer.step_spans([(0, store.numel)], [torch.ones(store.numel)], 0.1)
    with pytest.raises(RunFailed, match="Averaging keeps 'slow' in its state, which it did not at first"):
        optimizer.step_spans([(0, store.numel)], [torch.ones(store.numel)], 0.1)


def test_complex_parameters_are_refused() -> None:
    """They were kept, and never stepped."""
    with pytest.raises(BadInput, match="servers keep real numbers"):
        Store(MemoryComm(Hub(), 0), flat_layout(4, torch.complex64), SPECS["sgd"])
