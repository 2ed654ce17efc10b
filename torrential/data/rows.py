"""Rows to take statistics of, in any of these forms; a worker reads them in portions.

(x, y)             arrays, tensors or sparse matrices, or a nest of them, each a row for a sample: read where they lie
data set, Task     items, collated as a task's training data is
[read, read, ...]  functions that each read some rows, of a file or a part of one: a portion each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from torrential.data.batches import Batches
from torrential.data.nest import mapped
from torrential.errors import BadInput
from torrential.task import Task, is_stream
from torrential.usercode import calling


class Rows(Protocol):
    """Rows that can be read in portions."""

    in_place: bool  # whether reading costs nothing, so that there is nothing to keep

    def __len__(self) -> int:
        """The number of rows, or of functions that read them."""

    def read(self, first: int, last: int) -> Any: ...


class ArrayRows:
    """The rows of arrays."""

    in_place = True

    def __init__(self, arrays: Any) -> None:
        lengths = {int(array.shape[0]) for array in leaves(arrays)}
        if len(lengths) != 1:
            raise BadInput(f"arrays must have the same number of rows each (given: {sorted(lengths)})")
        self._arrays, self._length = arrays, lengths.pop()

    def __len__(self) -> int:
        return self._length

    def read(self, first: int, last: int) -> Any:
        return mapped(lambda array: array[first:last], self._arrays)


class ItemRows:
    """The items of a data set."""

    in_place = False

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._collate = dataset, collate
        self._batches: Batches | None = None  # made where it is read

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, first: int, last: int) -> Any:
        if self._batches is None:
            self._batches = Batches(self._dataset, "cpu", "data", self._collate)
        return self._batches.fetch(torch.arange(first, last))


class PartRows:
    """Rows that are read by functions, each a part of them."""

    in_place = False

    def __init__(self, readers: Sequence[Callable[[], Any]]) -> None:
        self._readers = readers

    def __len__(self) -> int:
        return len(self._readers)

    def read(self, first: int, last: int) -> Any:
        assert last == first + 1, "a portion is what one function reads"
        with calling(f"reader {first}", whose="the data"):
            return self._readers[first]()


def rows_of(data: Any) -> Rows:
    """The rows of an argument in any of the forms above."""
    if isinstance(data, Task):
        if is_stream(data.train):
            raise BadInput("a stream has no rows to read again; give a data set with __len__ and __getitem__")
        return ItemRows(data.train, data.collate)
    if isinstance(data, list) and any(callable(each) for each in data):
        odd = next((type(each).__name__ for each in data if not callable(each)), None)
        if odd is not None:
            raise BadInput(f"a list of functions that read rows has {odd} in it; give functions alone, or arrays alone")
        return PartRows(data)
    rows: Rows
    if _is_array(data) or (isinstance(data, dict | tuple | list) and data and all(map(_is_array, leaves(data)))):
        rows = ArrayRows(data)
    elif hasattr(data, "to_numpy"):
        raise BadInput(f"rows of a {type(data).__name__} cannot be cut out by number; give data.to_numpy()")
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, dict | str | np.ndarray):
        rows = ItemRows(data, None)
    else:
        raise BadInput(
            f"no rows can be read from {type(data).__name__}; give arrays, a nest of them with as many rows each, a "
            "data set, a task, or a list of functions that read some rows each"
        )
    if not len(rows):
        raise BadInput("there are no rows (0 given); give at least one")
    return rows


def _is_array(value: Any) -> bool:
    """Whether it has rows that can be cut out, as tensors, numpy's arrays and scipy's sparse matrices have."""
    return hasattr(value, "dtype") and bool(getattr(value, "shape", ()))


def leaves(value: Any) -> Iterator[Any]:
    """Everything in a nest that is no container."""
    found: list[Any] = []
    mapped(found.append, value)
    return iter(found)
