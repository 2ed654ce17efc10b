"""What a worker keeps of its own, as part of the checkpoints that servers make while it goes on (server/copies.py).

servers                    ── Marking(n, cut) ──► worker     all that it has sent so far belongs to checkpoint n,
worker                     ── its own part, n ──► observer   or all before clock `cut`
worker, when it has ended  ── its own part, last

Where the pushes of a clock become one update, a part has all named states that are the worker's own, as they are when
it comes to clock `cut`: no worker has pushed for that clock yet. Otherwise there is no moment at which all workers are
at the same place; then a part has what compression left behind, as it is when the worker marks the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torrential.server.client import LAST
from torrential.trainer.compressing import STATE
from torrential.trainer.snapshot import Outlet
from torrential.trainer.state import NamedStates


class OwnParts:
    """Implements server.client.Marked: a part is given at the moment that belongs to the checkpoint."""

    def __init__(self, outlet: Outlet, named: NamedStates, in_step: bool) -> None:
        """`in_step`: whether the pushes of a clock become one update."""
        self._outlet, self._named, self.in_step = outlet, named, in_step
        self._due: tuple[int, int] | None = None  # a checkpoint, and the first clock that does not belong to it

    def __bool__(self) -> bool:
        """Whether there is anything to give."""
        return self._named.some_are_own if self.in_step else bool(self._states())

    def marked(self, number: int, cut: int) -> None:
        self._due = number, cut
        if not self.in_step:
            self._give()

    def begins(self, clock: int) -> None:
        """This worker has samples for a clock, and has not trained on them yet."""
        if self.in_step and self._due is not None and clock >= self._due[1]:
            self._give()

    def last(self) -> None:
        """This worker has pushed all that it ever will."""
        self._give()
        self._due = LAST, 0
        self._give()

    def _states(self) -> Mapping[str, Tensor]:
        states = self._named.tensors("own")
        return states if self.in_step else {name: t for name, t in states.items() if name.startswith(f"{STATE}/")}

    def _give(self) -> None:
        if self._due is not None and self:
            self._outlet.own_states(self._due[0], self._states())
        self._due = None
