"""What slow workers cost each strategy: samples per second, and time to 97 % on digits, with four workers.

python -m experiments.stragglers --out OUT --seconds 560        # called until it says nothing is left
python -m experiments.stragglers --out OUT --report

Nobody is slow; one of four takes four times as long for every batch; every worker takes five times as long for one
batch in ten. A batch is 50 ms of sleep (`Sleepy`) and about one of arithmetic, and slowness is more sleep, so that four
workers do not compete for the cores of a small machine; 4 x 32 samples in 50 ms are 2,560 a second. Learning rates are
tuned first, for each strategy with nobody slow, on seeds of their own.

Every run is a directory in OUT/runs. What is finished is never run again, so it may be interrupted and called again.
Written: OUT/table.md, OUT/results.json, OUT/stragglers.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.jobs import options, run_missing
from torrential.records import Evaluation, Step, replace_file
from torrential.run import TrainResult, train
from torrential.tasks import load_task

WORKERS = 4
BATCH_SECONDS = 0.05
TARGET = 0.97
EPOCHS = 30
SEEDS = range(5)
TUNING_SEEDS = range(100, 103)
STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "bsp": {"servers": 1},
    "ssp": {"servers": 1, "staleness": 3},
    "backup": {"servers": 1, "backups": 1},
    "downpour": {"servers": 1, "server": "adagrad"},
}
RATES = {  # of SGD with momentum, or of Adagrad
    "allreduce": (0.05, 0.1, 0.2, 0.4),
    "bsp": (0.05, 0.1, 0.2, 0.4),
    "ssp": (0.0125, 0.025, 0.05, 0.1),
    "backup": (0.05, 0.1, 0.2, 0.4),
    "downpour": (0.005, 0.01, 0.02, 0.04),
}
CONDITIONS = {
    "nobody": ("nobody is slow", None),
    "one": ("one of four is 4× slow for good", "3:4"),
    "random": ("each is 5× slow for one batch in ten", "random:5:10"),
}
OUTCOME = "outcome.json"


class Sleepy:
    """A loss that takes so many seconds more where it is trained on."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], seconds: float) -> None:
        self._loss, self._seconds = loss, seconds

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            time.sleep(self._seconds)
        return self._loss(outputs, targets)


@dataclass(frozen=True)
class Setup:
    strategy: str
    condition: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.condition}-{self.lr:g}-{self.seed}"


@dataclass(frozen=True)
class Outcome:
    seconds: float  # of the whole run, with its start
    seconds_to_target: float | None
    epochs_to_target: float | None
    samples_per_second: float
    waiting: float  # share of the workers' time
    staleness: float
    dropped: int  # gradients


# -- one run ----------------------------------------------------------------------------------------------------------
def run_one(setup: Setup, directory: Path) -> None:
    """What is there from an interrupted try is removed first."""
    shutil.rmtree(directory, ignore_errors=True)
    began = time.monotonic()
    task = load_task("digits-mlp")
    assert task.loss is not None
    result = train(
        dataclasses.replace(task, loss=Sleepy(task.loss, BATCH_SECONDS)),
        setup.strategy,
        workers=WORKERS,
        epochs=EPOCHS,
        target=TARGET,
        lr=setup.lr,
        seed=setup.seed,
        out=directory,
        progress=False,
        threads=1,
        slow=CONDITIONS[setup.condition][1],
        **STRATEGIES[setup.strategy],
    )
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # the records are what counts here
    outcome = outcome_of(result, time.monotonic() - began)
    replace_file(directory / OUTCOME, json.dumps(asdict(outcome)).encode())


def outcome_of(result: TrainResult, seconds: float) -> Outcome:
    evaluations = [r for r in result.history if isinstance(r, Evaluation) and r.split == "validation"]
    steps = [r for r in result.history if isinstance(r, Step)]
    last, summary = evaluations[-1], result.summary
    dropped = {step.worker: step.dropped for step in steps}
    return Outcome(
        seconds=seconds,
        seconds_to_target=summary.time_to_target,
        epochs_to_target=last.samples / 1350 if summary.reached else None,
        samples_per_second=last.samples / last.time,
        waiting=sum(s.wait for s in steps) / sum(s.compute + s.communicate + s.wait for s in steps),
        staleness=summary.staleness_mean or 0.0,
        dropped=sum(dropped.values()),
    )


# -- all of them ------------------------------------------------------------------------------------------------------
class Experiment:
    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.jobs = Path(args.out), args.jobs
        self.deadline = time.monotonic() + args.seconds
        self.failed: list[str] = []

    def run(self) -> None:
        self._run(Setup(s, "nobody", lr, seed) for seed in TUNING_SEEDS for s in STRATEGIES for lr in RATES[s])
        best = self.best_rates()
        if best is not None:
            self._run(Setup(s, c, best[s], seed) for seed in SEEDS for c in CONDITIONS for s in STRATEGIES)

    def best_rates(self) -> dict[str, float] | None:
        """With which the target is reached after the fewest epochs on average; None while some are not known."""
        best = {}
        for strategy in STRATEGIES:
            epochs = {}
            for lr in RATES[strategy]:
                found = [self.outcome(Setup(strategy, "nobody", lr, seed)) for seed in TUNING_SEEDS]
                if None in found:
                    return None
                epochs[lr] = statistics.mean(o.epochs_to_target or math.inf for o in found if o is not None)
            best[strategy] = min(epochs, key=lambda lr, epochs=epochs: epochs[lr])  # type: ignore[misc]
        return best

    def outcome(self, setup: Setup) -> Outcome | None:
        path = self.out / "runs" / setup.name / OUTCOME
        return Outcome(**json.loads(path.read_bytes())) if path.exists() else None

    def outcomes(self, strategy: str, condition: str, lr: float) -> list[Outcome]:
        found = [self.outcome(Setup(strategy, condition, lr, seed)) for seed in SEEDS]
        return [outcome for outcome in found if outcome is not None]

    def _run(self, setups: Iterable[Setup]) -> None:
        known = {setup.name: setup for setup in setups}
        self.failed += run_missing(
            {name: self._command(setup) for name, setup in known.items()},
            out=self.out,
            at_once=self.jobs,
            deadline=self.deadline,
            expected=lambda name: self._expected(known[name]),
            came=lambda name: self._came(known[name]),
        )

    def _came(self, setup: Setup) -> str | None:
        outcome = self.outcome(setup)
        if outcome is None:
            return None
        after = outcome.seconds_to_target
        reached = "target not reached" if after is None else f"target after {after:.2f} s"
        return f"{outcome.samples_per_second:,.0f} samples/s, {reached}"

    def _expected(self, setup: Setup) -> float:
        paths = self.out.glob(f"runs/{setup.strategy}-{setup.condition}-*/{OUTCOME}")
        return max((json.loads(path.read_bytes())["seconds"] for path in paths), default=30.0)

    def _command(self, setup: Setup) -> list[str]:
        what = {"setup": asdict(setup), "directory": str(self.out / "runs" / setup.name)}
        return [sys.executable, "-m", "experiments.stragglers", "--one", json.dumps(what)]


# -- what came of it --------------------------------------------------------------------------------------------------
def spread(values: list[float], digits: int = 2) -> str:
    if not values:
        return "–"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):,.{digits}f} ± {deviation:,.{digits}f}"


def report(experiment: Experiment) -> None:
    rates = experiment.best_rates()
    if rates is None:
        raise SystemExit("some rates have not been tried yet; run without --report first")
    found = {(s, c): experiment.outcomes(s, c, rates[s]) for c in CONDITIONS for s in STRATEGIES}
    lines = [
        "| slow | strategy | rate | samples/s | × allreduce | seconds to 97 % | epochs to 97 % | waiting | staleness "
        "| dropped | runs |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (strategy, condition), outcomes in found.items():
        if not outcomes:
            continue
        speeds = [o.samples_per_second for o in outcomes]
        usual = [o.samples_per_second for o in found["allreduce", condition]]
        ratio = statistics.mean(speeds) / statistics.mean(usual) if usual else math.nan
        times = [o.seconds_to_target for o in outcomes if o.seconds_to_target is not None]
        epochs = [o.epochs_to_target for o in outcomes if o.epochs_to_target is not None]
        missed = f" ({len(outcomes) - len(times)} did not)" if len(times) < len(outcomes) else ""
        lines.append(
            f"| {CONDITIONS[condition][0]} | {strategy} | {rates[strategy]:g} | {spread(speeds, 0)} | {ratio:.2f} "
            f"| {spread(times)}{missed} | {spread(epochs, 1)} | {statistics.mean(o.waiting for o in outcomes):.0%} "
            f"| {statistics.mean(o.staleness for o in outcomes):.2f} "
            f"| {statistics.mean(o.dropped for o in outcomes):.0f} | {len(outcomes)} |"
        )
    replace_file(experiment.out / "table.md", ("\n".join(lines) + "\n").encode())
    numbers = {
        "rates": rates,
        "runs": [
            asdict(Setup(s, c, rates[s], seed)) | asdict(o) for (s, c), os in found.items() for seed, o in enumerate(os)
        ],
        "tuning": [
            {"strategy": s, "lr": lr, "seed": seed, "epochs_to_target": o.epochs_to_target}
            for s in STRATEGIES
            for lr in RATES[s]
            for seed in TUNING_SEEDS
            if (o := experiment.outcome(Setup(s, "nobody", lr, seed))) is not None
        ],
    }
    replace_file(experiment.out / "results.json", (json.dumps(numbers, indent=1) + "\n").encode())
    draw(experiment.out / "stragglers.png", found)
    print("\n".join(lines))


def draw(path: Path, found: dict[tuple[str, str], list[Outcome]]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 6), layout="constrained")
    left, right = figure.subplots(2, 1)
    for place, strategy in enumerate(STRATEGIES):
        for axes, value in (
            (left, lambda o: o.samples_per_second),
            (right, lambda o: o.seconds_to_target if o.seconds_to_target is not None else math.nan),
        ):
            values = [[value(o) for o in found[strategy, condition]] or [math.nan] for condition in CONDITIONS]
            x = [i + (place - 2) * 0.16 for i in range(len(CONDITIONS))]
            deviations = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
            axes.bar(x, [statistics.mean(v) for v in values], 0.15, yerr=deviations, capsize=2, label=strategy)
    for axes, label in ((left, "samples per second"), (right, "seconds to 97 %")):
        axes.set_xticks(range(len(CONDITIONS)), [words for words, _ in CONDITIONS.values()])
        axes.set_ylabel(label)
    left.legend(ncols=len(STRATEGIES), fontsize=8)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    args = options(__doc__, "runs/stragglers").parse_args(arguments)
    if args.one:
        what = json.loads(args.one)
        run_one(Setup(**what["setup"]), Path(what["directory"]))
        return 0
    experiment = Experiment(args)
    if not args.report:
        experiment.run()
    if experiment.best_rates() is not None:
        report(experiment)
    for name in experiment.failed:
        print(f"failed: {name}; see {experiment.out}/logs/{name}.log", file=sys.stderr)
    return 1 if experiment.failed else 0


if __name__ == "__main__":
    from experiments import stragglers  # so that the loss that travels to other processes is not of __main__

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that runs under way are ended, as by Ctrl-C
    sys.exit(stragglers.main())
