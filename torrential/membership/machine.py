"""The membership of a run: one pure state machine, driven by every world.

    what happened ──► Membership ──► actions      a member was lost, a member said something, time has passed
                                                  tell a member, start one, end one, put an event on record

It has no sockets, no threads and no clock: a world tells it what happened and when, and carries out the actions that it
finds afterwards, in order (also when a call has raised: what led to a failure goes on record). It knows roles and what
their deaths mean (roles.py), and no strategy; where members can be reached is opaque text. So it does not know in which
world it runs, and what random schedules test in simulated time is what real processes rely on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torrential.errors import RunFailed, WorkerFailed
from torrential.membership import messages as m
from torrential.membership.actions import Action
from torrential.membership.collective_hangs import CollectiveHangs
from torrential.membership.generations import Generations
from torrential.membership.leaving import Leaving
from torrential.membership.letter_hangs import LetterHangs
from torrential.membership.liveness import Liveness
from torrential.membership.observer import ObserverBacklog, Taken
from torrential.membership.roles import Members, Who
from torrential.membership.roll import How, Member, Roll, Rules, in_words
from torrential.membership.views import Views
from torrential.server.messages import View

START_SECONDS = 600.0  # until all are built; a task's model may take its time
ABSENT_SECONDS = 1.0  # without a tick: the process that drives this was itself stopped
LIVES = 100
FAILED_STARTS = 3


class Membership:
    def __init__(self, population: Iterable[Members], rules: Rules) -> None:
        self._rules, self._roll = rules, Roll(population)
        roll = self._roll
        self._generations = Generations(roll, rules)
        self._views = Views(roll, rules)
        self._observing = ObserverBacklog(roll, rules)
        self._leaving = Leaving(roll, rules, self._generations, self._views, self._observing)
        self._collectives, self._letters = CollectiveHangs(roll, rules), LetterHangs(roll, rules)
        self._liveness = Liveness(roll, rules)
        self._regroups = roll.population["worker"].death in ("regroup", "fail")  # they meet in generations
        self._failed_starts: dict[str, int] = {}  # by role, since one of it has come up
        self._started = 0.0
        self._ticked: float | None = None
        self._back = -math.inf  # when the process that drives this last ran again, after it was stopped, as by Ctrl-Z
        self.began: float | None = None  # when the run's time began; None before everybody was there
        self.done = False  # the observer, too, is finished
        self._together = self._to_regroup = False  # several are lost at once; whether those that remain are to meet
        self._stopping = False  # whether workers are to finish at the next step that all agree on
        self._handlers: dict[type, Callable[[Member, Any, Sequence[Any]], None]] = {
            m.Ready: lambda member, message, _: self._ready(member, message),
            m.Stopped: lambda member, message, _: self._generations.stopped(member, message),
            m.Standing: lambda member, message, _: self._stands(member, message),
            m.Filled: lambda member, message, _: self._views.filled(member, message),
            m.Suspect: lambda member, message, _: self._suspect(member, message),
            m.Overdue: lambda member, message, _: self._overdue(member, message),
            m.Relieved: lambda member, message, _: self._collectives.relieved(member),
            m.Pong: lambda member, message, _: self._pong(member, message),
            m.Delayed: lambda member, message, _: setattr(member, "delayed", message.waiting),
            m.Left: lambda member, message, _: self._left(member, message),
            m.OwnStates: lambda member, message, tensors: self._observing.own_states(message, tensors),
            m.SnapshotDone: lambda member, message, _: self._observing.snapshot_done(message),
            m.Stop: lambda member, message, _: self._stop(),
        }

    # -- what a world may ask -------------------------------------------------------------------------------------
    @property
    def view(self) -> View | None:
        """The newest view; None before everybody was there."""
        return self._views.view

    @property
    def dismissed(self) -> bool:
        """Whether everybody may go."""
        return self._leaving.dismissed

    @property
    def generation(self) -> int:
        return self._generations.number

    @property
    def workers(self) -> list[Who]:
        """The workers that are there, by rank."""
        return [self._roll.workers[rank].who for rank in sorted(self._roll.workers)]

    @property
    def finished(self) -> set[int]:
        """Ranks of workers whose program is finished."""
        return {rank for rank, worker in self._roll.workers.items() if worker.left}

    @property
    def deadline(self) -> float | None:
        """The time at which `wake` is to be called at the latest; None: it need not be."""
        dues = self._views.due, self._collectives.due, self._leaving.due
        return min((due for due in dues if due is not None), default=None)

    def actions(self) -> Iterator[Action]:
        """The actions to carry out, in order; also those that follow while they are carried out."""
        while self._roll.actions:
            yield self._roll.actions.popleft()

    # -- what a world tells ---------------------------------------------------------------------------------------
    def start(self, now: float) -> None:
        """The run begins: everybody is to be started."""
        self._roll.now = self._started = now
        for role in ("server", "coordinator", "worker"):
            for number in range(self._roll.count(role)):
                self._roll.start(role, number)
        if self._roll.count("observer"):
            self._observing.start()

    def exists(self, who: Who, now: float) -> None:
        """Note that a member has been started."""
        self._roll.now = now
        if (member := self._roll.find(who)) is not None:
            member.exists = True

    def greeted(self, who: Who, contact: str, now: float) -> None:
        """Note a member's first message: the address at which letters reach it."""
        self._notice(now)
        if (member := self._roll.find(who)) is not None:
            member.exists = member.greeted = True
            member.contact = contact
            member.heard_from()

    def hear(self, who: Who, message: Any, now: float, tensors: Sequence[Any] = ()) -> None:
        """Handle a member's message. Messages that are not for the membership are signs of life."""
        self._notice(now)
        member = self._roll.find(who)
        if member is None:
            return  # the last words of one that is known to be dead
        member.heard_from()
        if not isinstance(message, m.Alive):
            member.heard = now
        if self.dismissed and member.role != "observer":
            return  # whatever it wanted is of no use to anybody any more
        handle = self._handlers.get(type(message))
        if handle is not None and (isinstance(message, m.Ready) or who.address not in self._roll.starting):
            handle(member, message, tensors)

    def snapshot_taken(self, who: Who, message: Taken, now: float, tensors: Sequence[Any] = ()) -> None:
        """Pass a worker's snapshot to the observer. The world alone reads what the message says of it."""
        self.hear(who, message, now)
        self._observing.snapshot_taken(message, tensors)

    def stepped(self, step: int) -> None:
        """Note that the records have come to this step of training."""
        self._generations.step = max(self._generations.step, step)

    def lost(self, who: Who, how: How, now: float) -> None:
        """Note that a member is gone. A member that had finished was free to go; any other has died."""
        self._notice(now)
        member = self._roll.find(who)
        if member is None or self.done:
            return
        if member.role == "observer":
            self._roll.remove(member)
            self._observing.lost(how)
        elif self.dismissed:
            self._roll.remove(member)
        elif who.address in self._roll.starting:
            self._did_not_start(member, how)
        else:
            self._died(member, how)

    def lost_together(self, whos: Iterable[Who], how: How, now: float) -> None:
        """Members are gone at once, as with their host: one event, after which there is one view and one generation.
        The observer is the last, so that its successor is told who else is gone."""
        gone, self._together = sorted(whos), True
        try:
            with self._views.at_once(wanted=lambda: not self.dismissed):
                for who in gone:
                    self.lost(who, how, now)
        finally:
            self._together, regroup = False, self._to_regroup
            self._to_regroup = False
            self._roll.forget_words_to(gone)
        if regroup:
            self._generations.call()

    def revive(self, address: int, now: float) -> None:
        """Start a dead member again, in a world that decides itself when members come back."""
        self._roll.now = now
        life = self._roll.lives[address]
        if not self.dismissed and self._roll.find(Who(address, life)) is None:
            member = Member(Who(address, life), now)
            self._roll.start(member.role, member.number)

    def stop(self, why: str, now: float) -> None:
        """End the run on request of its watcher: workers finish at the next step that all agree on."""
        self._roll.now = now
        if not (self._stopping or self.dismissed):
            self._roll.note("stopped", None, why)
            self._have_workers_stop()

    def wake(self, now: float) -> None:
        """Publish what has been gathered until now, end workers that collectives have waited for in vain, and fail the
        run of a coordinator that does not leave."""
        self._roll.now = now
        if self._views.due is not None and now >= self._views.due:
            self._views.renew()
        self._collectives.end_hung()
        if not self._was_absent():
            self._leaving.refuse_staying()

    def tick(self, now: float) -> None:
        """Find members that hang, and end them; to be called many times a second where members may hang."""
        self._notice(now)
        self._ticked = now
        self.wake(now)
        roll = self._roll
        self._observing.end_idle()
        observer = [] if self._observing.current is None else [self._observing.current]
        self._liveness.end_silent([*roll.everybody(), *roll.starting.values(), *observer])
        limit = max(START_SECONDS, self._rules.timeout)
        if self.began is None and now - self._started > limit:
            silent = ", ".join(member.name for member in roll.starting.values())
            raise RunFailed(f"{silent or 'the workers'} did not start within {limit:.0f} s; look for errors above")
        busy = [w for w in roll.workers.values() if not w.left or w is self._leaving.finisher]
        waits = not self._regroups and any(w.left for w in roll.workers.values())
        self._letters.end_hung(busy, busy if waits else [], self._collectives.waiting)
        self._generations.end_silent()

    def _notice(self, now: float) -> None:
        """Note the time, and whether this process was stopped, before anything is made of what was said meanwhile."""
        if self._ticked is not None and now - self._ticked > ABSENT_SECONDS:
            self._back = now
            if self._generations.forming_since is not None:
                self._generations.forming_since = now
        self._roll.now = now

    # -- joining --------------------------------------------------------------------------------------------------
    def _ready(self, member: Member, message: m.Ready) -> None:
        if self._roll.starting.get(member.address) is not member:
            return
        self._roll.arrive(member)
        self._failed_starts.pop(member.role, None)
        if member.role != "server":
            self._observing.joined(member)
        if member.role != "server" and member.life:
            self._roll.note(f"{member.role}_joined", member.worker, "" if member.role == "worker" else member.name)
        if member.role != "server" and self._stopping:
            self._roll.send(member, m.Stop())
        if member.role == "server":
            self._views.arrived(member, message)
        if self.began is None and not self.generation:
            self._begin_if_all_are_there()
        elif member.role == "worker":
            self._go_on_with(member)
        elif member.role == "coordinator":
            self._views.renew()

    def _begin_if_all_are_there(self) -> None:
        roll = self._roll
        if roll.is_starting("worker", "server", "coordinator") or not roll.workers:
            return
        began = roll.now - self._rules.elapsed
        if self._regroups:
            self._generations.call()
            return self._views.begin(began)  # for now; it is known once they have agreed
        self.began = began
        self._views.begin(began)
        self._generations.number = 1
        for worker in roll.workers.values():
            self._let_go(worker)

    def _let_go(self, worker: Member) -> None:
        """Let a worker begin, where workers do not regroup and there is one generation."""
        assert self.began is not None
        members = sorted(self._roll.workers)
        self._roll.send(worker, m.Go(1, members, members[0], self._generations.step, [], self.began))
        self._roll.show(worker, "training")

    def _go_on_with(self, newcomer: Member) -> None:
        if self._regroups:
            return self._regroup()
        self._views.renew()
        self._let_go(newcomer)

    # -- generations ----------------------------------------------------------------------------------------------
    def _regroup(self) -> None:
        if self._together:
            self._to_regroup = True
        else:
            self._generations.call()
        self._leaving.finisher = None
        self._collectives.clear()
        self._views.renew()

    def _stands(self, worker: Member, message: m.Standing) -> None:
        began = self._roll.now - self._rules.elapsed if self.began is None else self.began
        go = self._generations.stands(worker, message, began)
        if go is None:
            return
        if self.began is None:
            self.began = self._views.began = began
        else:
            self._roll.note("regrouped", None, f"workers {', '.join(map(str, go.members))}")
        for rank in go.members:
            self._roll.send(self._roll.workers[rank], go)
            self._roll.show(self._roll.workers[rank], "training")

    # -- deaths ---------------------------------------------------------------------------------------------------
    def _did_not_start(self, member: Member, how: How) -> None:
        role, known = member.role, f"({how})" if isinstance(how, str) and how else ""
        self._roll.remove(member)
        self._failed_starts[role] = self._failed_starts.get(role, 0) + 1
        if role == "worker":
            self._roll.show(member, "lost")
            self._roll.note("worker_lost", member.number, f"while starting {known}".rstrip())
            if not self._roll.workers and not self._roll.is_starting("worker"):
                raise WorkerFailed(f"no worker came up; {member.name} ended while starting ({in_words(how)})")
            self._replace(member)
        else:
            if role == "server":
                self._views.missing(member)
            self._roll.note(f"{role}_lost", None, f"{member.name}, while starting {known}".rstrip())
            if self._failed_starts[role] < FAILED_STARTS:
                self._roll.start(role, member.number)
            elif self._views.view is None or role == "coordinator":
                raise WorkerFailed(f"{member.name} ended while starting ({in_words(how)})")
        if self.began is None and not self.generation:
            self._begin_if_all_are_there()

    def _died(self, member: Member, how: How) -> None:
        role = member.role
        self._roll.remove(member)
        if self._roll.population[role].death == "fail":
            ending = in_words(how)
            self._roll.note(f"{role}_lost", member.worker, ending if role == "worker" else f"{member.name} {ending}")
            raise RunFailed(
                f"{member.name} is gone ({ending}), and no other can take its place; {self._rules.going_on()}"
            )
        if role == "worker":
            self._worker_died(member, how)
        elif role == "server":
            self._server_died(member, how)
        else:
            self._coordinator_died(member, how)

    def _worker_died(self, member: Member, how: How) -> None:
        roll, begun = self._roll, self.generation > 0
        roll.show(member, "lost")
        roll.note("worker_lost", member.number, in_words(how))
        self._observing.gone(member)
        self._collectives.relieved(member)
        if not roll.workers and (begun or not roll.is_starting("worker")) and not self._comes_back(member):
            said = f"all workers are gone ({member.name} {in_words(how)})"
            raise RunFailed(f"{said}; {self._rules.going_on()}")
        self._replace(member)
        if not begun:
            self._begin_if_all_are_there()
        elif self._regroups:
            self._regroup()
        else:
            self._views.renew()
            self._leaving.dismiss_if_all_left()

    def _server_died(self, member: Member, how: How) -> None:
        if self._views.view is None:
            return self._did_not_start(member, how)
        self._views.lost(member)
        self._replace(member)

    def _coordinator_died(self, member: Member, how: How) -> None:
        self._roll.note("coordinator_lost", None, member.name)
        self._views.renew()
        if not self._replace(member) and self._roll.population["coordinator"].death == "restart":
            raise RunFailed(
                f"{member.name} died {LIVES} times (the last one {in_words(how)}); {self._rules.going_on()}"
            )
        if self.generation:
            self._leaving.dismiss_if_all_left()

    def _replace(self, member: Member) -> bool:
        """Start another one in its place, if that is wanted."""
        if self._may_be_replaced(member):
            self._roll.start(member.role, member.number)
            return True
        return False

    def _may_be_replaced(self, member: Member) -> bool:
        wanted = member.role in self._rules.replaced or self._roll.population[member.role].death == "restart"
        return wanted and member.life < LIVES and self._failed_starts.get(member.role, 0) < FAILED_STARTS

    def _comes_back(self, worker: Member) -> bool:
        """Whether a run without workers may wait for one, because others have what is needed to go on."""
        return not self._regroups and self._may_be_replaced(worker)

    # -- hangs ----------------------------------------------------------------------------------------------------
    def _suspect(self, member: Member, message: m.Suspect) -> None:
        if not self._was_absent():
            self._letters.suspect(member, message)

    def _overdue(self, member: Member, message: m.Overdue) -> None:
        if not self._was_absent():
            self._collectives.overdue(member, message)

    def _was_absent(self) -> bool:
        """Whether members may have waited for this process; a member that still waits will say so again."""
        return self._roll.now - self._back < self._rules.timeout

    def _pong(self, member: Member, message: m.Pong) -> None:
        if member.role == "worker":
            self._collectives.pong(member)
        self._letters.pong(member, message)

    # -- the end --------------------------------------------------------------------------------------------------
    def _stop(self) -> None:
        """The target is reached, as the observer has seen, or a script has reported."""
        if not self._observing.reached:
            self._roll.note("target_reached")
        self._observing.reached = True
        self._have_workers_stop()

    def _have_workers_stop(self) -> None:
        self._stopping = True
        for member in (*self._roll.workers.values(), *self._roll.coordinators.values()):
            self._roll.send(member, m.Stop())

    def _left(self, member: Member, message: m.Left) -> None:
        if member.role == "observer":
            self.done = True
        else:
            self._leaving.left(member, message)
