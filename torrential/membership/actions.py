"""What the membership asks of the world that drives it. Plain data, to be carried out in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torrential.membership.roles import Who


class Tell(NamedTuple):
    """Tell a member something. What is sent before it listens waits for it; what a dead member is sent is dropped."""

    to: Who
    message: Any
    tensors: Sequence[Any] = ()


class Start(NamedTuple):
    """Start a member."""

    who: Who


class Kill(NamedTuple):
    """End a member that is hung. That it is gone is to be reported as any death is."""

    who: Who


class Note(NamedTuple):
    """Put an event on record."""

    event: str
    worker: int | None
    detail: str


class Show(NamedTuple):
    """Tell the watcher of the run what a worker does: "starting", "training", "finished" or "lost"."""

    worker: int
    state: str


Action = Tell | Start | Kill | Note | Show
