"""Batches: the vectorised way and the ordinary way give the same; items of any shape, and streams."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from torrential.data.batches import Batches
from torrential.data.deal import Order
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


# -- batches of any shape ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Word:
    letters: Tensor
    about: dict[str, Any]


def test_dicts_and_dataclasses_are_joined_field_by_field() -> None:
    items = [{"word": Word(torch.full((2,), float(i)), {"length": i, "text": f"w{i}"}), "label": i} for i in range(4)]
    batch = Batches(Listed(items)).fetch(torch.tensor([3, 1]))
    assert batch["label"].tolist() == [3, 1]
    assert isinstance(batch["word"], Word) and batch["word"].letters.tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert batch["word"].about["length"].tolist() == [3, 1] and batch["word"].about["text"] == ["w3", "w1"]


def test_every_kind_of_nest_moves_to_the_device() -> None:
    items = [{"word": Word(torch.ones(2), {"n": 1}), "pair": Pair(torch.ones(1), torch.ones(1)), "name": "a"}] * 2
    batch = Batches(Listed(items), "meta").fetch(torch.arange(2))
    moved = [batch["word"].letters, batch["word"].about["n"], batch["pair"].left]
    assert {tensor.device.type for tensor in moved} == {"meta"} and batch["name"] == ["a", "a"]


def test_columns_as_hugging_face_has_them() -> None:
    class Columns:
        """Looks like datasets.Dataset: a row is a dict, and rows are asked for together."""

        asked: list[list[int]] = []

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Any]:
            raise AssertionError("rows are quicker together")

        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            self.asked.append(indices)
            return [{"text": f"t{i}", "label": i} for i in indices]

    batch = Batches(Subset(Columns(), [5, 4, 3])).fetch(torch.tensor([2, 0]))  # type: ignore[arg-type]
    assert Columns.asked == [[3, 5]]
    assert batch["text"] == ["t3", "t5"] and batch["label"].tolist() == [3, 5]


def test_a_collate_function_of_ones_own() -> None:
    def padded(items: list[Any]) -> Tensor:
        return nn.utils.rnn.pad_sequence(items, batch_first=True)

    batches = Batches(Listed([torch.ones(n) for n in range(1, 5)]), collate=padded)
    assert batches.fetch(torch.tensor([0, 3])).tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]
    whole = Batches(WHOLE, collate=lambda items: sum(int(y) for _, y in items))
    assert whole.fetch(torch.tensor([4, 5])) == 9


def test_a_tensor_data_set_of_any_number_of_tensors() -> None:
    three = Batches(TensorDataset(INPUTS, TARGETS, -TARGETS)).fetch(torch.tensor([4, 2]))
    assert [t.tolist() for t in three[1:]] == [[4, 2], [-4, -2]]


@pytest.mark.parametrize(
    ("items", "collate", "says"),
    [
        ([object()] * 3, None, "Listed cannot be joined into a batch (samples 2 and 0 of training data)"),
        ([torch.ones(1), torch.ones(2), torch.ones(3)], None, "give them equal shapes, or the task a collate function"),
        ([{"a": 1}, {"a": 1}, {"b": 1}], None, "(samples 2 and 0 of training data): 'b'"),
        ([1, 2, 3], lambda items: items[9], "collate on samples 2 and 0 of training data raised IndexError"),
    ],
)
def test_what_cannot_be_joined_is_named(items: list[Any], collate: Any, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        Batches(Listed(items), collate=collate).fetch(torch.tensor([2, 0]))
    assert says in str(caught.value)


def test_a_batch_of_another_form_is_named() -> None:
    batches = Batches(Listed([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}]))
    batches.fetch(torch.tensor([0, 1]))
    batches.fetch(torch.tensor([1]))
    with pytest.raises(BadInput) as caught:
        batches.fetch(torch.tensor([2]))
    assert str(caught.value) == (
        "the batch of sample 2 of training data has another form than those before it (dict(a: Tensor, b: Tensor) "
        "then, dict(a: Tensor) now); give all items the same keys and types"
    )


def test_lists_may_have_an_entry_for_each_sample() -> None:
    batches = Batches(Listed(["a", "b", "c"]))
    assert batches.fetch(torch.arange(3)) == ["a", "b", "c"] and batches.fetch(torch.tensor([1])) == ["b"]


# -- streams ----------------------------------------------------------------------------------------------------------
class Counting(IterableDataset[Any]):
    """Numbers with some noise; it counts how often it was begun."""

    def __init__(self, samples: int) -> None:
        self.samples, self.begun, self.epoch = samples, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.begun += 1
        for number in range(self.samples):
            yield 100 * self.epoch + number, random.random() + float(np.random.rand()) + float(torch.rand(()))


def test_a_stream_is_read_by_position() -> None:
    stream = Counting(50)
    batches = Batches(stream, samples=40, seed=3)
    assert len(batches) == 40
    numbers, noise = batches.fetch(torch.tensor([3, 4]))
    assert numbers.tolist() == [3, 4] and stream.begun == 1
    assert batches.fetch(torch.tensor([5, 11]))[0].tolist() == [5, 11] and stream.begun == 1
    again = batches.fetch(torch.tensor([3, 4]))
    assert stream.begun == 2 and torch.equal(again[1], noise), "what is random in it is the same"
    later = batches.fetch(torch.tensor([3]), epoch=2)
    assert later[0].tolist() == [203] and later[1][0] != noise[0]


def test_reading_a_stream_does_not_disturb_what_is_drawn_outside() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = torch.rand(1)
    Batches(Counting(9), samples=9).fetch(torch.tensor([7]))
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_neighbours_in_a_stream_are_held_so_that_they_can_be_shuffled() -> None:
    stream = Counting(20)
    order = Order(18, seed=1, stream=True, window=8)
    places = order.whole(0)
    assert sorted(places.tolist()) == list(range(18)) and places.tolist() != list(range(18))
    assert [set(piece.tolist()) for piece in places.split(8)] == [
        set(range(8)),
        set(range(8, 16)),
        {16, 17},
    ], "shuffled among themselves"
    batches = Batches(stream, samples=18, window=8)
    for first in range(0, 18, 5):
        mine = order.between(0, first, min(18, first + 5))
        assert torch.equal(mine, places[first : first + 5])
        assert batches.fetch(mine)[0].tolist() == mine.tolist()
    assert stream.begun == 1


def test_a_stream_that_is_shorter_than_said() -> None:
    with pytest.raises(BadInput) as caught:
        Batches(Counting(12), samples=40).fetch(torch.tensor([11, 12]))
    assert str(caught.value) == (
        "the stream of the task's training data ended after 12 samples of epoch 0 (samples: 40); say samples=12, "
        "or let it go on"
    )


def test_what_cannot_be_read_again_or_has_no_length_is_refused() -> None:
    class Once(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return 1, 2

    with pytest.raises(BadInput, match="Once cannot be read again"):
        Batches(Once(), samples=3).fetch(torch.tensor([0]))
    with pytest.raises(BadInput, match="Counting has no length"):
        Batches(Counting(3))
