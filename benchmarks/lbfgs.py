"""How long the two-loop recursion takes on servers, beside the time that memory takes for its passes over vectors.

python -m benchmarks.lbfgs --width 5000 --servers 2 --history 10

A run of `sandblaster` on an MLP of about `width`² parameters; told are the seconds of the recursions with a full
history, without evaluations and line searches. Beside them: as many processes as there are servers, each with its share
of the vectors, do the same passes by torch alone, one operation after the other: a dot product reads two vectors, an
addition reads two and writes one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.optim.lbfgs import CurvaturePair, Run, two_loop
from torrential.records import Event
from torrential.strategies import sandblaster


class TimedSandblaster(tt.Sandblaster, frozen=True, kw_only=True):
    """Sandblaster that puts the seconds of every two-loop recursion on record."""

    def coordinator(self, ctx: tt.Context) -> None:
        def timed(run: Run, pairs: Sequence[CurvaturePair], scale: float) -> float:
            began = time.perf_counter()
            slope = two_loop(run, pairs, scale)
            ctx.progress.note("two_loop", f"{len(pairs)} {time.perf_counter() - began}")
            return slope

        setattr(sandblaster, "two_loop", timed)  # noqa: B010 (of this process alone)
        super().coordinator(ctx)


def recursions(width: int, servers: int, history: int) -> list[float]:
    """Seconds of each recursion with a full history."""
    inputs, labels = torch.randn(64, width), torch.randint(10, (64,))
    data = TensorDataset(inputs, labels)
    task = tt.Task(
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)),
        loss=F.cross_entropy,
        train=data,
        validation=data,
        test=data,
        optimizer=tt.optimizer("sgd", lr=0.1, weight_decay=1e-4),
        batch_size=16,
        epochs=1000,
        name="wide",
    )
    steps = history + 8
    with tempfile.TemporaryDirectory() as directory:
        settings: dict[str, Any] = {
            "threads": 1,
            "replicas": 0,
            "evaluate_every": 10 * steps,
            "device": "cpu",
            "progress": False,
        }
        strategy = TimedSandblaster(history=history, portions=4)
        result = tt.train(
            task, strategy, workers=1, servers=servers, steps=steps, out=Path(directory) / "run", **settings
        )
    found = [r.detail.split() for r in result.history if isinstance(r, Event) and r.event == "two_loop"]
    return [float(seconds) for pairs, seconds in found if int(pairs) == history]


def passes(numel: int, history: int, rounds: int, queue: multiprocessing.Queue[float]) -> None:
    torch.set_num_threads(1)
    direction, pairs = torch.randn(numel), [(torch.randn(numel), torch.randn(numel)) for _ in range(history)]
    for _ in range(rounds):
        began = time.perf_counter()
        for s, y in pairs:
            torch.dot(s, direction)
            direction.add_(y, alpha=1e-9)
        for s, y in pairs:
            torch.dot(y, direction)
            direction.add_(s, alpha=1e-9)
        queue.put(time.perf_counter() - began)


def by_torch(width: int, servers: int, history: int) -> float:
    queue: multiprocessing.Queue[float] = multiprocessing.Queue()
    numel, rounds = width * (width + 11) // servers, 5
    processes = [multiprocessing.Process(target=passes, args=(numel, history, rounds, queue)) for _ in range(servers)]
    for process in processes:
        process.start()
    seconds = [queue.get(timeout=300) for _ in range(rounds * servers)]
    for process in processes:
        process.join()
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=5000)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--history", type=int, default=10)
    given = parser.parse_args()
    own = [by_torch(given.width, given.servers, given.history)]
    ours = recursions(given.width, given.servers, given.history)
    own.append(by_torch(given.width, given.servers, given.history))
    baseline = statistics.median(own)
    middle = statistics.median(ours)
    print(f"{given.width * (given.width + 11):,} parameters, {given.servers} servers, {given.history} pairs")
    print(
        f"passes by torch alone {baseline:.3f} s; two-loop recursion on servers {middle:.3f} s "
        f"({min(ours):.3f}–{max(ours):.3f}, {len(ours)} of them): {middle / baseline:.2f} times"
    )


if __name__ == "__main__":
    main()
