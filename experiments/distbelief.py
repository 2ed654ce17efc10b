"""DistBelief's Figure 4 in miniature: accuracy against time for SGD, Downpour and Sandblaster, by simulation.

python -m experiments.distbelief --data DIRECTORY --out OUT            # all that is missing, then table and picture
python -m experiments.distbelief --data DIRECTORY --out OUT --only sandblaster-2000

Real gradients, virtual time. Fashion-MNIST's first 20,000 training images at 14 x 14 pixels, one hidden layer of 32
sigmoids; minibatches of 16. A sample takes a worker 10 ms +- 10 %, about what the paper's network of 42 million
parameters takes a core; four servers on hosts of their own, 10 Gb/s, 100 us. SGD and Downpour have no momentum; their
rate is the one of three that comes first to 80 % on validation data. Sandblaster has no rate.

A finished run is OUT/runs/NAME.json and is not run again. Written: OUT/distbelief.json, OUT/distbelief.png.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.records import Evaluation, Work, replace_file
from torrential.tasks.fashion import fashion_mlp

SAMPLES, BATCH = 20_000, 16
TARGET, LEVELS = 0.80, (0.7, 0.75, 0.8, 0.82)
CLUSTER = {
    "compute": {"seconds_per_sample": 1e-2, "spread": "lognormal", "shape": 0.1},
    "network": {"latency": 100e-6, "bandwidth": 1.25e9},
    "servers_apart": True,
}
FIXED, ADAGRAD = tt.Downpour(server="task"), tt.Downpour()
WAYS: dict[str, tuple[Any, int, int, tuple[float, ...]]] = {  # strategy, workers, epochs, rates
    "SGD [1]": ("allreduce", 1, 5, (0.1, 0.3, 1.0)),
    "Downpour [20]": (FIXED, 20, 5, (0.03, 0.1, 0.3)),
    "Downpour, Adagrad [20]": (ADAGRAD, 20, 5, (0.01, 0.03, 0.1)),
    "Downpour, Adagrad [200]": (ADAGRAD, 200, 20, (0.003, 0.01, 0.03)),
    "Sandblaster [200]": (tt.Sandblaster(portions=1000), 200, 60, ()),
    "Sandblaster [2000]": (tt.Sandblaster(portions=2000), 2000, 25, ()),  # takes a core 8 s for each evaluation
}


def task_of(directory: Path | None) -> tt.Task:
    given = fashion_mlp(directory)
    train, validation, test = (_small(data) for data in (given.train, given.validation, given.test))
    return tt.Task(
        model=lambda: nn.Sequential(nn.Linear(14 * 14, 32), nn.Sigmoid(), nn.Linear(32, 10)),
        loss=F.cross_entropy,
        train=TensorDataset(*(column[:SAMPLES] for column in train.tensors)),
        validation=validation,
        test=test,
        optimizer=tt.optimizer("sgd", lr=0.1),
        batch_size=BATCH,
        name="fashion-small",
    )


def _small(data: Any) -> TensorDataset:
    images, labels = data.tensors
    pooled = F.avg_pool2d(images.view(-1, 1, 28, 28).float() / 255, 2)
    return TensorDataset((pooled.flatten(1) - 0.286) / 0.3, labels)


# -- runs -------------------------------------------------------------------------------------------------------------
def run_one(task: tt.Task, way: str, rate: float | None) -> dict[str, Any]:
    strategy, workers, epochs, _ = WAYS[way]
    began, batch = time.process_time(), isinstance(strategy, tt.Sandblaster)
    servers: dict[str, Any] = {} if strategy == "allreduce" else {"servers": 4, "replicas": 0}
    with tempfile.TemporaryDirectory() as directory:
        result = tt.train(
            task,
            strategy,
            workers=workers,
            lr=rate,
            epochs=epochs,
            evaluate_every=1 if batch else 125,
            world="sim",
            cluster=CLUSTER,
            out=Path(directory) / "run",
            progress=False,
            device="cpu",
            threads=1,
            **servers,
        )
    history = result.history
    return {
        "way": way,
        "rate": rate,
        "curve": [(e.time, e.value, e.loss) for e in history if isinstance(e, Evaluation) and e.split == "validation"],
        "test": result.summary.value,
        "staleness": result.summary.staleness_mean,
        "batch_seconds": [r.seconds for r in history if isinstance(r, Work)],
        "cpu_seconds": time.process_time() - began,
    }


def setups() -> dict[str, tuple[str, float | None]]:
    found: dict[str, tuple[str, float | None]] = {}
    for way, (_, _, _, rates) in WAYS.items():
        name = "-".join("".join(c if c.isalnum() else " " for c in way.lower()).split())
        found |= {f"{name}-{rate:g}": (way, rate) for rate in rates}
        if not rates:
            found[name] = way, None
    return found


def run_missing(out: Path, directory: Path | None, only: str) -> None:
    task = task_of(directory)
    for name, (way, rate) in setups().items():
        path = out / "runs" / f"{name}.json"
        if path.exists() or not fnmatch(name, only):
            continue
        outcome = run_one(task, way, rate)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(outcome).encode())
        print(f"{name}: {outcome['cpu_seconds']:.0f} s of a core, {outcome['curve'][-1]}", file=sys.stderr, flush=True)


# -- what came of it --------------------------------------------------------------------------------------------------
def seconds_to(run: dict[str, Any], value: float) -> float:
    return next((when for when, found, _ in run["curve"] if found >= value), math.inf)


def best_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each way, the one that comes first to the target; where none does, the one that ends highest."""
    best = []
    for way in WAYS:
        own = [run for run in runs if run["way"] == way]
        if own:
            best.append(min(own, key=lambda run: (seconds_to(run, TARGET), -run["curve"][-1][1])))
    return best


def table(runs: list[dict[str, Any]]) -> list[str]:
    reached = " | ".join(f"to {level:.0%}, s" for level in LEVELS)
    told = [
        f"| way | rate | {reached} | validation at the end | test | after, s | staleness |",
        "|---|---:|" + "---:|" * (len(LEVELS) + 4),
    ]
    for run in best_runs(runs):
        times = [seconds_to(run, level) for level in LEVELS]
        cells = [run["way"], _number(run["rate"], "g"), *("–" if math.isinf(t) else f"{t:.2f}" for t in times)]
        when, value, _ = run["curve"][-1]
        cells += [f"{value:.1%}", _number(run["test"], ".1%"), f"{when:.1f}", _number(run["staleness"], ".1f")]
        told.append(f"| {' | '.join(cells)} |")
    return told


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def continued(shorter: dict[str, Any], longer: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Times and accuracies that a run would go on with: both take the same steps but for rounding, so each takes as
    many times less as those did that both have taken."""
    done = len(shorter["curve"])
    end, before = shorter["curve"][-1][0], longer["curve"][done - 1][0]
    pace = (end - shorter["curve"][0][0]) / (before - longer["curve"][0][0])
    rest = longer["curve"][done - 1 :]
    return [end + (when - before) * pace for when, _, _ in rest], [value for _, value, _ in rest]


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(best_runs(runs)):
        label = run["way"] + ("" if run["rate"] is None else f", rate {run['rate']:g}")
        x, y, _ = zip(*run["curve"], strict=True)
        axes.plot(x, [100 * value for value in y], f"C{number}.-", label=label, linewidth=1, markersize=3)
    longer, shorter = (next((r for r in runs if r["way"] == f"Sandblaster [{n}]"), None) for n in (200, 2000))
    if longer is not None and shorter is not None:
        times, values = continued(shorter, longer)
        axes.plot(
            times, [100 * value for value in values], f"C{len(WAYS) - 1}:", label="its steps go on as those of [200]"
        )
    axes.set(xscale="log", xlabel="virtual seconds", ylabel="validation accuracy (%)", ylim=(10, 90))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distbelief"))
    parser.add_argument("--data", type=Path, help="where Fashion-MNIST is, if it is not found by itself")
    parser.add_argument("--only", default="*", help="run only what this pattern matches")
    given = parser.parse_args()
    torch.set_num_threads(1)
    run_missing(given.out, given.data, given.only)
    runs = [json.loads(path.read_bytes()) for path in sorted((given.out / "runs").glob("*.json"))]
    replace_file(given.out / "distbelief.json", (json.dumps(runs) + "\n").encode())
    draw(given.out / "distbelief.png", runs)
    print("\n".join(table(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
