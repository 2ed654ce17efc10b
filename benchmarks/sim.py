"""The simulator's speed.

python -m benchmarks.sim

    kernel     events a second, of events that do nothing but make the next one
    scale      gradients=off, 1,000 workers, 16 servers, Downpour, 100 steps each: real seconds on one core
    overhead   digits with 64 workers, real gradients: the run's seconds / those that forward and backward take, one
               after the other; without and with processes that compute them
    memory     1,000 workers of a model of 100,000 parameters, real gradients: the process's peak

Each case runs in a process of its own, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.trainer.backward import Gradients
from torrential.worlds.sim.kernel import Kernel

CLUSTER = {"compute": {"seconds_per_sample": 1e-3, "spread": "lognormal", "shape": 0.1}}


def kernel() -> dict[str, Any]:
    clock, chains, length = Kernel(), 100, 10_000

    def tick(left: int) -> None:
        if left:
            clock.after(1.0, tick, left - 1)

    for _ in range(chains):
        tick(length)
    began = time.perf_counter()
    clock.run()
    return {"events_per_second": clock.events / (time.perf_counter() - began), "target": 300_000}


def scale(workers: int = 1000, servers: int = 16, steps: int = 100) -> dict[str, Any]:
    began = time.perf_counter()
    result = _run(
        "digits-mlp", "downpour", workers, servers, steps=workers * steps, batch_size=1, gradients="off", replicas=0
    )
    return {
        "seconds": time.perf_counter() - began,
        "virtual_seconds": result.summary.seconds,
        "steps": result.summary.steps,
        "target_seconds": 120,
    }


def overhead(workers: int = 64, steps: int = 150) -> dict[str, Any]:
    """Of each worker so many steps, without and with processes for all cores but one."""
    spent = 0.0
    add_up = Gradients.add_up

    def timed(*args: Any) -> list[dict[str, float]]:
        nonlocal spent
        began = time.perf_counter()
        result = add_up(*args)
        spent += time.perf_counter() - began
        return result

    helpers = len(os.sched_getaffinity(0)) - 1
    ratios: dict[str, Any] = {"processes": helpers, "target": 1.15}
    for strategy, servers in (("allreduce", 0), ("downpour", 2), ("ssp", 2), ("backup", 2)):
        found, updates = {}, steps * (workers if strategy in ("downpour", "ssp") else 1)
        for processes in (0, helpers):
            Gradients.add_up = timed if not processes else add_up  # type: ignore[method-assign,assignment]
            began = time.perf_counter()
            options = {"steps": updates, "batch_size": 16, "evaluate_every": updates // 10}
            _run("digits", strategy, workers, servers, processes=processes, **options)
            found[processes] = time.perf_counter() - began
        ratios[strategy] = {"alone": found[0] / spent, "helped": found[helpers] / spent, "gradients_seconds": spent}
        spent = 0.0
    return ratios


class Wide(nn.Module):
    """About 100,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 260), nn.ReLU(), nn.Linear(260, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]


def memory(workers: int = 1000) -> dict[str, Any]:
    data = TensorDataset(torch.randn(8192, 64), torch.randint(10, (8192,)))
    task = tt.Task(model=Wide, loss=functional.cross_entropy, train=data, validation=data, test=data, name="wide")
    found = {}
    for strategy, servers in (("downpour", 16), ("allreduce", 0)):
        _run(task, strategy, workers, servers, steps=3 * workers if servers else 3, batch_size=2)
        found[strategy] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"gibibytes": found, "parameters": sum(p.numel() for p in Wide().parameters()), "target_gibibytes": 4}


def _run(task: Any, strategy: str, workers: int, servers: int, **options: Any) -> tt.TrainResult:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        return tt.train(
            task,
            strategy,
            workers=workers,
            servers=servers or None,
            world="sim",
            cluster=CLUSTER,
            out=Path(directory) / "run",
            device="cpu",
            progress=False,
            **{"epochs": 1000} | options,
        )


CASES = {"kernel": kernel, "scale": scale, "overhead": overhead, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(1)
        print(json.dumps(CASES[args.one]()))
        return
    for name in args.cases.split(","):
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.sim", "--one", name]
        print(name, subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
