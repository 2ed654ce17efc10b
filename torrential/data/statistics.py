"""Statistics: nests of dicts, lists, tuples, tensors, arrays and numbers that can be added, sent and saved.

flat(nest)             what it is made of, as plain data, and its tensors: what letters and checkpoints hold
restored(plan, ...)    the nest again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torrential.errors import BadInput

KINDS = "dicts by text, lists, tuples, tensors and arrays of real numbers, numbers and texts"


def flat(value: Any, what: str = "a statistic or estimate") -> tuple[Any, list[Tensor]]:
    """A nest as plain data, in which tensors and arrays are numbers, and these. `what` it is, for messages."""
    tensors: list[Tensor] = []
    return _plan(value, tensors, what), tensors


def _plan(value: Any, tensors: list[Tensor], what: str) -> Any:
    match value:
        case Tensor() if not value.is_complex():
            tensors.append(value.detach().cpu().contiguous())
            return {"tensor": len(tensors) - 1}
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf":
            array = np.asarray(value)
            ready = array.flags.c_contiguous and array.flags.writeable
            tensors.append(torch.from_numpy(array if ready else np.array(array, order="C")))
            return {"array": len(tensors) - 1}
        case dict() if all(isinstance(name, str) for name in value):
            return {"dict": [[name, _plan(each, tensors, what)] for name, each in value.items()]}
        case list() | tuple() if type(value) in (list, tuple):
            return {type(value).__name__: [_plan(each, tensors, what) for each in value]}
        case bool() | float() | str() | None:
            return {"plain": value}
        case int() if -(1 << 63) <= value < 1 << 63:
            return {"plain": value}
    raise BadInput(f"{what} may be made of {KINDS} (given: {_odd(value)})")


def _odd(value: Any) -> str:
    """What is given in the place of a statistic, in words."""
    if isinstance(value, dict):
        key = next(name for name in value if not isinstance(name, str))
        return f"a dict with the key {key!r}"
    if isinstance(value, int):
        return f"{value}, which has more than 64 bits"
    return shape_of(value)


def restored(plan: Any, tensors: Sequence[Tensor], copy: bool = True) -> Any:
    """The nest of which `flat` made this, with copies of the tensors or with themselves."""
    ((kind, inside),) = plan.items()
    match kind:
        case "tensor":
            return tensors[inside].clone() if copy else tensors[inside]
        case "array":
            return tensors[inside].clone().numpy()
        case "dict":
            return {name: restored(each, tensors, copy) for name, each in inside}
        case "list" | "tuple":
            made = [restored(each, tensors, copy) for each in inside]
            return made if kind == "list" else tuple(made)
    return inside


def widened(value: Any) -> Any:
    """A copy of the nest with all fractions in float64 and all whole numbers in int64, as they are added up."""
    match value:
        case Tensor():
            kind = torch.float64 if value.is_floating_point() else torch.int64
            return value if value.is_complex() else value.detach().to(kind, copy=True)
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf":
            return np.array(value, dtype=np.float64 if value.dtype.kind == "f" else np.int64)
        case dict():
            return {name: widened(each) for name, each in value.items()}
        case list() | tuple():
            return type(value)(widened(each) for each in value)
        case bool():
            return int(value)
    return value


def frozen(value: Any) -> Any:
    """The nest with arrays that cannot be written to; tensors can, and `versions` tells."""
    match value:
        case np.ndarray():
            value = value.view()
            value.flags.writeable = False
        case dict():
            return {name: frozen(each) for name, each in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(frozen(each) for each in value)
    return value


def versions(value: Any) -> list[int]:
    """How often each tensor of a nest has been changed in place."""
    match value:
        case Tensor():
            return [value._version]
        case dict():
            return [number for each in value.values() for number in versions(each)]
        case list() | tuple():
            return [number for each in value for number in versions(each)]
    return []


def added(one: Any, other: Any) -> Any:
    """The sum of two nests of the same form, place by place."""
    match one:
        case dict():
            return {name: added(each, other[name]) for name, each in one.items()}
        case list() | tuple():
            return type(one)(added(a, b) for a, b in zip(one, other, strict=True))
    return one + other


def shape_of(value: Any) -> str:
    """What a nest is made of, in words: dict(xx: float64[100, 100], n: int)."""
    match value:
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        case np.ndarray() | np.generic():
            return f"{value.dtype}{list(value.shape)}"
        case dict():
            return f"dict({', '.join(f'{name}: {shape_of(each)}' for name, each in value.items())})"
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(shape_of, value))})"
    return type(value).__name__


def not_finite(value: Any, where: str = "") -> Iterator[str]:
    """The places of a nest that hold NaN or infinity, in words."""
    match value:
        case Mapping():
            for name, each in value.items():
                yield from not_finite(each, f"{where}[{name!r}]")
        case list() | tuple():
            for place, each in enumerate(value):
                yield from not_finite(each, f"{where}[{place}]")
        case Tensor() | np.ndarray() | np.generic() | float():
            if not torch.as_tensor(value).isfinite().all():
                yield where or "its value"
