"""Which worker is hung, where collectives go by messages: not always the one that somebody waits for, since that one
may itself wait for another.

    worker ── Suspect(-1) ────► membership ── Ping ──► all workers       its wait has lasted for `timeout` seconds
    worker ── Pong ───────────► membership                               from where it waits itself
    worker ── Suspect(-1, 0) ─► membership                               its wait is over

As long as anybody complains there is a round of pings every moment. Whoever has neither complained nor answered by the
end of one is hung: it is named and ended. One that waits for the observer, or whose program is finished, is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.roll import Member, Roll, Rules

GRACE_SECONDS = 2.0


def gone_ahead(left: Sequence[Member], busy: Sequence[Member]) -> str:
    """What to say when some workers are finished, and others wait for them in a step."""
    finished, others = (" and ".join(worker.name for worker in workers) for workers in (left, busy))
    return (
        f"{finished} finished, and {others} waited for another step; have all workers take the same number of steps "
        "(a script with drop_last=True in its loader gives all equally many batches)"
    )


class CollectiveHangs:
    def __init__(self, roll: Roll, rules: Rules) -> None:
        self._roll, self._rules = roll, rules
        self.clear()

    def clear(self) -> None:
        """A new generation: all waits have ended."""
        self._waiting: set[int] = set()  # ranks that complain
        self._answered: set[int] = set()  # in this round
        self._since: float | None = None  # when this round began

    def suspect(self, worker: Member, message: m.Suspect) -> None:
        if message.seconds > 0:
            self._waiting.add(worker.number)
        else:
            self._waiting.discard(worker.number)
        if not self._waiting:
            self.clear()
        elif self._since is None:
            self._ask()

    def pong(self, worker: Member) -> None:
        self._answered.add(worker.number)

    def end_hung(self) -> None:
        """End who is hung; raises RunFailed if nobody is, and all wait for one another."""
        if self._since is None or self._roll.now - self._since <= GRACE_SECONDS:
            return
        busy = [w for w in self._roll.workers.values() if not w.left]
        for worker in busy:
            if worker.number not in self._waiting | self._answered and not worker.delayed:
                self._roll.end(worker, "the others waited for it")
        left = [worker for worker in self._roll.workers.values() if worker.left]
        if busy and left and all(worker.number in self._waiting for worker in busy):
            raise RunFailed(gone_ahead(left, busy))
        if busy and all(worker.number in self._waiting for worker in busy):
            algorithm, remedy = self._rules.algorithm, self._rules.remedy
            raise RunFailed(f"all workers wait for one another in {algorithm}; {remedy}")
        self._ask()

    def _ask(self) -> None:
        self._answered, self._since = set(), self._roll.now
        for worker in self._roll.workers.values():
            self._roll.send(worker, m.Ping())
