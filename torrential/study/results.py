"""What a study, or a directory of runs, has left: read from records, and from nothing else.

    study/                      study.json: what was asked for (absent for a plain directory of runs)
      runs/<entry>-<trial>/     ordinary run directories
      tuning/<entry>-<value>-<trial>/

An entry is one way of training (strategy, options, workers, cluster); its runs are trials with seeds of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torrential.records import Evaluation, Event, Manifest, Step, Summary


@dataclass(frozen=True)
class Run:
    """One trial."""

    directory: Path
    manifest: Manifest
    steps: list[Step]
    evaluations: list[Evaluation]
    events: list[Event]
    summary: Summary | None  # None: it was cut off
    problem: str = ""  # what is wrong with its records, in words

    @property
    def config(self) -> dict[str, Any]:
        return self.manifest.config


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


@dataclass(frozen=True)
class Study:
    directory: Path
    task: str
    metric: str
    target: float | None
    trials: int  # asked for, per entry
    entries: list[Entry]
    tuning: list[Entry]  # one per entry and value tried
    command: list[str]  # that made it; empty for a plain directory
    problems: list[str]  # what could not be read, in words
