"""Batches: the vectorised way and the ordinary way give the same; what is not a pair is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from torrential.data.batches import Batches
from torrential.errors import BadInput

INPUTS, TARGETS = torch.arange(60.0).reshape(20, 3), torch.arange(20)
WHOLE = TensorDataset(INPUTS, TARGETS)


class Listed(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Doubling(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        inputs, target = super().__getitem__(index)  # type: ignore[no-untyped-call]
        return inputs * 2, target


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (WHOLE, [3, 0, 3]),
        (Subset(WHOLE, range(5, 15)), [8, 5, 8]),
        (Subset(Subset(WHOLE, list(range(19, -1, -1))), [4, 5, 6, 7]), [12, 15, 12]),
        (Subset(WHOLE, torch.arange(5, 15)), [8, 5, 8]),  # type: ignore[arg-type]
        (Listed(list(zip(INPUTS, TARGETS, strict=True))), [3, 0, 3]),
        (Listed([[x, int(y)] for x, y in zip(INPUTS, TARGETS, strict=True)]), [3, 0, 3]),
        (Subset(Listed(list(zip(INPUTS, TARGETS, strict=True))), [4, 5, 6, 7]), [7, 4, 7]),
        (ConcatDataset([WHOLE, WHOLE]), [3, 0, 3]),
    ],
)
def test_fetches(dataset: Dataset[Any], expected: list[int]) -> None:
    batches = Batches(dataset)
    assert len(batches) == len(dataset)  # type: ignore[arg-type]
    inputs, targets = batches.fetch(torch.tensor([3, 0, 3]))
    assert torch.equal(inputs, INPUTS[expected]) and torch.equal(targets, TARGETS[expected])


def test_a_subclass_with_its_own_items_keeps_them() -> None:
    for dataset in (Doubling(INPUTS, TARGETS), Subset(Doubling(INPUTS, TARGETS), range(20))):
        assert torch.equal(Batches(dataset).fetch(torch.tensor([2, 1]))[0], INPUTS[[2, 1]] * 2)


class Negating(TensorDataset):
    def augment(self, inputs: Tensor) -> Tensor:
        return -inputs


def test_a_subclass_may_augment_whole_batches() -> None:
    for dataset in (Negating(INPUTS, TARGETS), Subset(Negating(INPUTS, TARGETS), range(20))):
        inputs, targets = Batches(dataset).fetch(torch.tensor([2, 1]))
        assert torch.equal(inputs, -INPUTS[[2, 1]]) and targets.tolist() == [2, 1]


def test_getitems_is_used() -> None:
    class Many(Listed):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(torch.tensor(-i), i) for i in indices]

    assert Batches(Many([0] * 9)).fetch(torch.tensor([4, 2]))[0].tolist() == [-4, -2]


def test_nested_inputs_move_to_the_device() -> None:
    items = [({"a": torch.ones(2), "b": [torch.zeros(1)]}, Pair(torch.ones(1), torch.ones(2))) for _ in range(3)]
    inputs, targets = Batches(Listed(items), "meta").fetch(torch.arange(3))
    assert inputs["a"].shape == (3, 2) and inputs["b"][0].shape == (3, 1) and targets.right.shape == (3, 2)
    assert {t.device.type for t in (inputs["a"], inputs["b"][0], targets.left)} == {"meta"}


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (torch.ones(2), "Listed gave a Tensor"),
        ((1, 2, 3), "Listed gave a tuple of 3"),
        ({"x": 1, "y": 2}, "Listed gave a dict"),
        ((1,), "Listed gave a tuple of 1"),
        ((object(), 1), "cannot be joined into a batch"),
    ],
)
def test_refuses_what_is_not_a_pair(item: Any, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        Batches(Listed([item])).fetch(torch.tensor([0]))
    assert says in str(caught.value)


def test_refuses_other_data() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield 1, 2

    with pytest.raises(BadInput, match="Stream has no length"):
        Batches(Stream())
    with pytest.raises(BadInput, match="TensorDataset of 3 tensors"):
        Batches(TensorDataset(INPUTS, INPUTS, TARGETS))
    with pytest.raises(BadInput, match="equal shapes"):
        Batches(Listed([(torch.ones(1), 0), (torch.ones(2), 0)])).fetch(torch.tensor([0, 1]))
