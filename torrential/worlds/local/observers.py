"""The supervisor's observer, and all that it has not finished: if it dies or hangs, another one goes on with that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from torrential.config import RunConfig
from torrential.errors import RunFailed
from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Crew, Member
from torrential.worlds.local.outlet import SLOTS

LIVES = 3
IDLE_SECONDS = 600.0  # without a batch evaluated or a snapshot saved, although there is work


class Observers:
    def __init__(
        self,
        config: RunConfig,
        crew: Crew,
        workers: Mapping[int, Member],  # those that are there, as the supervisor knows them
        event: Callable[[str, int | None, str], None],
        remedy: str,
    ) -> None:
        self._config, self._crew, self._workers, self._event, self._remedy = config, crew, workers, event, remedy
        self._limit = max(IDLE_SECONDS, config.settings.timeout)
        self._snapshots: dict[tuple[int, int], tuple[m.SnapshotTaken, list[Tensor]]] = {}
        self._parts: list[tuple[m.OwnBuffers, list[Tensor]]] = []
        self._reached = self._dismissed = False

    def start(self, life: int = 0) -> None:
        """A new one is told all that the one before it had not finished."""
        self.current = self._crew.spawn("observer", -1, life)
        for part, tensors in self._parts:
            self.tell(part, tensors)
        if self._reached:
            self.tell(m.Stop())
        for rank in set(range(self._config.workers)) - set(self._workers) if life else ():
            self.tell(m.Gone(rank))
        for taken, tensors in self._snapshots.values():
            self.tell(taken, tensors)
        if self._dismissed:
            self.tell(m.Dismissed())

    def tell(self, message: object, tensors: Sequence[Tensor] = ()) -> None:
        self.current.send(message, tensors)

    def gone(self, member: Member, how: Callable[[], str]) -> None:
        if member is not self.current:
            return
        if member.life + 1 >= LIVES:
            raise RunFailed(f"the observer died {LIVES} times (the last one {how()}); {self._remedy}")
        self._event("observer_lost", None, "")
        self.start(member.life + 1)

    def look(self) -> None:
        """End it if it has stopped working. One that does not run at all is found sooner (worlds/local/liveness.py)."""
        silent = time.monotonic() - self.current.heard
        if (self._snapshots or self._dismissed) and silent > self._limit:
            self._event("observer_hung", None, f"it evaluated and saved nothing for {silent:.0f} s; ended")
            self.current.heard = time.monotonic()
            self.current.kill()

    def reached(self) -> None:
        """Validation has come to the target: one that takes over need not look for it."""
        self._reached = True

    def dismiss(self) -> None:
        self._dismissed = True
        self.current.heard = time.monotonic()  # it may have had nothing to do before
        self.tell(m.Dismissed())

    # -- snapshots ------------------------------------------------------------------------------------------------
    def snapshot_taken(self, member: Member, message: m.SnapshotTaken, tensors: list[Tensor]) -> None:
        if not self._snapshots:
            self.current.heard = time.monotonic()
        self._snapshots[(message.rank, message.slot)] = (message, tensors)
        self.tell(message, tensors)

    def own_buffers(self, member: Member, message: m.OwnBuffers, tensors: list[Tensor]) -> None:
        self._parts.append((message, tensors))
        self.tell(message, tensors)

    def snapshot_done(self, member: Member, message: m.SnapshotDone, _: list[Tensor]) -> None:
        if (message.rank, message.slot) not in self._snapshots:
            return  # a new observer did again what the old one had done
        taken, _tensors = self._snapshots.pop((message.rank, message.slot))
        self._parts = [(p, t) for p, t in self._parts if p.step >= taken.snapshot.step]
        if message.rank in self._workers:
            self._workers[message.rank].send(message)

    def free_slots(self, worker: Member) -> None:
        """Tell a worker which of its slots no observer has to read."""
        for slot in range(SLOTS):
            if (worker.rank, slot) not in self._snapshots:
                worker.send(m.SnapshotDone(worker.rank, slot))
