"""The state that an optimizer keeps for each parameter, as tensors that can be saved, and back again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from torrential.optim.outside import is_number
from torrential.optimizers import OptimizerSpec
from torrential.params.whole import OptimizerTraits


def states_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[int, str, Tensor]]:
    """Every tensor and number of the state: the parameter's place, the key, the value."""
    for index, parameter in enumerate(parameters):
        for key, value in optimizer.state[parameter].items():
            if torch.is_tensor(value):
                yield index, key, value
            elif is_number(value):
                yield index, key, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def restored(key: str, tensor: Tensor, form: OptimizerTraits | None) -> object:
    """A piece of state as the optimizer keeps it: a tensor, or one of Python's numbers."""
    kind = None if form is None else form.numbers.get(key)
    return kind(tensor.item()) if isinstance(kind, type) else tensor.clone()


def begin_momentum(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> None:
    """Begin momentum from zero instead of from nothing: the same numbers, but torch's fused step refuses a mixture of
    both, as when a parameter is used later than others."""
    for group in optimizer.param_groups if spec.kind is torch.optim.SGD else ():
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
