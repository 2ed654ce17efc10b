"""What is random in training is a function of the seed and of the samples' place in the run, whatever the strategy.

So strategies that cut joined batches alike end with the same parameters, with dropout and random augmentation too; and
what is done again, by another worker or after a resume, draws the same numbers.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import torrential as tt
from tests.test_equivalence import assert_equal_models, fresh
from torrential.data.deal import Deal, order
from torrential.randomness import DATA, TRAINING, seed_all
from torrential.records import RECORDS
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers

pytestmark = pytest.mark.timeout(120)

SAMPLES, BATCH, EPOCHS = 61, 8, 2  # with one, two and three workers the last batch of an epoch is short
CPU = torch.device("cpu")
WORLDS: dict[str, dict[str, Any]] = {"local": {}, "sim": {"cluster": {"compute": {"seconds_per_sample": 1e-3}}}}


class Noisy(Dataset[Any]):
    """Random augmentation, sample by sample, from each of the generators that user code draws from."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, target = self.inner[index]
        image = image.flip(-1) if random.random() < 0.5 else image
        return image * (1 + 0.1 * np.random.rand()) + 0.1 * torch.randn(image.shape), target


class Shifted(TensorDataset):
    """The same by whole batches."""

    def augment(self, inputs: Tensor) -> Tensor:
        return torch.roll(inputs, random.randrange(3), -1) + 0.1 * torch.randn_like(inputs)


class Dropping(nn.Module):
    """Smooth, with dropout of elements and of channels, and weights in an order of memory of their own, by which
    masks are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.channels, self.elements, self.head = nn.Dropout2d(0.3), nn.Dropout(0.3), nn.Linear(4 * 36, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.elements(self.channels(self.conv(images).tanh()).flatten(1)))  # type: ignore[no-any-return]


def a_task(train: type[Noisy] | type[Shifted] = Noisy) -> tt.Task:
    made = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(SAMPLES, 1, 6, 6, generator=made), torch.randint(4, (SAMPLES,), generator=made)
    held_out = TensorDataset(inputs[:8], targets[:8])
    return tt.Task(
        model=Dropping,
        loss=F.cross_entropy,
        train=Noisy(TensorDataset(inputs, targets)) if train is Noisy else Shifted(inputs, targets),
        validation=held_out,
        test=held_out,
        optimizer=tt.optimizer("sgd", lr=0.05, momentum=0.9),
        batch_size=BATCH,
        epochs=EPOCHS,
    )


def train(out: Path, world: str, strategy: str, workers: int, task: tt.Task | None = None, **options: Any) -> Any:
    served = {"servers": 2} if needs_servers(STRATEGIES[strategy]) else {}
    given = WORLDS[world] | served | {"device": "cpu", "progress": False} | options
    return tt.train(task or a_task(), strategy, workers=workers, world=world, out=out, **given)


def plain(task: tt.Task, workers: int) -> nn.Module:
    """One plain loop that cuts each joined batch as so many workers do, and seeds every piece by its place."""
    model = fresh(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    deal = Deal(SAMPLES, seed=0)
    while deal.epoch < EPOCHS:
        optimizer.zero_grad()
        place = deal.cursor
        for share in [deal.share(member, workers, BATCH) for member in range(workers)]:
            if len(share.indices):
                seed_all(CPU, 0, DATA, deal.epoch, place)
                inputs, targets = (
                    torch.stack(c) for c in zip(*[task.train[int(i)] for i in share.indices], strict=True)
                )
                seed_all(CPU, 0, TRAINING, deal.epoch, place)
                (task.loss(model(inputs), targets) * len(share.indices) / share.total).backward()
                place += len(share.indices)
        optimizer.step()
        deal.advance(share.total)
    return model


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bsp_is_allreduce_with_dropout_and_random_augmentation(workers: int, world: str, tmp_path: Path) -> None:
    ways = [train(tmp_path / name, world, name, workers) for name in ("allreduce", "bsp")]
    steps = EPOCHS * -(-SAMPLES // (workers * BATCH))
    assert [way.summary.steps for way in ways] == [steps, steps]
    for way in ways:
        assert_equal_models(way.model, plain(a_task(), workers))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("bsp", {}), ("ssp", {}), ("backup", {"backups": 0}), ("downpour", {"server": "task"})],
    ids=["bsp", "ssp", "backup", "downpour"],
)
def test_one_worker_is_plain_training_where_the_last_batch_is_short(
    strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    alone = train(tmp_path / strategy, "sim", strategy, 1, **options)
    assert_equal_models(alone.model, plain(a_task(), 1))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("bsp", {}), ("ssp", {"staleness": 0}), ("allreduce", {"workers": 1, "accumulate": 3})],
    ids=["bsp", "ssp", "accumulate"],
)
def test_augmentation_by_whole_batches(strategy: str, options: dict[str, Any], tmp_path: Path) -> None:
    task = a_task(Shifted)
    reference = train(tmp_path / "reference", "sim", "allreduce", 3, task)
    other = train(tmp_path / strategy, "sim", strategy, **{"workers": 3, "task": task} | options)
    assert_equal_models(reference.model, other.model)


@pytest.mark.parametrize("world", WORLDS)
def test_a_resumed_bsp_is_an_allreduce_that_was_not_interrupted(world: str, tmp_path: Path) -> None:
    """Resumed in the middle of the first epoch."""
    whole = train(tmp_path / "allreduce", world, "allreduce", 2)
    part = train(tmp_path / "bsp", world, "bsp", 2, evaluate_every=2)
    for checkpoint in sorted((part.out / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)
    lines = (part.out / RECORDS).read_bytes().splitlines(keepends=True)
    (part.out / RECORDS).write_bytes(b"".join(line for line in lines if b'"summary"' not in line))
    resumed = tt.train(a_task(), resume=part.out, progress=False)
    assert resumed.summary.steps == whole.summary.steps
    assert_equal_models(resumed.model, whole.model)


# -- deaths ---------------------------------------------------------------------------------------------------------
class Telling(TensorDataset):
    """It tells which samples it is asked for, and what is drawn for them."""

    asked: list[tuple[list[int], float]]

    def augment(self, inputs: Tensor) -> Tensor:
        self.asked.append((inputs[:, 0].long().tolist(), float(torch.rand(()))))
        return inputs


@pytest.mark.parametrize(
    "strategy",
    [name for name, k in STRATEGIES.items() if "sim" in k.worlds and k().has_whole_model() and name != "fedavg"],
)  # clients of a dead worker are left out
def test_draws_are_those_of_the_samples_whoever_has_them(strategy: str, tmp_path: Path) -> None:
    """A worker dies, so others take its samples, and steps are done again; another is slow, so leases go round."""
    numbers = torch.arange(200.0)
    data = Telling(torch.stack([numbers, numbers / 200], 1), (numbers % 2).long())
    data.asked = []
    held_out = TensorDataset(data.tensors[0][:4], data.tensors[1][:4])
    task = tt.Task(
        model=lambda: nn.Linear(2, 2),
        loss=F.cross_entropy,
        train=data,
        validation=held_out,
        test=held_out,
        optimizer=tt.optimizer("sgd", lr=1e-6),
        batch_size=BATCH,
    )
    cluster = {
        "compute": {"seconds_per_sample": 1e-3, "spread": "lognormal"},
        "stragglers": [{"worker": 2, "factor": 3.0}],
        "faults": [{"kind": "crash", "worker": 1, "at": 0.05, "lasts": 0.05}],
        "detection": 0.01,
    }
    result = train(tmp_path / "run", "sim", strategy, 3, task, epochs=EPOCHS, cluster=cluster)
    assert result.summary.samples == EPOCHS * 200 and result.summary.events > 0
    orders = [order(200, 0, epoch).tolist() for epoch in range(EPOCHS)]
    asked = [what for what in data.asked if what[0] != [0, 1]]  # that one is tried before the run
    read = EPOCHS if STRATEGIES[strategy].uses_rate else 1  # sandblaster keeps what it has read
    assert sum(len(samples) for samples, _ in asked) >= read * 200
    for samples, drawn in asked:
        places = [orders[epoch].index(samples[0]) for epoch in range(EPOCHS)]
        (epoch,) = (e for e, at in enumerate(places) if orders[e][at : at + len(samples)] == samples)
        seed_all(CPU, 0, DATA, epoch, places[epoch])
        assert float(torch.rand(())) == drawn, (epoch, places[epoch])
