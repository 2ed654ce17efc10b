"""allreduce, pipeline and pipedream over a slow link, on a model with large layers: which learns soonest?

python -m experiments.slow_link --out OUT                    # four simulated workers on 100 Mb/s
python -m experiments.slow_link --out OUT --link 200mbit     # two processes, over a loopback of that rate (needs root)

The model has 0.8 million weights in five layers, on the 8 x 8 digits. Data parallelism sums 3.2 MB at every step; what
crosses between two stages is 64 KB each way for 32 samples. Rates are proportional to the batch of an update.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from torch import nn

import torrential as tt
from benchmarks import link
from torrential.tasks import load_task
from torrential.tasks.digits import Standard

WIDTHS = (64, 512, 512, 512, 512, 10)
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the directory of the study")
    parser.add_argument("--link", help="a rate, as in 200mbit, for processes of this machine")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.95)
    args = parser.parse_args(arguments)
    where: dict[str, Any] = {"world": "sim", "cluster": SLOW}
    if args.link:
        link.enter(args.link)
        where = {"world": "local", "transport": "tcp", "threads": 1}
    workers = 2 if args.link else 4
    options = {"trials": args.trials, "target": args.target, "workers": workers, "device": "cpu", "out": args.out}
    found = tt.compare(wide_task(), entries(workers), **options, **where)
    print("\n".join([found.sentence, *found.remarks]))
    return 0


if __name__ == "__main__":
    from experiments import slow_link  # so that the model that travels to other processes is not of __main__

    raise SystemExit(slow_link.main())
