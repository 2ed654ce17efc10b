"""Run schedules, and say what is wrong."""

from __future__ import annotations

import functools
import multiprocessing
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torrential.config import RunConfig, SimSettings
from torrential.errors import RunFailed, WorkerFailed
from torrential.optimizers import OptimizerSpec
from torrential.records import Evaluation, Record
from torrential.run import Silent
from torrential.strategies.registry import resolve_strategy
from torrential.task import Task
from torrential.testing.audit import Audit, Violation
from torrential.testing.events import last
from torrential.testing.schedule import FaultSchedule, draw
from torrential.trainer.observer import Observer
from torrential.trainer.pending import Parts
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.base import Job
from torrential.worlds.sim.cluster import make_cluster
from torrential.worlds.sim.world import SimWorld

INPUTS, HIDDEN, CLASSES = 5, 8, 3
RATE = 0.05
MOST_SAMPLES = 100
BATCH = 20  # schedules that a process is given at a time


class ScheduleFailed(Exception):
    """A schedule broke an invariant; the text says which, in which schedule, and how to see it again."""

    def __init__(self, seed: int, text: str) -> None:
        self.seed = seed
        super().__init__(seed, text)

    def __str__(self) -> str:
        return str(self.args[1])


def check(seed: int) -> str:
    """Run the schedule of a seed; raises ScheduleFailed. Returns what was lost so that it could not end well, or ""."""
    schedule = draw(seed)
    audit = Audit(_job(schedule), linear=not schedule.momentum and schedule.options.get("server") != "adagrad")
    try:
        simulate(schedule, audit)
        return ""
    except RunFailed as error:
        if audit.lost and not isinstance(error, WorkerFailed):  # that is an exception nobody meant
            return audit.lost
        wrong = f"the run failed: {error}{_traceback(error.__cause__)}"
    except Violation as violation:
        wrong = str(violation)
    except Exception as error:
        wrong = f"an error{_traceback(error)}"
    again = f"again: python -m torrential.testing --seed {seed}"
    raise ScheduleFailed(
        seed, "\n".join([f"seed {seed}: {wrong}", str(schedule), "the last events:", *last(audit.events), again])
    )


def outcomes(seeds: range, jobs: int) -> Iterator[ScheduleFailed | str]:
    if jobs == 1:
        yield from map(outcome, seeds)
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    try:
        yield from pool.map(outcome, seeds, chunksize=BATCH)
    finally:
        pool.shutdown(cancel_futures=True)


def outcome(seed: int) -> ScheduleFailed | str:
    """The outcome of `check`: what it returns, or the failure that it raises."""
    try:
        return check(seed)
    except ScheduleFailed as failure:
        return failure


def _traceback(error: BaseException | None) -> str:
    return "" if error is None else "\n" + "".join(traceback.format_exception(error)).rstrip()


def simulate(schedule: FaultSchedule, audit: Audit | None = None) -> tuple[list[Record], list[bytes]]:
    """Run a schedule; returns its records, and the parameters of its checkpoints."""
    records: list[Record] = []
    observer = Forgetful(audit)
    world = SimWorld(make_cluster(schedule.cluster), observer.of, audit)
    world.run(_job(schedule), records.append, Silent())
    return records, observer.saved


def _job(schedule: FaultSchedule) -> Job:
    task = _task(schedule.samples, schedule.momentum)
    strategy = resolve_strategy(schedule.strategy).make(schedule.options)
    config = RunConfig(
        task=task.name,
        source=None,
        strategy=schedule.strategy,
        options=schedule.options,
        world="sim",
        workers=schedule.workers,
        servers=schedule.servers,
        epochs=schedule.epochs,
        steps=schedule.steps,
        target=None,
        samples=schedule.samples,
        batch_size=schedule.batch_size,
        samples_per_step=strategy.samples_per_update(schedule.workers, schedule.batch_size),
        lr=RATE,
        optimizer={},
        seed=schedule.seed,
        device="cpu",
        settings=SimSettings(**schedule.settings),
    )
    return Job(config, task, strategy, Path("nowhere"))


@functools.cache
def _task(samples: int, momentum: bool) -> Task:
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(MOST_SAMPLES, INPUTS, generator=chance, dtype=torch.float64)
    targets = torch.randint(CLASSES, (MOST_SAMPLES,), generator=chance)
    data = TensorDataset(inputs[:samples], targets[:samples])
    spec = OptimizerSpec(torch.optim.SGD, RATE, {"momentum": 0.9} if momentum else {})
    return Task(model=_model, loss=F.cross_entropy, train=data, validation=data, test=data, optimizer=spec)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()


class Forgetful(Observer):
    """Evaluates nothing and keeps nothing but bytes."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit, self.evaluates = audit, True
        self.saved: list[bytes] = []

    def of(self, task: Task, config: RunConfig, *others: Any) -> Observer:
        self.task, self.config = task, config
        return self

    def complete(self, snapshot: Snapshot, parts: Parts) -> bool:
        return True

    def load(self, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor], parts: Parts) -> None: ...

    def load_saved(self) -> Snapshot | None:
        return None

    def evaluate(self, snapshot: Snapshot, split: str) -> Evaluation:
        where: dict[str, Any] = {"step": snapshot.step, "epoch": snapshot.epoch, "samples": snapshot.samples}
        return Evaluation(split=split, value=0.0, loss=0.0, time=snapshot.time, **where)

    def save(
        self,
        snapshot: Snapshot,
        flat: Mapping[str, Tensor],
        rest: Mapping[str, Tensor],
        workers: Parts,
        value: float | None = None,
    ) -> None:
        self.saved += [flat[name].numpy().tobytes() for name in sorted(flat)]
        if self._audit is not None:
            self._audit.snapshot(snapshot, flat)
