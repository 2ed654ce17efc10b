"""An optimizer yet to be built: its class, learning rate and other options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torrential.errors import BadInput, UnknownName
from torrential.fused import agrees, has_fused_kernel


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer yet to be built: its class, learning rate and other options. Made by `optimizer()`."""

    kind: type[torch.optim.Optimizer]
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    exempt: frozenset[str] = frozenset()  # parameters that weight decay and layer-wise rates leave alone

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, int | float) and math.isfinite(self.lr) and self.lr > 0):
            raise BadInput(f"the learning rate must be a positive number (lr: {self.lr!r}); try lr=0.1")

    def build(
        self, params: Iterable[Tensor], device_type: str = "cpu", names: Iterable[str] = ()
    ) -> torch.optim.Optimizer:
        """The optimizer over `params`, with torch's fused kernel wherever that is only a matter of speed."""
        params = list(params)
        options = dict(self.options)
        kind = self.kind if options.get("differentiable") else _without_compiler(self.kind)  # type: ignore[arg-type]
        # torch refuses fused with foreach or differentiable, and for parameters that are not floating point;
        # it also has no fused kernel for sparse gradients: a task with those sets fused=False.
        # SGD's kernel also refuses a parameter that is first used later than others; we start momentum from zero to
        # avoid that, which is the same unless there is dampening.
        chosen = {"fused", "foreach", "differentiable"} & options.keys() or options.get("dampening")
        may = has_fused_kernel(self.kind, device_type) and all(p.is_floating_point() for p in params)
        if may and not chosen and not self._wrongly_fused(kind, params, device_type):
            options["fused"] = True
        built = kind(self._groups(params, list(names)), lr=self.lr, **options)  # type: ignore[call-arg]
        if may and self.options.get("fused") and (wrong := self._wrongly_fused(kind, params, device_type)):
            raise BadInput(
                f"torch's fused {kind.__name__} does not give the numbers of the ordinary one for parameters of "
                f"{', '.join(wrong)} on {device_type}; leave out fused=True"
            )
        return built

    def _wrongly_fused(self, kind: type[torch.optim.Optimizer], params: list[Tensor], device_type: str) -> list[str]:
        """The dtypes for which the fused kernel is not to be trusted."""
        options = {name: value for name, value in self.options.items() if name != "fused"}
        groups = [options, *([{**options, "weight_decay": 0.0}] if self.exempt else [])]
        dtypes = {str(p.dtype).removeprefix("torch."): p.dtype for p in params}
        return [n for n, dtype in dtypes.items() if not all(agrees(kind, dtype, device_type, g) for g in groups)]

    def _groups(self, params: list[Tensor], names: list[str]) -> list[Any]:
        spared = [p for p, name in zip(params, names, strict=bool(names)) if name in self.exempt]
        if not spared:
            return params
        ids = {id(p) for p in spared}
        others = [p for p in params if id(p) not in ids]
        different = {"weight_decay": 0.0, "layerwise": False}  # optimizers ignore what they do not know
        return [{"params": spared, **different}] + ([{"params": others}] if others else [])

    def with_lr(self, lr: float) -> OptimizerSpec:
        return dataclasses.replace(self, lr=lr)

    def describe(self) -> dict[str, Any]:
        """Plain JSON values, for manifests."""
        return {"kind": self.kind.__name__, "lr": self.lr, **{name: _plain(v) for name, v in self.options.items()}}


def optimizer(kind: str | type[torch.optim.Optimizer], *, lr: float, **options: Any) -> OptimizerSpec:
    """An optimizer by its class or its name in torch.optim (any case), tried once so that a bad option shows here."""
    cls = _named_optimizer(kind) if isinstance(kind, str) else kind
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise BadInput(f"an optimizer is a name or a class of torch.optim (got {cls!r}); try optimizer('sgd', lr=0.1)")
    spec = OptimizerSpec(cls, lr, options)
    try:
        built = spec.build([nn.Parameter(torch.zeros(2, 2))])
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in {"lr": lr, **options}.items())
        raise BadInput(f"torch.optim refuses {cls.__name__}({given}): {error}; correct the option") from error
    if _has_own_zero_grad(built):
        raise BadInput(
            f"{cls.__name__} has a zero_grad of its own, which no run calls, since gradients are new in every step; do "
            "in step what it does, and leave zero_grad as it is in torch.optim.Optimizer"
        )
    return spec


def _has_own_zero_grad(built: torch.optim.Optimizer) -> bool:
    method = getattr(built.zero_grad, "__func__", built.zero_grad)
    return inspect.unwrap(method) is not inspect.unwrap(torch.optim.Optimizer.zero_grad)


@functools.cache
def _without_compiler(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class with torch's marks for its compiler taken off three methods.

    The marks load the compiler on first use, which costs every process more than a second and a hundred megabytes.
    Outside of compiled code they do nothing else but switch gradients off during `step`.
    """
    if not cls.__module__.startswith(("torch.optim", "torrential.optim")):
        return cls
    bare = {n: getattr(cls, n).__wrapped__ for n in ("add_param_group", "zero_grad") if _marked(getattr(cls, n))}
    if _marked(cls.step):
        bare["step"] = torch.no_grad()(cls.step.__wrapped__)  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), bare)


def _marked(method: Any) -> bool:
    return hasattr(method, "__wrapped__")


def _named_optimizer(name: str) -> type[torch.optim.Optimizer]:
    known = {
        attr.lower(): cls
        for attr, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise UnknownName("optimizer", name.lower(), known)
    return known[name.lower()]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return repr(value)


def default_optimizer() -> OptimizerSpec:
    """The optimizer of a task that names none."""
    return OptimizerSpec(torch.optim.SGD, 0.1, {"momentum": 0.9})
