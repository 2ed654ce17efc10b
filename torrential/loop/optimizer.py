"""The script's optimizers: their class and groups are the run's optimizer, and `step` wakes the strategy's program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from torrential.errors import BadInput, RunFailed
from torrential.optim.built import spec_of
from torrential.optim.rates import Option, Rate
from torrential.optimizers import OptimizerSpec, ParameterGroup


def spec_of_all(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> OptimizerSpec:
    """One optimizer for the parameters of all, whose groups have the options of theirs."""
    kinds = {type(optimizer) for optimizer in optimizers}
    if len(kinds) > 1:
        listed = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise BadInput(f"the script's optimizers are of several classes ({listed}), and a run has one; use one class")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)]
    if len(set(held)) < len(held):
        raise BadInput("a parameter belongs to two optimizers; give it to one")
    specs = [spec_of(optimizer, names) for optimizer in optimizers]
    left = frozenset(n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held)
    first = specs[0]
    if len(specs) == 1 and not left:
        return first
    groups: list[ParameterGroup] = []
    for optimizer, spec in zip(optimizers, specs, strict=True):
        all_names = frozenset(names[id(parameter)] for parameter in parameters_of(optimizer))
        for group in spec.groups or (ParameterGroup(all_names),):
            options = {"lr": spec.lr, **{k: optimizer.defaults[k] for k in {*first.options, *spec.options}}}
            groups.append(ParameterGroup(group.names, options | dict(group.options), len(groups)))
    if left:  # trained, but by none of them: no step is of these
        groups.append(ParameterGroup(left, {}, len(groups)))
    return OptimizerSpec(first.kind, first.lr, first.options, tuple(groups))


class GroupOptions:
    """The options of the script's optimizers that schedulers may move: learning rates, momentum, betas, ..."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], groups: int) -> None:
        """`groups`: of the run's optimizer, which may have one more than these."""
        self._optimizers, self._more = optimizers, groups - sum(len(o.param_groups) for o in optimizers)
        self._names = [
            [name for name, value in group.items() if name in optimizer.defaults and _is_numeric(value)]
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._begun = self.values()
        self._moved = {"lr"}

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def values(self) -> list[float]:
        """All of them as they are now, one after the other."""
        groups = list(self._groups())
        if len(groups) != len(self._names):
            raise RunFailed(
                f"an optimizer was given another parameter group (there were {len(self._names)}, now {len(groups)}), "
                "which the run's optimizer does not know; add all groups before run.prepare, frozen ones too"
            )
        return [
            number
            for names, group in zip(self._names, groups, strict=True)
            for name in names
            for number in _numbers(group[name])
        ]

    def rate(self, optimizer: int, values: Sequence[float]) -> Rate:
        """What a step of one of the optimizers is taken with, given the `values` of all."""
        found: list[dict[str, Option]] = []
        places = iter(range(len(values)))
        for names, group in zip(self._names, self._groups(), strict=True):
            options: dict[str, Option] = {}
            for name in names:
                mine = [next(places) for _ in _numbers(group[name])]
                if any(values[place] != self._begun[place] for place in mine):
                    self._moved.add(name)
                given = tuple(values[place] for place in mine)
                options[name] = given if isinstance(group[name], list | tuple) else given[0]
            found.append(options)
        moved = [{name: value for name, value in options.items() if name in self._moved} for options in found]
        first = sum(len(each.param_groups) for each in self._optimizers[:optimizer])
        return Rate(float(found[first]["lr"]), (*moved, *moved[:1] * self._more))  # type: ignore[arg-type]


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_numeric, value))
    return not isinstance(value, bool) and (
        isinstance(value, int | float) or (torch.is_tensor(value) and value.dim() == 0)
    )


def _numbers(value: Any) -> list[float]:
    return [float(each) for each in value] if isinstance(value, list | tuple) else [float(value)]


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

    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # a GradScaler unscales and skips itself
    if patched:  # a scheduler made before has to see that this is its optimizer still
        take_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(take_step, optimizer)  # type: ignore[method-assign]


def tell_of_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer say, when a script asks it for its state or gives it one in its loop, that the run has it."""
    plain = optimizer.state_dict

    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        warnings.warn(
            "optimizer.state_dict() has no state in a launched script: the run keeps it, and saves it in checkpoints "
            "(go on with --resume)",
            stacklevel=2,
        )
        return plain()

    def load_state_dict(self: torch.optim.Optimizer, state: dict[str, Any]) -> NoReturn:
        raise RunFailed(
            "optimizer.load_state_dict was called in a launched script, where the run keeps the state; leave it out, "
            "and go on with --resume"
        )

    optimizer.state_dict = MethodType(state_dict, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = MethodType(load_state_dict, optimizer)  # type: ignore[method-assign]


class BackwardLosses:
    """The values on which the script calls `backward`, added up from one step to the next."""

    def __init__(self, called: Callable[[], None] = lambda: None) -> None:
        """`called`: what is to happen at every call."""
        self._called = called
        self._heard: list[torch.Tensor] = []
        self.calls = 0
        """How often backward was called."""
        self.pending = False
        """Whether it was called since the sum was last asked for."""

    def listen(self) -> None:
        """Hear of every `loss.backward()` of this process."""
        plain, heard = torch.Tensor.backward, self._heard

        def backward(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            self._called()
            self.calls, self.pending = self.calls + 1, True
            if tensor.numel() == 1:
                heard.append(tensor.detach())
            plain(tensor, *args, **options)

        torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]

    def total(self) -> float:
        """Their sum since it was last asked for; 0 if backward was called on none."""
        total = sum(float(value) for value in self._heard)
        self._heard.clear()
        self.pending = False
        return total


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
