"""How much memory a worker of a pipeline takes, and a model that is too large for one worker.

python -m benchmarks.stage_memory
python -m benchmarks.stage_memory --limit 1000

Without --limit: the PSS of every worker, the highest after the first steps, with 1, 2 and 4 stages, and with
copies. A part of it is the process itself, which does not shrink with the model: `empty` is a worker with a model of
next to nothing. With --limit MB, every worker refuses itself more private memory than that (RLIMIT_DATA), from before
it takes its part of the model on, and the same task is tried with 1 and with 4 stages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from benchmarks.memory import pss, tree
from torrential.errors import TorrentialError
from torrential.records import Step
from torrential.strategies.pipeline import Pipeline

WIDTH, BATCH, MICROBATCHES, STEPS, SETTLED = 1024, 64, 8, 6, 3
MB = 1 << 20


def task(layers: int, width: int = WIDTH) -> tt.Task:
    """Equal layers, and Adam: four numbers for each parameter, with its gradient."""

    def model() -> nn.Sequential:
        return nn.Sequential(*chain(*((nn.Linear(width, width), nn.ReLU()) for _ in range(layers))))

    inputs = torch.randn(4 * BATCH, width, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs)
    return tt.Task(
        model=model,
        loss=F.mse_loss,
        metric=F.mse_loss,
        maximize=False,
        train=data,
        validation=TensorDataset(inputs[:8], inputs[:8]),
        test=TensorDataset(inputs[:8], inputs[:8]),
        optimizer=tt.optimizer("adam", lr=1e-4),
        batch_size=BATCH,
        name=f"{layers} layers",
    )


class WorkerMemory(tt.Listener):
    """Notes the most memory that each worker takes once training is under way."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}

    def record(self, record: Any) -> None:
        if not isinstance(record, Step) or record.step < SETTLED:
            return
        for pid in tree(os.getpid()):
            with contextlib.suppress(OSError):  # it has ended
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("tt-worker"):
                    self.highest[name] = max(self.highest.get(name, 0), pss(pid))


class Limited(Pipeline, frozen=True, kw_only=True):
    """A pipeline whose workers refuse themselves more private memory than `limit`."""

    name: ClassVar[str] = "limited pipeline"
    limit: int = 0
    """Bytes of RLIMIT_DATA."""

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))
        return super().part(model, rank, workers)


def train(given: tt.Task, strategy: Pipeline, workers: int, listeners: list[tt.Listener]) -> float:
    """The last loss on validation data."""
    options: dict[str, Any] = {"device": "cpu", "progress": False, "threads": 1, "evaluate_every": 1000}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        result = tt.train(given, strategy, workers=workers, steps=STEPS, out=out, listeners=listeners, **options)
    assert result.summary.value is not None
    return result.summary.value


def measure(layers: int) -> None:
    print(f"{layers} layers, {layers * WIDTH * (WIDTH + 1) * 4 / MB:.0f} MB of parameters, Adam")
    cases = [(1, False), (2, False), (4, False), (4, True)]
    empty = _highest(task(4, width=8), 1, False)
    print(f"{'empty':<24} {empty / MB:6.0f} MB")
    whole = 0
    for stages, copies in cases:
        most = _highest(task(layers), stages, copies)
        whole = whole or most
        words = f"{stages} stage{'s' * (stages > 1)}{', copies' * copies}"
        share = f"{most / whole:.2f} of one; without the process itself {(most - empty) / (whole - empty):.2f}"
        print(f"{words:<24} {most / MB:6.0f} MB, {share}", flush=True)


def _highest(given: tt.Task, stages: int, copies: bool) -> int:
    memory = WorkerMemory()
    train(given, Pipeline(copies=copies, microbatches=MICROBATCHES), stages, [memory])
    return max(memory.highest.values())


def try_limit(layers: int, limit: int) -> None:
    for stages in (1, 4):
        words = f"{stages} stage{'s' * (stages > 1)}, at most {limit / MB:.0f} MB of private memory each"
        try:
            loss = train(task(layers), Limited(copies=False, limit=limit), stages, [])
            print(f"{words}: trained, loss {loss:.4f}")
        except TorrentialError as error:
            print(f"{words}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--limit", type=int, help="MB of private memory for each worker")
    given = parser.parse_args()
    if given.limit is None:
        measure(given.layers)
    else:
        try_limit(given.layers, given.limit * MB)


if __name__ == "__main__":
    main()
