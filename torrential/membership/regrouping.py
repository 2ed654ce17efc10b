"""The workers' side of the agreement: how one meets the others of a generation, and how it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torrential.membership.messages import AllStopped, Go, Left, Standing, Stopped

W = TypeVar("W", Go, AllStopped)


class Attendant(Protocol):
    """A worker's line to the membership, as its world provides it."""

    generation: int
    """The one that this worker has met last."""

    def tell(self, message: Any) -> None:
        """Say something to the membership."""

    def newer(self) -> int:
        """Wait until a generation is known that this worker has not met; the newest."""

    def word(self, kind: type[W], generation: int) -> W | None:
        """Wait for the membership's word on this generation; None if there is a newer one."""

    def asked_to_finish(self, able: bool) -> bool:
        """Wait until all are finished: False. True if this worker, which is able to, shall give the last snapshot
        first. Raises Regrouped if there is a newer generation."""


def meet(worker: Attendant, stand: Callable[[], int]) -> Go:
    """Meet the other workers of the newest generation. `stand` is called once all of them have stopped; it returns how
    many steps this one has taken."""
    while True:
        generation = worker.newer()
        worker.tell(Stopped(generation))
        if worker.word(AllStopped, generation) is None:
            continue
        worker.tell(Standing(generation, stand()))
        go = worker.word(Go, generation)
        if go is not None:
            return go


def leave(worker: Attendant, last: Callable[[], None] | None) -> None:
    """Return when all workers are finished; give the last snapshot if that is asked for."""
    worker.tell(Left(worker.generation, last is not None))
    while worker.asked_to_finish(last is not None):
        assert last is not None
        last()
        worker.tell(Left(worker.generation))
