"""Golden equivalences for data and steps of the user's own: dict batches of any length, grouped by it, and streams.

Under every strategy that waits, many workers are one plain loop on the joined batches, to 1e-6; under all of them one
worker is. Real processes read with loaders, the simulation without, and both give the same.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import torrential as tt
from tests.test_contract import JOINED, PLAIN, pairs, train
from tests.test_equivalence import TOLERANCE, assert_equal_models, files_below, fresh
from torrential.data.deal import Deal, Order
from torrential.randomness import DATA, TRAINING, seed_all
from torrential.records import RECORDS, Evaluation, Step
from torrential.task import Lengths

NO_STEP = {"pipeline", "pipedream"}  # which needs outputs and targets apart

pytestmark = pytest.mark.timeout(120)

SAMPLES, BATCH, STEPS = 70, 8, 13  # over an epoch's end, with its short last batch
CPU = torch.device("cpu")


def sentence(number: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(number)
    words = torch.randint(1, 20, (2 + number % 7,), generator=made)
    return {"words": words, "label": int(words.sum()) % 3}


class Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sentence(index)


class Noisy(Sentences):
    """Random augmentation, from each of the generators that user code draws from: words are left out."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = sentence(index)
        kept = torch.rand(len(item["words"])) + random.random() + float(np.random.rand()) > 0.5
        return item | {"words": torch.where(kept, item["words"], 0)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from map(sentence, range(SAMPLES + 5))


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    words = nn.utils.rnn.pad_sequence([item["words"] for item in items], batch_first=True)
    return {"words": words, "label": torch.tensor([item["label"] for item in items])}


class Bag(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table, self.head, self.dropout = nn.Embedding(20, 6), nn.Linear(6, 3), nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        there = (words > 0).unsqueeze(2)
        mean = (self.table(words) * there).sum(1) / there.sum(1).clamp(min=1)
        return self.head(self.dropout(mean.tanh()))  # type: ignore[no-any-return]


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    outputs = model(batch["words"])
    right = (outputs.argmax(1) == batch["label"]).float().mean()
    return {"loss": F.cross_entropy(outputs, batch["label"]), "right": right}


def make(train: Dataset[Any] | None = None, dropout: float = 0.0, **changes: Any) -> tt.Task:
    held_out = [sentence(number) for number in range(100, 120)]
    given: dict[str, Any] = dict(
        model=lambda: Bag(dropout),
        step=step,
        collate=padded,
        metric="right",
        train=train or Sentences(),
        validation=held_out,
        test=held_out,
        optimizer=tt.optimizer("sgd", lr=0.05, momentum=0.9),
        batch_size=BATCH,
        epochs=5,
    )
    return tt.Task(**given | changes)


KINDS: dict[str, Callable[[], tt.Task]] = {  # all of them with dict batches, padded, and a step of their own
    "grouped": lambda: make(length=lambda item: len(item["words"])),
    "stream": lambda: make(Stream(), samples=SAMPLES, shuffle_buffer=16),
}


SAME_IN_BOTH = "local", "grouped"  # the order is made alike in both worlds: it is tried in one


def order_of(kind: str, joined: int) -> Order:
    lengths = Lengths([len(sentence(i)["words"]) for i in range(SAMPLES)]) if kind == "grouped" else None
    stream = kind == "stream"
    return Order(SAMPLES, 0, lengths, joined, stream=stream, window=16 if stream else 0)


def plain(task: tt.Task, order: Order, joined: int, steps: int = STEPS, pieces: int = 1) -> nn.Module:
    """A loop as people write it, on joined batches in the order of a run with seed 0; every piece is seeded by its
    place."""
    model, deal = fresh(task), Deal(SAMPLES, 0, order=order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        for share in [deal.share(piece, pieces, joined // pieces) for piece in range(pieces)]:
            for batch in share.batches:
                seed_all(CPU, 0, DATA, batch.epoch, batch.first)
                dataset: Any = Sentences() if order.stream else task.train
                items = padded([dataset[i] for i in batch.indices.tolist()])
                seed_all(CPU, 0, TRAINING, batch.epoch, batch.first)
                (step(model, items)["loss"] * batch.weight).backward()
        optimizer.step()
        deal.advance(share.total)
    return model


def loaders(world: str) -> dict[str, Any]:
    return {"loaders": 2} if world == "local" else {}


@pytest.mark.parametrize(
    ("strategy", "world", "kind"),
    [
        (strategy, world, kind)
        for strategy, world in pairs(sorted(JOINED.keys() - NO_STEP))
        for kind in KINDS
        if (world, kind) != SAME_IN_BOTH
    ],
)
def test_workers_that_wait_are_a_plain_loop_on_joined_batches(
    strategy: str, world: str, kind: str, tmp_path: Path
) -> None:
    task = KINDS[kind]()
    options = JOINED[strategy] | loaders(world)
    steps = 4 if strategy == "backup" else STEPS  # it deals no joined batches, so the end of an epoch is another
    result = train(tmp_path / "run", world, strategy, 2, task, steps=steps, **options)
    assert result.summary.steps == steps
    assert_equal_models(result.model, plain(task, order_of(kind, 2 * BATCH), 2 * BATCH, steps), TOLERANCE)


@pytest.mark.parametrize(("strategy", "world"), pairs(sorted(PLAIN.keys() - NO_STEP)))
def test_one_worker_is_a_plain_loop(strategy: str, world: str, tmp_path: Path) -> None:
    task = KINDS["stream"]()
    result = train(tmp_path / "run", world, strategy, 1, task, steps=STEPS, **PLAIN[strategy] | loaders(world))
    assert_equal_models(result.model, plain(task, order_of("stream", BATCH), BATCH), TOLERANCE)
    evaluation = next(r for r in result.history if isinstance(r, Evaluation))
    assert evaluation.figures == {"right": evaluation.value} and result.summary.metric == "right"
    steps = [r for r in result.history if isinstance(r, Step)]
    assert steps and all(record.figures.keys() == {"right"} for record in steps)
    assert all(0 <= record.figures["right"] <= 1 for record in steps)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_random_augmentation_is_the_same_with_any_number_of_loaders(count: int, tmp_path: Path) -> None:
    task = make(Noisy(), dropout=0.3)
    result = train(tmp_path / "run", "local", "allreduce", 2, task, steps=STEPS, loaders=count)
    assert_equal_models(result.model, plain(task, order_of("dicts", 2 * BATCH), 2 * BATCH, pieces=2), TOLERANCE)


@pytest.mark.parametrize("strategy", ["ssp", "downpour", "backup"])
def test_every_sample_is_used_once_where_leases_are_taken_ahead(strategy: str, tmp_path: Path) -> None:
    result = train(tmp_path / "run", "local", strategy, 2, make(), epochs=3, loaders=2)
    assert result.summary.samples == 3 * SAMPLES


@pytest.mark.parametrize("steps", [5, 26])
def test_leases_that_were_taken_ahead_are_given_back(steps: int, tmp_path: Path) -> None:
    """Whoever waits for the last samples would wait for ever."""
    result = train(tmp_path / "run", "local", "downpour", 2, make(), epochs=3, steps=steps, loaders=2)
    assert steps <= result.summary.steps <= steps + 1


# -- resuming ---------------------------------------------------------------------------------------------------------
def cut_back(run: Path) -> None:
    """The run as if it had been killed after its first checkpoint."""
    for checkpoint in sorted((run / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)
    lines = (run / RECORDS).read_bytes().splitlines(keepends=True)
    (run / RECORDS).write_bytes(b"".join(line for line in lines if b'"summary"' not in line))


@pytest.mark.parametrize(
    ("strategy", "world", "kind", "workers"),
    [("allreduce", "local", "stream", 2), ("bsp", "sim", "stream", 2), ("downpour", "local", "stream", 1),
     ("allreduce", "sim", "grouped", 2), ("ddp", "local", "grouped", 2)],
)  # fmt: skip
def test_a_resumed_run_is_one_that_was_not_interrupted(
    strategy: str, world: str, kind: str, workers: int, tmp_path: Path
) -> None:
    task = dataclasses.replace(KINDS[kind](), epochs=2)
    options = loaders(world) | {"evaluate_every": 4}
    whole = train(tmp_path / "whole", world, strategy, workers, task, **options)
    part = train(tmp_path / "part", world, strategy, workers, task, **options)
    cut_back(part.out)
    tt.train(task, resume=part.out, progress=False)
    last = f"step-{whole.summary.steps:08d}"
    assert files_below(part.out / "checkpoints" / last) == files_below(whole.out / "checkpoints" / last)


# -- streams without a length -----------------------------------------------------------------------------------------
def test_a_stream_without_a_length_takes_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    task = make(Stream())
    result = train(tmp_path / "run", "sim", "allreduce", 2, task, steps=4, evaluate_every=2)
    assert (result.summary.steps, result.summary.samples) == (4, 4 * 2 * BATCH)
    assert_equal_models(result.model, plain(task, Order(64, 0, stream=True), 2 * BATCH, 4))
    cut_back(result.out)
    resumed = tt.train(task, resume=result.out, progress=False)
    assert_equal_models(resumed.model, result.model, 0.0)
    with pytest.raises(tt.TorrentialError, match=r"train is a stream without a length \(Stream\); give the task"):
        train(tmp_path / "other", "sim", "allreduce", 2, task)


@pytest.mark.parametrize("count", [0, 2])
def test_a_stream_that_is_shorter_than_said_ends_the_run_with_numbers(count: int, tmp_path: Path) -> None:
    task = make(Stream(), samples=100)
    with pytest.raises(tt.TorrentialError, match=r"ended after 75 samples of epoch 0 \(samples: 100\); say samples=75"):
        train(tmp_path / "run", "local", "allreduce", 2, task, loaders=count)
