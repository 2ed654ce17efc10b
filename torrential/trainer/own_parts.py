"""What a worker keeps of its own, as part of the checkpoints that servers make while it goes on (server/copies.py).

servers                    ── Marking(n, cut) ──► worker     all that it has sent so far belongs to checkpoint n,
worker                     ── its own part, n ──► observer   or all before clock `cut`
worker, when it has ended  ── its own part, last
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from torrential.server.client import LAST
from torrential.trainer.snapshot import Outlet


class OwnParts:
    """Implements server.client.Marked: a part is given at the moment that belongs to the checkpoint."""

    def __init__(self, outlet: Outlet, states: Callable[[], Mapping[str, Tensor]], aggregates: bool) -> None:
        """`states`: what the parts are of; `aggregates`: whether the pushes of a clock become one update."""
        self._outlet, self._states, self._aggregates = outlet, states, aggregates
        self._due: tuple[int, int] | None = None  # a checkpoint, and the first clock that does not belong to it

    def marked(self, number: int, cut: int) -> None:
        self._due = number, cut
        if not self._aggregates:
            self._give()

    def pushing(self, clock: int) -> None:
        if self._due is not None and clock >= self._due[1]:
            self._give()

    def last(self) -> None:
        """This worker has pushed all that it ever will."""
        self._give()
        self._due = LAST, 0
        self._give()

    def _give(self) -> None:
        if self._due is not None:
            self._outlet.own_states(self._due[0], self._states())
            self._due = None
