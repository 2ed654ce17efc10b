"""The membership of a simulated run: what members say to it, and are told, takes the network's latency.

    role ── tell ──► latency ──► Membership (membership/machine.py)   the one that decides about real processes too
    role ◄── hear ── latency ◄── actions

Deaths are noticed by the world, after the cluster's `detection` seconds. The observer is beside time: what it says, and
is told, takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from torrential.comm.protocol import OBSERVER
from torrential.membership import messages as m
from torrential.membership.actions import Action, Note, Show, Start, Tell
from torrential.membership.machine import Membership
from torrential.membership.roles import Who
from torrential.worlds.observing import SnapshotTaken
from torrential.worlds.sim.mail import Hub


class Stage(Protocol):
    """The world, as its membership sees it."""

    def start(self, who: Who) -> m.Ready | None:
        """Start a member, which takes no time: what it says as soon as it is there."""

    def observe(self, message: Any, tensors: Sequence[Tensor]) -> None:
        """The observer is told something."""

    def event(self, event: str, worker: int | None, detail: str) -> None:
        """Put an event on record."""

    def state(self, worker: int, state: str) -> None:
        """Show what a worker is at."""


class SimMembership:
    """The membership machine of a simulated run: it hears members and carries out actions, with latency."""

    def __init__(self, hub: Hub, membership: Membership, stage: Stage) -> None:
        self._hub, self.membership, self._stage = hub, membership, stage
        self._wakes_at: float | None = None
        self._snapshots = 0

    # -- what members say -----------------------------------------------------------------------------------------
    def tell(self, who: Who, message: Any) -> None:
        self._hub.kernel.after(self._hub.cluster.network.latency, self.hear, who, message)

    def hear(self, who: Who, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        self.membership.hear(who, message, self._hub.kernel.now, tensors)
        self._carry_out()

    def snapshot_taken(self, who: Who, message: SnapshotTaken, tensors: Sequence[Tensor]) -> None:
        self.membership.snapshot_taken(who, message, self._hub.kernel.now, tensors)
        self._carry_out()

    def slot(self) -> int:
        """Snapshots need no memory that is used again: each has a slot of its own."""
        self._snapshots += 1
        return self._snapshots

    # -- what the world says --------------------------------------------------------------------------------------
    def start(self) -> None:
        self.membership.start(self._hub.kernel.now)
        self._carry_out()

    def lost(self, who: Who, how: str) -> None:
        try:
            self.membership.lost(who, how, self._hub.kernel.now)
        finally:
            self._carry_out()

    def revive(self, address: int) -> None:
        self.membership.revive(address, self._hub.kernel.now)
        self._carry_out()

    def stop(self, why: str) -> None:
        self.membership.stop(why, self._hub.kernel.now)
        self._carry_out()

    def _wake(self, planned: float) -> None:
        if self._wakes_at == planned:
            self._wakes_at = None
        try:
            self.membership.wake(self._hub.kernel.now)
        finally:
            self._carry_out()

    # -- what is to be done ---------------------------------------------------------------------------------------
    def _carry_out(self) -> None:
        for action in self.membership.actions():
            self._do(action)
        due = self.membership.deadline
        if due is not None and (self._wakes_at is None or due < self._wakes_at):
            self._wakes_at = due
            self._hub.kernel.at(due, self._wake, due)

    def _do(self, action: Action) -> None:
        kernel = self._hub.kernel
        match action:
            case Tell(to, message, tensors) if to.address == OBSERVER:
                self._stage.observe(message, tensors)
            case Tell(to, m.Ping()):
                kernel.after(0.0, self.hear, to, m.Pong())  # nobody hangs here
            case Tell(to, message):
                kernel.after(self._hub.cluster.network.latency, self.deliver, to, message)
            case Start(who):
                ready = self._stage.start(who)
                if ready is not None:
                    kernel.after(0.0, self.hear, who, ready)
            case Note(event, worker, detail):
                self._stage.event(event, worker, detail)
            case Show(worker, state):
                self._stage.state(worker, state)
            case _:
                raise AssertionError(f"nobody hangs here, so nobody is to be ended ({action})")

    def deliver(self, to: Who, message: Any) -> None:
        mail = self._hub.mails.get(to.address)
        if mail is not None and mail.who == to:
            mail.hear(message)
