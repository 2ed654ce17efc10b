"""Time to a held-out metric over a slow link: ours, compressed and not, DDP, PowerSGD, Accelerate's LocalSGD and
torchft's DiLoCo.

python -m benchmarks.slowlink --out OUT --link 100mbit                 # again: it goes on where it was stopped
python -m benchmarks.slowlink --out OUT --link 100mbit --predict       # the same table from the simulated world
python -m benchmarks.slowlink --out OUT --report                       # OUT/table.md, OUT/times.png of OUT/runs.jsonl

Two processes with one thread each, over a loopback of that rate in a network namespace of their own, which both
directions share (benchmarks/link.py; needs root). It is not a veth between two namespaces, because the workers of a run
listen on the loopback. All run in this system, in turns: same model, data, seeds, evaluation and records; a snapshot
every 2,048 samples or so, evaluated beside training. Periods are 8 steps, and 32 on links below 50 Mb/s; workers keep
their momentum at an average, as Accelerate's do.

Accelerate and torchft are left out where they are not installed. In an environment of their own they are seen with
PYTHONPATH. Hivemind is not compared.

python -m venv PEERS && PEERS/bin/pip install accelerate==1.15.0 torchft==0.2.0
PYTHONPATH=PEERS/lib/python3.11/site-packages python -m benchmarks.slowlink --out OUT --link 100mbit
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import nn

import torrential as tt
from benchmarks import link
from benchmarks.slowlink_peers import AccelerateLocalSgd, PowerSgd, TorchftDiLoCo
from torrential.data.images import Pixels
from torrential.records import Step
from torrential.study.statistics import FEWEST, compare, holm
from torrential.tasks import load_task

WORKERS, BATCH, EVERY = 2, 32, 2048  # EVERY: samples between two evaluations
TARGETS = {"fashion": 0.85, "characters": 1.5}
EPOCHS = {"fashion": 2, "characters": 40}
RUNS = "runs.jsonl"
OURS, PEERS = ("local", "adacomm", "diloco"), ("ddp", "Accelerate", "torchft")
Groups = dict[tuple[str, str], dict[str, dict[str, list[dict[str, Any]]]]]  # by task and link, entry, world
MBIT = {"1gbit": 1000, "100mbit": 100, "10mbit": 10}


def small_cnn() -> nn.Sequential:
    """106,000 parameters, 0.42 MB."""
    blocks = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    blocks += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(Pixels(72.94, 90.02), *blocks, *head)


def make_task(name: str) -> tt.Task:
    if name == "characters":
        given = load_task(str(Path(__file__).parents[1] / "examples/character_transformer.py"))
        options: dict[str, Any] = {"model": given.model, "metric": given.metric, "maximize": False}
        options |= {"optimizer": tt.optimizer("adamw", lr=3e-3, weight_decay=0.1), "batch_size": 16}
    else:
        given = load_task("fashion")
        options = {"model": small_cnn, "optimizer": tt.optimizer("sgd", lr=0.02, momentum=0.9), "batch_size": BATCH}
    held = {"validation": given.validation} if given.validation is not None else {}
    about = {"loss": given.loss, "train": given.train, "test": given.test, "epochs": EPOCHS[name], "name": name}
    return tt.Task(**options | held | about)


COMPRESSED: dict[str, dict[str, Any]] = {
    "bf16": {"wire": "bf16"},
    "int8": {"compress": "int8"},
    "powersgd(4)": {"compress": "powersgd", "rank": 4},
    "dgc 1 %": {"compress": "dgc", "ratio": 0.01, "sparsity_warmup": 0.1},
}


class Way(NamedTuple):
    """A way to train."""

    strategy: tt.Strategy
    every: int  # steps between two snapshots
    options: dict[str, Any] = {}


def entries(rate: str, batch: int, simulated: bool) -> dict[str, Way]:
    """All ways to train, by name, with about equally many samples between two snapshots of each."""
    period = 8 if MBIT[rate] >= 50 else 32
    every = max(1, EVERY // (WORKERS * batch))

    def rounds(steps: int) -> int:
        return max(1, every // steps)

    found = {
        "allreduce": Way(tt.AllReduce(), every),
        **{f"allreduce, {name}": Way(tt.AllReduce(), every, options) for name, options in COMPRESSED.items()},
        f"local {period}": Way(tt.Local(period=period, inner="keep"), rounds(period)),
        f"adacomm {2 * period}": Way(tt.AdaComm(period=2 * period, inner="keep"), rounds(2 * period)),
        f"diloco {2 * period}": Way(tt.DiLoCo(period=2 * period), rounds(2 * period)),
        f"easgd {period}, momentum": Way(tt.Easgd(period=period, momentum=0.9), max(1, EVERY // (period * batch))),
    }
    if simulated:
        return found
    found |= {"ddp": Way(tt.Ddp(), every), "ddp, PowerSGD(4)": Way(PowerSgd(), every)}
    peers: dict[str, tuple[str, tt.Strategy, int]] = {
        "accelerate": (f"Accelerate LocalSGD {period}", AccelerateLocalSgd(period=period), rounds(period)),
        "torchft": (f"torchft DiLoCo {2 * period}", TorchftDiLoCo(period=2 * period), rounds(2 * period)),
    }
    for package, (name, strategy, after) in peers.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed; {name} is left out", file=sys.stderr)
        else:
            found[name] = Way(strategy, after)
    return found


def carry_out(args: argparse.Namespace) -> None:
    """Train in all ways, in turns, and append a line for each run; runs that are there already are left out."""
    task, path, where = make_task(args.task), args.out / RUNS, dict[str, Any]()
    there = read_runs(path)
    if args.predict:
        seconds = seconds_per_sample([run for run in there if run["task"] == args.task])
        bandwidth = MBIT[args.link] * 1e6 / 8 / WORKERS  # of a worker: both share the real link
        network = {"bandwidth": bandwidth, "latency": 1e-4}
        where |= {"world": "sim", "cluster": {"compute": {"seconds_per_sample": seconds}, "network": network}}
    else:
        where |= {"world": "local", "transport": "tcp", "threads": 1}
        link.enter(args.link)
    done = {(run["task"], run["link"], run["world"], run["entry"], run["seed"]) for run in there}
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in range(1, args.trials + 1):
        for name, (strategy, every, options) in entries(args.link, task.batch_size, args.predict).items():
            if not re.search(args.only, name) or (args.task, args.link, where["world"], name, seed) in done:
                continue
            with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
                os.environ["XDG_CACHE_HOME"] = directory  # what messages cost on this link is of no use elsewhere
                servers: dict[str, Any] = {"servers": 1} if name.startswith("easgd") else {}
                about: dict[str, Any] = {
                    "target": TARGETS[args.task],
                    "seed": seed,
                    "evaluate_every": every,
                    "device": "cpu",
                    **options,
                }
                out = Path(directory) / "run"
                made = tt.train(task, strategy, workers=WORKERS, out=out, progress=False, **servers, **about, **where)
            found = line(args, where["world"], name, seed, made)
            with open(path, "a") as file:
                file.write(json.dumps(found) + "\n")
            print(found, flush=True)


def line(args: argparse.Namespace, world: str, name: str, seed: int, made: tt.TrainResult) -> dict[str, Any]:
    """What is kept of a run."""
    summary, steps = made.summary, [s for s in made.history if isinstance(s, Step) and s.of_worker]
    return {
        "task": args.task,
        "link": args.link,
        "world": world,
        "entry": name,
        "seed": seed,
        "time_to_target": summary.time_to_target,
        "test": summary.value,
        "samples": summary.samples,
        "seconds": max(step.time for step in steps),
        "bytes_sent": summary.bytes_sent,
        "compute": sum(step.compute for step in steps),
    }


def read_runs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def seconds_per_sample(runs: Sequence[dict[str, Any]]) -> float:
    """What forward and backward of a sample took in the real runs of `allreduce`."""
    own = [run for run in runs if run["world"] == "local" and run["entry"] == "allreduce"]
    if not own:
        raise SystemExit("--predict needs what computing takes; run the same without it first")
    return float(median(run["compute"] / run["samples"] for run in own))


# -- what came of it --------------------------------------------------------------------------------------------------
def report(out: Path) -> None:
    groups: Groups = {}
    for run in read_runs(out / RUNS):
        entry = groups.setdefault((run["task"], run["link"]), {}).setdefault(run["entry"], {"local": [], "sim": []})
        entry[run["world"]].append(run)
    heads = ["task", "link", "entry", "s to the target", "all", "sooner than ddp", "samples/s", "test", "predicted s"]
    rows = ["| " + " | ".join(heads) + " |", "|---|---|---|---:|---|---:|---:|---:|---:|"]
    for (task, rate), found in groups.items():
        baseline = middle(found["ddp"]["local"]) if "ddp" in found else math.inf
        for name, runs in found.items():
            rows.append(f"| {task} | {rate} | {name} | {' | '.join(cells(runs['local'], runs['sim'], baseline))} |")
    rows += ["", *verdicts(groups)]
    (out / "table.md").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))
    draw(out, groups)


def verdicts(groups: Groups) -> list[str]:
    """Our ways that send averages against the libraries, by the test of `torrential compare`, corrected for its being
    made several times on a task and a link. Where one of them has fewer than three trials nothing is said."""
    rows = ["| task | link | ours | against | times sooner | 95 % | p, corrected |", "|---|---|---|---|---:|---|---:|"]
    for (task, rate), found in groups.items():
        there = {name: times(runs["local"]) for name, runs in found.items() if len(runs["local"]) >= FEWEST}
        own = [name for name in there if name.startswith(OURS)]
        pairs = [(name, peer) for name in own for peer in there if peer.startswith(PEERS)]
        made = [compare(there[name], there[peer]) for name, peer in pairs]
        for (name, peer), each, p in zip(pairs, made, holm([each.p for each in made]), strict=True):
            interval = f"{each.low:.2f} to {each.high:.2f}"
            rows.append(f"| {task} | {rate} | {name} | {peer} | {each.ratio:.2f} | {interval} | {p:.3f} |")
    return rows


def times(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [math.inf if run["time_to_target"] is None else run["time_to_target"] for run in runs]


def middle(runs: Sequence[dict[str, Any]]) -> float:
    return median(times(runs)) if runs else math.inf


def cells(real: Sequence[dict[str, Any]], simulated: Sequence[dict[str, Any]], baseline: float) -> list[str]:
    own = middle(real)
    return [
        said(own),
        " ".join(map(said, times(real))),
        f"{baseline / own:.1f}" if own < math.inf and baseline < math.inf else "",
        f"{median(run['samples'] / run['seconds'] for run in real):,.0f}" if real else "",
        f"{median(run['test'] for run in real):.3f}" if real else "",
        said(middle(simulated)) if simulated else "",
    ]


def said(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < math.inf else "missed"


def draw(out: Path, groups: Groups) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(groups), 3.6), layout="constrained")
    for axes, (about, found) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        for place, runs in enumerate(found.values()):
            there = [time for time in times(runs["local"]) if time < math.inf]
            if there:
                axes.barh(place, median(there), 0.6, color=f"C{place}", alpha=0.5)
                axes.plot(there, [place] * len(there), ".", color=f"C{place}")
            if runs["sim"]:
                axes.plot(middle(runs["sim"]), place, "kx")
        axes.set_yticks(range(len(found)), list(found))
        axes.invert_yaxis()
        axes.set_xlabel("seconds to the target: medians, trials; x: predicted")
        axes.set_title(", ".join(about))
    figure.savefig(out / "times.png", dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--link", choices=list(MBIT))
    parser.add_argument("--task", choices=list(TARGETS), default="fashion")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--only", default="", help="entries in whose name this regular expression is found")
    parser.add_argument("--predict", action="store_true", help="simulate it, with what computing took in real runs")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args(arguments)
    if args.link:
        carry_out(args)
    if args.report or not args.link:
        report(args.out)
    return 0


if __name__ == "__main__":
    from benchmarks import slowlink  # so that the model that travels to other processes is not of __main__

    raise SystemExit(slowlink.main())
