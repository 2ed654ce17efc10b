"""One run from beginning to end: run it in a world, keep what it leaves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import nn

from torrential import checkpoint as checkpoints
from torrential import records
from torrential.config import NO_LIMIT, SimSettings, label_of
from torrential.data.deal import Deal
from torrential.errors import BadInput, RunFailed, TorrentialError
from torrential.limits import Patience
from torrential.listeners.base import Listener, RunHandle, check_listeners
from torrential.listeners.delivery import Deliveries
from torrential.opening import open_run, resume_run, unlock
from torrential.optim.schedule import schedule_of
from torrential.progress import ProgressDisplay
from torrential.records import Evaluation, Event, Record, RecordWriter, Step, Summary
from torrential.resolve import RunRequest
from torrential.strategies.base import Strategy
from torrential.task import Task, build_model
from torrential.tasks import load_task
from torrential.terminal import standard_error
from torrential.usercode import refuse_exit, refuse_training, telling_interrupts
from torrential.worlds.base import Job, RunWatcher, World
from torrential.worlds.failure import resuming
from torrential.worlds.local.launch import Launch
from torrential.worlds.sim.cluster import Cluster

if TYPE_CHECKING:
    from torrential.worlds.local.supervisor import Meeting
    from torrential.worlds.ray.agents import Agents


@dataclass(frozen=True)
class TrainResult:
    """What a run left. `history` is every record; `model` is the model that was evaluated last."""

    model: nn.Module
    summary: Summary
    history: list[Record]
    out: Path


class Display(RunWatcher, Protocol):
    """What a person sees of a run."""

    def message(self, text: str) -> None:
        """Show a line."""

    def close(self) -> None:
        """The run is over; what stays visible is the display's choice."""


class Silent:
    """A Display that shows messages and nothing else."""

    def record(self, record: Record) -> None: ...

    def worker_state(self, worker: int, state: str) -> None: ...

    def tick(self) -> None: ...

    def message(self, text: str) -> None:
        standard_error().print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None: ...


class Audience:
    """The watchers of a run: its display, its patience, and listeners. Implements worlds.base.RunWatcher."""

    def __init__(self, job: Job, display: Display, listeners: Sequence[Any], history: list[Record]) -> None:
        self._display = display
        self._patience = Patience(job.config, job.task.maximize, history)
        self._handle = RunHandle(job.directory, job.config, job.task.metric_name, job.task.maximize, history)
        self._deliveries = Deliveries(listeners, self._handle, display.message)

    def record(self, record: Record) -> None:
        self._display.record(record)
        self._patience.record(record)
        self._deliveries.record(record)

    def worker_state(self, worker: int, state: str) -> None:
        self._display.worker_state(worker, state)

    def tick(self) -> None:
        self._display.tick()
        self._deliveries.tell_problems()

    def stop_reason(self) -> str | None:
        return self._patience.stop_reason() or self._handle.stop_reason()

    def close(self, summary: Summary | None) -> None:
        """The run is over, and has left a summary unless it failed; listeners hear the rest."""
        self._display.close()
        if summary is not None:
            self._deliveries.record(summary)
        self._deliveries.close(failed=summary is None)


@telling_interrupts()
def train(
    task: Task | str,
    strategy: Strategy | type[Strategy] | str | None = None,
    *,
    workers: int = 1,
    servers: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    target: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    device: str = "auto",
    world: str = "local",
    cluster: str | os.PathLike[str] | dict[str, Any] | Cluster | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    listeners: Sequence[Listener] = (),
    progress: bool | None = None,
    **options: Any,
) -> TrainResult:
    """Train a task with a strategy; blocks until it is done.

    `strategy` is an object (`tt.Downpour(push_every=4)`, or one of a class of your own), a class, a name, or
    "file.py:Class"; allreduce by default.

    On this machine's processes; with `world="ray"` on the Ray cluster that this process is, or can be, connected to; or
    with `world="sim"` on a simulated cluster, which `cluster` describes: a TOML file, the name of a shipped one, a
    table, or a tt.Cluster.

    With `resume` a run's directory, go on with that run. Everything else is taken from there, except for the task, and
    for a strategy that a program made: give the same again. To go on further than the run was to go, give `epochs`,
    `steps`, `target` or `patience`.

    `listeners` hear of every record as it happens, each in a thread of its own in this process (tt.Listener).

    `options` are the world's and the recipe's, as after `--set`: `transport="tcp"`, `restart=True`, ...; and those of a
    strategy that is given by its name or class.
    """
    refuse_training()
    launch: Launch | Agents | None = Launch() if world == "local" else None
    try:
        hearing = check_listeners(listeners)
        if world == "ray" and resume is None:
            from torrential.worlds.ray.agents import agents_for

            launch = agents_for(options, workers)
            options["hosts"] = launch.hosts
        loaded = load_task(task) if isinstance(task, str) else task
        if resume is not None:
            limits = {"epochs": epochs, "steps": steps, "target": target}
            given = {name: value for name, value in limits.items() if value is not None}
            job = resume_run(Path(resume), loaded, strategy, given | options)
            return execute(job, launch, lambda j: display_of(j, progress), hearing)
        asked = RunRequest(
            task=loaded,
            source=task if isinstance(task, str) else None,
            strategy="allreduce" if strategy is None else strategy,
            options=options,
            workers=workers,
            servers=servers,
            epochs=epochs,
            steps=steps,
            target=target,
            batch_size=batch_size,
            lr=lr,
            seed=seed,
            device=device,
            world=world,
            cluster=os.fspath(cluster) if isinstance(cluster, os.PathLike) else cluster,
        )
        return _train(open_run(asked, None if out is None else Path(out)), launch, progress, hearing)
    except SystemExit as end:
        raise refuse_exit(end) from end
    finally:
        if launch is not None:
            launch.close()


def _train(job: Job, launch: Launch | Agents | None, progress: bool | None, listeners: Sequence[Any]) -> TrainResult:
    try:
        return execute(job, launch, lambda j: display_of(j, progress), listeners)
    except KeyboardInterrupt:
        onward = resuming(job.directory)
        standard_error().print(f"stopped; {onward}", markup=False, highlight=False, soft_wrap=True)
        raise


def display_of(job: Job, show: bool | None) -> Display:
    """What shows a run's progress; nothing where it is to be silent."""
    if show is False:
        return Silent()
    return show_progress(job, standard_error())


def show_progress(job: Job, console: Any) -> Display:
    """A display that shows on `console` what it is told."""
    config = job.config
    by_samples = (not job.strategy.uses_rate or (job.loop is not None and config.steps is None)) and (
        config.epochs < NO_LIMIT
    )
    return ProgressDisplay(
        planned_steps(job),
        config.workers,
        job.task.metric_name,
        config.target,
        console,
        virtual=config.world == "sim",
        total_samples=config.epochs * config.samples if by_samples else None,
        reported=job.loop is not None,
    ).__enter__()


def execute(
    job: Job,
    launch: Launch | Agents | None,
    display_for: Callable[[Job], Display],
    listeners: Sequence[Any] = (),
    meeting: Meeting | None = None,
) -> TrainResult:
    """Carry a run out. `launch`: what begins its processes (agents in the world ray), if that is there; `meeting`: how
    other hosts take part."""
    try:
        return _execute(job, _world(job, launch, meeting), display_for, listeners)
    except TorrentialError as error:
        try:
            records.note_end(job.directory, records.FAILED, str(error))
        except TorrentialError as another:
            error.add_note(str(another))
        raise
    finally:
        unlock(job.directory)


def _execute(job: Job, world: World, display_for: Callable[[Job], Display], listeners: Sequence[Any]) -> TrainResult:
    path = job.directory / records.RECORDS
    summary = None
    with RecordWriter(path) as writer:
        before = records.read_records(path) if job.checkpoint is not None else []
        audience = Audience(job, display_for(job), listeners, before)
        try:
            for event in _first_events(job):
                writer.write(event)
                audience.record(event)
            world.run(job, writer.write, audience, audience.stop_reason)
            history = records.read_records(path)
            summary = summarise(job, history)
            writer.write(summary)
        finally:
            audience.close(summary)
    final, _ = checkpoints.latest(job.directory / "checkpoints")
    model = build_model(job.task)
    if final is not None:
        model.load_state_dict(final.model)
    elif not (isinstance(job.config.settings, SimSettings) and job.config.settings.gradients == "off"):
        raise RunFailed(f"the run left no checkpoint in {job.directory}")
    model.eval()
    return TrainResult(model, summary, [*history, summary], job.directory)


def _first_events(job: Job) -> Iterator[Event]:
    """What is on record before anything happens."""
    if job.checkpoint is not None:
        yield Event(event="resumed", time=job.elapsed, step=job.checkpoint.step, detail=job.extended)
    if job.changes:
        yield Event(event="recipe", time=job.elapsed, detail=job.changes)
    for line in job.warnings:
        yield Event(event="warning", time=job.elapsed, detail=line)


def _world(job: Job, launch: Launch | Agents | None, meeting: Meeting | None) -> World:
    if job.config.world == "hosts" and meeting is None:
        raise BadInput("other hosts take part by: torrential train ... --rendezvous HOST:PORT")
    if job.config.world == "sim":
        from torrential.worlds.sim.cluster import make_cluster
        from torrential.worlds.sim.world import SimWorld

        return SimWorld(make_cluster(job.config.cluster or {}))
    if job.config.world == "ray":
        from torrential.worlds.ray.agents import Agents
        from torrential.worlds.ray.world import RayWorld

        return RayWorld(launch if isinstance(launch, Agents) else None)
    from torrential.worlds.local.supervisor import LocalWorld

    return LocalWorld(cast("Launch | None", launch), meeting)


def summarise(job: Job, history: list[Record]) -> Summary:
    config = job.config
    steps = [r for r in history if isinstance(r, Step)]
    evaluations = [r for r in history if isinstance(r, Evaluation)]
    last = "test" if job.loop is None else "validation"  # a script has reported what there is to say
    test = next((e for e in reversed(evaluations) if e.split == last), None)
    reached = [e for e in evaluations if e.split == "validation" and job.task.reaches(config.target, e.value)]
    return Summary(
        task=config.task,
        strategy=label_of(config.strategy),
        world=config.world,
        workers=config.workers,
        servers=config.servers,
        seed=config.seed,
        steps=test.step if test and job.loop is None else max((s.step for s in steps), default=0),
        samples=test.samples if test and job.loop is None else max((s.samples for s in steps), default=0),
        seconds=test.time if test and job.loop is None else max((s.time for s in steps), default=0.0),
        metric=job.task.metric_name,
        value=test.value if test else None,
        target=config.target,
        reached=None if config.target is None else bool(reached),
        time_to_target=min((e.time for e in reached), default=None),
        bytes_sent=_bytes_sent(steps),
        **_staleness(steps),
        events=sum(isinstance(r, Event) for r in history),
        out=str(job.directory),
        reported=job.loop is not None,
    )


def _staleness(steps: list[Step]) -> dict[str, Any]:
    """Over all updates on record, of every worker; None where none can be stale. Counts begin anew when a worker is
    replaced or the run resumed."""
    ended, newest = [], dict[int, dict[int, int]]()
    for step in steps:
        before = newest.get(step.worker, {})
        if sum(step.staleness.values()) < sum(before.values()):
            ended.append(before)
        newest[step.worker] = step.staleness
    counts = [(versions, times) for life in [*ended, *newest.values()] for versions, times in life.items()]
    updates = sum(times for _, times in counts)
    if not updates:
        return {"staleness_mean": None, "staleness_max": None}
    mean = sum(versions * times for versions, times in counts) / updates
    return {"staleness_mean": mean, "staleness_max": max(versions for versions, _ in counts)}


def planned_steps(job: Job) -> int | None:
    """The steps that a run takes without deaths; None: that is not known, as of a script, which may add gradients of
    several batches up, or take several steps on one."""
    config, deal = job.config, Deal(job.config.samples, job.config.seed)
    if config.epochs >= NO_LIMIT or job.loop is not None:
        return config.steps
    joined = config.samples_per_step
    schedule = schedule_of(config, joined)
    steps = 0
    while deal.epoch < config.epochs and (config.steps is None or steps < config.steps):
        seen = deal.epoch * config.samples + deal.cursor
        left = config.samples - deal.cursor
        if deal.cursor == 0 and schedule.growth(seen, joined) == schedule.growth(seen + left, joined):
            times = joined * schedule.growth(seen, joined)  # a whole epoch alike
            steps += -(-left // times)
            deal.advance(left)
        else:
            deal.advance(min(left, joined * schedule.growth(seen, joined)))
            steps += 1
    return steps if config.steps is None else min(steps, config.steps)


def _bytes_sent(steps: list[Step]) -> int:
    """Each worker's counter starts at zero when it is replaced or the run resumed: add up the runs of it."""
    total, last = 0, dict[int, int]()
    for step in steps:
        before = last.get(step.worker, 0)
        total += step.bytes_sent - (before if step.bytes_sent >= before else 0)
        last[step.worker] = step.bytes_sent
    return total
