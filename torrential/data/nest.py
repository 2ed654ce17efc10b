"""Nests: batches and items of any shape, made of tensors, numbers, texts, dicts, tuples, lists and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map


@runtime_checkable
class DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


def default_collate(items: Sequence[Any]) -> Any:
    """Join items into a batch as torch's default_collate does; dataclasses, wherever in them, field by field."""
    return torch_collate(list(items), collate_fn_map=_COLLATE)


def _collate_dataclass(items: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    columns = {field.name: [getattr(item, field.name) for item in items] for field in _fields(items[0])}
    joined = {name: torch_collate(column, collate_fn_map=collate_fn_map) for name, column in columns.items()}
    return dataclasses.replace(items[0], **joined)


_COLLATE: dict[Any, Any] = {**default_collate_fn_map, DataclassInstance: _collate_dataclass}


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(value) if field.init]


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device. On the way to a GPU they pass through pinned memory, so that no caller
    waits for the copy. What has a method `to` of its own is moved by that."""
    if device.type == "cpu":
        return batch
    pin = device.type == "cuda"

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.pin_memory() if pin and value.device.type == "cpu" else value).to(device, non_blocking=True)
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return mapped(move, batch)


def channels_last(batch: Any) -> Any:
    """A batch whose images lie in memory pixel by pixel, as many a convolution likes it best; they look the same."""

    def lay_out(value: Any) -> Any:
        image = isinstance(value, Tensor) and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if image else value

    return mapped(lay_out, batch)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same nest with `function` applied to everything that is no container."""
    if isinstance(value, Tensor | str | bytes):
        return function(value)
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        clone.update({name: mapped(function, each) for name, each in value.items()})
        return clone
    if isinstance(value, Mapping):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(function, each) for each in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(function, each) for each in value)
    if isinstance(value, DataclassInstance) and not isinstance(value, type):
        changed = {field.name: mapped(function, getattr(value, field.name)) for field in _fields(value)}
        return dataclasses.replace(value, **changed)
    return function(value)


def form(value: Any) -> str:
    """What a batch is made of, in words: dict(input_ids: Tensor, labels: Tensor). Two batches of one task have the same
    form; lists, which may have an entry for each sample, are described by what is in them and not by their length."""
    if isinstance(value, Tensor | str | bytes):
        return "Tensor" if isinstance(value, Tensor) else type(value).__name__
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"{kind}({', '.join(sorted(f'{name}: {form(each)}' for name, each in value.items()))})"
    if isinstance(value, tuple):
        return f"{kind}({', '.join(map(form, value))})"
    if isinstance(value, list):
        return f"list of {' and '.join(sorted(set(map(form, value)))) or 'nothing'}"
    if isinstance(value, DataclassInstance) and not isinstance(value, type):
        return f"{kind}({', '.join(f'{f.name}: {form(getattr(value, f.name))}' for f in _fields(value))})"
    return kind
