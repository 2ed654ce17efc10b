"""Samples per second where reading a sample takes 5 ms, with and without loaders; per worker, from step records.

python -m benchmarks.loaders --workers 1,2 --loaders 0,2 --strategies allreduce,bsp,ssp,downpour --samples 2400

Loaders alone can give 200 samples/s each. A sample is read by sleeping, as from a disk or a network, so that cores are
free for training. The first fifth of each run is left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import torrential as tt
from torrential.records import Step
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers

READ_SECONDS = 0.005
WIDTH = 64


class SlowData(Dataset[Any]):
    """Random samples, each of which takes a while to read."""

    def __init__(self, samples: int, seconds: float = READ_SECONDS) -> None:
        self._samples, self._seconds = samples, seconds

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._seconds)
        return torch.randn(WIDTH), index % 10


def rate(strategy: str, workers: int, loaders: int, samples: int) -> float:
    """Samples per second and worker."""
    held_out = SlowData(8, 0.0)
    task = tt.Task(
        model=lambda: nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 10)),
        loss=F.cross_entropy,
        train=SlowData(samples * workers),
        validation=held_out,
        test=held_out,
        optimizer=tt.optimizer("sgd", lr=0.01),
        batch_size=16,
        epochs=1,
        name="slow-data",
    )
    servers: dict[str, Any] = {"servers": 1} if needs_servers(STRATEGIES[strategy]) else {}
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {"device": "cpu", "threads": 1, "progress": False, "out": Path(directory) / "run"}
        result = tt.train(task, strategy, workers=workers, loaders=loaders, **options, **servers)
    steps = sorted((r for r in result.history if isinstance(r, Step)), key=lambda record: record.time)
    first = next(record for record in steps if record.samples >= result.summary.samples / 5)
    last = max(steps, key=lambda record: (record.samples, -record.time))
    return (last.samples - first.samples) / (last.time - first.time) / workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--loaders", default="0,2")
    parser.add_argument("--strategies", default="allreduce,bsp,ssp,downpour,backup")
    parser.add_argument("--samples", type=int, default=2400, help="for each worker")
    given = parser.parse_args()
    print(f"{'strategy':12}{'workers':>8}{'loaders':>8}{'samples/s':>11}{'of what they can give':>23}")
    for strategy in given.strategies.split(","):
        for workers in map(int, given.workers.split(",")):
            if strategy == "backup" and workers == 1:
                continue  # somebody must be waited for
            for loaders in map(int, given.loaders.split(",")):
                found = rate(strategy, workers, loaders, given.samples)
                share = found * READ_SECONDS / max(1, loaders)
                print(f"{strategy:12}{workers:8}{loaders:8}{found:11.0f}{share:23.2f}", flush=True)


if __name__ == "__main__":
    main()
