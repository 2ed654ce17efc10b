"""What a profile predicts of a pipeline, against real runs of it.

python -m benchmarks.planner --stages 2 --rounds 3
python -m benchmarks.planner --stages 2,4,8 --model transformer

For each number of stages: the layers of a model are profiled on a microbatch, first by one process alone, then by as
many at once as there are stages, for cores that work share memory and clock. `torrential.stages.plan` cuts the model by
the second profile. Predicted: the seconds of a step, by a rehearsal of `1f1b` with these times, plus an update of the
largest stage. Measured: the median over rounds of what a step of `pipeline` with these cuts takes, one thread for each
worker, copies=false. A message is taken to need LATENCY and its bytes at BANDWIDTH, whatever it meets.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.records import Step
from torrential.stages.plan import TwoLevelNetwork, plan_pipeline
from torrential.stages.profile import LayerProfile, profile_task
from torrential.stages.rehearse import StageCosts, rehearse_schedule
from torrential.worlds.local.nursery import keep_freed_memory

MICROBATCH, STEPS = 32, 12
LATENCY, BANDWIDTH = 1e-4, 4e9  # seconds, bytes per second: docs/results/pipeline.md
WIDTHS = [1024, 512, 1536, 1024, 1024, 2048, 512, 1024, 1536, 512, 1024, 1024, 2048, 512, 1024, 1024, 512]
TOKENS, FEATURES, BLOCKS = 32, 128, 8
OFF = 0.15  # the share by which a prediction may be off


class FirstToken(nn.Module):
    """Classes from the first token of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x[:, 0])  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTHS[-1], 10))


def transformer() -> nn.Module:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(FEATURES, 4, 4 * FEATURES, dropout=0.0, batch_first=True)

    return nn.Sequential(*(block() for _ in range(BLOCKS)), FirstToken())


MODELS = {"mlp": (mlp, (WIDTHS[0],)), "transformer": (transformer, (TOKENS, FEATURES))}


def make_task(model: str, microbatches: int) -> tt.Task:
    make, shape = MODELS[model]
    samples = microbatches * MICROBATCH
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(samples, *shape, generator=draw), torch.randint(10, (samples,), generator=draw))
    held = TensorDataset(*data[:MICROBATCH])
    return tt.Task(
        model=make,
        loss=F.cross_entropy,
        train=data,
        validation=held,
        test=held,
        optimizer=tt.optimizer("sgd", lr=0.001, momentum=0.9),
        batch_size=samples,
        epochs=STEPS,
        name=model,
    )


# -- predicted --------------------------------------------------------------------------------------------------------
def _profile(_: int, model: str, begin: Any, found: Any) -> None:
    keep_freed_memory()  # as workers do
    begin.wait(120)
    task = make_task(model, 1)
    layers = [name for name, _ in task.model().named_children()]  # which are what `pipeline` cuts between
    found.put(profile_task(task, MICROBATCH, layers=layers, runs=9))


def profiles(model: str, processes: int) -> list[LayerProfile]:
    """The layers as so many processes find them at once, in the mean."""
    context = mp.get_context("spawn")
    begin, found = context.Barrier(processes), context.Queue()
    children = [context.Process(target=_profile, args=(n, model, begin, found)) for n in range(processes)]
    for child in children:
        child.start()
    each = [found.get(timeout=300) for _ in children]
    for child in children:
        child.join(60)
    return [
        LayerProfile(
            name=layers[0].name,
            kind=layers[0].kind,
            forward_seconds=statistics.fmean(layer.forward_seconds for layer in layers),
            backward_seconds=statistics.fmean(layer.backward_seconds for layer in layers),
            recompute_seconds=statistics.fmean(layer.recompute_seconds for layer in layers),
            activation_bytes=layers[0].activation_bytes,
            parameter_bytes=layers[0].parameter_bytes,
        )
        for layers in zip(*each, strict=True)
    ]


def update_seconds(nbytes: int) -> float:
    """An update of so many bytes of parameters, on one thread."""
    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.zeros(nbytes // 4))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def predicted(layers: list[LayerProfile], firsts: list[int], microbatches: int) -> float:
    """The seconds of a step of stages that begin at these layers."""
    spans = [layers[a:b] for a, b in itertools.pairwise([*firsts, len(layers)])]
    crossing = max((span[-1].activation_bytes for span in spans[:-1]), default=0)
    costs = StageCosts(
        forward=[sum(layer.forward_seconds for layer in span) for span in spans],
        backward=[sum(layer.backward_seconds for layer in span) for span in spans],
        communication=LATENCY + crossing / BANDWIDTH,
    )
    largest = max(sum(layer.parameter_bytes for layer in span) for span in spans)
    return rehearse_schedule("1f1b", costs, microbatches).seconds + update_seconds(largest)


# -- measured ---------------------------------------------------------------------------------------------------------
def measured(model: str, firsts: list[int], microbatches: int) -> float:
    """The seconds of a step of a real run."""
    how = tt.Pipeline(microbatches=microbatches, cuts=",".join(map(str, firsts[1:])), copies=False)
    with tempfile.TemporaryDirectory() as out:
        result = tt.train(
            make_task(model, microbatches),
            how,
            workers=len(firsts),
            out=Path(out) / "run",
            device="cpu",
            threads=1,
            evaluate_every=10_000,
            test=False,
            progress=False,
        )
    steps = [r for r in result.history if isinstance(r, Step) and r.worker == 0]
    first, last = steps[0], steps[-1]
    return (last.time - first.time) / (last.step - first.step)


class Outcome(NamedTuple):
    stages: int
    cuts: str
    alone: float
    together: float
    measured: float

    @property
    def off(self) -> float:
        """By which share of what was measured the prediction is off."""
        return self.together / self.measured - 1


def compare(model: str, stages: int, microbatches: int, rounds: int) -> Outcome:
    alone, together = profiles(model, 1), profiles(model, stages)
    network = TwoLevelNetwork(workers_per_host=stages, inside_bytes_per_second=BANDWIDTH)
    plan = plan_pipeline(together, network, replicate=False, schedule="1f1b", microbatches=microbatches)
    firsts = [stage.first for stage in plan.stages]
    took = statistics.median(measured(model, firsts, microbatches) for _ in range(rounds))
    cuts = ",".join(map(str, firsts[1:]))
    told = predicted(alone, firsts, microbatches), predicted(together, firsts, microbatches)
    return Outcome(stages, cuts, told[0], told[1], took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="2", help="numbers of stages, with commas")
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{asked.model}, {asked.microbatches} microbatches of {MICROBATCH}, milliseconds of a step")
    print(f"{'stages':>6} {'cuts':>24} {'alone':>9} {'together':>9} {'measured':>9} {'off':>7}")
    missed = 0
    for stages in map(int, asked.stages.split(",")):
        found = compare(asked.model, stages, asked.microbatches, asked.rounds)
        times = " ".join(f"{1e3 * seconds:9.1f}" for seconds in (found.alone, found.together, found.measured))
        print(f"{stages:6} {found.cuts:>24} {times} {100 * found.off:+6.0f} %", flush=True)
        missed += abs(found.off) > OFF
    if missed:
        sys.exit(f"{missed} off by more than {100 * OFF:.0f} %")


if __name__ == "__main__":
    main()
