"""Runs that nobody trained, for tests of what is made of them: directories with a manifest and a few records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from torrential.config import LocalSettings, RunConfig, SimSettings
from torrential.records import (
    RECORDS,
    Evaluation,
    Event,
    Manifest,
    Record,
    Step,
    Summary,
    encode,
    read_records,
    write_manifest,
)
from torrential.study.ask import Question, StudyRequest, make_specs
from torrential.study.plan import Trial
from torrential.study.results import DIVERGED, Entry, Run, Study
from torrential.study.show import show
from torrential.study.verdict import judge

TARGET = 0.9
EPOCH = 1000  # samples


def config(strategy: str = "allreduce", **different: Any) -> RunConfig:
    given = {
        "task": "digits",
        "source": "digits",
        "strategy": strategy,
        "options": {},
        "world": "local",
        "workers": 2,
        "servers": 0,
        "epochs": 10,
        "steps": None,
        "target": TARGET,
        "samples": EPOCH,
        "batch_size": 10,
        "lr": 0.1,
        "optimizer": {},
        "seed": 0,
        "device": "cpu",
        "settings": SimSettings() if different.get("world") == "sim" else LocalSettings(),
        "samples_per_step": 20,
    }
    return RunConfig(**given | different)


def manifest(of: RunConfig) -> Manifest:
    return Manifest(
        torrential="0.1.0",
        config=msgspec.to_builtins(of),
        versions={},
        hardware={},
        seed=of.seed,
        created="2026-01-01T00:00:00+00:00",
        command=["torrential"],
    )


def history(
    of: RunConfig, time: float | None, looks: int = 4, value: float = 0.95, diverged: bool = False
) -> list[Record]:
    """Of a run that reaches the target in its last of so many looks, one per epoch, or never."""
    end = 10.0 if time is None else time
    found: list[Record] = []
    for look in range(1, looks + 1):
        place = {"step": 50 * look, "epoch": look, "samples": EPOCH * look, "time": end * look / looks}
        there = TARGET + 0.01 if time is not None and look == looks else TARGET - 0.1
        spent = {"loss": 0.1, "compute": 0.1, "communicate": 0.0, "wait": 0.0}
        found += [Step(worker=w, bytes_sent=100 * look, **place, **spent) for w in range(of.workers)]
        found.append(Evaluation(split="validation", value=there, loss=0.1, **place))
    if diverged:
        return [*found, Event(event=DIVERGED, time=end, detail="the loss turned nan")]
    found.append(Evaluation(split="test", value=value, loss=0.1, **place))
    summary = Summary(
        task=of.task,
        strategy=of.strategy,
        world=of.world,
        workers=of.workers,
        servers=of.servers,
        seed=of.seed,
        steps=50 * looks,
        samples=EPOCH * looks,
        seconds=end,
        metric="accuracy",
        value=value,
        target=of.target,
        reached=time is not None,
        time_to_target=time,
        bytes_sent=100 * looks * of.workers,
        staleness_mean=0.0,
        staleness_max=0,
        events=0,
        out="",
    )
    return [*found, summary]


def write_run(
    directory: Path, of: RunConfig, time: float | None, pause: Callable[[], None] = lambda: None, **how: Any
) -> None:
    """`pause` is called at every moment at which a kill would leave something else on disk."""
    pause()
    directory.mkdir(parents=True)
    pause()
    write_manifest(directory, manifest(of))
    pause()
    with open(directory / RECORDS, "ab", buffering=0) as file:
        for record in history(of, time, **how):
            line = encode(record) + b"\n"
            file.write(line[:10])
            pause()
            file.write(line[10:])
            pause()


def run(of: RunConfig, time: float | None, **how: Any) -> Run:
    """One that is not on disk."""
    found = history(of, time, **how)
    kinds = {kind: [r for r in found if isinstance(r, kind)] for kind in (Step, Evaluation, Event, Summary)}
    end = kinds[Summary][-1] if kinds[Summary] else None
    return Run(Path("nowhere"), manifest(of), kinds[Step], kinds[Evaluation], kinds[Event], end)


def study(times: dict[str, Sequence[float | None]], **different: Any) -> Study:
    """By the names of entries, their times to the target; None: missed."""
    entries = [
        Entry(
            name, name, {}, 2, 0, "local", "", [run(config(name, seed=i), time, looks=1) for i, time in enumerate(all_)]
        )
        for name, all_ in times.items()
    ]
    given = {
        "directory": Path("nowhere"),
        "task": "digits",
        "metric": "accuracy",
        "target": TARGET,
        "trials": max(map(len, times.values()), default=0),
        "entries": entries,
        "tuning": [],
        "command": [],
        "problems": [],
        "asked": True,
    }
    return Study(**given | different)


def content(directory: Path) -> list[Record]:
    return read_records(directory / RECORDS)


# -- studies of them -------------------------------------------------------------------------------------------------
def asked(**different: Any) -> StudyRequest:
    given = {"task": "digits", "strategies": ["allreduce,ssp"], "target": TARGET, "trials": 3, "workers": [2]}
    return StudyRequest(**given | different)


def question(**different: Any) -> Question:
    what = asked(**different)
    return Question(
        torrential="0.1.0",
        digest="",
        created="2026-01-01T00:00:00+00:00",
        command=["torrential", "compare"],
        asked=what,
        entries=make_specs(what),
        task="digits",
        metric="accuracy",
        maximize=True,
        interval=None,
    )


class Unseen:
    def planned(self, runs: int, done: int) -> None: ...

    def goes_on(self, runs: int, trials: int, more: int) -> None: ...

    def begins(self, trial: Trial) -> None: ...

    def ended(self, trial: Trial) -> None: ...


def fake(trial: Trial, time: float | None = 1.0, **how: Any) -> None:
    spec = trial.spec
    write_run(trial.directory, config(spec.strategy, workers=spec.workers, seed=trial.seed), time, **how)


def shown(found: Study, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    show(found, judge(found), console)
    return console.file.getvalue()  # type: ignore[attr-defined]
