"""Where workers of the simulated world leave records and snapshots: the observer is beside time, and costs none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torrential.comm.protocol import OBSERVER
from torrential.membership.messages import OwnStates
from torrential.membership.roles import Who
from torrential.records import Evaluation, Record
from torrential.trainer.observer import Observer
from torrential.trainer.snapshot import Snapshot
from torrential.usercode import is_interrupt
from torrential.worlds.observing import Observing, SnapshotTaken, Vectors
from torrential.worlds.sim.group import SimMembership


class SimObserving(Observing):
    def __init__(
        self,
        observer: Observer,
        write: Callable[[Record], None],
        evaluated: Mapping[tuple[str, int], float],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`fail` is told what the observer raises: it works inside of the calls of workers, who are not to blame."""
        super().__init__(observer)
        self._write, self._evaluated, self._fail = write, dict(evaluated), fail
        self.group: SimMembership  # that it belongs to

    def take(self, message: Any, tensors: Sequence[Tensor]) -> None:
        """Hear something, and do at once what can be done by then."""
        try:
            self.hear(message, tensors)
            self.work()
        except BaseException as error:  # user code may raise anything
            if is_interrupt(error):
                raise
            self._fail(error)

    def end(self) -> None:
        try:
            self.close()
        except BaseException as error:  # user code may raise anything
            if is_interrupt(error):
                raise
            self._fail(error)

    def tell(self, message: Any) -> None:
        self.group.hear(Who(OBSERVER, 0), message)

    def note(self, evaluation: Evaluation) -> None:
        if (evaluation.split, evaluation.step) not in self._evaluated:
            self._evaluated[evaluation.split, evaluation.step] = evaluation.time
            self._write(evaluation)

    def vectors(self, taken: SnapshotTaken, tensors: Sequence[Tensor]) -> Vectors:
        return {name: vector for (name, _, _), vector in zip(taken.vectors, tensors, strict=False)}


class SimOutlet:
    """Implements trainer.snapshot.Outlet."""

    def __init__(self, who: Who, group: SimMembership, write: Callable[[Record], None]) -> None:
        self._who, self._group, self._write = who, group, write

    def record(self, record: Record) -> None:
        self._write(record)

    def snapshot(self, snapshot: Snapshot, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
        vectors = [(name, v.numel(), str(v.dtype).removeprefix("torch.")) for name, v in flat.items()]
        taken = SnapshotTaken(self._who.address, self._group.slot(), snapshot, vectors, list(rest))
        self._group.snapshot_taken(self._who, taken, [_copy(t) for t in (*flat.values(), *rest.values())])

    def own_states(self, step: int, states: Mapping[str, Tensor]) -> None:
        copies = [_copy(t) for t in states.values()]
        self._group.hear(self._who, OwnStates(self._who.address, step, list(states)), copies)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
