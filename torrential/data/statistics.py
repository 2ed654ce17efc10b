"""Statistics: nests of dicts, lists, tuples, tensors, arrays and numbers that can be added, sent and saved.

flat(nest)             what it is made of, as plain data, and its tensors: what letters and checkpoints hold
restored(plan, ...)    the nest again
"""

from __future__ import annotations

import dataclasses
import zlib
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
    if isinstance(value, list | tuple):
        return f"{shape_of(value)}, a {'list' if isinstance(value, list) else 'tuple'} of its own class"
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
            made = value if value.is_complex() else value.detach().to(kind, copy=True)
            return _with_sign(made) if value.dtype == torch.uint64 else made
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf":
            array = np.array(value, dtype=np.float64 if value.dtype.kind == "f" else np.int64)
            return _with_sign(array) if value.dtype == np.uint64 else array
        case dict():
            return {name: widened(each) for name, each in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
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


def checksum(value: Any, start: int = 0, within: bool = False) -> int:
    """A checksum of the bytes of all arrays and tensors of a nest, and of those that its objects have as attributes.
    `within` an object, other objects are not looked into."""
    match value:
        case Tensor() | np.ndarray():
            return _checksum(value, start)
        case Mapping():
            parts = list(value.values())
        case list() | tuple():
            parts = list(value)
        case _:
            parts, within = [] if within else _attributes(value), True
    for part in parts:
        start = checksum(part, start, within)
    return start


PIECE = 1 << 20  # bytes of an array that may have to be copied at a time


def _checksum(array: Tensor | np.ndarray[Any, Any], start: int) -> int:
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.is_quantized:
            return start
        array = array.detach().resolve_conj().resolve_neg()
    elif array.dtype.hasobject:
        return start
    if array.nbytes:
        array = array.reshape(1) if array.ndim == 0 else array
        step = max(1, PIECE * len(array) // array.nbytes)
        for first in range(0, len(array), step):
            start = zlib.crc32(_bytes(array[first : first + step]), start)
    return start


def _bytes(array: Tensor | np.ndarray[Any, Any]) -> memoryview:
    if isinstance(array, Tensor):
        return array.contiguous().view(-1).view(torch.uint8).numpy(force=True).data
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _attributes(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def added(one: Any, other: Any) -> Any:
    """The sum of two nests of the same form, place by place."""
    match one:
        case dict():
            return {name: added(each, other[name]) for name, each in one.items()}
        case list() | tuple():
            return type(one)(added(a, b) for a, b in zip(one, other, strict=True))
    total = one + other
    if _is_beyond(one, other, total):
        raise BadInput(BEYOND)
    return total


BEYOND = "the sum of whole numbers in the statistic is beyond 64 bits; return them as float64"


def _is_beyond(one: Any, other: Any, total: Any) -> bool:
    """Whether a sum of whole numbers has more than 64 bits: in int64 it has wrapped, and has neither's sign."""
    match total:
        case Tensor() if total.is_floating_point():
            return False
        case np.ndarray() | np.generic() if total.dtype.kind != "i":
            return False
        case Tensor() | np.ndarray() | np.generic():
            return bool((((one ^ total) & (other ^ total)) < 0).any())
        case int():
            return not -(1 << 63) <= total < 1 << 63
    return False


def _with_sign(array: Any) -> Any:
    """What was made of whole numbers without a sign."""
    if (array < 0).any():
        raise BadInput(BEYOND)
    return array


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
    for place, leaf in _places(value, where):
        is_number = isinstance(leaf, Tensor | np.ndarray | np.generic | float)
        if is_number and not torch.as_tensor(leaf).isfinite().all():
            yield place


def not_addable(value: Any) -> Iterator[str]:
    """What of a nest cannot be added, and where, in words."""
    for where, leaf in _places(value):
        if isinstance(leaf, str | None):
            yield f"{'None' if leaf is None else 'a text'} in {where}"


def _places(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a nest that is no container, with its place in words."""
    match value:
        case Mapping():
            for name, each in value.items():
                yield from _places(each, f"{where}[{name!r}]")
        case list() | tuple():
            for place, each in enumerate(value):
                yield from _places(each, f"{where}[{place}]")
        case _:
            yield where or "its value", value
