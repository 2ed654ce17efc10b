"""The observer's program: take snapshots as they come, evaluate, record, save. The same in every world."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torrential.membership import messages as m
from torrential.records import Evaluation
from torrential.trainer.observer import Observer
from torrential.trainer.pending import Parts, PendingSnapshots
from torrential.trainer.snapshot import Snapshot

Vectors = dict[str, Tensor]


class SnapshotTaken(m.MemberMessage, frozen=True):
    """A worker has a snapshot in one of its slots. Where its flat vectors lie is the world's matter; the rest of it
    travels beside the message."""

    rank: int
    slot: int
    snapshot: Snapshot
    vectors: list[tuple[str, int, str]]  # name, numel, dtype
    rest: list[str]  # names of the tensors that travel beside it, the last of them

    @property
    def step(self) -> int:
        """What the parts that belong to it are given under."""
        return self.snapshot.parts_under


class Observing(ABC):
    """Evaluates and saves snapshots as soon as every member's part of them is there."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._pending: PendingSnapshots[tuple[SnapshotTaken, Sequence[Tensor]]] = PendingSnapshots()
        self._last: Snapshot | None = None
        self._reached = False
        self.dismissed = False

    # -- what a world provides ------------------------------------------------------------------------------------
    @abstractmethod
    def tell(self, message: Any) -> None:
        """Say something to the membership."""

    @abstractmethod
    def note(self, evaluation: Evaluation) -> None:
        """Return when it is on record: no checkpoint shall exist whose evaluation is not."""

    @abstractmethod
    def vectors(self, taken: SnapshotTaken, tensors: Sequence[Tensor]) -> Vectors:
        """The flat vectors of a snapshot."""

    # -- the program ----------------------------------------------------------------------------------------------
    def hear(self, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        match message:
            case SnapshotTaken(snapshot=snapshot):
                self._pending.add(snapshot, (message, tensors))
            case m.OwnStates(rank, step, names):
                self._pending.part(rank, step, dict(zip(names, tensors, strict=True)))
            case m.Back(rank):
                self._pending.back(rank)
            case m.Gone(rank):
                self._pending.gone(rank)
            case m.Stop():
                self._reached = True  # as seen by an observer before this one
            case m.Dismissed():
                self.dismissed = True

    def work(self) -> None:
        """Deal with all snapshots that are complete."""
        while (item := self._pending.next(ready_or_not=self.dismissed)) is not None:
            _, (taken, tensors), parts, news = item
            if news and not self._reached and not self._process(taken, tensors, parts):
                self._pending.not_used(taken.snapshot)
            self.tell(m.SnapshotDone(taken.rank, taken.slot))

    def _process(self, taken: SnapshotTaken, tensors: Sequence[Tensor], parts: Parts) -> bool:
        """Evaluate and save a snapshot, if there is a model in it."""
        flat = self.vectors(taken, tensors)
        rest = dict(zip(taken.rest, tensors[len(tensors) - len(taken.rest) :], strict=True))
        if not self._observer.complete(taken.snapshot, parts):
            return False
        self._observer.load(flat, rest, parts)
        if not self._observer.evaluates:
            self._observer.save(taken.snapshot, flat, rest, parts)
            return True
        evaluation = self._observer.evaluate(taken.snapshot, "validation")
        self.note(evaluation)
        self._observer.save(taken.snapshot, flat, rest, parts, evaluation.value)
        self._last = taken.snapshot
        if self._observer.task.reaches(self._observer.config.target, evaluation.value):
            self._reached = True
            self.tell(m.Stop())
        return True

    def close(self) -> None:
        """The last word is the test set's, on the parameters last evaluated, maybe by an observer before this one."""
        last = (self._last or self._observer.load_saved()) if self._observer.evaluates else None
        if last is not None and self._observer.config.settings.test:
            self.note(self._observer.evaluate(last, "test"))
        self.tell(m.Left(0))
