"""Two claims about averaging rarely: AdaComm's threefold gain, and elastic averaging where Downpour is unstable.

python -m experiments.local_updates --out OUT --jobs 2
python -m experiments.local_updates --out OUT --report

Real gradients, simulated time: a small CNN on 8,192 photographs of Fashion-MNIST, four workers with batches of 32.

AdaComm (Wang and Joshi 2019): up to three times less time than with an average after every step, at the same training
loss. Tried with an all-reduce that takes 1, 4 and 16 times as long as computing a step. Training loss is that of the
averaged model on 2,048 of the training samples.

Elastic averaging (Zhang, Choromanska and LeCun 2015): with 16 steps between exchanges Downpour is unstable, or worse
than with 1, and EASGD and EAMSGD are not. Four workers whose steps take unequally long; every way at three rates.

Finished runs are never run again. Written: OUT/adacomm.md, OUT/way.md, OUT/elastic.md, OUT/adacomm.png,
OUT/elastic.png, OUT/results.json.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from experiments.jobs import options, run_missing
from torrential.data.images import Pixels
from torrential.errors import Diverged
from torrential.records import Evaluation, Event, replace_file
from torrential.tasks import load_task

WORKERS, BATCH, SAMPLES, LOOKED_AT = 4, 32, 8192, 2048
SECONDS_PER_SAMPLE = 1e-3
RATIOS = (1, 4, 16)  # what an all-reduce takes, in steps of computing
PERIOD = 16
ADACOMM_EPOCHS, ADACOMM_RATE = 24, 0.1
SEEDS = range(5)
ADACOMM_SEEDS = {1: [0], 4: SEEDS, 16: [0, 1]}  # by ratio: of one seed losses are the same at all, only times are not
ON_THE_WAY = (1.5, 1.2, 1.05, 1.0)  # losses, as multiples of that at the end of averaging after every step
ELASTIC_EPOCHS = 8
ELASTIC_RATES = (0.02, 0.05, 0.1)
AVERAGED: dict[str, tt.Strategy] = {
    "every step": tt.AllReduce(overlap=False),
    f"every {PERIOD}": tt.Local(period=PERIOD),
    "adacomm": tt.AdaComm(period=PERIOD, interval=2.0),
}
ELASTIC: dict[str, tt.Strategy] = {
    "downpour, 1": tt.Downpour(server="task"),
    f"downpour, {PERIOD}": tt.Downpour(server="task", push_every=PERIOD, fetch_every=PERIOD),
    f"easgd, {PERIOD}": tt.Easgd(period=PERIOD),
    f"eamsgd, {PERIOD}": tt.Easgd(period=PERIOD, momentum=0.9),
}
OUTCOME = "outcome.json"


def small_cnn() -> nn.Sequential:
    """9,098 parameters."""
    layers = [nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(Pixels(72.94, 90.02), *layers, nn.Linear(16 * 7 * 7, 10))


def make_task(rate: float, epochs: int, held: bool) -> tt.Task:
    """`held`: evaluate on held-out data, not on what is trained on."""
    given = load_task("fashion")
    assert isinstance(given.train, TensorDataset) and isinstance(given.validation, TensorDataset)
    train = TensorDataset(*(tensor[:SAMPLES] for tensor in given.train.tensors))
    seen = TensorDataset(*(tensor[:LOOKED_AT] for tensor in (given.validation if held else train).tensors))
    about: dict[str, Any] = {"epochs": epochs, "name": "photographs", "batch_size": BATCH, "test": given.test}
    plain = tt.optimizer("sgd", lr=rate)
    return tt.Task(model=small_cnn, loss=F.cross_entropy, train=train, validation=seen, optimizer=plain, **about)


@dataclass(frozen=True)
class Setup:
    entry: str
    number: float  # the ratio, or the rate
    seed: int

    @property
    def averages(self) -> bool:
        return self.entry in AVERAGED

    @property
    def name(self) -> str:
        return f"{self.entry}-{self.number:g}-{self.seed}".replace(", ", "-").replace(" ", "-")

    def arguments(self) -> dict[str, Any]:
        """The task, the strategy and the cluster."""
        compute: dict[str, Any] = {"seconds_per_sample": SECONDS_PER_SAMPLE}
        if not self.averages:
            cluster: dict[str, Any] = {"compute": compute | {"spread": "lognormal", "shape": 0.3}}
            how = {"strategy": ELASTIC[self.entry], "cluster": cluster, "servers": 1}
            return how | {"task": make_task(self.number, ELASTIC_EPOCHS, held=True)}
        sent = 2 * (WORKERS - 1) / WORKERS * 4 * sum(p.numel() for p in small_cnn().parameters())  # a ring, by each
        bandwidth = sent / (self.number * BATCH * SECONDS_PER_SAMPLE)
        cluster = {"compute": compute, "network": {"latency": 0.0, "bandwidth": bandwidth, "handling": 0.0}}
        how = {"strategy": AVERAGED[self.entry], "cluster": cluster, "algorithm": "ring"}
        return how | {"task": make_task(ADACOMM_RATE, ADACOMM_EPOCHS, held=False)}


def setups() -> list[Setup]:
    averaged = [Setup(entry, ratio, seed) for ratio in RATIOS for seed in ADACOMM_SEEDS[ratio] for entry in AVERAGED]
    elastic = [Setup(entry, rate, seed) for seed in SEEDS for rate in ELASTIC_RATES for entry in ELASTIC]
    return sorted(averaged + elastic, key=lambda setup: setup.seed)


def run_one(setup: Setup, directory: Path) -> None:
    """What is there from an interrupted try is removed first."""
    shutil.rmtree(directory, ignore_errors=True)
    torch.set_num_threads(1)
    began = time.monotonic()
    fixed: dict[str, Any] = {"workers": WORKERS, "world": "sim", "device": "cpu", "progress": False}
    outcome: dict[str, Any] = {"curve": [], "periods": [], "test": None}
    try:
        made = tt.train(seed=setup.seed, out=directory, **fixed, **setup.arguments())
        found = [e for e in made.history if isinstance(e, Evaluation) and e.split == "validation"]
        outcome["curve"] = [(e.time, e.epoch, e.loss, e.value) for e in found]
        changes = [e for e in made.history if isinstance(e, Event) and e.event == "period"]
        outcome["periods"] = [(e.time, int(str(e.detail).split()[2])) for e in changes]
        outcome["test"] = made.summary.value
    except Diverged as error:
        print(error)
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # the records are what counts here
    outcome["seconds"] = time.monotonic() - began
    replace_file(directory / OUTCOME, json.dumps(outcome).encode())


class Experiment:
    def __init__(self, out: Path) -> None:
        self._out = out
        self._setups = {setup.name: setup for setup in setups()}

    def run(self, deadline: float, jobs: int) -> list[str]:
        def command(setup: Setup) -> list[str]:
            what = {"setup": asdict(setup), "directory": str(self._out / "runs" / setup.name)}
            return [sys.executable, "-m", "experiments.local_updates", "--one", json.dumps(what)]

        return run_missing(
            {name: command(setup) for name, setup in self._setups.items()},
            out=self._out,
            at_once=jobs,
            deadline=deadline,
            expected=self._expected,
            came=self._came,
        )

    def outcome(self, setup: Setup) -> dict[str, Any] | None:
        path = self._out / "runs" / setup.name / OUTCOME
        return dict(json.loads(path.read_bytes())) if path.exists() else None

    def _came(self, name: str) -> str | None:
        outcome = self.outcome(self._setups[name])
        if outcome is None:
            return None
        return "diverged" if outcome["test"] is None else f"test accuracy {outcome['test']:.3f}"

    def _expected(self, name: str) -> float:
        found = [o["seconds"] for s in self._setups.values() if (o := self.outcome(s)) is not None]
        return max(found, default=60.0)

    def report(self) -> None:
        every = [asdict(s) | outcome for s in self._setups.values() if (outcome := self.outcome(s)) is not None]
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in every]
        replace_file(self._out / "results.json", (json.dumps(rows) + "\n").encode())
        averaged = [row for row in rows if row["entry"] in AVERAGED]
        elastic = [row for row in rows if row["entry"] in ELASTIC]
        tables = {"adacomm": adacomm_table(averaged), "way": way_table(averaged), "elastic": elastic_table(elastic)}
        for name, lines in tables.items():
            replace_file(self._out / f"{name}.md", ("\n".join(lines) + "\n").encode())
            print("\n".join(lines), end="\n\n")
        draw_adacomm(averaged, self._out / "adacomm.png")
        draw_elastic(elastic, self._out / "elastic.png")


# -- AdaComm ----------------------------------------------------------------------------------------------------------
def seconds_to(row: dict[str, Any], loss: float) -> float:
    """Virtual seconds until the training loss was that low."""
    took: float = next((at for at, _, found, _ in row["curve"] if found <= loss), math.inf)
    return took


def last_loss(row: dict[str, Any]) -> float:
    """The mean training loss of the last three epochs."""
    mean: float = statistics.mean(loss for _, _, loss, _ in row["curve"][-3:])
    return mean


def adacomm_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| all-reduce / computing | averaging | s a step | loss at the end | s to the loss of every step | sooner | "
        "test | periods |",
        "|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    steps = ADACOMM_EPOCHS * SAMPLES / (WORKERS * BATCH)
    for ratio in RATIOS:
        by_seed = {row["seed"]: row for row in rows if row["entry"] == "every step" and row["number"] == ratio}
        for entry in AVERAGED:
            mine = [r for r in rows if (r["entry"], r["number"]) == (entry, ratio) and r["seed"] in by_seed]
            if not mine:
                continue
            ends = {r["seed"]: last_loss(by_seed[r["seed"]]) for r in mine}
            took = [seconds_to(r, ends[r["seed"]]) for r in mine]
            gains = [seconds_to(by_seed[r["seed"]], ends[r["seed"]]) / t for r, t in zip(mine, took, strict=True)]
            each = statistics.mean(r["curve"][-1][0] for r in mine) / steps
            periods = [PERIOD, *(period for _, period in mine[0]["periods"])] if entry == "adacomm" else []
            lines.append(
                f"| {ratio} | {entry} | {each:.3f} | {spread([last_loss(r) for r in mine], 3)} | {listed(took, 0)} | "
                f"{listed(gains, 1)} | {spread([100 * r['test'] for r in mine], 1)} | {' '.join(map(str, periods))} |"
            )
    return lines


def way_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How many times sooner than with an average after every step a training loss was reached, over all seeds."""
    lines = [
        "| all-reduce / computing | averaging | "
        + " | ".join(f"loss {share:g} × the last" for share in ON_THE_WAY)
        + " |",
        "|---:|---|" + "---|" * len(ON_THE_WAY),
    ]
    for ratio in RATIOS:
        by_seed = {row["seed"]: row for row in rows if row["entry"] == "every step" and row["number"] == ratio}
        for entry in list(AVERAGED)[1:]:
            mine = [r for r in rows if (r["entry"], r["number"]) == (entry, ratio) and r["seed"] in by_seed]
            cells = []
            for share in ON_THE_WAY:
                gains = []
                for row in mine:
                    base = by_seed[row["seed"]]
                    loss = share * last_loss(base)
                    gains.append(seconds_to(base, loss) / seconds_to(row, loss))
                cells.append(listed(gains, 1))
            lines.append(f"| {ratio} | {entry} | {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values) if len(values) > 1 else 0:.{digits}f}"


def listed(values: Sequence[float], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" if 0 < value < math.inf else "never" for value in values)


def draw_adacomm(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    for place, ratio in enumerate(RATIOS):
        axes = figure.add_subplot(1, len(RATIOS), place + 1, xlabel="virtual seconds", yscale="log")
        axes.set_title(f"all-reduce: {ratio} × computing")
        for color, entry in zip(("black", "#E69F00", "#0072B2"), AVERAGED, strict=True):
            for row in rows:
                if (row["entry"], row["number"]) == (entry, ratio):
                    times, _, losses, _ = zip(*row["curve"], strict=True)
                    label = f"average: {entry}" if row["seed"] == 0 else None
                    axes.plot(times, losses, color=color, label=label, linewidth=1)
        if not place:
            axes.set_ylabel("training loss")
            axes.legend(fontsize=8)
        axes.set_yticks(ticks := [0.3, 0.4, 0.5, 0.6, 0.8, 1.0], list(map(str, ticks)))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


# -- elastic averaging ------------------------------------------------------------------------------------------------
def error(row: dict[str, Any]) -> float:
    """The test error in per cent, of chance where the run diverged."""
    return 90.0 if row["test"] is None else 100 * (1 - float(row["test"]))


def elastic_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| way, steps between exchanges | "
        + " | ".join(f"rate {rate:g}" for rate in ELASTIC_RATES)
        + " | at its best rate |",
        "|---|" + "---|" * len(ELASTIC_RATES) + "---|",
    ]
    for entry in ELASTIC:
        cells, means = [], {}
        for rate in ELASTIC_RATES:
            mine = [row for row in rows if (row["entry"], row["number"]) == (entry, rate)]
            if mine:
                means[rate] = statistics.mean(map(error, mine))
                gone = sum(row["test"] is None for row in mine)
                cells.append(spread([*map(error, mine)], 1) + (f", {gone} diverged" if gone else ""))
        if means:
            best = min(means, key=lambda rate: means[rate])
            found = sorted((row["seed"], error(row)) for row in rows if (row["entry"], row["number"]) == (entry, best))
            lines.append(f"| {entry} | {' | '.join(cells)} | {listed([e for _, e in found], 1)} (rate {best:g}) |")
    return lines


def draw_elastic(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(1, 1, 1, ylabel="test error, %", yscale="log")
    for place, entry in enumerate(ELASTIC):
        for shift, rate in enumerate(ELASTIC_RATES):
            mine = [error(row) for row in rows if (row["entry"], row["number"]) == (entry, rate)]
            label = f"rate {rate:g}" if not place else None
            axes.plot([place + 0.2 * (shift - 1)] * len(mine), mine, "o", color=f"C{shift}", alpha=0.6, label=label)
    axes.set_xticks(range(len(ELASTIC)), list(ELASTIC))
    axes.set_yticks(ticks := [12, 15, 20, 30, 50, 90], list(map(str, ticks)))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    args = options(__doc__, "runs/local-updates").parse_args(arguments)
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
