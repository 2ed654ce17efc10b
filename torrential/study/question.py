"""From what was asked to a study whose every run has been checked, before the first of them is started."""

from __future__ import annotations

import hashlib
import itertools
import math
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from torrential import prepare
from torrential.config import Settings
from torrential.errors import BadInput
from torrential.options import make
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers
from torrential.study import statistics
from torrential.study.ask import Asked, ComputeTime, Question, Spec, check_asked, grid, make_specs, with_values
from torrential.study.measured import measure_compute_times, with_compute_time
from torrential.task import Task
from torrential.tasks import load_task
from torrential.version import __version__
from torrential.worlds.base import Job
from torrential.worlds.sim.cluster import read_cluster

CLOSE = 0.1  # how far the samples of an entry's interval may be off, as steps are whole


def make_question(asked: Asked, command: list[str], measured: Sequence[ComputeTime] = ()) -> tuple[Question, Task]:
    """`measured`: what a study that goes on has measured already."""
    check_asked(asked)
    task = load_task(asked.task)
    asked = msgspec.structs.replace(asked, target=task.target if asked.target is None else asked.target)
    if asked.target is None:
        raise BadInput(f"the task {task.name} has no target of its own; give one with --target")
    specs = make_specs(asked)
    _check_auto(asked, len(specs))
    jobs = [_check(asked, spec, task) for spec in specs]
    specs, interval = _same_rules(asked, specs, jobs)
    tuned = [with_values(spec, values) for spec in specs for values in grid(asked.tune)]
    for spec in tuned:
        _check(asked, spec, task)
    requests = [request(asked, spec, task, asked.seed) for spec in (*specs, *tuned)]
    question = Question(
        torrential=__version__,
        digest=_digest(asked),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        asked=asked,
        entries=specs,
        task=task.name,
        metric=task.metric_name,
        maximize=task.maximize,
        interval=interval,
        measured=measure_compute_times(requests, jobs[0].config.device, measured),
    )
    return question, task


def _check_auto(asked: Asked, entries: int) -> None:
    """Refuse to add trials where no number of them, or not as many as there may be, can decide anything."""
    pairs = math.comb(entries, 2)
    if not asked.auto:
        return
    if not pairs:
        raise BadInput("--trials auto ends when entries can be told apart, and there is one; name another, or a number")
    if not statistics.looks(pairs, asked.trials):
        needed = statistics.trials_needed(pairs, statistics.LEVEL / statistics.LOOKS)
        raise BadInput(
            f"--trials auto:{asked.trials} cannot decide between {entries} entries: the first look takes {needed} "
            f"trials each; use auto:{needed} or more"
        )


def request(asked: Asked, spec: Spec, task: Task, seed: int, measured: Sequence[ComputeTime] = ()) -> prepare.Request:
    """One run of an entry."""
    options = {k: v for k, v in asked.set.items() if k != "evaluate_every"} | spec.options
    if spec.evaluate_every is not None:
        options["evaluate_every"] = str(spec.evaluate_every)
    served = spec.strategy in STRATEGIES and needs_servers(STRATEGIES[spec.strategy])
    run = prepare.Request(
        task=task,
        source=asked.task,
        strategy=spec.strategy,
        options=options,
        workers=spec.workers,
        servers=(asked.servers if served else None) if spec.servers is None else spec.servers,
        epochs=asked.epochs,
        steps=spec.steps,
        target=asked.target,
        batch_size=asked.batch_size if spec.batch_size is None else spec.batch_size,
        lr=asked.lr if spec.lr is None else spec.lr,
        seed=seed,
        device=asked.device,
        world=spec.world,
        cluster=spec.cluster or None,
    )
    return with_compute_time(run, measured)


def _check(asked: Asked, spec: Spec, task: Task) -> Job:
    """Refuse what a run of this entry would refuse; leaves nothing."""
    with tempfile.TemporaryDirectory(prefix="torrential-") as place:
        try:
            job = prepare.prepare(request(asked, spec, task, asked.seed), Path(place) / "run")
        except BadInput as error:
            raise BadInput(f"{spec.name}: {error}") from error
        prepare.unlock(job.directory)
    return job


def _same_rules(asked: Asked, specs: list[Spec], jobs: list[Job]) -> tuple[list[Spec], int | None]:
    """Steps mean different numbers of samples in different entries. What is given in steps counts those of the first
    entry; the others are stopped, and evaluated, after as many samples."""
    joined = [_samples_of_a_step(job) for job in jobs]
    every = make(Settings, {k: v for k, v in asked.set.items() if k == "evaluate_every"}).evaluate_every
    if every is not None and every < 1:
        raise BadInput(f"evaluate_every must be at least 1 (given: {every})")
    limit = None if asked.steps is None else asked.steps * joined[0]
    interval = None if every is None else round(every * joined[0])
    odd = [spec.name for spec, samples in zip(specs, joined, strict=True) if interval and not _fits(interval, samples)]
    if odd and every is not None:
        fits = (k for k in itertools.count(every) if all(_fits(k * joined[0], samples) for samples in joined))
        raise BadInput(
            f"an evaluation every {interval:,} samples is no whole number of steps of {odd[0]}; "
            f"use --set evaluate_every={next(fits)}, or none for one per epoch"
        )
    changed = [
        msgspec.structs.replace(
            spec,
            steps=None if limit is None else max(1, round(limit / samples)),
            evaluate_every=None if interval is None else round(interval / samples),
        )
        for spec, samples in zip(specs, joined, strict=True)
    ]
    return changed, interval


def _samples_of_a_step(job: Job) -> float:
    """The last step of an epoch takes what is left. Where that matters, as steps are a large part of an epoch, it is
    the average that counts."""
    full, epoch = job.strategy.joined(job.config.workers, job.config.batch_size), job.config.samples
    average = epoch / math.ceil(epoch / full)
    return full if average >= (1 - CLOSE) * full else average


def _fits(interval: float, joined: float) -> bool:
    """Whether it is a whole number of steps, or nearly so."""
    return abs(round(interval / joined) * joined - interval) <= CLOSE * interval


def _digest(asked: Asked) -> str:
    """Of the task's file and the clusters, so that a study does not go on with other ones."""
    file = asked.task if asked.task.endswith(".py") else asked.task.rpartition(":")[0]
    parts = [Path(file).read_bytes()] if file.endswith(".py") else []
    parts += [msgspec.json.encode(read_cluster(cluster)) for cluster in asked.clusters]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16] if parts else ""
