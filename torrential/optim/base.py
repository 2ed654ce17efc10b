"""What our optimizers share: a step is taken group by group, on whole lists of tensors.

Nothing here or in a subclass makes the host wait for the device. Per-element state has the parameter's shape; anything
else is a 0-dim tensor on the host, so that reading it is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, overload

import torch
from torch import Tensor

from torrential.errors import BadInput


class GroupOptimizer(torch.optim.Optimizer):
    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, [p.grad for p in params], group)
        return loss

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        """Move the parameters of a group that have a gradient; the gradients stay as they are."""
        raise NotImplementedError

    def _zeros(self, params: list[Tensor], key: str) -> list[Tensor]:
        """The state under `key` of each parameter; at first zero."""
        for param in params:
            if key not in self.state[param]:
                self.state[param][key] = torch.zeros_like(param)
        return [self.state[param][key] for param in params]


def lengths(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each, (n,), in float32 at least: a norm of half precision overflows early."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def or_one(ratios: Tensor, *norms: Tensor) -> list[Tensor]:
    """Each ratio as a 0-dim tensor, but 1 where one of the norms it was made of is zero."""
    sound = torch.stack(norms).ne(0).all(0)
    return list(torch.where(sound, ratios, torch.ones_like(ratios)).unbind())


def check_positive(**options: float) -> None:
    """Zero is allowed too; NaN is not."""
    for name, value in options.items():
        if not value >= 0:
            raise BadInput(f"{name} must not be negative (got {value!r})")


def check_fraction(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value < 1:
            raise BadInput(f"{name} must be at least 0 and below 1 (got {value!r})")
