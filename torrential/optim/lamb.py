"""LAMB: Adam with a learning rate for each layer, by the size of its weights over that of its step (You et al. 2020,
"Large batch optimization for deep learning: training BERT in 76 minutes").

    m = b1 m + (1 - b1) g          m^ = m / (1 - b1^t)
    v = b2 v + (1 - b2) g g        v^ = v / (1 - b2^t)
    r = m^ / (sqrt(v^) + eps) + wd w
    w = w - lr (|w| / |r|) r       the ratio is 1 where |w| or |r| is zero, and otherwise not clipped
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torrential.optim.base import GroupOptimizer, check_fraction, check_positive, lengths, or_one


class LAMB(GroupOptimizer):
    """Groups with layerwise=False (biases, norm layers) have the ratio 1; every group may have its own weight decay."""

    per_parameter = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        layerwise: bool = True,
    ) -> None:
        check_positive(lr=lr, eps=eps, weight_decay=weight_decay)
        check_fraction(beta1=betas[0], beta2=betas[1])
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "layerwise": layerwise}
        super().__init__(params, {"lr": lr, **options})

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        means, squares = self._zeros(params, "exp_avg"), self._zeros(params, "exp_avg_sq")
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)

        counts = self._count(params)
        scales = torch._foreach_sqrt(squares)
        torch._foreach_div_(scales, [(1 - beta2**t) ** 0.5 for t in counts])
        torch._foreach_add_(scales, group["eps"])
        steps = torch._foreach_div(means, [1 - beta1**t for t in counts])
        torch._foreach_div_(steps, scales)
        torch._foreach_add_(steps, params, alpha=group["weight_decay"])

        if group["layerwise"]:
            w, r = lengths(params), lengths(steps)
            torch._foreach_mul_(steps, or_one(w / r, w, r))
        torch._foreach_sub_(params, steps, alpha=group["lr"])

    def _count(self, params: list[Tensor]) -> list[float]:
        """The number of steps that each parameter has taken, this one included."""
        for param in params:
            if "step" not in self.state[param]:
                self.state[param]["step"] = torch.tensor(0.0)
        steps = [self.state[param]["step"] for param in params]
        torch._foreach_add_(steps, 1)
        return [float(step) for step in steps]
