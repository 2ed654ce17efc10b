"""Pipelines beside torch.distributed.pipelining: samples a second of the same model, cuts and microbatches.

python -m benchmarks.pipeline --stages 2 --microbatches 4,8,16 --rounds 3
python -m benchmarks.pipeline --parts

A model of eight layers, each 1024 wide, in microbatches of 64; contenders take turns, one thread for each process:

    whole       one process on the unsplit batch
    apart       as many processes as stages, each with the whole model on a batch of its own in the same microbatches,
                which never communicate: what this machine gives so many processes at once
    apart, added up   the same with this project's backward, which adds weight gradients up in place
    gpipe, 1f1b     torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B) over Gloo
    ours            `pipeline` with order=gpipe and order=1f1b; copies=false, as torch keeps none, and with copies

The bound of a schedule with K stages and M microbatches is M / (M + K - 1) of what processes apart reach; told beside
both kinds of them.

With --parts (two stages), what a step has besides its computing: the seconds in which a tensor crosses from one process
to another, half of there and back, beside Gloo; and those of a step with layers 8 wide, less the bound's for them.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.records import Event, Step
from torrential.stages.whole_backward import backward

WIDTH, LAYERS, MICROBATCH = 1024, 8, 64
TINY, TINY_STEPS = 8, 600  # layers next to nothing, whose steps are only overhead
ALONE_SECONDS = 2.0
ORDERS: tuple[Literal["gpipe", "1f1b"], ...] = ("gpipe", "1f1b")


def make_model(width: int = WIDTH) -> nn.Sequential:
    layers = [[nn.Linear(width, width), nn.ReLU()] for _ in range(LAYERS - 1)]
    return nn.Sequential(*(layer for pair in layers for layer in pair), nn.Linear(width, 10))


def data(samples: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(samples, width, generator=draw), torch.randint(10, (samples,), generator=draw)


# -- processes of torch alone -----------------------------------------------------------------------------------------
def _rate(step: Any, samples: int, seconds: float) -> float:
    step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
    return steps * samples / (time.perf_counter() - began)


def _alone(
    rank: int, processes: int, store: str, samples: int, size: int, width: int, in_place: bool, queue: Any
) -> None:
    """Train the whole model on batches of `samples`, in pieces of `size`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    model = make_model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = data(samples, width)

    def step() -> None:
        optimizer.zero_grad()
        for x, y in zip(inputs.split(size), labels.split(size), strict=True):
            loss = F.cross_entropy(model(x), y) * (len(x) / samples)
            backward([loss], []) if in_place else loss.backward()
        optimizer.step()

    dist.barrier()
    queue.put(_rate(step, samples, ALONE_SECONDS))


def _torch_stage(
    rank: int, stages: int, store: str, order: str, microbatches: int, steps: int, width: int, queue: Any
) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=stages)
    layers = list(make_model(width))
    size = 2 * LAYERS // stages
    part = nn.Sequential(*layers[rank * size : (rank + 1) * size])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[order]
    schedule = kind(stage, microbatches, loss_fn=F.cross_entropy)
    inputs, labels = data(microbatches * MICROBATCH, width)

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


def _gloo_transfers(rank: int, count: int, store: str, numel: int, times: int, queue: Any) -> None:
    """Half of there and back, in seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    tensor, place = torch.ones(numel), torch.empty(numel)

    def there_and_back() -> None:
        for turn in (0, 1):
            dist.send(tensor, 1 - rank) if turn == rank else dist.recv(place, 1 - rank)

    found = _times(there_and_back, times)
    if rank == 0:
        queue.put(statistics.median(found) / 2)


def _times(work: Callable[[], None], times: int) -> list[float]:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found[times // 4 :]


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
class Transfers(tt.Pipeline, frozen=True, kw_only=True):
    """Stages that only pass a tensor there and back, and put on record how long that took."""

    name: ClassVar[str] = "transfers"
    numel: int = 1
    times: int = 1

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local(own=True, undo=False)
        comm, tensor = ctx.comm, torch.ones(self.numel)

        def there_and_back() -> None:
            for turn in (0, 1):
                if turn == comm.rank:
                    comm.pass_on(tensor, 1 - comm.rank, "there and back", 2).wait()
                else:
                    comm.take(tensor.shape, tensor.dtype, 1 - comm.rank, "there and back", 2).wait()

        def propose() -> tt.Vote:
            ctx.data.share(1, part=0, parts=1)
            found = statistics.median(_times(there_and_back, self.times)) / 2
            ctx.progress.note("crossed", f"{found}")
            return tt.Vote(0.0, ctx.config.batch_size if comm.rank == 0 else 0)

        ctx.rounds(propose, lambda decision: None)


def transfer(numel: int, times: int) -> float:
    """Seconds in which so many floats cross from one stage to another."""
    found = _trained(Transfers(stages=2, numel=numel, times=times), 2, MICROBATCH, 1, 1, 8)
    return float(next(r.detail for r in found if isinstance(r, Event) and r.event == "crossed"))


def ours(
    stages: int, order: Literal["gpipe", "1f1b"], microbatches: int, steps: int, copies: bool, width: int = WIDTH,
    batches: int = 1,
) -> float:  # fmt: skip
    """Samples a second; `batches`: of an epoch."""
    cuts = ",".join(str(2 * LAYERS // stages * stage) for stage in range(1, stages))
    strategy = tt.Pipeline(stages=stages, order=order, microbatches=microbatches, copies=copies, cuts=cuts)
    records = _trained(strategy, stages, microbatches * MICROBATCH, batches, steps + 1, width)
    steps_taken = [r for r in records if isinstance(r, Step) and r.worker == 0]
    first, last = steps_taken[0], steps_taken[-1]
    return (last.samples - first.samples) / (last.time - first.time)


def _trained(strategy: tt.Pipeline, workers: int, samples: int, batches: int, steps: int, width: int) -> Sequence[Any]:
    inputs, labels = data(samples * batches, width)
    held = TensorDataset(inputs[:64], labels[:64])
    task = tt.Task(
        model=functools.partial(make_model, width),
        loss=F.cross_entropy,
        train=TensorDataset(inputs, labels),
        validation=held,
        test=held,
        optimizer=tt.optimizer("sgd", lr=0.01, momentum=0.9),
        batch_size=samples,
        name="wide",
    )
    options: dict[str, Any] = {"device": "cpu", "threads": 1, "evaluate_every": 100_000, "progress": False}
    with tempfile.TemporaryDirectory() as out:
        return tt.train(task, strategy, workers=workers, steps=steps, out=Path(out) / "run", **options).history


# -- what is told -----------------------------------------------------------------------------------------------------
def compare(stages: int, count: int, rounds: int, steps: int) -> None:
    """Samples a second with so many microbatches."""
    found: dict[str, list[float]] = {}
    samples = count * MICROBATCH
    for _ in range(rounds):
        found.setdefault("whole", []).extend(processes(_alone, 1, samples, samples, WIDTH, False))
        for name, in_place in (("apart", False), ("apart, added up", True)):
            rates = processes(_alone, stages, samples, MICROBATCH, WIDTH, in_place)
            found.setdefault(name, []).append(sum(rates))
        for order in ORDERS:
            (rate,) = processes(_torch_stage, stages, order, count, steps, WIDTH)
            found.setdefault(f"torch {order}", []).append(rate)
            for copies in (False, True):
                name = f"ours {order}{', copies' if copies else ''}"
                found.setdefault(name, []).append(ours(stages, order, count, steps, copies))
    filled = count / (count + stages - 1)
    bounds = [statistics.median(found[name]) * filled for name in ("apart", "apart, added up")]
    print(f"{stages} stages, {count} microbatches of {MICROBATCH}; samples/s, median of {rounds}")
    print(f"  {'':<22}{'':8}   of the bound, with weight gradients added up")
    for name, rates in found.items():
        median = statistics.median(rates)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(
            f"  {name:<22}{median:8,.0f}   {median / bounds[0]:5.2f}  {median / bounds[1]:5.2f}   {spread}", flush=True
        )


def compare_parts(rounds: int) -> None:
    """What is not computing: transfers, and a step of next to nothing."""
    print(f"a tensor crosses, ms, median of {rounds}")
    for mb, times in ((1, 400), (16, 60)):
        numel = mb << 18
        rows = [(processes(_gloo_transfers, 2, numel, times)[0], transfer(numel, times)) for _ in range(rounds)]
        gloo, mine = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        print(f"  {mb:2} MB: Gloo {gloo:.3f}, ours {mine:.3f}, {gloo / mine:.1f} times as fast", flush=True)
    print(f"a step of 2 stages with layers {TINY} wide, less the bound's seconds, ms, median of {rounds}")
    for count in (2, 8):  # torch takes no fewer than there are stages
        samples, found = count * MICROBATCH, dict[str, list[float]]()
        for _ in range(rounds):
            apart = sum(processes(_alone, 2, samples, MICROBATCH, TINY, False))
            computed = samples / (apart * count / (count + 1))
            (rate,) = processes(_torch_stage, 2, "1f1b", count, TINY_STEPS, TINY)
            rates = {"torch": rate} | {
                f"ours{', copies' if copies else ''}": ours(2, "1f1b", count, TINY_STEPS, copies, TINY, 20)
                for copies in (False, True)
            }
            for name, each in rates.items():
                found.setdefault(name, []).append(1e3 * (samples / each - computed))
        told = ", ".join(f"{name} {statistics.median(each):.2f}" for name, each in found.items())
        print(f"  {count} microbatches: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", default="4,8,16", help="numbers of microbatches, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--parts", action="store_true", help="transfers and the overhead of a step instead")
    asked = parser.parse_args()
    if asked.parts:
        return compare_parts(asked.rounds)
    for count in map(int, asked.microbatches.split(",")):
        compare(asked.stages, count, asked.rounds, asked.steps)


if __name__ == "__main__":
    main()
