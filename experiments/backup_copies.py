"""What one slow worker costs sandblaster: static shards, small portions, and small portions with backup copies.

python -m experiments.backup_copies --out OUT

Digits, four workers, in both worlds; one of them takes ten times as long for every portion. A sample costs a
millisecond: virtual in the simulated world, and of sleep in the local one, so that four workers do not compete for the
cores of a small machine. The time of a batch is that of its `work` record, from the first portion dealt to the last sum
on the servers.

The ideal is what the workers could do if nothing were lost: a batch of N samples takes N ms / 4 while nobody is slow,
and N ms / 3.1 with a worker that does a tenth of what the others do. Written: OUT/backup_copies.json, .png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torrential as tt
from torrential.records import Work, replace_file
from torrential.tasks.digits import digits_mlp

WORKERS, FACTOR, SECONDS = 4, 10, 1e-3
STEPS = 8
WAYS: dict[str, dict[str, Any]] = {
    "static shards": {"portions": WORKERS, "copies": 0},
    "20 portions each": {"copies": 0},
    "20 portions each, copies": {"copies": 1},
}
WORLDS = ("local", "sim")


class SleepyLoss:
    """A loss whose forward pass takes a while for each sample, without using a core."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss = loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(SECONDS * len(outputs))
        return self._loss(outputs, targets)


def batch_seconds(world: str, slow: bool, way: str) -> tuple[list[float], int]:
    """Of every batch, and the copies that were given out."""
    task = digits_mlp()
    assert task.loss is not None
    where: dict[str, Any] = {"world": world, "threads": 1, "device": "cpu"}
    if world == "sim":
        stragglers = [{"worker": 0, "factor": FACTOR}] if slow else []
        where["cluster"] = {"compute": {"seconds_per_sample": SECONDS}, "stragglers": stragglers}
    else:
        task = dataclasses.replace(task, loss=SleepyLoss(task.loss))
        where["slow"] = f"0:{FACTOR}" if slow else None
    with tempfile.TemporaryDirectory() as directory:
        result = tt.train(
            task,
            tt.Sandblaster(**WAYS[way]),
            workers=WORKERS,
            servers=2,
            steps=STEPS,
            epochs=10 * STEPS,
            evaluate_every=10 * STEPS,
            out=Path(directory) / "run",
            progress=False,
            **where,
        )
    works = [r for r in result.history if isinstance(r, Work)]
    return [work.seconds for work in works[1:]], sum(work.copies for work in works[1:])  # workers come one by one


def ideal(slow: bool) -> float:
    return len(digits_mlp().train) * SECONDS / (WORKERS - 1 + 1 / FACTOR if slow else WORKERS)  # type: ignore[arg-type]


def table(rows: list[dict[str, Any]]) -> list[str]:
    told = [
        "| world | slow | way | median batch, s | of the ideal | of the ideal, nobody slow | copies for each batch |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        middle = statistics.median(row["seconds"])
        told.append(
            f"| {row['world']} | {'one, 10×' if row['slow'] else 'nobody'} | {row['way']} | {middle:.3f} "
            f"| {middle / ideal(row['slow']):.2f} | {middle / ideal(False):.2f} "
            f"| {row['copies'] / len(row['seconds']):.1f} |"
        )
    return told


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, world in zip(figure.subplots(1, 2, sharey=True), WORLDS, strict=True):
        for place, slow in enumerate((False, True)):
            axes.hlines(ideal(slow), place - 0.45, place + 0.45, "black", "--", label=None if place else "ideal")
            for number, way in enumerate(WAYS):
                row = next(r for r in rows if (r["world"], r["slow"], r["way"]) == (world, slow, way))
                x, middle = place + (number - 1) * 0.28, statistics.median(row["seconds"])
                axes.bar(x, middle, 0.26, color=f"C{number}", label=None if place else way)
                axes.plot([x] * len(row["seconds"]), row["seconds"], ".", color="black", markersize=3)
                axes.annotate(f"{middle / ideal(slow):.2f}×", (x, max(row["seconds"])), (0, 3), ha="center",
                              textcoords="offset points", fontsize=8)  # fmt: skip
        axes.set(title="real processes" if world == "local" else "simulated world", yscale="log")
        axes.set_xticks((0, 1), ["nobody is slow", "one of four is ten times as slow"])
        axes.set_ylim(0.2, 8)
    figure.axes[0].set_ylabel("seconds of a batch (numbers: times the ideal)")
    figure.axes[0].legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sandblaster"))
    given = parser.parse_args()
    rows = list[dict[str, Any]]()
    for world in WORLDS:
        for slow in (False, True):
            for way in WAYS:
                seconds, copies = batch_seconds(world, slow, way)
                rows.append({"world": world, "slow": slow, "way": way, "seconds": seconds, "copies": copies})
    given.out.mkdir(parents=True, exist_ok=True)
    replace_file(given.out / "backup_copies.json", (json.dumps(rows) + "\n").encode())
    draw(given.out / "backup_copies.png", rows)
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    from experiments import backup_copies  # so that the loss that travels to other processes is not of __main__

    sys.exit(backup_copies.main())
