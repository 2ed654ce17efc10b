"""Finds the hung member where members wait for letters: not always the one that others wait for.

    worker ── Suspect(server) ──► membership ── Ping ──► server         a request was not answered for `timeout` seconds
    server ── Pong(waits for) ──► membership ── Ping ──► those of them that have been silent for as long
    worker ── Pong ─────────────► membership                            it waits for somebody itself

A Ping is answered from where a role works: by a server between two letters, by a worker that waits. A member that does
not answer within a moment is hung: it is named and ended, and the next view is without it. A worker that has been
computing for longer than `timeout` while others wait for it is taken for hung, as it is by collectives; a worker that
waits for the observer is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.collective_hangs import in_words
from torrential.membership.roles import Who
from torrential.membership.roll import Member, Roll, Rules

GRACE_SECONDS = 2.0


class LetterHangs:
    def __init__(self, roll: Roll, rules: Rules) -> None:
        self._roll, self._timeout, self._going_on = roll, rules.timeout, rules.going_on
        self._grace = min(GRACE_SECONDS, rules.timeout)
        self._pinged: dict[Who, tuple[Member, float, str]] = {}  # since when, and why
        self._complained: dict[int, float] = {}  # by worker: when it last did
        self._stuck: float | None = None  # since when all workers complain

    def suspect(self, accuser: Member, message: m.Suspect) -> None:
        if accuser.role == "worker":
            self._complained[accuser.number] = self._roll.now
        accused = self._roll.at(message.address)
        if accused is not None:
            self._ping(accused, f"{accuser.name} waited {message.seconds:.0f} s for it")

    def pong(self, member: Member, message: m.Pong) -> None:
        self._pinged.pop(member.who, None)
        for address, silent in message.waits:
            accused = self._roll.at(address)
            if accused is not None and accused is not member and silent >= self._timeout:
                self._ping(accused, f"{member.name} waited {silent:.0f} s for it")

    def end_hung(self, busy: list[Member], awaited: list[Member], others: Mapping[int, m.Overdue]) -> None:
        """`busy`: workers that are not finished; `awaited`: those of them that others, who are, wait for; `others`: the
        waits of workers for one another. Raises RunFailed if all wait, some of them for servers, and have done so for
        longer than it takes to find the hung member."""
        now = self._roll.now
        for worker in awaited:
            if now - worker.heard > self._timeout:
                self._ping(worker, f"the others are finished, and it has been silent for {now - worker.heard:.0f} s")
        for member, since, why in list(self._pinged.values()):
            if self._roll.at(member.address) is not member or member.delayed:
                del self._pinged[member.who]
            elif now - since > self._grace:
                del self._pinged[member.who]
                self._stuck = None
                self._roll.end(member, why)
        asking = [w for w in busy if now - self._complained.get(w.number, -math.inf) <= self._timeout]
        if not asking or any(w not in asking and w.number not in others for w in busy):
            self._stuck = None
        elif self._stuck is None:
            self._stuck = now
        if self._stuck is not None and now - self._stuck > self._timeout + self._grace:
            also = f", or for one another ({in_words(others)})" if others else ""
            raise RunFailed(f"all workers wait for servers{also}, though none of them is hung; {self._going_on()}")

    def _ping(self, member: Member, why: str) -> None:
        if not member.delayed and member.who not in self._pinged:
            self._pinged[member.who] = member, self._roll.now, why
            self._roll.send(member, m.Ping())
