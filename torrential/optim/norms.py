"""What training with large batches asks of norm layers.

Batch norm's batch size is part of the loss (Goyal et al. 2017), so it must stay when a worker's batch grows:
`ghost` has it work on groups of n samples (Hoffer et al. 2017, "Train longer, generalize better").

    worker's batch   s0 s1 s2 s3 | s4 s5 s6 s7 | s8 s9      n = 4; the last group is what remains

`zero_last_gamma` lets each residual block begin as the identity. `exempt` says what weight decay leaves alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from torrential.errors import BadInput

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # the first: batch and instance norms
_ONE_BY_ONE = ("cpu",)  # where a call costs little: one for each group beats a single one over a folded copy
_TORCHVISION = {"BasicBlock": "bn2", "Bottleneck": "bn3"}  # in torchvision.models.resnet


class GhostBatchNorm(_BatchNorm):
    """Batch norm over groups of `group` samples, as if they were passed one after the other. Made by `ghost`.

    A single value per channel has no variance: where that is all that remains, it joins the group before it.
    """

    group: int

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        plain = super().forward
        sizes = self._sizes(input)
        if len(sizes) == 1:
            return plain(input)
        if input.device.type in _ONE_BY_ONE:
            return torch.cat([plain(group) for group in input.split(sizes)])
        equal = sizes.count(self.group)
        first, *rest = input.split([equal * self.group, *sizes[equal:]])
        output = self._at_once(first, equal)
        return torch.cat([output, plain(*rest)]) if rest else output

    def _sizes(self, input: Tensor) -> list[int]:
        whole, rest = divmod(len(input), self.group)
        if not self.training or not whole:
            return [len(input)]
        alone = rest * input[0, 0].numel() == 1
        return [self.group] * (whole - alone) + [rest + self.group * alone] * (rest > 0)

    def _at_once(self, input: Tensor, groups: int) -> Tensor:
        """Channel c of group g becomes channel (g, c) of one batch norm over `group` samples."""
        channels_last = input.dim() > 2 and input.stride(1) == 1 and not input.is_contiguous()
        folded = _fold_last(input, groups) if channels_last else _fold(input, groups)
        weight, bias = (None if p is None else p.repeat(groups) for p in (self.weight, self.bias))
        if self.running_mean is None:
            output = F.batch_norm(folded, None, None, weight, bias, True, 0.0, self.eps)
        else:
            found = self.running_mean.new_zeros(2, folded.shape[1])  # with momentum 1: the groups' means and variances
            output = F.batch_norm(folded, found[0], found[1], weight, bias, True, 1.0, self.eps)
            self._follow(found.view(2, groups, -1))
        return _unfold_last(output, groups) if channels_last else _unfold(output, groups)

    @torch.no_grad()
    def _follow(self, found: Tensor) -> None:
        """Running statistics after these means and variances, (2, groups, channels), one group after the other."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        groups = found.shape[1]
        kept: float | Tensor
        if self.momentum is None:  # the mean of all batches so far
            before = self.num_batches_tracked.to(found.dtype)
            kept, weights = before / (before + groups), 1 / (before + groups)
        else:
            later = torch.arange(groups - 1, -1, -1, device=found.device, dtype=found.dtype)[:, None]
            kept, weights = (1 - self.momentum) ** groups, self.momentum * (1 - self.momentum) ** later
        mean, var = (weights * found).sum(1)
        self.running_mean.mul_(kept).add_(mean)
        self.running_var.mul_(kept).add_(var)
        self.num_batches_tracked += groups

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group={self.group}"


class GhostBatchNorm1d(GhostBatchNorm, nn.BatchNorm1d):
    pass


class GhostBatchNorm2d(GhostBatchNorm, nn.BatchNorm2d):
    pass


class GhostBatchNorm3d(GhostBatchNorm, nn.BatchNorm3d):
    pass


_GHOSTS = {nn.BatchNorm1d: GhostBatchNorm1d, nn.BatchNorm2d: GhostBatchNorm2d, nn.BatchNorm3d: GhostBatchNorm3d}


def _fold(x: Tensor, groups: int) -> Tensor:
    """(groups * n, C, ...) to (n, groups * C, ...)."""
    return x.reshape(groups, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _unfold(x: Tensor, groups: int) -> Tensor:
    return x.reshape(len(x), groups, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)


def _fold_last(x: Tensor, groups: int) -> Tensor:
    """The same for channels that lie last in memory, and stay there."""
    x = x.movedim(1, -1)
    return x.reshape(groups, -1, *x.shape[1:]).movedim(0, -2).flatten(-2).movedim(-1, 1)


def _unfold_last(x: Tensor, groups: int) -> Tensor:
    x = x.movedim(1, -1)
    return x.reshape(*x.shape[:-1], groups, -1).movedim(-2, 0).flatten(0, 1).movedim(-1, 1)


def ghost(model: nn.Module, n: int) -> nn.Module:
    """The same model, whose batch norms now work on groups of `n` samples.

    They change their class and nothing else, as torch's lazy modules do, so parameters, buffers, hooks and names stay.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadInput(f"a ghost batch is a whole number of samples, at least 1 (got {n!r})")
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    for name, module in found:
        if type(module) not in _GHOSTS and not isinstance(module, GhostBatchNorm):
            kind = type(module).__name__
            raise BadInput(f"{kind} cannot work on ghost batches ({name or 'the model'}); use nn.BatchNorm1d, 2d or 3d")
    for _, module in found:
        module.__class__ = _GHOSTS.get(type(module), type(module))
        module.group = n  # type: ignore[assignment]
    return model


def zero_last_gamma(model: nn.Module) -> list[str]:
    """Sets gamma of the last norm of every residual block to zero; returns the names of these parameters.

    A block says which norm is its last by a property `last_norm` that gives the module. The blocks of torchvision's
    ResNets have none but are known.
    """
    names = {module: name for name, module in model.named_modules()}
    zeroed = []
    for module, name in names.items():
        last = _last_norm(module)
        if last is None:
            continue
        if last not in names or not isinstance(last.weight, Tensor):
            block = f"{type(module).__name__} {name}".rstrip()
            raise BadInput(f"last_norm of {block} must give a norm of this model, with a weight (got {last!r})")
        nn.init.zeros_(last.weight)
        zeroed.append(f"{names[last]}.weight")
    return zeroed


def _last_norm(module: nn.Module) -> nn.Module | None:
    for cls in type(module).__mro__:
        if cls.__module__ == "torchvision.models.resnet" and cls.__name__ in _TORCHVISION:
            return module.get_submodule(_TORCHVISION[cls.__name__])
    return getattr(module, "last_norm", None)


def exempt(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone: every bias, and all of torch's norm layers.

    A parameter is a bias if its own name begins or ends so: bias, in_proj_bias, bias_hh_l0.
    """
    spared = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, _NORMS) or name.startswith("bias") or name.endswith("bias"):
                spared.add(id(parameter))
    return {name for name, parameter in model.named_parameters() if id(parameter) in spared}
