"""How a run ends: members leave, one of them gives the last snapshot, and everybody is dismissed.

    worker ── Left ──────► membership      its program is finished; it waits for the others
    membership ── Finish ► worker          all have left: one that can gives the last snapshot, and leaves again
    membership ── Dismissed ──► everybody

When all workers have left, none can be waited for any more, so the last snapshot is complete. A coordinator has to
leave, too: if it then neither sends a message nor takes a step for `timeout` seconds, the run fails.
"""

from __future__ import annotations

from itertools import chain

from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.generations import Generations
from torrential.membership.observer import ObserverBacklog
from torrential.membership.roll import Member, Roll, Rules
from torrential.membership.views import Views

ASKED_SECONDS = 2.0  # in which a process is started, and before which nobody is to blame that it was not


class Leaving:
    def __init__(
        self, roll: Roll, rules: Rules, generations: Generations, views: Views, observing: ObserverBacklog
    ) -> None:
        self._roll, self._generations, self._views, self._observing = roll, generations, views, observing
        self._rules = rules
        self._since, self._step = 0.0, 0  # when somebody left or died, or a step was taken; and the steps by then
        self.finisher: Member | None = None  # who was asked for the last snapshot
        self.dismissed = False

    def left(self, member: Member, message: m.Left) -> None:
        if member.role == "worker" and message.generation != self._generations.number:
            return  # it has not heard yet that somebody died
        member.left = True
        if member.role == "worker":
            self._roll.show(member, "finished")
            member.last = message.last
        if member is self.finisher:
            self.finisher = None
            for worker in self._roll.workers.values():
                worker.last = False
        else:
            self._views.gather()
        self.dismiss_if_all_left()

    def dismiss_if_all_left(self) -> None:
        """Let everybody go if nothing is left to be done."""
        roll = self._roll
        self._since, self._step = roll.now, self._generations.step
        programs = chain(roll.workers.values(), roll.coordinators.values())
        if self.dismissed or not roll.workers or not all(member.left for member in programs):
            return
        if self._generations.forming_since is not None or roll.is_starting("coordinator"):
            return
        able = sorted(rank for rank, worker in roll.workers.items() if worker.last)
        if able:
            return self._ask(roll.workers[able[0]])
        self.dismissed = True
        for member in roll.starting.values():
            if not member.exists and member.quiet > ASKED_SECONDS:
                silent = f"the process that starts workers did not answer for {member.quiet:.0f} s"
                roll.note("warning", member.worker, f"{member.name} was not replaced: {silent}")
        for member in roll.everybody():
            roll.send(member, m.Dismissed())
        self._views.due = None  # nobody would read it
        self._observing.dismiss()

    def _ask(self, worker: Member) -> None:
        asked = self.finisher
        if asked is not None and self._roll.workers.get(asked.number) is asked:
            return
        if self._views.due is not None:
            self._views.renew()  # it has to know that all have left, itself included
        self.finisher = worker
        self._roll.send(worker, m.Finish())

    # -- coordinators that stay -----------------------------------------------------------------------------------
    @property
    def due(self) -> float | None:
        """When the patience with coordinators is over that stay though all workers have left; None: there are none."""
        staying = self._staying()
        return max(self._since, *(member.heard for member in staying)) + self._rules.timeout if staying else None

    def refuse_staying(self) -> None:
        """Raise RunFailed if coordinators have stayed for too long, and nothing has come of it."""
        due, step = self.due, self._generations.step
        if due is None or self._roll.now < due:
            return
        if step > self._step:
            self._since, self._step = self._roll.now, step
            return
        names = " and ".join(member.name for member in self._staying())
        raise RunFailed(
            f"{names} has not left though all workers have, and has taken no step for {self._rules.timeout:g} s; have "
            f"its program end with ctx.leave() (a larger --set timeout waits longer); {self._rules.going_on()}"
        )

    def _staying(self) -> list[Member]:
        roll = self._roll
        if self.dismissed or not roll.workers or not all(worker.left for worker in roll.workers.values()):
            return []
        return [member for member in roll.coordinators.values() if not (member.left or member.delayed)]
