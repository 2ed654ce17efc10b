"""Run schedules, and say what is wrong."""

from __future__ import annotations

import functools
import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping
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
from torrential.randomness import MODEL, seed_all
from torrential.records import Evaluation, Record
from torrential.run import Silent
from torrential.strategies.base import Strategy
from torrential.strategies.easgd import Easgd
from torrential.strategies.registry import resolve_strategy
from torrential.task import Task
from torrential.testing.audit import Audit, Violation
from torrential.testing.events import last
from torrential.testing.falling import Balanced
from torrential.testing.models import CLASSES, INPUTS, Falling, blocks, perceptron
from torrential.testing.pipelined import PipelineAudit, SavedModels
from torrential.testing.schedule import FaultSchedule, draw, without_faults
from torrential.trainer.observer import Observer
from torrential.trainer.pending import Parts
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.base import Job
from torrential.worlds.sim.cluster import make_cluster
from torrential.worlds.sim.world import SimWorld

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
    job = _job(schedule)
    linear = not schedule.momentum and schedule.options.get("server") != "adagrad"
    pipelined = None
    if schedule.strategy == "pipeline":
        pipelined = PipelineAudit(job, schedule.normed, lambda: _saved_models(without_faults(schedule)))
    audit = Audit(job, linear, pipelined)
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


def _saved_models(schedule: FaultSchedule) -> SavedModels:
    """The models of the checkpoints of a schedule, by step, and the one that it begins with."""
    observer, job = Forgetful(None), _job(schedule)
    SimWorld(make_cluster(schedule.cluster), observer.of).run(job, lambda record: None, Silent())
    seed_all(torch.device("cpu"), schedule.seed, MODEL)
    return {0: dict(job.task.model().state_dict())} | observer.models


def simulate(schedule: FaultSchedule, audit: Audit | None = None) -> tuple[list[Record], list[bytes]]:
    """Run a schedule; returns its records, and the parameters of its checkpoints."""
    records: list[Record] = []
    observer = Forgetful(audit)
    world = SimWorld(make_cluster(schedule.cluster), observer.of, audit)
    world.run(_job(schedule), records.append, Silent())
    return records, observer.saved


def _job(schedule: FaultSchedule) -> Job:
    task = _task(schedule)
    kind = resolve_strategy(Balanced if schedule.strategy == Easgd.name else schedule.strategy)
    strategy = kind.make(schedule.options).fitted(task, task.model(), schedule.workers)
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


def _task(schedule: FaultSchedule) -> Task:
    inputs, targets = _data()
    data = TensorDataset(inputs[: schedule.samples], targets[: schedule.samples])
    spec = OptimizerSpec(torch.optim.SGD, RATE, {"momentum": 0.9} if schedule.momentum else {})
    model: Callable[[], nn.Module] = functools.partial(blocks, schedule.normed)
    if schedule.strategy != "pipeline":
        model = Falling if schedule.falling else perceptron
    return Task(
        model=model,
        loss=_mean if schedule.falling else F.cross_entropy,
        train=data,
        validation=data,
        test=data,
        optimizer=spec,
        batch_size=schedule.batch_size,
    )


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


@functools.cache
def _data() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    inputs = torch.randn(MOST_SAMPLES, INPUTS, generator=chance, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (MOST_SAMPLES,), generator=chance)


class Forgetful(Observer):
    """Evaluates nothing and keeps nothing but bytes."""

    def __init__(self, audit: Audit | None) -> None:
        self._audit, self.evaluates = audit, True
        self.saved: list[bytes] = []
        self.models: SavedModels = {}  # where they are put together from what workers have

    def of(self, task: Task, config: RunConfig, strategy: Strategy, *others: Any) -> Observer:
        self.task, self.config, self.model, self._strategy = task, config, task.model(), strategy
        self._assembles = type(strategy).assembled is not Strategy.assembled
        return self

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
        self.models[snapshot.step] = model = dict(self._strategy.assembled(workers))
        self.saved += [model[name].numpy().tobytes() for name in sorted(model)]
        if self._audit is not None:
            self._audit.snapshot(snapshot, flat, self.models[snapshot.step])
