"""Finds the hung worker where workers wait for one another, in collectives or for a tensor. It is not always the worker
that others wait for, since that one may itself wait for another.

    worker ── Overdue(whom, what for) ──► membership ── Ping ──► all workers     its wait has lasted `timeout` seconds
    worker ── Pong ─────────────────────► membership                             from where it waits itself
    worker ── Relieved ─────────────────► membership                             its wait is over

As long as a worker's wait is overdue there is a round of pings every moment. A worker that has neither complained nor
answered by the end of a round is hung: it is named and ended. A worker that waits for the observer, or whose program is
finished, is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.roll import Member, Roll, Rules

GRACE_SECONDS = 2.0
FEW = 4  # waits that one message names


def gone_ahead(left: Sequence[Member], busy: Sequence[Member]) -> str:
    """What to say when some workers are finished, and others wait for them in a step."""
    finished, others = (" and ".join(worker.name for worker in workers) for workers in (left, busy))
    return (
        f"{finished} finished, and {others} waited for another step; have all workers take the same number of steps "
        "(a script with drop_last=True in its loader gives all equally many batches, and run.stop() ends all together)"
    )


class CollectiveHangs:
    def __init__(self, roll: Roll, rules: Rules) -> None:
        self._roll, self._rules = roll, rules
        self._grace = min(GRACE_SECONDS, rules.timeout)
        self.clear()

    def clear(self) -> None:
        """A new generation: all waits have ended."""
        self.waiting: dict[int, m.Overdue] = {}  # the complaints, by the rank of who makes them
        self._answered: set[int] = set()  # in this round
        self.due: float | None = None  # when this round is over

    def overdue(self, worker: Member, message: m.Overdue) -> None:
        self.waiting[worker.number] = message
        if self.due is None:
            self._ask()

    def relieved(self, worker: Member) -> None:
        """A worker does not wait any more, or is dead."""
        self.waiting.pop(worker.number, None)
        if not self.waiting:
            self.clear()

    def pong(self, worker: Member) -> None:
        self._answered.add(worker.number)

    def end_hung(self) -> None:
        """End the hung worker; raises RunFailed if none is hung, and all wait for one another."""
        if self.due is None or self._roll.now < self.due:
            return
        busy = [w for w in self._roll.workers.values() if not w.left]
        for worker in busy:
            if worker.number not in self.waiting and worker.number not in self._answered and not worker.delayed:
                self._roll.end(worker, self._why(worker))
        left = [worker for worker in self._roll.workers.values() if worker.left]
        if busy and left and all(worker.number in self.waiting for worker in busy):
            raise RunFailed(gone_ahead(left, busy))
        if busy and all(worker.number in self.waiting for worker in busy):
            raise RunFailed(
                f"all workers have waited for one another for {self._rules.timeout:g} s: {in_words(self.waiting)}; "
                "check that every recv has its send, and that all members start the same collectives in the same "
                f"order; {self._rules.going_on()}"
            )
        self._ask()

    def _why(self, hung: Member) -> str:
        for rank, wait in sorted(self.waiting.items()):
            if wait.rank == hung.number:
                return f"worker {rank} waited {wait.seconds:.0f} s for it {wait.what}"
        return "the others waited for it"

    def _ask(self) -> None:
        self._answered, self.due = set(), self._roll.now + self._grace
        for worker in self._roll.workers.values():
            self._roll.send(worker, m.Ping())


def in_words(waiting: Mapping[int, m.Overdue]) -> str:
    """Who waits for whom, and what for."""
    said = []
    for rank, wait in sorted(waiting.items())[:FEW]:
        whom = "another worker" if wait.rank < 0 else f"worker {wait.rank}"
        said.append(f"worker {rank} for {whom} {wait.what}")
    more = len(waiting) - len(said)
    return ", ".join(said) + (f" and {more} more" if more else "")
