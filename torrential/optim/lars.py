"""LARS: a learning rate for each layer, by the size of its weights over that of its gradient (You, Gitman, Ginsburg
2017, "Large batch training of convolutional networks").

    local = trust |w| / (|g| + wd |w| + eps)       1 where |w| or |g| is zero
    v     = m v + lr local (g + wd w)              decay is in the denominator and in the update
    w     = w - v

Momentum comes after the local rate, so v mixes the rates of different steps. `g` is the gradient of the loss without
any L2 term. With trust = 0.001 a usual lr is 10 to 30, where SGD's would be about 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torrential.optim.base import GroupOptimizer, check_fraction, check_positive, lengths, or_one


class LARS(GroupOptimizer):
    """Groups with layerwise=False (biases, norm layers) have local = 1; every group may have its own weight decay."""

    per_parameter = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 0.0,
        layerwise: bool = True,
    ) -> None:
        check_positive(lr=lr, weight_decay=weight_decay, trust=trust, eps=eps)
        check_fraction(momentum=momentum)
        options = {"momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        super().__init__(params, {"lr": lr, **options, "layerwise": layerwise})

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        steps = torch._foreach_add(grads, params, alpha=decay)
        if group["layerwise"]:
            w, g = lengths(params), lengths(grads)
            torch._foreach_mul_(steps, or_one(group["trust"] * w / (g + decay * w + group["eps"]), w, g))
        velocities = self._zeros(params, "velocity")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps, alpha=group["lr"])
        torch._foreach_sub_(params, velocities)
