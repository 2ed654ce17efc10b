"""A run's configuration: plain, frozen, complete. Everything downstream reads it and nothing writes to it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How the local world runs its roles."""

    transport: Literal["shared", "unix", "tcp"] = "shared"
    """What carries data between workers on this host."""
    algorithm: Literal["auto", "shared", "direct", "native"] = "auto"
    """Who adds gradients up: our shared-memory or direct carrier (auto: whichever fits the transport), or
    torch.distributed's (native)."""
    threads: int | None = None
    """Threads per worker for arithmetic; by default the cores divided by the workers, at least one."""
    restart: bool = False
    """Whether a worker that died is replaced."""
    timeout: float = 60.0
    """Seconds that one role waits for another before it is taken for hung."""
    evaluate_every: int | None = None
    """Steps between two snapshots (evaluation and checkpoint); by default one per epoch."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    source: str | None  # how to load it again: a built-in name or file.py[:name]
    strategy: str
    options: dict[str, Any]  # the strategy's
    world: str
    workers: int
    servers: int
    epochs: int
    steps: int | None
    target: float | None
    samples: int  # in the training set
    batch_size: int  # per worker
    lr: float
    optimizer: dict[str, Any]
    seed: int
    device: str
    settings: Settings
