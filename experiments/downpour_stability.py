"""Is Downpour with many replicas stable? One fixed rate against Adagrad's rates on the servers, and a warm start.

python -m experiments.downpour_stability --out OUT --seconds 560        # called until it says nothing is left
python -m experiments.downpour_stability --out OUT --report

After Dean et al. 2012: with one fixed rate many replicas diverge or stall where one replica does not; a rate of its own
for every parameter (Adagrad) makes them stable, and a warm start, in which one replica runs alone for an epoch, makes
the worst of several runs better. SGD without and with momentum, or Adagrad, at the same rates; digits-mlp, ten epochs.

Every run is a directory in OUT/runs. What is finished is never run again, so it may be interrupted and called again.
Written: OUT/table.md, OUT/results.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.jobs import options, run_missing
from torrential.errors import Diverged
from torrential.optimizers import optimizer
from torrential.records import Evaluation, replace_file
from torrential.run import train
from torrential.tasks import load_task

REPLICAS = 8
EPOCHS = 10
SEEDS = range(5)
RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
WARM = 43  # updates: an epoch of one replica
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("1 replica, fixed rate", {"workers": 1, "server": "task"}),
    "fixed": ("8 replicas, fixed rate", {"workers": REPLICAS, "server": "task"}),
    "fixed-warm": ("8 replicas, fixed rate, warm start", {"workers": REPLICAS, "server": "task", "warm": WARM}),
    "momentum-one": ("1 replica, fixed rate, momentum 0.9", {"workers": 1, "server": "task"}),
    "momentum": ("8 replicas, fixed rate, momentum 0.9", {"workers": REPLICAS, "server": "task"}),
    "adagrad": ("8 replicas, Adagrad", {"workers": REPLICAS, "server": "adagrad"}),
    "adagrad-warm": ("8 replicas, Adagrad, warm start", {"workers": REPLICAS, "server": "adagrad", "warm": WARM}),
}
MOST = {"momentum-one": 0.1, "momentum": 0.1}  # rates up to here: with momentum 0.9 steps become ten times as long
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Setup:
    variant: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True)
class Outcome:
    seconds: float
    loss: float | None  # on validation data at the end; None: it turned NaN or infinite before
    accuracy: float | None
    staleness: float | None


def run_one(setup: Setup, directory: Path) -> None:
    """What is there from an interrupted try is removed first."""
    shutil.rmtree(directory, ignore_errors=True)
    began = time.monotonic()
    task = load_task("digits-mlp")
    outcome = Outcome(0.0, None, None, None)
    momentum = 0.9 if setup.variant.startswith("momentum") else 0.0
    try:
        result = train(
            dataclasses.replace(task, optimizer=optimizer("sgd", lr=setup.rate, momentum=momentum)),
            "downpour",
            servers=1,
            lr=setup.rate,
            epochs=EPOCHS,
            seed=setup.seed,
            out=directory,
            progress=False,
            threads=1,
            **VARIANTS[setup.variant][1],
        )
        last = [r for r in result.history if isinstance(r, Evaluation) and r.split == "validation"][-1]
        outcome = Outcome(0.0, last.loss, last.value, result.summary.staleness_mean)
    except Diverged as error:
        print(error)
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # the records are what counts here
    outcome = dataclasses.replace(outcome, seconds=time.monotonic() - began)
    replace_file(directory / OUTCOME, json.dumps(asdict(outcome)).encode())


class Experiment:
    def __init__(self, out: Path) -> None:
        self._out = out
        every = (Setup(v, r, seed) for seed in SEEDS for r in RATES for v in VARIANTS)
        self._setups = {s.name: s for s in every if s.rate <= MOST.get(s.variant, math.inf)}

    def run(self, deadline: float, jobs: int) -> list[str]:
        return run_missing(
            {name: self._command(setup) for name, setup in self._setups.items()},
            out=self._out,
            at_once=jobs,
            deadline=deadline,
            expected=lambda name: self._expected(self._setups[name]),
            came=lambda name: self._came(self._setups[name]),
        )

    def outcome(self, setup: Setup) -> Outcome | None:
        path = self._out / "runs" / setup.name / OUTCOME
        return Outcome(**json.loads(path.read_bytes())) if path.exists() else None

    def _came(self, setup: Setup) -> str | None:
        outcome = self.outcome(setup)
        if outcome is None:
            return None
        return "diverged" if outcome.loss is None else f"loss {outcome.loss:.3f}, accuracy {outcome.accuracy:.3f}"

    def _expected(self, setup: Setup) -> float:
        found = [o.seconds for s in self._setups.values() if s.variant == setup.variant and (o := self.outcome(s))]
        return max(found, default=20.0)

    def _command(self, setup: Setup) -> list[str]:
        what = {"setup": asdict(setup), "directory": str(self._out / "runs" / setup.name)}
        return [sys.executable, "-m", "experiments.downpour_stability", "--one", json.dumps(what)]

    def report(self) -> None:
        lines = [
            "| | rate | loss, mean ± deviation | worst loss | accuracy, mean | worst accuracy | staleness | diverged "
            "| runs |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for variant, (words, _) in VARIANTS.items():
            for rate in RATES:
                found = [o for seed in SEEDS if (o := self.outcome(Setup(variant, rate, seed))) is not None]
                if found:
                    lines.append(f"| {words} | {rate:g} | {summary(found)} | {len(found)} |")
        replace_file(self._out / "table.md", ("\n".join(lines) + "\n").encode())
        every = [asdict(s) | asdict(o) for s in self._setups.values() if (o := self.outcome(s)) is not None]
        replace_file(self._out / "results.json", (json.dumps(every, indent=1) + "\n").encode())
        print("\n".join(lines))


def summary(found: list[Outcome]) -> str:
    losses = [o.loss for o in found if o.loss is not None]
    right = [o.accuracy for o in found if o.accuracy is not None]
    late = [o.staleness for o in found if o.staleness is not None]
    gone = len(found) - len(losses)
    if not losses:
        return f"– | infinite | – | – | – | {gone}"
    deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
    worst = "infinite" if gone else f"{max(losses):.3f}"
    return (
        f"{statistics.mean(losses):.3f} ± {deviation:.3f} | {worst} | {statistics.mean(right):.1%} | {min(right):.1%} "
        f"| {statistics.mean(late):.1f} | {gone or ''}"
    )


def main(arguments: list[str] | None = None) -> int:
    args = options(__doc__, "runs/downpour-stability").parse_args(arguments)
    if args.one:
        what = json.loads(args.one)
        run_one(Setup(**what["setup"]), Path(what["directory"]))
        return 0
    experiment = Experiment(Path(args.out))
    failed = [] if args.report else experiment.run(time.monotonic() + args.seconds, args.jobs)
    experiment.report()
    for name in failed:
        print(f"failed: {name}; see {args.out}/logs/{name}.log", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that runs under way are ended, as by Ctrl-C
    sys.exit(main())
