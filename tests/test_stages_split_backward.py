"""Backward in two halves gives the gradients of one, whatever a stage is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torrential.stages.split_backward import NotedCall, backward_input, backward_weight, noting


class Tied(nn.Module):
    """An autoencoder: its decoder uses the weights of a layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(self.inner(x).tanh(), self.inner.weight.t()))


class Reused(nn.Module):
    """The output of a layer is used, then changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return 2 * y + y.clone().relu_() + F.relu(self.inner(x), inplace=True)


class Branch(nn.Module):
    """A layer whose output goes nowhere, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.lost, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.lost(x)
        return self.used(x)


def frozen() -> nn.Module:
    layer = nn.Linear(6, 6)
    layer.weight.requires_grad_(False)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 6))


def twice() -> nn.Module:
    same = nn.Linear(6, 6)
    return nn.Sequential(same, nn.Tanh(), same)


STAGES = {  # with the number of layers whose weights can wait
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), 2),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6)), 2),
    "norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)), 2),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), 2),
    "tied": (Tied, 1),
    "twice": (twice, 0),
    "reused": (Reused, 0),
    "branch": (Branch, 1),
    "frozen": (frozen, 2),
    "none": (nn.Tanh, 0),
}


@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 6)])
@pytest.mark.parametrize("name", STAGES)
def test_two_halves_are_one(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    make, can_wait = STAGES[name]
    stage = make().double()
    reference = {n: None if not p.requires_grad else p for n, p in stage.named_parameters()}
    given, slope = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    whole = given.clone().requires_grad_()
    for _ in range(2):  # gradients add up
        stage(whole).backward(slope)
    expected = {n: None if p is None or p.grad is None else p.grad.clone() for n, p in reference.items()}
    stage.zero_grad()
    half = given.clone().requires_grad_()
    for _ in range(2):
        calls = list[NotedCall]()
        output = noting(stage, calls)(half)
        deferred = backward_input([output], [slope], [half], [p for p in reference.values() if p is not None], calls)
        if name != "in place":  # over three dimensions the output is a view, and changing it leads past the layer
            assert len(deferred) == can_wait
        backward_weight(deferred)
    torch.testing.assert_close(half.grad, whole.grad)
    for parameter, known in expected.items():
        found = stage.get_parameter(parameter).grad
        assert (found is None) == (known is None), parameter
        if known is not None:
            torch.testing.assert_close(found, known)


def test_the_second_half_is_all_of_the_weights() -> None:
    """Before it no linear layer has a gradient; after it, all have."""
    stage = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    calls = list[NotedCall]()
    loss = noting(stage, calls)(torch.randn(5, 6)).mean()
    deferred = backward_input([loss], [], [], list(stage.parameters()), calls)
    assert all(p.grad is None for p in stage.parameters())
    backward_weight(deferred)
    assert all(p.grad is not None for p in stage.parameters())
    assert not any(layer._forward_hooks for layer in stage)
