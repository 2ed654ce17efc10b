"""What an optimizer keeps beside its state: numbers and tensors among its attributes and in its groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import torch

from torrential.errors import RunFailed


class Outside:
    """The numbers that an optimizer keeps beside its state, as they were when this was made.

    A trial of three steps does not see a number that changes later; so the numbers are checked again whenever the
    optimizer's state is saved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._begun = dict(values_outside(optimizer))

    def changed(self, optimizer: torch.optim.Optimizer) -> str | None:
        """A tensor that `optimizer` keeps beside its state, or another number than this one has seen there, and where
        that is; None if there is none."""
        for where, value in values_outside(optimizer):
            if torch.is_tensor(value) or self._begun.get(where) != value:
                return f"{where} {'for no parameter' if where.startswith('state[') else 'outside of its state'}"
        return None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RunFailed if what `optimizer` keeps beside its state has changed."""
        where = self.changed(optimizer)
        if where is not None:
            raise RunFailed(
                f"{type(optimizer).__name__} keeps {where}, and has changed it, so no checkpoint and no replica "
                "would be right; keep it in self.state[parameter]"
            )


def values_outside(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors, by where they are, among the optimizer's attributes, in its groups and in its state of what
    is no parameter, but rates and what torch keeps there; containers and objects are looked into."""
    usual = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    seen = {id(thing) for thing in (*parameters, optimizer, optimizer.state, optimizer.param_groups)}
    for name, value in vars(optimizer).items():
        if name not in usual:
            yield from _inside(name, value, seen)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                yield f"groups[{number}]['params']", len(value)
            elif key != "lr":
                yield from _inside(f"groups[{number}][{key!r}]", value, seen)
    for owner, value in cast("Mapping[object, Any]", optimizer.state).items():
        if not torch.is_tensor(owner):
            yield from _inside(f"state[{owner!r}]", value, seen)


def _inside(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if kept(value):
        if id(value) not in seen:  # else it is a parameter
            yield name, value
        return
    if id(value) in seen or isinstance(value, type | ModuleType) or callable(value):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: Iterable[tuple[object, Any]] = value.items()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = enumerate(value)
    else:
        inner = getattr(value, "__dict__", {}).items()
    for number, (key, each) in enumerate(inner):
        yield from _inside(f"{name}[{number if torch.is_tensor(key) else key!r}]", each, seen)


def is_number(value: object) -> bool:
    """Whether a state is one number: Python's, or a tensor without dimensions."""
    return isinstance(value, bool | int | float) or (torch.is_tensor(value) and value.dim() == 0)


def kept(value: object) -> bool:
    """Whether a value is what a checkpoint can hold: a tensor or a number."""
    return torch.is_tensor(value) or is_number(value)
