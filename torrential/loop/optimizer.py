"""The script's optimizers: their class and groups are the run's optimizer, and `step` wakes the strategy's program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from torrential.errors import BadInput, RunFailed
from torrential.optimizers import OptimizerSpec

UNSET = ("foreach", "fused")  # None: torch chooses


def spec_of_all(optimizers: Sequence[torch.optim.Optimizer], names: dict[int, str]) -> OptimizerSpec:
    """One optimizer for the parameters of all; `names`: of parameters, by id."""
    kinds = {type(optimizer) for optimizer in optimizers}
    if len(kinds) > 1:
        listed = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise BadInput(f"the script's optimizers are of several classes ({listed}), and a run has one; use one class")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise BadInput("an optimizer has a parameter of no prepared model; give the model to run.prepare, too")
    (kind,) = kinds
    known = inspect.signature(kind).parameters
    options = [
        {k: v for k, v in g.items() if k in known and k not in ("params", "lr") and not (k in UNSET and v is None)}
        for g in groups
    ]
    if any(each != options[0] for each in options) or len({float(g["lr"]) for g in groups}) > 1:
        raise BadInput("the script's optimizers have groups with different options; give them the same")
    return OptimizerSpec(kind, float(groups[0]["lr"]), options[0])


def check_optimizer_object(optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "_torrential", False):
        raise BadInput("the optimizer was prepared already; call run.prepare once for each")


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
    """Have the optimizer's `step` do this instead. It stays the script's own object, which schedulers know."""
    patched = getattr(optimizer.step, "_wrapped_by_lr_sched", False)

    def take_step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        if closure is not None:
            raise RunFailed(
                "optimizer.step was given a closure, which would compute the loss several times in a step; compute it "
                "before, and call step() without"
            )
        self._opt_called = True  # type: ignore[attr-defined]  # by which schedulers know the order of calls
        step()

    if patched:  # a scheduler made before has to see that this is its optimizer still
        take_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(take_step, optimizer)  # type: ignore[method-assign]
    optimizer._torrential = True  # type: ignore[attr-defined]


class BackwardLosses:
    """The values on which the script calls `backward`, added up from one step to the next."""

    def __init__(self) -> None:
        self._heard: list[torch.Tensor] = []

    def listen(self) -> None:
        """Hear of every `loss.backward()` of this process."""
        plain, heard = torch.Tensor.backward, self._heard

        def backward(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            if tensor.numel() == 1:
                heard.append(tensor.detach())
            plain(tensor, *args, **options)

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]

    def total(self) -> float:
        """Their sum since it was last asked for; 0 if backward was called on none."""
        total = sum(float(value) for value in self._heard)
        self._heard.clear()
        return total


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
