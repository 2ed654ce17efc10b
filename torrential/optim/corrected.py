"""SGD for gradients that carry their momentum already (Deep Gradient Compression, Lin et al. 2018).

    w = w - lr (G + d) ;  d = m d + wd w         G: the sum of what workers have sent, each with momentum of its own

Momentum is applied to weight decay alone, which is not part of what is sent. Groups with corrected=False (tensors that
are sent whole) have the ordinary step, d = m d + wd w + G.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from torrential.config import Compression
from torrential.errors import BadInput
from torrential.optim.base import GroupOptimizer, check_fraction, check_positive
from torrential.optimizers import OptimizerSpec


class CorrectedSGD(GroupOptimizer):
    """torch's SGD, but for groups with corrected=True, whose gradients have their momentum already."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        corrected: bool = False,
    ) -> None:
        check_positive(lr=lr, weight_decay=weight_decay)
        check_fraction(momentum=momentum)
        options = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, **options, "corrected": corrected})

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        m, decay, corrected = group["momentum"], group["weight_decay"], group["corrected"]
        if corrected:
            steps = list(torch._foreach_mul(params, decay)) if decay else []
            torch._foreach_add_(params, grads, alpha=-group["lr"])
            if not decay:
                return
        else:
            steps = list(torch._foreach_add(grads, params, alpha=decay))
        if m:
            buffers = self._zeros(params, "momentum_buffer")
            torch._foreach_mul_(buffers, m)
            torch._foreach_add_(buffers, steps)
            steps = list(torch._foreach_add(steps, buffers, alpha=m)) if group["nesterov"] else buffers
        torch._foreach_add_(params, steps, alpha=-group["lr"])


def is_compressed(tensor: Tensor) -> bool:
    """Whether a tensor is one of those that compressors of matrices take: biases and norms are sent as they are."""
    return tensor.dim() > 1


def momentum_of(spec: OptimizerSpec, name: str) -> tuple[float, bool]:
    """SGD's momentum for a parameter, and whether it is Nesterov's; none of other optimizers."""
    if spec.kind is not torch.optim.SGD:
        return 0.0, False
    own = next((group.options for group in spec.groups if name in group.names), {})
    options = {**spec.options, **own}
    return float(options.get("momentum", 0.0)), bool(options.get("nesterov", False))


def corrected(compression: Compression, spec: OptimizerSpec, model: nn.Module) -> OptimizerSpec:
    """The optimizer of a model whose workers have momentum of their own, where they have."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not compression.corrects_momentum or not any(momentum_of(spec, name)[0] for name in trained):
        return spec
    for options in spec.option_sets():
        if odd := [name for name in ("dampening", "maximize") if options.get(name)]:
            raise BadInput(
                f"momentum correction is of SGD without {odd[0]} ({odd[0]}: {options[odd[0]]}); leave it out, or "
                "use --set momentum_correction=false"
            )
    replaced = spec.replaced(CorrectedSGD, spec.lr, ("momentum", "weight_decay", "nesterov"))
    names = frozenset(name for name, parameter in trained.items() if is_compressed(parameter))
    return replaced.divided(names, frozenset(trained), {"corrected": True})
