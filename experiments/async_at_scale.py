"""Does asynchrony lose accuracy beyond 32 workers? Real gradients on a simulated cluster of 1 to 256 workers.

python -m experiments.async_at_scale --out OUT --jobs 2 --seconds 3000
python -m experiments.async_at_scale --out OUT --report

Every run sees the same number of samples of digits (an MLP, batches of 4 per worker), so what differs is what workers
do to each other, and how long it takes. Synchronous ways have the large-minibatch recipe, whose rate grows with the
joined batch from the task's (0.05 for 32); the others that rate for a batch of 4, or Adagrad. Twice: on a quiet
cluster, and on one where every worker is ten times as slow in one of fifty steps.

Finished runs are never run again. Written: OUT/table.md, OUT/accuracy.png, OUT/results.json.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from experiments.jobs import options, run_missing
from torrential.errors import NonFiniteLoss, RunFailed
from torrential.records import Evaluation, Summary, read_records, replace_file
from torrential.run import train

WORKERS = (1, 8, 32, 64, 256)
BATCH, FIXED = 4, 0.05 * 4 / 32
SYNC: dict[str, Any] = {"recipe": "goyal"}
WAYS: dict[str, dict[str, Any]] = {
    "allreduce": {"strategy": "allreduce"} | SYNC,
    "backup": {"strategy": "backup", "servers": 4} | SYNC,
    "ssp": {"strategy": "ssp", "servers": 4, "staleness": 3, "lr": FIXED},
    "downpour": {"strategy": "downpour", "servers": 4, "server": "adagrad", "lr": 0.02},
    "downpour-fixed": {"strategy": "downpour", "servers": 4, "server": "task", "lr": FIXED},
}
QUIET = {
    "compute": {"seconds_per_sample": 5e-3, "spread": "lognormal", "shape": 0.1},
    "network": {"latency": 100e-6, "bandwidth": 1.25e9},
}
CLUSTERS = {"quiet": QUIET, "stragglers": QUIET | {"stragglers": [{"factor": 10.0, "every": 50}]}}
OUTCOME = "outcome.json"
TARGET = 95.0  # per cent, of the second table


@dataclass(frozen=True)
class Cell:
    way: str
    cluster: str
    workers: int

    def name(self, seed: int) -> str:
        return f"{self.way}-{self.cluster}-{self.workers}-{seed}"


def cells() -> list[Cell]:
    possible = (Cell(way, cluster, workers) for workers, cluster, way in product(WORKERS, CLUSTERS, WAYS))
    return [c for c in possible if c.workers > 1 or c.way != "backup"]


def run_one(way: str, cluster: str, workers: int, seed: int, directory: str, epochs: int) -> None:
    chosen = dict(WAYS[way])
    if way == "backup":
        chosen["backups"] = max(1, workers // 20)
    out = Path(directory)
    shutil.rmtree(out, ignore_errors=True)
    began, outcome = time.monotonic(), "finished"
    fixed: dict[str, Any] = {"world": "sim", "batch_size": BATCH, "device": "cpu", "progress": False, "threads": 1}
    try:
        train(
            "digits-mlp",
            workers=workers,
            cluster=CLUSTERS[cluster],
            seed=seed,
            epochs=epochs,
            out=out,
            **fixed,
            **chosen,
        )
    except (NonFiniteLoss, RunFailed) as error:
        if not isinstance(error, NonFiniteLoss) and "loss turned" not in str(error) and "NaN" not in str(error):
            raise
        outcome = "diverged"
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    replace_file(out / OUTCOME, json.dumps({"outcome": outcome, "seconds": time.monotonic() - began}).encode())


# -- what came of it --------------------------------------------------------------------------------------------------
def read(out: Path, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for cell in cells():
        runs = [out / "runs" / cell.name(seed) for seed in range(seeds)]
        done = [run for run in runs if (run / OUTCOME).exists()]
        found = [_result(run) for run in done]
        if found:
            rows.append(vars(cell) | {"runs": found})
    return rows


def _result(run: Path) -> dict[str, Any]:
    outcome = json.loads((run / OUTCOME).read_bytes())
    history = read_records(run / "records.jsonl")
    summary = next((r for r in history if isinstance(r, Summary)), None)
    curve = [(e.time, 100 * e.value) for e in history if isinstance(e, Evaluation) and e.split == "validation"]
    if outcome["outcome"] == "diverged" or summary is None or summary.value is None:
        return {"outcome": "diverged", "curve": curve}
    return {
        "outcome": "finished",
        "test": 100 * summary.value,
        "seconds": summary.seconds,
        "staleness": summary.staleness_mean,
        "curve": curve,
    }


def tables(rows: list[dict[str, Any]], epochs: int) -> str:
    accuracy = f"Test accuracy in % after {epochs} epochs (mean ± sd over seeds); virtual seconds; mean staleness."
    soonest = f"Virtual seconds until validation accuracy was {TARGET:.0f} % (mean over the seeds that came so far)."
    return "\n".join([accuracy, "", *_table(rows, _cell), "", soonest, "", *_table(rows, _seconds)]) + "\n"


def _table(rows: list[dict[str, Any]], cell: Callable[[list[dict[str, Any]]], str]) -> list[str]:
    lines = [
        "| cluster | way | " + " | ".join("1 worker" if w == 1 else f"{w} workers" for w in WORKERS) + " |",
        "|---|---|" + "---|" * len(WORKERS),
    ]
    for cluster, way in product(CLUSTERS, WAYS):
        found = {r["workers"]: r["runs"] for r in rows if r["cluster"] == cluster and r["way"] == way}
        lines.append(f"| {cluster} | {way} | " + " | ".join(cell(found.get(w, [])) for w in WORKERS) + " |")
    return lines


def _seconds(runs: list[dict[str, Any]]) -> str:
    reached = [next((time for time, value in run["curve"] if value >= TARGET), None) for run in runs]
    there = [time for time in reached if time is not None]
    if not there:
        return f"0 of {len(runs)}" if runs else "–"
    return f"{statistics.mean(there):.2f}" + (f" ({len(there)} of {len(runs)})" if len(there) < len(runs) else "")


def _cell(runs: list[dict[str, Any]]) -> str:
    good = [run for run in runs if run["outcome"] == "finished"]
    lost = f"{len(runs) - len(good)} of {len(runs)} diverged" if len(good) < len(runs) else ""
    if not good:
        return lost or "–"
    tests = [run["test"] for run in good]
    spread = f" ± {statistics.stdev(tests):.1f}" if len(tests) > 1 else ""
    seconds = statistics.mean(run["seconds"] for run in good)
    stale = [run["staleness"] for run in good if run["staleness"] is not None]  # nothing is stale in allreduce
    late = f"; {statistics.mean(stale):.1f}" if stale else ""
    return f"{statistics.mean(tests):.1f}{spread}; {seconds:.1f} s{late} {lost}".strip()


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(15, 8), layout="constrained")
    colors = dict(zip(WAYS, ("black", "#E69F00", "#56B4E9", "#009E73", "#D55E00"), strict=True))
    shown = [w for w in WORKERS if w > 1]
    for i, cluster in enumerate(CLUSTERS):
        for j, workers in enumerate(shown):
            axes = figure.add_subplot(len(CLUSTERS), len(shown), i * len(shown) + j + 1, xlabel="virtual seconds")
            axes.set(title=f"{cluster}, {workers} workers", ylim=(0, 100), xscale="log")
            axes.xaxis.set_minor_formatter(NullFormatter())
            for row in (r for r in rows if r["cluster"] == cluster and r["workers"] == workers):
                for number, run in enumerate(row["runs"]):
                    if run["curve"]:
                        x, y = zip(*run["curve"], strict=True)
                        label = row["way"] if number == 0 else None
                        axes.plot(x, y, color=colors[row["way"]], label=label, marker=".", markersize=3, linewidth=1)
            if j == 0:
                axes.set_ylabel("validation accuracy (%)")
            if i == j == 0:
                axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = options(__doc__, "runs/async-at-scale")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.one:
        run_one(**json.loads(args.one))
        return 0
    out, failed = Path(args.out), list[str]()
    if not args.report:
        commands = {}
        for seed, cell in product(range(args.seeds), cells()):
            name = cell.name(seed)
            what = vars(cell) | {"seed": seed, "directory": str(out / "runs" / name), "epochs": args.epochs}
            commands[name] = [sys.executable, "-m", "experiments.async_at_scale", "--one", json.dumps(what)]
        failed = run_missing(
            commands,
            out=out,
            at_once=args.jobs,
            deadline=time.monotonic() + args.seconds,
            expected=lambda name: None,
            came=lambda name: _outcome(out / "runs" / name),
        )
    rows = read(out, args.seeds)
    replace_file(out / "table.md", tables(rows, args.epochs).encode())
    replace_file(out / "results.json", json.dumps(rows).encode())
    draw(out / "accuracy.png", rows)
    print((out / "table.md").read_text())
    return 1 if failed else 0


def _outcome(run: Path) -> str | None:
    path = run / OUTCOME
    return str(json.loads(path.read_bytes())["outcome"]) if path.exists() else None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
