"""Generations: how workers that depend on one another come together again after a death or a join.

A change of members is a new generation, agreed on in two rounds so that all decide alike about the step in flight:

    membership ── Regroup(g) ──► workers     all their waits end with Regrouped
    workers ── Stopped(g) ─────► membership  this worker touches no shared state any more
    membership ── AllStopped ──► workers     each looks whether its step was decided, and concludes it if so
    workers ── Standing(n) ────► membership  steps taken so far
    membership ── Go ──────────► workers     the members, and whose state those that are behind take over

A death at any point starts the next generation. regrouping.py is the workers' side of it.
"""

from __future__ import annotations

from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.roll import Member, Roll, Rules


class Generations:
    def __init__(self, roll: Roll, rules: Rules) -> None:
        self._roll, self._rules = roll, rules
        self.number = 0
        self.step = 0  # the highest that is known to have been taken
        self.forming_since: float | None = None  # when this generation was called, until it is agreed on
        self._stopped: set[int] = set()
        self._standing: dict[int, int] = {}

    def call(self) -> None:
        """Have the workers meet. A worker that had finished may be needed again."""
        self.number += 1
        self._stopped, self._standing = set(), {}
        self.forming_since = self._roll.now
        for worker in self._roll.workers.values():
            worker.left = worker.last = False
            self._roll.send(worker, m.Regroup(self.number))

    def stopped(self, worker: Member, message: m.Stopped) -> None:
        if message.generation != self.number or worker.number in self._stopped:
            return
        self._stopped.add(worker.number)
        if self._stopped == self._roll.workers.keys():
            for other in self._roll.workers.values():
                self._roll.send(other, m.AllStopped(self.number))

    def stands(self, worker: Member, message: m.Standing, began: float) -> m.Go | None:
        """The agreement, once every worker has said where it stands; `began`: when the run began, or begins now."""
        if message.generation != self.number or self.forming_since is None:
            return None
        self._standing[worker.number] = message.applied
        if self._standing.keys() != self._roll.workers.keys():
            return None
        members = sorted(self._roll.workers)
        furthest = max(self._standing.values())
        if furthest < 0 and (self.step > 0 or self._rules.resumed):
            raise RunFailed(f"every worker that had the parameters is gone; {self._rules.going_on()}")
        source = min(r for r in members if self._standing[r] == furthest)
        behind = [r for r in members if self._standing[r] < furthest or (furthest < 0 and r != source)]
        self.forming_since = None
        return m.Go(self.number, members, source, furthest, behind, began)

    def end_silent(self) -> None:
        """End the workers without whom this generation cannot be agreed on."""
        now, timeout = self._roll.now, self._rules.timeout
        if self.forming_since is None or now - self.forming_since <= timeout:
            return
        self.forming_since = now
        workers = self._roll.workers
        answered = self._stopped if len(self._stopped) < len(workers) else set(self._standing)
        for number, worker in workers.items():
            if number not in answered and not worker.delayed:
                self._roll.end(worker, f"did not answer for {timeout:.0f} s")
