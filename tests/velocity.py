"""SGD in the other form of momentum, the one in which the learning rate is part of the velocity.

    u form (torch.optim.SGD)      u = m u + g                     w = w - lr u
    v form (here)                 v = m v + lr g                  w = w - v
    v form, corrected             v = m (lr / last lr) v + lr g   w = w - v

While lr is constant, v = lr u and all three are the same. When lr changes, the plain v form goes on with a velocity of
the old scale, which hurts most where lr jumps up; the correction (Goyal et al. 2017, remark 2) makes it the u form
again. The u form needs none: its u contains no rate, so the new one applies at once to all of the past.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torrential.optim.base import GroupOptimizer, check_fraction, check_positive


class VelocitySGD(GroupOptimizer):
    """The last rate is part of each parameter's state, so that the correction outlives a checkpoint."""

    per_parameter = True

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, correct: bool = True
    ) -> None:
        check_positive(lr=lr, weight_decay=weight_decay)
        check_fraction(momentum=momentum)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "correct": correct})

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        velocities = self._zeros(params, "velocity")
        if group["correct"]:
            torch._foreach_mul_(velocities, [momentum * self._growth(p, lr) for p in params])
        else:
            torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, grads, alpha=lr)
        if group["weight_decay"]:
            torch._foreach_add_(velocities, params, alpha=lr * group["weight_decay"])
        torch._foreach_sub_(params, velocities)

    def _growth(self, param: Tensor, lr: float) -> float:
        """lr over the last rate, which lr becomes."""
        state = self.state[param]
        last = float(state.get("rate", lr))
        state["rate"] = torch.tensor(lr, dtype=torch.float64)
        return lr / last if last else 1.0  # after a rate of zero the velocity is zero too
