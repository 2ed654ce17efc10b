"""allreduce, pipeline and pipedream over a slow link, on a model with large layers: which learns soonest?

python -m experiments.slow_link --out OUT/four                      # four simulated workers on 100 Mb/s
python -m experiments.slow_link --out OUT/real --link 200mbit       # two processes, over a loopback of that rate (root)
python -m experiments.slow_link --out OUT/predicted --predict       # the same two, simulated
python -m experiments.slow_link --out OUT --draw four,real,predicted     # OUT/slow_link.png

The model has 0.8 million weights in five layers, on the 8 x 8 digits. Data parallelism sums 3.2 MB at every step; what
crosses between two stages is 64 KB each way for 32 samples. Rates are proportional to the batch of an update. All are
evaluated every 512 samples, before which `pipedream` is drained. A loopback's rate is shared by all that is sent: it is
simulated as half of it for each of two workers, with what forward and backward take here.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torrential as tt
from benchmarks import link
from torrential.tasks import load_task
from torrential.tasks.digits import Standard

WIDTHS = (64, 512, 512, 512, 512, 10)
EVERY = 512  # samples between two evaluations
FOUND = "found.json"
RATE = 0.1  # of an update of 128 samples
SLOW = {"compute": {"seconds_per_sample": 1e-3}, "network": {"bandwidth": 1.25e7}}


def wide() -> nn.Sequential:
    layers = [layer for a, b in itertools.pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(Standard(), nn.Flatten(), *layers[:-1])


def wide_task() -> tt.Task:
    given = load_task("digits-mlp")
    return tt.Task(
        model=wide,
        loss=given.loss,
        train=given.train,
        validation=given.validation,
        test=given.test,
        optimizer=tt.optimizer("sgd", lr=RATE, momentum=0.9),
        batch_size=32,
        epochs=20,
        name="wide",
    )


def entries(workers: int) -> list[str]:
    """The ways to train: an update of all workers' batches, or one of each minibatch."""
    together, alone = f"lr={RATE * workers / 4}", f"lr={RATE / 4}"
    whole = f"batch_size={32 * workers}+{together}"
    found = [f"allreduce:{together}", f"pipeline:copies=false+{whole}", f"pipedream:window=64+{alone}"]
    return [*found, f"pipeline:{whole}"] if workers == 4 else found


def seconds_per_sample() -> float:
    """What forward and backward of a minibatch take on one thread, by the sample."""
    torch.set_num_threads(1)
    model, loss, times = wide(), wide_task().loss, list[float]()
    assert loss is not None
    inputs, targets = torch.zeros(32, 8, 8), torch.zeros(32, dtype=torch.int64)
    for _ in range(100):
        began = time.perf_counter()
        loss(model(inputs), targets).backward()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / 32


def draw(out: Path, studies: list[str]) -> None:
    """Seconds to the target of every trial, and how many times sooner than allreduce with 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.4 * len(studies)), layout="constrained")
    for row, name in zip(figure.subplots(len(studies), 2, squeeze=False), studies, strict=True):
        found = json.loads((out / name / FOUND).read_text())
        names = [entry["name"] for entry in found["entries"]]
        for place, entry in enumerate(found["entries"]):
            row[0].barh(place, entry["median"], 0.6, color=f"C{place}", alpha=0.4)
            row[0].plot(entry["times"], [place] * len(entry["times"]), ".", color=f"C{place}")
        row[0].set_yticks(range(len(names)), [name.partition(":")[0] + kept(name) for name in names])
        row[0].set_title(found["about"], fontsize=10)
        row[0].set_xlabel("seconds to the target: trials and their median")
        for pair in found["pairs"]:
            if pair["second"].startswith("allreduce"):
                place, ratio = names.index(pair["first"]), pair["ratio"]
                error = [[ratio - pair["low"]], [pair["high"] - ratio]]
                row[1].errorbar(ratio, place, xerr=error, fmt="o", color=f"C{place}", capsize=4)
        row[1].axvline(1, color="black", linewidth=0.8)
        row[1].set_yticks(range(len(names)), [""] * len(names))
        row[1].set_xlabel("times as soon as allreduce, with 95 % intervals")
        for axes in row:
            axes.invert_yaxis()
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.grid(axis="x", alpha=0.3)
    figure.savefig(out / "slow_link.png", dpi=110)


def kept(name: str) -> str:
    return ", with copies" if name.startswith("pipe") and "copies=false" not in name else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the directory of the study")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--link", help="a rate, as in 200mbit, for processes of this machine")
    where.add_argument("--predict", action="store_true", help="simulate two workers on 200 Mb/s that both share")
    where.add_argument("--draw", help="studies in OUT, with commas")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--target", type=float, default=0.95)
    args = parser.parse_args(arguments)
    if args.draw:
        draw(args.out, args.draw.split(","))
        return 0
    workers = 2 if args.link or args.predict else 4
    options: dict[str, Any] = {"world": "sim", "cluster": SLOW}
    about = f"{workers} simulated workers, 100 Mb/s each"
    if args.predict:
        options["cluster"] = SLOW | {"compute": {"seconds_per_sample": seconds_per_sample()}}
    if args.link:
        about = f"{workers} processes, a loopback of {args.link} for both"
        link.enter(args.link)
        options = {"world": "local", "transport": "tcp", "threads": 1}
    options |= {"trials": args.trials, "target": args.target, "workers": workers, "device": "cpu", "out": args.out}
    found = tt.compare(wide_task(), entries(workers), evaluate_every=EVERY // (32 * workers), **options)
    print("\n".join([found.sentence, *found.remarks]))
    rows = {name: [dataclasses.asdict(each) for each in getattr(found, name)] for name in ("entries", "pairs")}
    (args.out / FOUND).write_text(json.dumps({"about": about} | rows, indent=1))
    return 0


if __name__ == "__main__":
    from experiments import slow_link  # so that the model that travels to other processes is not of __main__

    raise SystemExit(slow_link.main())
