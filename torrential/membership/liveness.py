"""Which members do not run at all: stopped by a signal, frozen, or stuck before they could say hello.

    membership ── Probe ──► member     nothing has come from it for `timeout` seconds
    member ── Alive ──────► membership

A thread of its own answers, so a member that computes for long is not taken for hung; whether a running member also
makes progress is found out elsewhere (collective_hangs.py, letter_hangs.py, observer.py). A member that does not answer
within a moment is named and ended, and the run goes on as after its death.
"""

from __future__ import annotations

from collections.abc import Iterable

from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.roll import Member, Roll, Rules

GRACE_SECONDS = 5.0
HELLO_SECONDS = 60.0  # from the wish for a member to its first word; torch is being loaded at the first of them
STEP_SECONDS = 1.0


class Liveness:
    def __init__(self, roll: Roll, rules: Rules) -> None:
        self._roll, self._timeout, self._going_on = roll, rules.timeout, rules.going_on
        self._checked: float | None = None

    def end_silent(self, members: Iterable[Member]) -> None:
        """Called many times a second. Where that was not so, because the supervisor itself was stopped, no more than a
        step of the time counts: nobody could be heard meanwhile."""
        now = self._roll.now
        passed = 0.0 if self._checked is None else min(now - self._checked, STEP_SECONDS)
        self._checked = now
        for member in members:
            member.quiet += passed
            if not member.greeted:
                self._await_hello(member)
            elif member.quiet > self._timeout + GRACE_SECONDS:
                self._end(member, "did not answer")
            elif member.quiet > self._timeout and not member.probed:
                member.probed = True
                self._roll.send(member, m.Probe())

    def _await_hello(self, member: Member) -> None:
        if member.quiet <= max(HELLO_SECONDS, self._timeout):
            return
        if member.exists:
            return self._end(member, "said nothing after its start")
        raise RunFailed(
            f"the process that starts workers did not answer for {member.quiet:.0f} s, when asked for {member.name}: "
            f"it is stopped, or this machine is very slow (a larger --set timeout waits longer); {self._going_on()}"
        )

    def _end(self, member: Member, why: str) -> None:
        self._roll.end(member, f"{why} for {member.quiet:.0f} s")
        member.heard_from()
