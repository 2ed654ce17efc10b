"""A run that is asked for, and one that is known to fit together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torrential.config import LocalSettings, RunConfig, SimSettings
from torrential.loop.blueprint import OwnLoop
from torrential.strategies.base import Strategy
from torrential.strategies.registry import Given
from torrential.task import Task
from torrential.worlds.sim.cluster import Cluster

AnySettings = LocalSettings | SimSettings


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The run that the user asked for, not yet checked."""

    task: Task
    loop: OwnLoop | None = None  # the script that the task stands for
    source: str | None = None  # how to load it again: a built-in name or file.py[:name]
    strategy: Given = "allreduce"
    options: dict[str, Any]
    workers: int = 1
    servers: int | None = None  # what the strategy needs
    epochs: int | None = None
    steps: int | None = None
    target: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int = 0
    device: str = "auto"
    world: str = "local"
    cluster: str | dict[str, Any] | Cluster | None = None  # to simulate: a file, the name of a shipped one, or a table


@dataclass(frozen=True)
class ResolvedRun:
    """A run that can be started: all of its parts are there and fit together."""

    config: RunConfig
    task: Task
    strategy: Strategy
    changes: str  # what the recipe changes, in one line
    warnings: list[str]  # what is likely a mistake, a line each
