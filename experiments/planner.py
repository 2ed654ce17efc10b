"""Is the planner's cut the best one? All cuts of ten models, tried one by one in simulated time.

python -m experiments.planner --profiles 10

A model has eight layers whose seconds, outputs and weights are drawn from a seed: seconds over a factor of ten, outputs
over a factor of a hundred, and a network that is a bottleneck for some of the cuts. `torrential.stages.plan` cuts it
into two, three or four stages, from its profile alone; then `pipeline` runs in the simulated world with that cut and
with every other one. Told: by how much the planner's choice is slower than the best.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.records import Step
from torrential.stages.plan import TwoLevelNetwork, plan_pipeline
from torrential.stages.profile import LayerProfile

MICROBATCHES, MICROBATCH, STEPS = 8, 4, 3
LATENCY = 1e-5
SLOWER = 1.05  # than the best: what is allowed


@dataclass(frozen=True)
class Case:
    """A model, and the workers and network that it is cut for."""

    widths: list[int]  # of the input and of every layer's output
    seconds: list[float]  # of each layer, forward and backward, on a minibatch
    stages: int
    bandwidth: float  # bytes per second

    @property
    def batch(self) -> int:
        return MICROBATCHES * MICROBATCH

    def profile(self) -> list[LayerProfile]:
        return [
            LayerProfile(
                name=str(number),
                kind="Linear",
                forward_seconds=seconds / 3,
                backward_seconds=2 * seconds / 3,
                recompute_seconds=seconds / 3,
                activation_bytes=4 * self.batch * after,
                parameter_bytes=4 * (before + 1) * after,
            )
            for number, (seconds, (before, after)) in enumerate(
                zip(self.seconds, itertools.pairwise(self.widths), strict=True)
            )
        ]

    def planned(self) -> tuple[int, ...]:
        """The layers at which the planner begins stages."""
        network = TwoLevelNetwork(workers_per_host=self.stages, inside_bytes_per_second=self.bandwidth)
        plan = plan_pipeline(self.profile(), network, replicate=False, schedule="1f1b", microbatches=MICROBATCHES)
        return tuple(stage.first for stage in plan.stages[1:])

    def every_cut(self) -> list[tuple[int, ...]]:
        return list(itertools.combinations(range(1, len(self.seconds)), self.stages - 1))

    def simulated(self, cuts: tuple[int, ...]) -> float:
        """The seconds of a step in the simulated world."""
        inputs = torch.zeros(self.batch, self.widths[0])
        data = TensorDataset(inputs, torch.zeros(self.batch, dtype=torch.int64))
        widths = self.widths
        task = tt.Task(
            model=lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))),
            loss=F.cross_entropy,
            train=data,
            validation=data,
            test=data,
            optimizer=tt.optimizer("sgd", lr=0.01),
            batch_size=self.batch,
            epochs=STEPS,
            name="drawn",
        )
        ends = [0, *cuts, len(self.seconds)]
        costs = ",".join(f"{sum(self.seconds[a:b]):.9g}" for a, b in itertools.pairwise(ends))
        cluster = {
            "compute": {"seconds_per_sample": sum(self.seconds) / self.batch},
            "network": {"latency": LATENCY, "bandwidth": self.bandwidth, "handling": 0.0},
        }
        how = tt.Pipeline(microbatches=MICROBATCHES, cuts=",".join(map(str, cuts)), costs=costs, copies=False)
        with tempfile.TemporaryDirectory() as out:
            result = tt.train(
                task, how, workers=self.stages, world="sim", cluster=cluster, out=Path(out) / "run", device="cpu",
                evaluate_every=STEPS, test=False, progress=False,
            )  # fmt: skip
        last = max(r.time for r in result.history if isinstance(r, Step) and r.step == STEPS)
        return last / STEPS


def draw(seed: int, layers: int = 8) -> Case:
    chance = random.Random(f"planner {seed}")
    widths = [8, *(round(4 * 100 ** chance.random()) for _ in range(layers - 1)), 10]
    seconds = [0.002 * 10 ** chance.random() for _ in range(layers)]
    stages = 2 + seed % 3
    crossing = sorted(4 * MICROBATCHES * MICROBATCH * width for width in widths[1:-1])
    slowest = sum(seconds) / stages
    bandwidth = 2 * crossing[-1] / slowest * chance.choice((0.3, 1.0, 10.0))
    return Case(widths, seconds, stages, bandwidth)


@dataclass(frozen=True)
class Outcome:
    """All cuts of a model, with the simulated seconds of a step."""

    planned: tuple[int, ...]
    seconds: dict[tuple[int, ...], float]

    @property
    def best(self) -> tuple[int, ...]:
        return min(self.seconds, key=lambda cuts: self.seconds[cuts])

    @property
    def slower(self) -> float:
        """How many times as long a step takes with the planner's cut as with the best."""
        return self.seconds[self.planned] / self.seconds[self.best]


def try_all(case: Case) -> Outcome:
    return Outcome(case.planned(), {cuts: case.simulated(cuts) for cuts in case.every_cut()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first profile")
    asked = parser.parse_args()
    heads = {
        "profile": 7,
        "stages": 6,
        "cuts": 5,
        "planned": 12,
        "ms": 9,
        "best": 12,
        "ms ": 9,
        "slower": 7,
        "median": 7,
    }
    print(" ".join(f"{head:>{width}}" for head, width in heads.items()))
    worst = 0.0
    for seed in range(asked.first, asked.first + asked.profiles):
        case = draw(seed)
        outcome = try_all(case)
        times = sorted(outcome.seconds.values())
        middle = times[len(times) // 2] / times[0]
        names = [",".join(map(str, cuts)) for cuts in (outcome.planned, outcome.best)]
        planned, best = (1e3 * outcome.seconds[cuts] for cuts in (outcome.planned, outcome.best))
        print(
            f"{seed:7} {case.stages:6} {len(times):5} {names[0]:>12} {planned:9.2f} {names[1]:>12} {best:9.2f} "
            f"{outcome.slower:7.3f} {middle:7.3f}",
            flush=True,
        )
        worst = max(worst, outcome.slower)
    print(f"the planner's cut takes {worst:.3f} times as long as the best, at most")
    if worst > SLOWER:
        sys.exit(f"that is more than {SLOWER} times")


if __name__ == "__main__":
    main()
