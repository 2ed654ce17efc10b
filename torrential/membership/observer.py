"""The observer, and all that it has not finished: if it dies or hangs, another one goes on with that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.roll import How, Member, Roll, Rules, in_words

LIVES = 3
IDLE_SECONDS = 600.0  # without a batch evaluated or a snapshot saved, although there is work


class Taken(Protocol):
    """A world's own message that a worker has taken a snapshot of a step, which lies in one of its slots."""

    @property
    def rank(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def step(self) -> int: ...


class ObserverBacklog:
    """The observer's place in the membership, and what it still has to do."""

    def __init__(self, roll: Roll, rules: Rules) -> None:
        self._roll, self._rules = roll, rules
        self._limit = max(IDLE_SECONDS, rules.timeout)
        self._snapshots: dict[tuple[int, int], tuple[Taken, Sequence[Any]]] = {}
        self._parts: list[tuple[m.OwnStates, Sequence[Any]]] = []
        self._dismissed = False
        self.reached = False  # validation has come to the target: one that takes over need not look for it
        self.current: Member | None = None

    def start(self) -> None:
        """A new one is told all that the one before it had not finished."""
        self.current = self._roll.start("observer", 0)
        self._roll.arrive(self.current)  # from the start: what it is told waits for it
        for part, tensors in self._parts:
            self.tell(part, tensors)
        if self.reached:
            self.tell(m.Stop())
        absent = set(range(self._roll.count("worker"))) - set(self._roll.workers) if self.current.life else ()
        for rank in sorted(absent):
            self.tell(m.Gone(rank))
        for taken, tensors in self._snapshots.values():
            self.tell(taken, tensors)
        if self._dismissed:
            self.tell(m.Dismissed())

    def tell(self, message: Any, tensors: Sequence[Any] = ()) -> None:
        if self.current is not None:
            self._roll.send(self.current, message, tensors)

    def lost(self, how: How) -> None:
        """The observer is dead."""
        assert self.current is not None
        if self.current.life + 1 >= LIVES:
            raise RunFailed(f"the observer died {LIVES} times (the last one {in_words(how)}); {self._rules.going_on()}")
        self._roll.note("observer_lost")
        self.start()

    def end_idle(self) -> None:
        """End it if it has stopped working. One that does not run at all is found sooner (liveness.py)."""
        observer = self.current
        if observer is None or not (self._snapshots or self._dismissed):
            return
        silent = self._roll.now - observer.heard
        if silent > self._limit:
            observer.heard = self._roll.now
            self._roll.end(observer, f"it evaluated and saved nothing for {silent:.0f} s")

    def dismiss(self) -> None:
        self._dismissed = True
        self._has_work()  # it may have had nothing to do before
        self.tell(m.Dismissed())

    def _has_work(self) -> None:
        if self.current is not None:
            self.current.heard = self._roll.now

    # -- workers and coordinators ---------------------------------------------------------------------------------
    def joined(self, worker: Member) -> None:
        """One is there that may give snapshots; it is told which of its slots no observer has to read."""
        self.tell(m.Back(worker.address))
        for slot in range(self._rules.slots):
            if (worker.address, slot) not in self._snapshots:
                self._roll.send(worker, m.SnapshotDone(worker.address, slot))

    def gone(self, worker: Member) -> None:
        self.tell(m.Gone(worker.address))

    # -- snapshots ------------------------------------------------------------------------------------------------
    def snapshot_taken(self, message: Taken, tensors: Sequence[Any]) -> None:
        if not self._snapshots:
            self._has_work()
        self._snapshots[(message.rank, message.slot)] = (message, tensors)
        self.tell(message, tensors)

    def own_states(self, message: m.OwnStates, tensors: Sequence[Any]) -> None:
        self._parts.append((message, tensors))
        self.tell(message, tensors)

    def snapshot_done(self, message: m.SnapshotDone) -> None:
        taken, _ = self._snapshots.pop((message.rank, message.slot), (None, ()))
        if taken is None:
            return  # a new observer did again what the old one had done
        self._parts = [(part, tensors) for part, tensors in self._parts if part.step >= taken.step]
        if (giver := self._roll.at(message.rank)) is not None:
            self._roll.send(giver, message)
