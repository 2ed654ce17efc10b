"""Federated averaging on Fashion-MNIST: 1,000 clients, whose labels are more or less uneven, a tenth in every round.

python -m experiments.fedavg --out OUT [--rounds N]       # a few minutes for each alpha
python -m experiments.fedavg --out OUT --report

The shares of the labels of each client are drawn from Dirichlet(alpha, ..., alpha): at 0.1 most of its 55 photographs
are of one or two labels, at 100 it has about as many of each. A client makes one pass in batches of 10, by plain SGD at
0.1, with the model of the task `fashion`. Simulated, with four workers. Accuracy is that on validation data, and once
at the end on test data.

Written: OUT/alpha-A.json for each alpha that is not there yet, OUT/fedavg.md, OUT/fedavg.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import torrential as tt
from torrential.data.clients import clients_of
from torrential.data.deal import Order
from torrential.records import Evaluation
from torrential.tasks import load_task

ALPHAS = (0.1, 1.0, 100.0)
CLIENTS, SHARE, BATCH, RATE, WORKERS = 1000, 0.1, 10, 0.1, 4
EVERY = 4  # rounds between two evaluations


def make_task(alpha: float) -> tt.Task:
    return dataclasses.replace(
        load_task("fashion"),
        partition=tt.partition(CLIENTS, alpha=alpha),
        optimizer=tt.optimizer("sgd", lr=RATE),
        batch_size=BATCH,
        epochs=10_000,  # rounds are counted
    )


def labels_of_clients(task: tt.Task) -> float:
    """The mean share of a client's commonest label."""
    clients = clients_of(task, 0, CLIENTS)
    labels = task.train.tensors[1]  # type: ignore[attr-defined]
    counts = torch.zeros(CLIENTS, 10)
    for client, samples in enumerate(clients.split(Order(len(labels), 0).whole(0))):
        counts[client] = labels[samples].bincount(minlength=10)
    return float((counts.max(1).values / counts.sum(1)).mean())


def run(alpha: float, rounds: int) -> dict[str, Any]:
    began, task = time.monotonic(), make_task(alpha)
    with tempfile.TemporaryDirectory() as out:
        made = tt.train(
            task,
            tt.FedAvg(share=SHARE),
            workers=WORKERS,
            world="sim",
            steps=rounds,
            evaluate_every=EVERY,
            out=Path(out) / "run",
            progress=False,
        )
    curve = [(r.step, r.value) for r in made.history if isinstance(r, Evaluation) and r.split == "validation"]
    return {
        "alpha": alpha,
        "rounds": made.summary.steps,
        "samples": made.summary.samples,
        "commonest": labels_of_clients(task),
        "seconds": time.monotonic() - began,
        "curve": curve,
        "test": made.summary.value,
    }


def first(curve: list[tuple[int, float]], target: float) -> str:
    return next((str(step) for step, value in curve if value >= target), "–")


def report(found: list[dict[str, Any]], out: Path) -> None:
    lines = [
        "| alpha | commonest label | rounds to 75 % | to 80 % | to 85 % | last five, min–max | test | seconds |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for run_of in found:
        curve, last = run_of["curve"], [value for _, value in run_of["curve"][-5:]]
        lines.append(
            f"| {run_of['alpha']:g} | {run_of['commonest']:.0%} | {first(curve, 0.75)} | {first(curve, 0.8)} | "
            f"{first(curve, 0.85)} | {min(last):.1%}–{max(last):.1%} | {run_of['test']:.1%} | {run_of['seconds']:.0f} |"
        )
    (out / "fedavg.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw(found, out / "fedavg.png")


def draw(found: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return print("no picture: matplotlib is not installed")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=150)
    for run_of in found:
        steps, values = zip(*run_of["curve"], strict=True)
        axes.plot(steps, [100 * value for value in values], marker=".", label=f"alpha = {run_of['alpha']:g}")
    axes.set_xlabel("rounds, of 100 of 1,000 clients")
    axes.set_ylabel("validation accuracy, %")
    axes.set_title("Federated averaging on Fashion-MNIST")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/fedavg"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--report", action="store_true", help="of what is there already")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for alpha in ALPHAS:
        path = args.out / f"alpha-{alpha:g}.json"
        if not path.exists() and not args.report:
            path.write_text(json.dumps(run(alpha, args.rounds)) + "\n")
    paths = [args.out / f"alpha-{alpha:g}.json" for alpha in ALPHAS]
    report([json.loads(path.read_text()) for path in paths if path.exists()], args.out)


if __name__ == "__main__":
    main()
