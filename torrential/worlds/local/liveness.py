"""Which processes do not run at all: stopped by a signal, frozen, or stuck before they could say hello.

    supervisor ── Probe ──► role     nothing has come from it for `timeout` seconds
    role ── Alive ────────► supervisor

A thread of its own answers (worlds/local/link.py), so one that computes for long is not taken for hung; whether one
that runs also gets on is for others to find out (complaints.py, doubts.py, observers.py). What does not answer within a
moment is named and ended, and the run goes on as after its death.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torrential.errors import RunFailed
from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Member

GRACE_SECONDS = 5.0
HELLO_SECONDS = 60.0  # from the wish for a process to its first word; torch is being loaded at the first of them
STEP_SECONDS = 1.0


class Liveness:
    def __init__(self, timeout: float, event: Callable[[str, int | None, str], None], remedy: str) -> None:
        self._timeout, self._event, self._remedy = timeout, event, remedy
        self._looked = time.monotonic()

    def look(self, members: Iterable[Member]) -> None:
        """Called many times a second. Where that was not so, because the supervisor itself was stopped, no more than a
        step of the time counts: nobody could be heard meanwhile."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, STEP_SECONDS), now
        for member in members:
            member.quiet += passed
            if member.connection is None:
                self._await_hello(member)
            elif member.quiet > self._timeout + GRACE_SECONDS:
                self._end(member, "did not answer")
            elif member.quiet > self._timeout and not member.probed:
                member.probed = True
                member.send(m.Probe())

    def _await_hello(self, member: Member) -> None:
        if member.quiet <= max(HELLO_SECONDS, self._timeout):
            return
        if member.pid:
            return self._end(member, "said nothing after its start")
        raise RunFailed(
            f"the process that starts workers did not answer for {member.quiet:.0f} s, when asked for {member.name}: "
            f"it is stopped, or this machine is very slow (a larger --set timeout waits longer); {self._remedy}"
        )

    def _end(self, member: Member, why: str) -> None:
        said = f"{why} for {member.quiet:.0f} s; ended"
        worker = member.rank if member.role == "worker" else None
        self._event(f"{member.role}_hung", worker, f"{member.name}: {said}" if member.role == "server" else said)
        member.heard_from()
        member.kill()
