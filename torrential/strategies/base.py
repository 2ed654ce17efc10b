"""The strategy contract: a strategy is its options and a small set of role programs.

A program is plain blocking code. Whatever it needs from outside (time, randomness, messages) comes through `ctx`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from torrential.comm.protocol import Comm, Handle
from torrential.data.deal import Share
from torrential.params.home import Home, Update
from torrential.params.layout import Bucket


@dataclass(frozen=True)
class Decision:
    """What a complete ballot says: the same on every member."""

    update: Update
    loss: float  # mean over the joined batch
    samples: int
    stop: bool


class Context(Protocol):
    """What a worker's program may use."""

    comm: Comm
    home: Home
    ballot: Handle | None

    def join(self, conclude: Callable[[Context], None]) -> None:
        """Meet the other members, settle with them where everybody stands, and take over the current parameters.
        If this member's ballot turns out to be complete, `conclude` is called first: that step was decided."""

    def finished(self) -> bool: ...

    def leave(self) -> None:
        """Wait until all members are finished."""

    def share(self, accumulate: int = 1) -> Share:
        """This member's part of the next joined batch. Nothing is consumed until `advance`."""

    def backward(self, share: Share, ready: Callable[[Bucket], None]) -> float:
        """Forward and backward over a share. `ready` is called with each bucket as its gradients are complete, in
        the same order on every member. Returns the sum of the losses of its samples."""

    def vote(self, share: Share, loss: float) -> None:
        """Tell the others that this member's part of the step is done; sets `ballot`."""

    def decide(self) -> Decision:
        """Wait for everybody's vote."""

    def advance(self, decision: Decision) -> None:
        """The step is taken: count it, record it."""

    def settle(self) -> None:
        """Wait until everybody has taken the step; snapshots are made here."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """Subclasses are frozen structs: their fields are the strategy's options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    bucket_bytes: ClassVar[int] = 1 << 22

    def worker(self, ctx: Context) -> None:
        raise NotImplementedError
