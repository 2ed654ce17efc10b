"""Where workers of the simulated world leave records and snapshots: the observer is beside time, and costs none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from torrential.errors import INTERRUPTS
from torrential.records import Evaluation, Record
from torrential.trainer.observer import Observer
from torrential.trainer.pending import Parts, Pending
from torrential.trainer.snapshot import Snapshot


class Observing:
    """Evaluates and saves snapshots as soon as every member's part of them is there."""

    def __init__(
        self,
        observer: Observer,
        write: Callable[[Record], None],
        evaluated: Mapping[tuple[str, int], float],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`fail` is told what the observer raises: it works inside of the calls of workers, who are not to blame."""
        self._observer, self._write, self._evaluated, self._fail = observer, write, dict(evaluated), fail
        self._pending: Pending[tuple[dict[str, Tensor], dict[str, Tensor]]] = Pending(observer.has_buffers)
        self._last: Snapshot | None = None
        self.reached = False

    def part(self, rank: int, step: int, buffers: Mapping[str, Tensor]) -> None:
        self._pending.part(rank, step, {name: t.clone() for name, t in buffers.items()})
        self.work()

    def take(self, snapshot: Snapshot, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
        self._pending.add(snapshot, (_copies(flat), _copies(rest)))
        self.work()

    def gone(self, rank: int) -> None:
        self._pending.gone(rank)
        self.work()

    def back(self, rank: int) -> None:
        self._pending.back(rank)

    def work(self, all_of_them: bool = False) -> None:
        try:
            while (item := self._pending.next(ready_or_not=all_of_them)) is not None:
                snapshot, (flat, rest), parts, news = item
                if news and not self.reached:
                    self._process(snapshot, flat, rest, parts)
        except INTERRUPTS:
            raise
        except BaseException as error:  # user code may raise anything
            self._fail(error)

    def _process(self, snapshot: Snapshot, flat: dict[str, Tensor], rest: dict[str, Tensor], parts: Parts) -> None:
        self._observer.load(flat, rest)
        evaluation = self._observer.evaluate(snapshot, "validation")
        self.reached = self._observer.task.reaches(self._observer.config.target, evaluation.value)
        self._note(evaluation)  # with which the world hears that the target is reached
        self._observer.save(snapshot, flat, rest, parts)
        self._last = snapshot

    def _note(self, evaluation: Evaluation) -> None:
        if (evaluation.split, evaluation.step) not in self._evaluated:
            self._evaluated[evaluation.split, evaluation.step] = evaluation.time
            self._write(evaluation)

    def close(self) -> None:
        """The last word is the test set's, unless it was to be left alone."""
        self.work(all_of_them=True)
        try:
            last = self._last or self._observer.load_saved()
            if last is not None and self._observer.config.settings.test:
                self._note(self._observer.evaluate(last, "test"))
        except INTERRUPTS:
            raise
        except BaseException as error:  # user code may raise anything
            self._fail(error)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


class SimOutlet:
    """Implements trainer.snapshot.Outlet."""

    def __init__(self, rank: int, observing: Observing, write: Callable[[Record], None]) -> None:
        self._rank, self._observing, self._write = rank, observing, write

    def record(self, record: Record) -> None:
        self._write(record)

    def snapshot(self, snapshot: Snapshot, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
        self._observing.take(snapshot, flat, rest)

    def own_buffers(self, step: int, buffers: Mapping[str, Tensor]) -> None:
        self._observing.part(self._rank, step, buffers)
