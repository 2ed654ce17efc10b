"""What a study, or a directory of runs, has left: read from records, and from nothing else.

    study/                      study.json: what was asked for (absent for a plain directory of runs)
      runs/<entry>-<trial>/     ordinary run directories
      tuning/<entry>-<value>-<trial>/

An entry is one way of training (strategy, options, workers, cluster); its runs are trials with seeds of their own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torrential.records import FAILED, Evaluation, Event, Manifest, Step, Summary, Work
from torrential.study.ask import ComputeTime

STUDY = "study.json"
REPORT = "report.html"
DIVERGED = "diverged"  # the event that ends the records of a run whose loss was no number any more


def unit_of_time(world: str) -> str:
    """A simulated cluster's seconds are not ours."""
    return "virtual s" if world == "sim" else "s"


@dataclass(frozen=True)
class Run:
    """One trial as its records show it."""

    directory: Path
    manifest: Manifest
    steps: list[Step]
    evaluations: list[Evaluation]
    events: list[Event]
    summary: Summary | None  # None: it was cut off, failed, or diverged
    problem: str = ""  # what is wrong with its records, in words
    batches: list[Work] = field(default_factory=list)  # cut into portions, where a coordinator deals these

    @property
    def config(self) -> dict[str, Any]:
        return self.manifest.config

    @property
    def diverged(self) -> bool:
        return any(event.event == DIVERGED for event in self.events)

    @property
    def failed(self) -> str:
        """The error that ended it, unless it was resumed since; empty: none, or one that counts as a result."""
        last = self.events[-1] if self.events and not self.finished else None
        return last.detail if last is not None and last.event == FAILED else ""

    @property
    def finished(self) -> bool:
        """Whether it counts: it ended by itself."""
        return self.summary is not None or self.diverged

    @property
    def validation(self) -> list[Evaluation]:
        return [e for e in self.evaluations if e.split == "validation"]

    @property
    def time_to_target(self) -> float | None:
        """Seconds from the first touch of data; None: missed, or there was no target."""
        return None if self.summary is None else self.summary.time_to_target

    @property
    def seconds(self) -> float:
        """The seconds that the run trained: until its last step on record, or the last parameters that were
        evaluated, for not every step is on record."""
        return max([0.0, *(step.time for step in self.steps), *(e.time for e in self.evaluations)])

    @property
    def samples(self) -> int:
        """The samples that the run trained on until the target, or its end."""
        trained = max((step.samples for step in self.steps), default=0)
        return trained if self._samples_to_target is None else self._samples_to_target

    @functools.cached_property
    def bytes_to_target(self) -> int | None:
        """The bytes sent until the target; None: missed. Between two records a worker is taken to have sent evenly, by
        samples: records are a few a second, and a short run has few. Counters start at zero in a worker that
        replaces another."""
        if (end := self._samples_to_target) is None:
            return None
        total, last = 0.0, dict[int, tuple[int, int]]()  # by worker: samples, and its counter
        for step in self.steps:
            samples, before = last.get(step.worker, (0, 0))
            sent = step.bytes_sent - (before if step.bytes_sent >= before else 0)
            total += sent * _share_before(end, samples, step.samples)
            last[step.worker] = max(samples, step.samples), step.bytes_sent
        return round(total)

    @property
    def _samples_to_target(self) -> int | None:
        if (time := self.time_to_target) is None:
            return None
        return min((e.samples for e in self.validation if e.time >= time), default=None)


def _share_before(end: int, first: int, last: int) -> float:
    """The share that lies before `end`, of what happened from the first to the last."""
    if last <= end:
        return 1.0
    return max(0, end - first) / (last - first) if last > first else 0.0


@dataclass(frozen=True)
class Entry:
    name: str  # unique in the study: "ssp:staleness=3 · 4 workers"
    strategy: str
    options: dict[str, Any]  # that were set, and so differ from the defaults
    workers: int
    servers: int
    world: str
    cluster: str  # the name of the cluster file, or ""
    runs: list[Run] = field(default_factory=list)
    tuned: dict[str, str] = field(default_factory=dict)  # what tuning has chosen

    @property
    def finished(self) -> list[Run]:
        """The trials that count."""
        return [run for run in self.runs if run.finished]


@dataclass(frozen=True)
class Study:
    directory: Path
    task: str
    metric: str
    target: float | None
    trials: int  # asked for, per entry; where trials are added, up to the look that comes next or was the last
    entries: list[Entry]
    tuning: list[Entry]  # one per entry and value tried
    command: list[str]  # that made it; empty for a plain directory
    problems: list[str]  # what could not be read, in words
    maximize: bool = True  # whether more of the metric is better
    interval: int | None = None  # samples between two evaluations, as declared; None: an epoch
    own_loop: bool = False  # whether it is of a script, which evaluates when it likes
    asked: bool = False  # whether there is a study.json
    looks: list[int] = field(default_factory=list)  # where trials are added: the numbers after which it is looked
    measured: list[ComputeTime] = field(default_factory=list)  # for clusters that leave open how long a sample takes
