"""Backward that adds up weight gradients in place gives the gradients of autograd's, whatever a stage is made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.test_stages_split_backward import STAGES
from torrential.stages.parameters import GradientPlace
from torrential.stages.whole_backward import backward, products_of


class Penalty(nn.Module):
    """A layer whose output depends on a gradient that was computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        (slope,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
        return y + slope


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.weight.register_hook(lambda slope: 2 * slope)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False))


CASES = {  # with the number of weights whose gradients are added up in place
    **{name: make for name, (make, _) in STAGES.items()},
    "no bias": plain,
    "penalty": Penalty,
    "hooked": Hooked,
    "itself": nn.Identity,
}
ADDED_UP = {"mlp": 2, "in place": 2, "norm": 2, "transformer": 4, "tied": 1, "branch": 1, "frozen": 1, "no bias": 2}


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_autograd(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    stage = CASES[name]().double()
    other = copy.deepcopy(stage) if name != "hooked" else CASES[name]().double()
    other.load_state_dict(stage.state_dict())
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    slope = torch.randn(shape, dtype=torch.float64)
    for number, each in enumerate(inputs):
        mine, theirs = each.clone().requires_grad_(), each.clone().requires_grad_()
        other(theirs).backward(slope)
        output = stage(mine)
        if number:  # autograd's first gradient need not be added to anything
            expected = ADDED_UP.get(name, 0) - (name == "transformer" and len(shape) == 2)  # one is computed otherwise
            assert len(products_of([output])) == expected
        backward([output], [slope])
        torch.testing.assert_close(mine.grad, theirs.grad)
    for (known, theirs), found in zip(other.named_parameters(), stage.parameters(), strict=True):
        assert (found.grad is None) == (theirs.grad is None), known
        if theirs.grad is not None:
            torch.testing.assert_close(found.grad, theirs.grad)


def test_a_first_gradient_is_computed_where_it_belongs() -> None:
    layer, place = nn.Linear(6, 4), torch.full((4, 6), 7.0)
    layer.weight.register_post_accumulate_grad_hook(GradientPlace(lambda: place))
    x, y = torch.randn(2, 3, 6).unbind()
    for each in (x, y):
        assert len(products_of([layer(each).sum()])) == 1
        backward([layer(each).sum()], [])
    assert layer.weight.grad is not None and layer.weight.grad.data_ptr() == place.data_ptr()
    torch.testing.assert_close(place, (x + y).sum(0).expand(4, 6))


def test_more_rows_than_inputs_are_autograds() -> None:
    """There the product is smaller than what would have to be kept for it."""
    layer = nn.Linear(6, 4)
    layer(torch.randn(3, 6)).sum().backward()
    assert len(products_of([layer(torch.randn(6, 6))])) == 1
    assert not products_of([layer(torch.randn(7, 6))])


def test_what_was_changed_since_is_refused_as_autograd_does() -> None:
    layer, x = nn.Linear(6, 6), torch.randn(3, 6)
    backward([layer(x).sum()], [])
    output = layer(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward([output], [])


def test_lower_precision_on_the_way_is_autograds() -> None:
    layer = nn.Linear(6, 6)
    layer(torch.randn(3, 6)).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.randn(3, 6))
    assert not products_of([output])
    backward([output], [F.relu(torch.ones_like(output))])
