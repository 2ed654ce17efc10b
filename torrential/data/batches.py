"""Turns indices into batches: one index_select per tensor for tensor data sets, item by item for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from torrential.data.nest import default_collate, form, to_device
from torrential.data.stream import StreamReader
from torrential.errors import BadInput
from torrential.task import Task, is_stream, training_samples
from torrential.usercode import calling

_RESIDENT_BYTES = 2 * 10**9  # a data set up to this size is kept in a GPU's memory
_LISTED = 8  # indices that a message names

Collate = Callable[[list[Any]], Any]


class Batches:
    """Batches of `dataset` on `device`, by index.

    A TensorDataset, also under Subsets, is read vectorised, and from the GPU's memory if that is the device and it is
    small enough. A subclass may have a method `augment`, which is given each batch's inputs; one with its own
    `__getitem__` is read like other data sets: by `__getitems__` where they have it, else item by item, joined by
    `collate`. Streams, of which `samples` are used in an epoch, are read in order; `window` of them are held at once.

    `name` is what errors of the data set's own code call it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device | str = "cpu",
        name: str = "training data",
        collate: Collate | None = None,
        *,
        samples: int | None = None,
        window: int = 1,
        seed: int = 0,
    ) -> None:
        kind, sized = type(dataset).__name__, hasattr(dataset, "__len__")
        if samples is None and not sized:
            raise BadInput(f"{kind} has no length; give its number of samples, or a data set with __len__")
        self.device, self.name, self._own_collate = torch.device(device), name, collate
        self._length = len(dataset) if samples is None else samples  # type: ignore[arg-type]
        self._stream = StreamReader(dataset, self._length, max(1, window), seed, name) if is_stream(dataset) else None
        self._dataset, self._places = _without_subsets(dataset)
        self._form: str | None = None  # of the batches so far
        self._tensors: tuple[Tensor, ...] | None = None
        self._augment: Callable[[Tensor], Tensor] | None = None
        if collate is None and is_vectorised(dataset):
            self._tensors = self._dataset.tensors
            self._augment = getattr(self._dataset, "augment", None)
            if self.device.type == "cuda" and sum(t.nbytes for t in self._tensors) <= _RESIDENT_BYTES:
                self._tensors = tuple(t.to(self.device) for t in self._tensors)
                self._places = None if self._places is None else self._places.to(self.device)

    def __len__(self) -> int:
        return self._length

    @property
    def draws(self) -> bool:
        """Whether reading a batch runs the user's code, which may draw random numbers."""
        return self._tensors is None or self._augment is not None

    def fetch(self, indices: Tensor, epoch: int = 0) -> Any:
        """The batch of the samples at `indices`, of which there is at least one, on the device. `epoch` matters to
        streams alone."""
        assert len(indices), "a batch of nothing"
        if self._tensors is not None:
            return self._select(indices)
        return to_device(self._read(indices, epoch), self.device)

    def _select(self, indices: Tensor) -> Any:
        assert self._tensors is not None
        indices = indices.to(self._tensors[0].device)
        if self._places is not None:
            indices = self._places[indices]
        batch = [to_device(tensor.index_select(0, indices), self.device) for tensor in self._tensors]
        if self._augment is not None:
            with calling(self.name):
                batch[0] = self._augment(batch[0])
        return tuple(batch)

    def _read(self, indices: Tensor, epoch: int) -> Any:
        places = (indices if self._places is None else self._places[indices]).tolist()
        if self._stream is not None:
            items = self._stream.read(places, epoch)
        else:
            many = getattr(self._dataset, "__getitems__", None)
            with calling(self.name):
                items = many(places) if many else [self._dataset[i] for i in places]
        batch = self._collate(items, places)
        found = form(batch)
        if self._form is None:
            self._form = found
        if found != self._form:
            raise BadInput(
                f"the batch of {_listed(places)} of {self.name} has another form than those before it ({self._form} "
                f"then, {found} now); give all items the same keys and types"
            )
        return batch

    def _collate(self, items: list[Any], places: Sequence[int]) -> Any:
        if self._own_collate is not None:
            with calling(f"collate on {_listed(places)} of {self.name}"):
                return self._own_collate(items)
        try:
            return default_collate(items)
        except (TypeError, RuntimeError, KeyError, ValueError) as error:
            kind = type(self._dataset).__name__
            why = " ".join(str(error).split())
            raise BadInput(
                f"the items of {kind} cannot be joined into a batch ({_listed(places)} of {self.name}): {why}; give "
                "them equal shapes, or the task a collate function"
            ) from error


def training_batches(task: Task, device: torch.device | str = "cpu", seed: int = 0) -> Batches:
    """The training data of a task."""
    return Batches(
        task.train, device, "training data", task.collate, samples=task.samples, window=task.shuffle_buffer, seed=seed
    )


def is_vectorised(dataset: Any) -> bool:
    """Whether a data set's batches are cut from its tensors at once, without code of the user's for each item."""
    inner, _ = _without_subsets(dataset)
    return isinstance(inner, TensorDataset) and type(inner).__getitem__ is TensorDataset.__getitem__


def targets_of(task: Task) -> Tensor:
    """The label of each training item."""
    if is_vectorised(task.train):
        inner, places = _without_subsets(task.train)
        found: Any = inner.tensors[1] if len(inner.tensors) == 2 else None
        found = found if found is None or places is None else found[places]
    else:
        with calling("training data"):
            items = [task.train[index] for index in range(training_samples(task))]
        pairs = all(isinstance(item, tuple | list) and len(item) == 2 for item in items)
        found = torch.as_tensor([item[1] for item in items]) if pairs else None
    if found is None or found.dim() != 1 or found.is_floating_point():
        kind = type(task.train).__name__
        raise BadInput(
            f"a partition by labels needs (input, label) pairs with whole numbers as labels (train: {kind}); give "
            "partition a list of index lists"
        )
    return torch.as_tensor(found)


def _without_subsets(dataset: Any) -> tuple[Any, Tensor | None]:
    """The data set under any Subsets, and where in it each index leads (None: to itself)."""
    places: Tensor | None = None
    while type(dataset) is Subset:
        inner = torch.as_tensor(dataset.indices, dtype=torch.long)
        places = inner if places is None else inner[places]
        dataset = dataset.dataset
    return dataset, places


def _listed(places: Sequence[int]) -> str:
    """The samples of a batch in words: samples 3, 17 and 5; of many the first few."""
    if len(places) > _LISTED:
        return f"samples {', '.join(map(str, places[:_LISTED]))} and {len(places) - _LISTED} more"
    *others, last = map(str, places)
    return f"samples {', '.join(others)} and {last}" if others else f"sample {last}"
