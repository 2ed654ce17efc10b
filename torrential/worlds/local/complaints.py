"""Which worker is hung, where collectives go by messages: not always the one that somebody waits for, since that one
may itself wait for another.

    worker ── Suspect(-1) ────► supervisor ── Ping ──► all workers       its wait has lasted for `timeout` seconds
    worker ── Pong ───────────► supervisor                               from where it waits itself
    worker ── Suspect(-1, 0) ─► supervisor                               its wait is over

As long as anybody complains there is a round of pings every moment. Whoever has neither complained nor answered by the
end of one is hung: it is named and ended. One that waits for the observer, or whose program is finished, is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Member

GRACE_SECONDS = 2.0


class Complaints:
    def __init__(self, workers: Mapping[int, Member], event: Callable[[str, int | None, str], None]) -> None:
        """Of the workers that are there, as the supervisor knows them."""
        self._workers, self._event = workers, event
        self.clear()

    def clear(self) -> None:
        """A new generation: all waits have ended."""
        self._waiting: set[int] = set()  # ranks that complain
        self._answered: set[int] = set()  # in this round
        self._since: float | None = None  # when this round began

    def hear(self, worker: Member, message: m.Suspect) -> None:
        if message.seconds > 0:
            self._waiting.add(worker.rank)
        else:
            self._waiting.discard(worker.rank)
        if not self._waiting:
            self.clear()
        elif self._since is None:
            self._ask()

    def pong(self, worker: Member) -> None:
        self._answered.add(worker.rank)

    def look(self) -> bool:
        """End who is hung. True if nobody is, and all wait for one another."""
        if self._since is None or time.monotonic() - self._since <= GRACE_SECONDS:
            return False
        busy = [w for w in self._workers.values() if not w.left]
        silent = [w for w in busy if w.rank not in self._waiting | self._answered and not w.delayed]
        for worker in silent:
            self._event("worker_hung", worker.rank, "the others waited for it; ended")
            worker.kill()
        if busy and all(worker.rank in self._waiting for worker in busy):
            return True
        self._ask()
        return False

    def _ask(self) -> None:
        self._answered, self._since = set(), time.monotonic()
        for worker in self._workers.values():
            worker.send(m.Ping())
