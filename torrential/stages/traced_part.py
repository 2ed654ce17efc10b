"""A part of a traced model, as a module: source that torch's tracer has written, and the model's own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten, treespec_loads

from torrential.errors import RunFailed

Shape = tuple[int | None, ...]  # None: the samples


@dataclass(frozen=True)
class PartCode:
    """What a part computes, apart from its tensors."""

    source: str
    """The source of `forward(self, ...)`, a function of the values that live where the part begins."""
    names: Mapping[str, Any]
    """What the source refers to, beside `self`."""
    numbers_in: frozenset[int]
    """The places, among the values that it is given, of whole numbers, such as the number of samples."""
    numbers_out: frozenset[int]
    """The places of whole numbers among the values that it returns."""
    changes_inputs: bool
    """Whether it has an operation that may change its inputs in place."""
    takes: tuple[Shape, ...] | None = None
    """The shapes of the model's inputs, if the part is the first."""
    gives: str | None = None
    """The model's output around its tensors, as torch writes it, if the part is the last."""


class TracedPart(nn.Module):
    """A part of a traced model: a function of the values that live where it begins, to those that live where it ends.

    Values that it does not use pass through it, so what a later part needs of an earlier one travels by every part
    between. Whole numbers pass between parts as tensors. The first part is given what the model is given; the last one
    returns what the model returns.
    """

    def __init__(self, code: PartCode, tensors: Mapping[str, Tensor], buffers: set[int]) -> None:
        """`tensors`: by the names that the source has for them; `buffers`: the ids of those that are the model's
        buffers. The rest are its parameters, or constants."""
        super().__init__()
        self.code = code
        for name, tensor in tensors.items():
            if id(tensor) in buffers:
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, tensor)
        self._compile()

    def _compile(self) -> None:
        made = dict(self.code.names)
        exec(compile(self.code.source, "<a part of a traced model>", "exec"), made)
        self._function = made["forward"]
        self._form = None if self.code.gives is None else treespec_loads(self.code.gives)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_function", "_form")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()

    def forward(self, given: Any) -> Any:
        values: Sequence[Any] = given
        if self.code.takes is not None:
            values = tree_leaves(given)
            _check_shapes(values, self.code.takes)
        if self.code.numbers_in:
            values = [int(v) if place in self.code.numbers_in else v for place, v in enumerate(values)]
        results = self._function(self, *values)
        if self._form is not None:
            return tree_unflatten(results, self._form)
        if self.code.numbers_out:
            results = [torch.tensor(v) if place in self.code.numbers_out else v for place, v in enumerate(results)]
        return tuple(results)


def _check_shapes(values: Sequence[Any], traced: Sequence[Shape]) -> None:
    """Whether the model was traced with inputs of such shapes, whatever the number of samples."""
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else () for value in values]
    same = len(shapes) == len(traced) and all(
        len(now) == len(then) and all(b is None or a == b for a, b in zip(now, then, strict=True))
        for now, then in zip(shapes, traced, strict=True)
    )
    if not same:
        then = ", ".join("(" + ", ".join("samples" if n is None else str(n) for n in shape) + ")" for shape in traced)
        raise RunFailed(
            f"the model was traced for inputs of shape {then} and is given {', '.join(map(str, shapes))}; pad inputs "
            "to one length, or cut the model by hand: Task(stages=[...])"
        )
