"""Pipelines beside torch.distributed.pipelining: samples a second of the same model, cuts and microbatches.

python -m benchmarks.pipeline --stages 2 --microbatches 4,8,16 --rounds 3

A model of eight layers, each 1024 wide, in microbatches of 64; contenders take turns, one thread for each process:

    whole       one process on the unsplit batch
    apart       as many processes as stages, each with the whole model on a batch of its own in the same microbatches,
                which never communicate: what this machine gives so many processes at once
    gpipe, 1f1b     torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B) over Gloo
    ours            `pipeline` with order=gpipe and order=1f1b; copies=false, as torch keeps none, and with copies

The bound of a schedule with K stages and M microbatches is `apart` times M / (M + K - 1).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.records import Step

WIDTH, LAYERS, MICROBATCH = 1024, 8, 64
ORDERS: tuple[Literal["gpipe", "1f1b"], ...] = ("gpipe", "1f1b")


def make_model() -> nn.Sequential:
    layers = [[nn.Linear(WIDTH, WIDTH), nn.ReLU()] for _ in range(LAYERS - 1)]
    return nn.Sequential(*(layer for pair in layers for layer in pair), nn.Linear(WIDTH, 10))


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(samples, WIDTH, generator=draw), torch.randint(10, (samples,), generator=draw)


# -- processes of torch alone -----------------------------------------------------------------------------------------
def _rate(step: Any, samples: int, seconds: float) -> float:
    step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
    return steps * samples / (time.perf_counter() - began)


def _alone(rank: int, processes: int, store: str, samples: int, size: int, seconds: float, queue: Any) -> None:
    """Train the whole model on batches of `samples`, in pieces of `size`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = data(samples)

    def step() -> None:
        optimizer.zero_grad()
        for x, y in zip(inputs.split(size), labels.split(size), strict=True):
            (F.cross_entropy(model(x), y) * (len(x) / samples)).backward()
        optimizer.step()

    dist.barrier()
    queue.put(_rate(step, samples, seconds))


def _torch_stage(rank: int, stages: int, store: str, order: str, microbatches: int, steps: int, queue: Any) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=stages)
    layers = list(make_model())
    size = 2 * LAYERS // stages
    part = nn.Sequential(*layers[rank * size : (rank + 1) * size])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[order]
    schedule = kind(stage, microbatches, loss_fn=F.cross_entropy)
    inputs, labels = data(microbatches * MICROBATCH)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels if rank == stages - 1 else None)
        optimizer.step()

    step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    if rank == 0:
        queue.put(steps * microbatches * MICROBATCH / (time.perf_counter() - began))


def processes(target: Any, count: int, *arguments: Any) -> list[float]:
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        children = [context.Process(target=target, args=(r, count, store, *arguments, queue)) for r in range(count)]
        for child in children:
            child.start()
        expected = count if target is _alone else 1
        found = [queue.get(timeout=300) for _ in range(expected)]
        for child in children:
            child.join(60)
    return found


# -- ours -------------------------------------------------------------------------------------------------------------
def ours(stages: int, order: Literal["gpipe", "1f1b"], microbatches: int, steps: int, copies: bool) -> float:
    samples = microbatches * MICROBATCH
    inputs, labels = data(samples)
    held = TensorDataset(inputs[:64], labels[:64])
    task = tt.Task(
        model=make_model,
        loss=F.cross_entropy,
        train=TensorDataset(inputs, labels),
        validation=held,
        test=held,
        optimizer=tt.optimizer("sgd", lr=0.01, momentum=0.9),
        batch_size=samples,
        epochs=steps + 1,
        name="wide",
    )
    cuts = ",".join(str(2 * LAYERS // stages * stage) for stage in range(1, stages))
    with tempfile.TemporaryDirectory() as out:
        result = tt.train(
            task,
            tt.Pipeline(stages=stages, order=order, microbatches=microbatches, copies=copies, cuts=cuts),
            workers=stages,
            out=Path(out) / "run",
            device="cpu",
            threads=1,
            evaluate_every=10_000,
            progress=False,
        )
    steps_taken = [r for r in result.history if isinstance(r, Step) and r.worker == 0]
    first, last = steps_taken[0], steps_taken[-1]
    return (last.samples - first.samples) / (last.time - first.time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", default="4,8,16", help="numbers of microbatches, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    for count in map(int, asked.microbatches.split(",")):
        found: dict[str, list[float]] = {}
        for _ in range(asked.rounds):
            samples = count * MICROBATCH
            found.setdefault("whole", []).extend(processes(_alone, 1, samples, samples, 3.0))
            found.setdefault("apart", []).append(sum(processes(_alone, asked.stages, samples, MICROBATCH, 3.0)))
            for order in ORDERS:
                (rate,) = processes(_torch_stage, asked.stages, order, count, asked.steps)
                found.setdefault(f"torch {order}", []).append(rate)
                for copies in (False, True):
                    name = f"ours {order}{', copies' if copies else ''}"
                    found.setdefault(name, []).append(ours(asked.stages, order, count, asked.steps, copies))
        bound = statistics.median(found["apart"]) * count / (count + asked.stages - 1)
        print(f"{asked.stages} stages, {count} microbatches of {MICROBATCH}; samples/s, median of {asked.rounds}")
        for name, rates in found.items():
            median = statistics.median(rates)
            spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
            print(f"  {name:<22}{median:8,.0f}   {median / bound:5.2f} of the bound   {spread}")


if __name__ == "__main__":
    main()
