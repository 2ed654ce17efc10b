"""The member that is hung is ended, and nobody who merely waits for it: in collectives, for letters, and at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torrential.comm.protocol import SERVERS, address_of
from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.actions import Kill, Note, Tell
from torrential.membership.collective_hangs import CollectiveHangs
from torrential.membership.letter_hangs import LetterHangs
from torrential.membership.liveness import GRACE_SECONDS, HELLO_SECONDS, Liveness
from torrential.membership.machine import Membership
from torrential.membership.roles import Members, Who
from torrential.membership.roll import Member, Roll, Rules

RULES = Rules(timeout=10.0, going_on=lambda: "go on")
POPULATION = [Members("worker", 3, "view"), Members("server", 2, "view"), Members("observer", 1, "restart")]


class Scene:
    """Three workers, two servers and a clock; a role is hung after 10 seconds, and has 2 to answer."""

    def __init__(self) -> None:
        self.roll = Roll(POPULATION)
        self.roll.now = 100.0
        for role, count in (("worker", 3), ("server", 2), ("observer", 1)):
            for number in range(count):
                member = Member(Who(address_of(role, number), 0), heard=0.0, greeted=True, exists=True)
                self.roll.here[role][number] = member
        self.workers, self.servers = self.roll.workers, self.roll.servers
        self.observer = self.roll.here["observer"][0]
        self.events: list[tuple[str, int | None, str]] = []
        self.ended: list[str] = []
        self.told: dict[Who, list[Any]] = {}
        self.collectives, self.letters = CollectiveHangs(self.roll, RULES), LetterHangs(self.roll, RULES)
        self.liveness = Liveness(self.roll, RULES)

    def seen(self) -> Scene:
        while self.roll.actions:
            match self.roll.actions.popleft():
                case Tell(to, message):
                    self.told.setdefault(to, []).append(message)
                case Kill(who):
                    self.ended.append(str(who))
                case Note(event, worker, detail):
                    self.events.append((event, worker, detail))
        return self

    def pings(self, member: Member) -> int:
        return self.seen().told.get(member.who, []).count(m.Ping())

    def end_collectives(self, after: float) -> list[str]:
        self.roll.now += after
        self.collectives.end_hung()
        return self.seen().ended

    def end_letters(self, after: float, *awaited: Member) -> list[str]:
        self.roll.now += after
        self.letters.end_hung(list(self.workers.values()), list(awaited), self.collectives.waiting)
        return self.seen().ended

    def pass_time(self, seconds: float, *members: Member, step: float = 0.5) -> None:
        for _ in range(round(seconds / step)):
            self.roll.now += step
            self.liveness.end_silent(members)
        self.seen()


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- collectives -------------------------------------------------------------------------------------------------------
WAITS = m.Overdue(-1, "in a gloo all-reduce", 10.0)


def test_of_those_who_do_not_complain_the_one_that_does_not_answer_is_ended(scene: Scene) -> None:
    scene.collectives.overdue(scene.workers[0], WAITS)
    scene.collectives.pong(scene.workers[2])  # it began to wait later
    assert scene.end_collectives(1.9) == []
    assert scene.end_collectives(0.2) == ["worker 1"]
    assert scene.events == [("worker_hung", 1, "the others waited for it; ended")]


def test_one_that_answered_is_asked_again_while_somebody_complains(scene: Scene) -> None:
    scene.collectives.overdue(scene.workers[0], WAITS)
    for rank in (1, 2):
        scene.collectives.pong(scene.workers[rank])
    assert scene.end_collectives(2.1) == []
    assert [scene.pings(worker) for worker in scene.workers.values()] == [2, 2, 2]
    scene.collectives.pong(scene.workers[1])
    assert scene.end_collectives(2.1) == ["worker 2"]


def test_a_complaint_that_is_taken_back_has_no_consequences(scene: Scene) -> None:
    scene.collectives.overdue(scene.workers[0], WAITS)
    scene.collectives.relieved(scene.workers[0])
    assert scene.end_collectives(2.1) == []


def test_nobody_is_ended_who_waits_for_the_observer_or_is_finished(scene: Scene) -> None:
    scene.workers[1].delayed = scene.workers[2].left = True
    scene.collectives.overdue(scene.workers[0], WAITS)
    assert scene.end_collectives(2.1) == []


def test_all_that_complain_wait_for_one_another(scene: Scene) -> None:
    for rank in (0, 1):
        scene.collectives.overdue(scene.workers[rank], WAITS)
        for other in (1, 2):
            scene.collectives.pong(scene.workers[other])
        assert scene.end_collectives(2.1) == []
    scene.collectives.overdue(scene.workers[2], WAITS)
    with pytest.raises(RunFailed, match=r"^all workers have waited for one another for 10 s: worker 0 for another"):
        scene.end_collectives(2.1)
    assert scene.seen().ended == []


def test_who_waits_for_whom_and_what_for_is_said(scene: Scene) -> None:
    scene.collectives.overdue(scene.workers[0], m.Overdue(1, "to send a tensor (tag 'x')", 10.0))
    for rank in (1, 2):
        scene.collectives.overdue(scene.workers[rank], m.Overdue(0, "in an all-gather (a vote is one)", 11.0))
    with pytest.raises(RunFailed) as failure:
        scene.end_collectives(2.1)
    assert str(failure.value) == (
        "all workers have waited for one another for 10 s: worker 0 for worker 1 to send a tensor (tag 'x'), "
        "worker 1 for worker 0 in an all-gather (a vote is one), worker 2 for worker 0 in an all-gather (a vote is "
        "one); check that every recv has its send, and that all members start the same collectives in the same order; "
        "go on"
    )


def test_one_of_many_waits_is_not_lost_with_a_worker_that_dies(scene: Scene) -> None:
    for rank in (0, 1):
        scene.collectives.overdue(scene.workers[rank], WAITS)
    scene.collectives.relieved(scene.workers[0])
    assert list(scene.collectives.waiting) == [1] and scene.collectives.due == 102.0
    scene.collectives.relieved(scene.workers[1])
    assert scene.collectives.due is None


# -- letters -----------------------------------------------------------------------------------------------------------
def test_a_server_that_does_not_answer_is_hung(scene: Scene) -> None:
    for server in (0, 1):
        scene.letters.suspect(scene.workers[2], m.Suspect(SERVERS + server, 10.0))
    scene.letters.pong(scene.servers[0], m.Pong([(SERVERS + 1, 30.0)]))
    assert scene.end_letters(1.9) == [] and not scene.events
    assert scene.end_letters(0.2) == ["server 1"]
    assert scene.events == [("server_hung", None, "server 1: worker 2 waited 10 s for it; ended")]


def test_a_worker_that_servers_wait_for_is_hung_if_it_does_not_answer(scene: Scene) -> None:
    scene.letters.suspect(scene.workers[0], m.Suspect(SERVERS, 10.0))
    scene.letters.pong(scene.servers[0], m.Pong([(1, 9.0), (2, 11.0)]))  # worker 1 has been heard of since
    assert (scene.pings(scene.workers[1]), scene.pings(scene.workers[2])) == (0, 1)
    assert scene.end_letters(2.1) == ["worker 2"]
    assert scene.events == [("worker_hung", 2, "server 0 waited 11 s for it; ended")]


def test_whoever_waits_itself_is_not_hung_nor_is_one_that_the_observer_keeps_waiting(scene: Scene) -> None:
    scene.workers[1].delayed = True
    scene.letters.suspect(scene.workers[0], m.Suspect(SERVERS, 10.0))
    scene.letters.pong(scene.servers[0], m.Pong([(1, 11.0), (2, 11.0)]))
    scene.letters.pong(scene.workers[2], m.Pong())
    assert scene.end_letters(50.0) == [] and scene.events == []


def test_those_who_are_finished_wait_for_nobody_who_is_hung(scene: Scene) -> None:
    scene.workers[0].heard = 95.0
    assert scene.end_letters(0.0, scene.workers[0], scene.workers[1]) == []
    assert scene.end_letters(2.1, scene.workers[0], scene.workers[1]) == ["worker 1"]


def test_a_run_in_which_all_wait_and_nobody_is_hung_is_given_up(scene: Scene) -> None:
    for seconds in range(0, 14, 2):
        complain(scene, seconds)
        assert scene.end_letters(2.0) == []
    complain(scene, 14)
    with pytest.raises(RunFailed, match=r"^all workers wait for servers, though none of them is hung; go on$"):
        scene.end_letters(2.0)
    assert scene.seen().ended == []


def test_some_wait_for_servers_and_some_for_one_another(scene: Scene) -> None:
    """A worker that waits for a tensor which nobody sends keeps the others waiting at the servers."""
    scene.collectives.overdue(scene.workers[0], m.Overdue(1, "to send a tensor", 10.0))
    for seconds in range(0, 14, 2):
        complain(scene, seconds, 1, 2)
        assert scene.end_letters(2.0) == []
    complain(scene, 14, 1, 2)
    said = r"^all workers wait for servers, or for one another \(worker 0 for worker 1 to send a tensor\), though none"
    with pytest.raises(RunFailed, match=said):
        scene.end_letters(2.0)


def complain(scene: Scene, seconds: int, *ranks: int) -> None:
    for rank in ranks or scene.workers:
        scene.letters.suspect(scene.workers[rank], m.Suspect(SERVERS, 10.0 + seconds))
    scene.letters.pong(scene.servers[0], m.Pong([(rank, 1.0) for rank in range(3)]))


# -- signs of life -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("role", "event"),
    [
        ("worker", ("worker_hung", 0, "did not answer for 16 s; ended")),
        ("server", ("server_hung", None, "server 0: did not answer for 16 s; ended")),
        ("observer", ("observer_hung", None, "did not answer for 16 s; ended")),
    ],
)
def test_one_that_does_not_answer_is_ended(scene: Scene, role: str, event: Any) -> None:
    silent, answering = scene.roll.here[role][0], scene.workers[1]
    scene.pass_time(RULES.timeout + 0.5, silent, answering)
    assert scene.told == {}
    scene.pass_time(0.5, silent, answering)
    assert scene.told == {silent.who: [m.Probe()], answering.who: [m.Probe()]}
    answering.heard_from()
    scene.pass_time(GRACE_SECONDS - 0.5, silent, answering)
    assert scene.ended == []
    scene.pass_time(0.5, silent, answering)
    assert scene.ended == [silent.name] and scene.events == [event]


def test_a_supervisor_that_was_stopped_itself_blames_nobody(scene: Scene) -> None:
    worker = scene.workers[0]
    scene.pass_time(RULES.timeout + 1.5, worker)
    assert scene.told == {worker.who: [m.Probe()]}
    scene.pass_time(1000, worker, step=1000)  # it was stopped; the answer lies in the socket
    worker.heard_from()
    scene.pass_time(RULES.timeout, worker)
    assert scene.ended == [] and len(scene.told[worker.who]) == 1


def test_before_hello(scene: Scene) -> None:
    """One that was started is ended; for one that was not, it is whoever starts members that hangs."""
    scene.observer.greeted = False
    scene.pass_time(HELLO_SECONDS + 0.5, scene.observer)
    assert scene.ended == [] and scene.told == {}
    scene.pass_time(0.5, scene.observer)
    assert scene.events == [("observer_hung", None, "said nothing after its start for 60 s; ended")]
    scene.workers[0].greeted = scene.workers[0].exists = False
    scene.pass_time(HELLO_SECONDS, scene.workers[0])
    with pytest.raises(RunFailed, match=r"starts workers did not answer for 60 s, when asked for worker 0: .*; go on$"):
        scene.pass_time(0.5, scene.workers[0])


# -- through the machine -----------------------------------------------------------------------------------------------
class Run:
    """A machine of three workers, which have all come up, and a clock."""

    def __init__(self, death: Any, **rules: Any) -> None:
        self.machine = Membership([Members("worker", 3, death), *POPULATION[1:]], replace(RULES, **rules))
        self.now = 0.0
        self.machine.start(self.now)
        self.everybody = [Who(rank, 0) for rank in range(3)] + [Who(SERVERS + n, 0) for n in range(2)]
        for who in self.everybody:
            self.machine.greeted(who, "", self.now)
            self.hear(who, m.Ready(1000))

    def hear(self, who: Who, message: Any) -> None:
        self.machine.hear(who, message, self.now)

    def pass_time(self, seconds: float) -> list[Any]:
        """In which everybody runs; who was ended, and what went on record."""
        done: list[Any] = []
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for who in (*self.everybody, Who(SERVERS * 3, 0)):
                self.machine.greeted(who, "", self.now)
                self.hear(who, m.Alive())
            self.machine.tick(self.now)
            done += [action for action in self.machine.actions() if isinstance(action, Kill | Note)]
        return done


def test_a_generation_that_somebody_does_not_come_to() -> None:
    run = Run("regroup")
    for rank in (0, 1):
        run.hear(Who(rank, 0), m.Stopped(1))
    assert run.pass_time(10.0) == []
    assert run.pass_time(0.5) == [Note("worker_hung", 2, "did not answer for 10 s; ended"), Kill(Who(2, 0))]


def test_whom_a_collective_waits_for_is_ended_if_it_does_not_answer() -> None:
    run = Run("regroup")
    run.pass_time(1.0)
    run.hear(Who(0, 0), m.Overdue(1, "in a barrier", 10.0))
    run.hear(Who(2, 0), m.Pong())
    assert run.pass_time(1.5) == []
    said = "worker 0 waited 10 s for it in a barrier; ended"
    assert run.pass_time(0.5) == [Note("worker_hung", 1, said), Kill(Who(1, 0))]


@pytest.mark.parametrize("death", ["regroup", "view"])
def test_a_server_that_does_not_answer_is_found_whatever_the_death_of_a_worker_means(death: Any) -> None:
    run = Run(death)
    run.pass_time(1.0)
    run.hear(Who(0, 0), m.Suspect(SERVERS, 10.0))
    killed = run.pass_time(3.0)
    assert killed == [Note("server_hung", None, "server 0: worker 0 waited 10 s for it; ended"), Kill(Who(SERVERS, 0))]


def test_nothing_is_made_of_complaints_while_the_supervisor_was_stopped() -> None:
    run = Run("regroup")
    run.pass_time(1.0)
    run.now += 60.0  # as by Ctrl-Z
    run.hear(Who(0, 0), m.Suspect(SERVERS, 60.0))
    run.hear(Who(0, 0), m.Overdue(1, "in a barrier", 60.0))
    assert run.pass_time(5.0) == []
    run.pass_time(6.0)
    run.hear(Who(0, 0), m.Overdue(1, "in a barrier", 10.0))
    assert len(run.pass_time(2.5)) >= 2


def test_a_run_that_does_not_come_up_names_who_is_missing() -> None:
    machine = Membership([Members("worker", 2, "regroup")], RULES)
    machine.start(0.0)
    for who in (Who(0, 0), Who(1, 0)):
        machine.greeted(who, "", 0.0)
    machine.hear(Who(0, 0), m.Ready(), 0.0)
    with pytest.raises(RunFailed, match=r"^worker 1 did not start within 600 s; look for errors above$"):
        machine.tick(601.0)


@pytest.mark.parametrize(("seconds", "said"), [(1.0, []), (12.0, [12])])
def test_a_run_that_ends_before_a_dead_worker_is_replaced_says_who_did_not_answer(
    seconds: float, said: list[int]
) -> None:
    """Found by a user: the process that starts workers was stopped, and the run ended well with a worker less."""
    run = Run("view", replaced=frozenset({"worker"}))
    run.pass_time(1.0)
    run.machine.lost(Who(1, 0), "SIGKILL", run.now)
    run.everybody.remove(Who(1, 0))
    run.pass_time(seconds)
    for rank in (0, 2):
        run.hear(Who(rank, 0), m.Left(run.machine.generation))
    warned = [
        action.detail for action in run.machine.actions() if isinstance(action, Note) and action.event == "warning"
    ]
    who = "worker 1 was not replaced: the process that starts workers did not answer for"
    assert run.machine.dismissed and warned == [f"{who} {quiet} s" for quiet in said]
