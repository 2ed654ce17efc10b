"""From what was asked to a study whose every run has been checked, before the first of them is started."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from torrential import launching
from torrential.config import Settings
from torrential.errors import BadInput
from torrential.launching import is_script, script_of, task_of, try_script
from torrential.loop.blueprint import OwnLoop
from torrential.options import make
from torrential.resolve import ResolvedRun, RunRequest, cluster_table, resolve
from torrential.strategies.base import Strategy, needs_servers
from torrential.strategies.registry import resolve_strategy
from torrential.study import statistics
from torrential.study.ask import ComputeTime, Question, Spec, StudyRequest, check_asked, grid, make_specs, with_values
from torrential.study.measured import measure_compute_times, with_compute_time
from torrential.task import Task
from torrential.tasks import load_task
from torrential.userfiles import split_spec
from torrential.version import __version__
from torrential.worlds.local.launch import Launch

CLOSE = 0.1  # how far the samples of an entry's interval may be off, as steps are whole


@dataclass(frozen=True)
class Subject:
    """The subject of a study: the task, and the class of each strategy that its entries name."""

    task: Task
    source: str | None  # where the task is loaded from; None: a program made it
    strategies: Mapping[str, type[Strategy]]
    loop: OwnLoop | None = None  # the script that the task stands for


def make_question(
    asked: StudyRequest,
    command: list[str],
    measured: Sequence[ComputeTime] = (),
    task: Task | None = None,
    strategies: Mapping[str, type[Strategy]] | None = None,
) -> tuple[Question, Subject]:
    """`measured`: what a study that goes on has measured already. `task` and `strategies`: those of a program."""
    check_asked(asked)
    source = asked.task if task is None else None
    loop = tried(asked, asked.seed) if task is None and is_script(asked.task) else None
    if loop is not None:
        task = task_of(loop, not asked.minimize, lambda batch: batch)
    elif asked.args:
        raise BadInput(
            f"arguments (after --, or args=) are for scripts that call tt.join(), and {asked.task} is a task; drop them"
        )
    task = load_task(asked.task) if task is None else task
    asked = msgspec.structs.replace(asked, target=task.target if asked.target is None else asked.target)
    if asked.target is None:
        what = "task" if loop is None else "script"
        raise BadInput(f"the {what} {task.name} has no target of its own; give one with --target")
    specs = make_specs(asked)
    _check_auto(asked, len(specs))
    subject = Subject(task, source, _load_strategies(specs, strategies or {}), loop)
    runs = [_check(asked, spec, subject) for spec in specs]
    specs, interval = _same_rules(asked, specs, runs)
    tuned = [with_values(spec, values) for spec in specs for values in grid(asked.tune)]
    for spec in tuned:
        _check(asked, spec, subject)
    requests = [request(asked, spec, subject, asked.seed) for spec in (*specs, *tuned)]
    question = Question(
        torrential=__version__,
        digest=_digest(asked, subject),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        asked=asked,
        entries=specs,
        task=task.name,
        metric=task.metric_name,
        maximize=task.maximize,
        interval=interval,
        own_loop=loop is not None,
        measured=measure_compute_times(requests, runs[0].config.device, measured),
    )
    return question, subject


def tried(asked: StudyRequest, seed: int, launch: Launch | None = None) -> OwnLoop:
    """The study's script, tried with a seed: what it begins with may depend on that."""
    own = Launch() if launch is None else launch
    try:
        return try_script(script_of(asked.task, tuple(asked.args)), max(asked.workers), seed, own)
    finally:
        if launch is None:
            own.close()


def _load_strategies(specs: Sequence[Spec], known: Mapping[str, type[Strategy]]) -> dict[str, type[Strategy]]:
    """The class of every strategy, each loaded once for all its runs."""
    found = dict(known)
    for spec in specs:
        if spec.strategy not in found:
            try:
                found[spec.strategy] = resolve_strategy(spec.strategy).kind
            except BadInput as error:
                raise BadInput(f"{spec.name}: {error}") from error
    return found


def _check_auto(asked: StudyRequest, entries: int) -> None:
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


def request(
    asked: StudyRequest, spec: Spec, subject: Subject, seed: int, measured: Sequence[ComputeTime] = ()
) -> RunRequest:
    """One run of an entry."""
    options = {k: v for k, v in asked.set.items() if k != "evaluate_every"} | spec.options
    if spec.evaluate_every is not None:
        options["evaluate_every"] = str(spec.evaluate_every)
    kind = subject.strategies[spec.strategy]
    servers = (asked.servers if needs_servers(kind) else None) if spec.servers is None else spec.servers
    if subject.loop is not None:
        return launching.request(
            subject.loop,
            strategy=kind,
            options=options,
            maximize=not asked.minimize,
            workers=spec.workers,
            servers=servers,
            epochs=asked.epochs,
            steps=spec.steps,
            target=asked.target,
            batch_size=asked.batch_size if spec.batch_size is None else spec.batch_size,
            lr=asked.lr if spec.lr is None else spec.lr,
            seed=seed,
            world=spec.world,
        )
    run = RunRequest(
        task=subject.task,
        source=subject.source,
        strategy=kind,
        options=options,
        workers=spec.workers,
        servers=servers,
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


def _check(asked: StudyRequest, spec: Spec, subject: Subject) -> ResolvedRun:
    """Refuse what a run of this entry would refuse."""
    try:
        return resolve(request(asked, spec, subject, asked.seed))
    except BadInput as error:
        raise BadInput(f"{spec.name}: {error}") from error


def _same_rules(asked: StudyRequest, specs: list[Spec], runs: list[ResolvedRun]) -> tuple[list[Spec], int | None]:
    """Steps mean different numbers of samples in different entries. What is given in steps counts those of the first
    entry; the others are stopped, and evaluated, after as many samples."""
    joined = [_samples_of_a_step(run) for run in runs]
    every = make(Settings, {k: v for k, v in asked.set.items() if k == "evaluate_every"}).evaluate_every
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


def _samples_of_a_step(run: ResolvedRun) -> float:
    """The last step of an epoch takes what is left. Where that matters, as steps are a large part of an epoch, it is
    the average that counts."""
    full, epoch = run.config.samples_per_step, run.config.samples
    average = epoch / math.ceil(epoch / full)
    return full if average >= (1 - CLOSE) * full else average


def _fits(interval: float, joined: float) -> bool:
    """Whether it is a whole number of steps, or nearly so."""
    return abs(round(interval / joined) * joined - interval) <= CLOSE * interval


def _digest(asked: StudyRequest, subject: Subject) -> str:
    """A digest of the files of task and strategies and of the clusters, so that a study does not go on with other
    ones."""
    files = [split_spec(spec)[0] for spec in (subject.source or "", *subject.strategies)]
    parts = [Path(file).read_bytes() for file in files if file]
    parts += [msgspec.json.encode(cluster_table(cluster)) for cluster in asked.clusters]
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16] if parts else ""
