"""Turns indices into batches: one index_select per tensor for tensor data sets, item by item for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from torrential.errors import BadInput
from torrential.usercode import calling

_RESIDENT_BYTES = 2 * 10**9  # a data set up to this size is kept in a GPU's memory


class Batches:
    """Batches of `dataset` on `device`, by index.

    A TensorDataset, also under Subsets, is read vectorised, and from the GPU's memory if that is the device and it is
    small enough. A subclass may have a method `augment`, which is given each batch's inputs; one with its own
    `__getitem__` is read like other data sets: by `__getitems__` where they have it, else item by item.

    `name` is what errors of the data set's own code call it.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device | str = "cpu", name: str = "training data") -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            kind = type(dataset).__name__
            raise BadInput(
                f"{kind} has no length, so it cannot be dealt out; give a data set with __len__ and __getitem__"
            )
        self.device, self.name = torch.device(device), name
        self._length = len(dataset)
        self._dataset, self._places = _without_subsets(dataset)
        self._tensors: tuple[Tensor, ...] | None = None
        self._augment: Callable[[Tensor], Tensor] | None = None
        if isinstance(self._dataset, TensorDataset) and type(self._dataset).__getitem__ is TensorDataset.__getitem__:
            self._tensors = self._dataset.tensors
            if len(self._tensors) != 2:
                raise BadInput(
                    f"items must be (input, target) pairs (got a TensorDataset of {len(self._tensors)} tensors)"
                )
            self._augment = getattr(self._dataset, "augment", None)
            if self.device.type == "cuda" and sum(t.nbytes for t in self._tensors) <= _RESIDENT_BYTES:
                self._tensors = tuple(t.to(self.device) for t in self._tensors)
                self._places = None if self._places is None else self._places.to(self.device)

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: Tensor) -> tuple[Any, Any]:
        """The (inputs, targets) at `indices`, of which there is at least one."""
        assert len(indices), "a batch of nothing"
        if self._tensors is not None:
            indices = indices.to(self._tensors[0].device)
        if self._places is not None:
            indices = self._places[indices]
        if self._tensors is not None:
            inputs, targets = (tensor.index_select(0, indices) for tensor in self._tensors)
        else:
            inputs, targets = self._collate(indices.tolist())
        inputs, targets = _move(inputs, self.device), _move(targets, self.device)
        if self._augment is not None:
            with calling(self.name):
                inputs = self._augment(inputs)
        return inputs, targets

    def _collate(self, indices: list[int]) -> tuple[Any, Any]:
        many = getattr(self._dataset, "__getitems__", None)
        with calling(self.name):
            items = many(indices) if many else [self._dataset[i] for i in indices]
        kind = type(self._dataset).__name__
        for item in items:
            if not (isinstance(item, tuple | list) and len(item) == 2):
                got = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
                raise BadInput(f"items must be (input, target) pairs ({kind} gave a {got}); return two values")
        try:
            inputs, targets = default_collate(items)
        except (TypeError, RuntimeError, KeyError) as error:
            raise BadInput(
                f"the items of {kind} cannot be joined into a batch: {error}; give them equal shapes"
            ) from error
        return inputs, targets


def _without_subsets(dataset: Any) -> tuple[Any, Tensor | None]:
    """The data set under any Subsets, and where in it each index leads (None: to itself)."""
    places: Tensor | None = None
    while type(dataset) is Subset:
        inner = torch.as_tensor(dataset.indices, dtype=torch.long)
        places = inner if places is None else inner[places]
        dataset = dataset.dataset
    return dataset, places


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return type(value)({name: _move(v, device) for name, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(v, device) for v in value))
    if isinstance(value, tuple | list):
        return type(value)(_move(v, device) for v in value)
    return value
