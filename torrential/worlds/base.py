"""The World protocol: take a configured run, run its roles, leave records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torrential import checkpoint as checkpoints
from torrential.checkpoint import Checkpoint
from torrential.config import RunConfig
from torrential.loop.blueprint import OwnLoop
from torrential.membership.roles import Death
from torrential.records import Record
from torrential.strategies.base import Strategy
from torrential.task import Task


@dataclass(frozen=True)
class Job:
    """Everything a world needs to know."""

    config: RunConfig
    task: Task
    strategy: Strategy
    directory: Path
    checkpoint: Checkpoint | None = None  # where to go on from
    changes: str = ""  # what the recipe changes, in one line
    warnings: Sequence[str] = ()  # what is likely a mistake, a line each
    elapsed: float = 0.0  # seconds that the run had taken by then
    evaluated: Mapping[tuple[str, int], float] = field(default_factory=dict)  # (split, step) on record: their times
    loop: OwnLoop | None = None  # the script that workers run, where the loop is its own
    handed: tuple[int, int, int] | None = None  # where the model lies that workers take parts of: pid, two descriptors
    extended: str = ""  # the limits that a run was given when it was resumed, in words


RETURNED = (
    "the program of {name} returned before the run was finished; let it take its steps with ctx.rounds(...), or end "
    "with ctx.leave()"
)
"""What is wrong with a strategy's program that ends too early."""


def going_on_from(job: Job, death: Death, life: int) -> Checkpoint | None:
    """The checkpoint that a program goes on from. One that takes another's place has the newest, unless it gets all
    that it needs from the members that it regroups with: servers keep parameters, but no statistics of batch norm."""
    if not life or death == "regroup":
        return job.checkpoint
    return checkpoints.latest(job.directory / "checkpoints")[0]


class RunWatcher(Protocol):
    """An object that is told in the world's own thread how a run goes on, and must not keep it waiting."""

    def record(self, record: Record) -> None: ...

    def worker_state(self, worker: int, state: str) -> None: ...

    def tick(self) -> None: ...


class World(Protocol):
    def run(
        self,
        job: Job,
        write: Callable[[Record], None],
        watcher: RunWatcher,
        stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Run all roles to the end. Raises RunFailed. Leaves nothing behind, however it ends. The run is stopped when
        `stop_reason` gives one, which is asked after every record."""
