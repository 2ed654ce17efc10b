"""A copy of the parameters with every worker: the step is that of plain training, however tensors lie in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torrential.optimizers import optimizer
from torrential.params.base import Finished, Update
from torrential.params.layout import plan
from torrential.params.replicated import ReplicatedParameters

CPU = torch.device("cpu")


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    model[2].weight = nn.Parameter(torch.randn(16, 3).t())
    return model.to(memory_format=torch.channels_last)


def twins() -> Any:
    """The comm of one of two members that compute the same."""
    return SimpleNamespace(
        rank=0,
        members=(0, 1),
        buffer=lambda name, numel, dtype: torch.zeros(numel, dtype=dtype),
        all_reduce=lambda tensor: Finished(tensor.mul_(2)),
    )


def home_of(model: nn.Module, kind: str) -> ReplicatedParameters:
    spec = optimizer(kind, lr=0.1, **({"momentum": 0.9} if kind == "sgd" else {}))
    return ReplicatedParameters(twins(), model, plan(model, 1 << 20), spec, CPU, CPU)


def step(home: ReplicatedParameters, model: nn.Module, inputs: Tensor) -> None:
    model(inputs).square().mean().backward()
    for bucket in home.layout.buckets:
        home.reduce(bucket).wait()
    home.apply(Update(lr=0.1, scale=0.5, used=(True,) * len(home.layout.entries)))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_parameters_that_lie_otherwise_in_memory_are_trained_as_by_a_plain_loop(kind: str) -> None:
    ours, plain = net(), net()
    assert not any(m.weight.is_contiguous() for m in (ours[0], ours[2]))
    home = home_of(ours, kind)
    loop = home.spec.build(list(plain.parameters()))
    for inputs in torch.randn(4, 5, 2, 4, 4).unbind():
        step(home, ours, inputs)
        plain(inputs).square().mean().backward()
        loop.step()
        loop.zero_grad()
        again = net()  # as after a change of members: all state goes through flat vectors
        restored = home_of(again, kind)
        restored.counts = home.counts
        restored.load(home.flat(), home.extras())
        ours, home = again, restored
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
