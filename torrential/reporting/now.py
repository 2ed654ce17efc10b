"""How the runs of a study stand at this moment, from their records: what the live page shows first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torrential.progress import byte_count, counted, metric_value, number
from torrential.records import Step
from torrential.reporting import series
from torrential.reporting.timeline import event_words
from torrential.study.results import Entry, Run, Study, unit_of_time

SILENT_SECONDS = 60.0  # without a record after which nobody can say whether a run goes on
NOTICED_SECONDS = 10.0  # without a record after which the page says so
RATE_SECONDS = 5.0  # of the run, over which samples a second are taken
MOST_RUNS = 4
MOST_WORKERS = 256
EVENTS_LISTED = 20  # of one run
STATES = {"worker_lost": "lost", "worker_hung": "hung", "worker_joined": "training"}

Age = Callable[[Run], float]  # the seconds since a run's records were last written


@dataclass(frozen=True)
class WorkerNow:
    """A row of the table of workers. What is not on record is empty."""

    worker: int
    state: str  # starting, training, hung, lost, silent or finished
    step: str = ""
    loss: str = ""
    shares: str = ""
    staleness: str = ""
    sent: str = ""
    last: str = ""


@dataclass(frozen=True)
class RunNow:
    """A run that goes on, or the last one that did."""

    name: str
    state: str
    facts: list[str]
    done: float | None  # the share of the run that is done; None where it is not known
    counts: str  # how many workers are in which state
    workers: list[WorkerNow]
    more_workers: int  # that the table leaves out
    events: list[str]  # the newest first


@dataclass(frozen=True)
class Now:
    """The state of a study: how many runs are in which state, and those to look at."""

    counts: str
    runs: list[RunNow]


def now(study: Study, works: dict[int, series.StepColumns], age: Age) -> Now:
    """Shown are the runs that were written to a moment ago; where there are none, the last one."""
    found = sorted(((entry, run) for entry in (*study.tuning, *study.entries) for run in entry.runs),
                   key=lambda each: age(each[1]))  # fmt: skip
    states = Counter(_state(run, age(run)) for _, run in found)
    going_on = [each for each in found if _state(each[1], age(each[1])) == "going on"]
    return Now(
        f"{counted(len(found), 'run')}: " + ", ".join(f"{count:,} {state}" for state, count in sorted(states.items())),
        [_run_now(study, *each, works[id(each[1])], age(each[1])) for each in going_on[:MOST_RUNS] or found[:1]],
    )


def _state(run: Run, age: float) -> str:
    if run.finished:
        return "diverged" if run.diverged else "ended"
    if run.failed:
        return "failed"
    return "silent" if age >= SILENT_SECONDS else "going on"


def _run_now(study: Study, entry: Entry, run: Run, work: series.StepColumns, age: float) -> RunNow:
    state = _state(run, age)
    quiet = f", no record for {_rough(age)}" if not run.finished and age >= NOTICED_SECONDS else ""
    states = _worker_states(run, work, state)
    listed = sorted(states)[:MOST_WORKERS]
    counts = ", ".join(f"{count:,} {name}" for name, count in sorted(Counter(states.values()).items()))
    return RunNow(
        name=f"{entry.name} · {run.directory.name}",
        state=state + quiet,
        facts=_facts(study, entry, run, work),
        done=_share_done(run, work),
        counts=f"{counted(len(states), 'worker')}: {counts}",
        workers=[_worker(worker, states[worker], work.updates.newest.get(worker)) for worker in listed],
        more_workers=len(states) - len(listed),
        events=[event_words(event) for event in run.events[: -EVENTS_LISTED - 1 : -1]],
    )


def _worker_states(run: Run, work: series.StepColumns, run_state: str) -> dict[int, str]:
    """By worker. What happened before a run was resumed says nothing about the workers of now."""
    resumed = max((i for i, event in enumerate(run.events) if event.event == "resumed"), default=None)
    since = -1.0 if resumed is None else run.events[resumed].time
    states = dict.fromkeys(range(min(int(run.config.get("workers", 1)), 1 << 20)), "starting")
    states |= {worker: "training" for worker, step in work.updates.newest.items() if step.time > since}
    for event in run.events[0 if resumed is None else resumed :]:
        if event.worker is not None and event.event in STATES:
            states[event.worker] = STATES[event.event]
    if run_state == "going on":
        return states
    end = "silent" if run_state == "silent" else "finished"
    return {worker: state if state in ("lost", "hung") else end for worker, state in states.items()}


def _worker(worker: int, state: str, step: Step | None) -> WorkerNow:
    if step is None:
        return WorkerNow(worker, state)
    spent = [step.compute, step.communicate, step.wait]
    whole = sum(spent) or 1.0
    updates = sum(step.staleness.values())
    mean = sum(versions * times for versions, times in step.staleness.items()) / updates if updates else None
    return WorkerNow(
        worker,
        state,
        step=f"{step.step:,}",
        loss=number(step.loss),
        shares=" / ".join(f"{100 * part / whole:.0f}" for part in spent),
        staleness="" if mean is None else f"{number(mean)}, at most {max(step.staleness):,}",
        sent=byte_count(step.bytes_sent) if step.bytes_sent else "",
        last=f"{step.time:,.1f}",
    )


def _facts(study: Study, entry: Entry, run: Run, work: series.StepColumns) -> list[str]:
    newest = max(work.updates.newest.values(), key=lambda step: step.samples, default=None)
    if newest is None:
        return ["no step on record yet"]
    epochs = run.config.get("epochs")
    facts = [
        f"{number(work.seconds)} {unit_of_time(entry.world)}",
        f"step {newest.step:,}",
        f"epoch {newest.epoch:,}" + (f" of {epochs:,}" if isinstance(epochs, int) else ""),
        counted(newest.samples, "sample"),
    ]
    if (rate := _rate(run)) is not None:
        facts.append(f"{rate:,.0f} samples a second")
    _, values = series.metric_curve(run, "time")
    if len(values):
        target = "" if study.target is None else f" (target {metric_value(study.metric, study.target)})"
        facts.append(f"{study.metric} {metric_value(study.metric, float(values[-1]))}{target}")
    return facts


def _share_done(run: Run, work: series.StepColumns) -> float | None:
    """By samples or by steps, whichever comes to its end sooner."""
    if run.finished:
        return 1.0
    newest = work.updates.newest.values()
    samples, epochs, steps = (run.config.get(name) for name in ("samples", "epochs", "steps"))
    done = [max((step.samples for step in newest), default=0) / (samples * epochs)] if samples and epochs else []
    if steps:
        done.append(max((step.step for step in newest), default=0) / steps)
    return min(1.0, max(done)) if done else None


def _rate(run: Run) -> float | None:
    """Samples a second over the last seconds on record."""
    if not run.steps:
        return None
    last = first = run.steps[-1]
    for step in reversed(run.steps):
        if step.time < last.time - RATE_SECONDS:
            break
        first = step
    passed, trained = last.time - first.time, last.samples - first.samples
    return trained / passed if passed > 0 and trained >= 0 else None


def _rough(seconds: float) -> str:
    """Rounded down so far that it does not change at every look."""
    if seconds < 2 * 60:
        return f"{seconds // 10 * 10:.0f} s"
    return f"{seconds // 60:,.0f} min" if seconds < 2 * 3600 else f"{seconds // 3600:,.0f} h"
