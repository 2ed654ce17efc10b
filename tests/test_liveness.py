"""A process that gives no sign of life is asked for one, and then ended; time in which nobody looked does not count."""

from __future__ import annotations

import time
from typing import Any

import pytest

from torrential.errors import RunFailed
from torrential.worlds.local import liveness
from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Member

TIMEOUT = 3.0


class Watched:
    """Members in a time of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *members: Member) -> None:
        self.now, self.members = 0.0, members
        self.killed: list[str] = []
        self.events: list[tuple[Any, ...]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Member, "kill", lambda member: self.killed.append(member.name))
        self.liveness = liveness.Liveness(TIMEOUT, lambda *event: self.events.append(event), "go on")

    def pass_time(self, seconds: float, step: float = 0.5) -> None:
        for _ in range(round(seconds / step)):
            self.now += step
            self.liveness.look(self.members)


def member(role: str, connected: bool = True, pid: int = 1) -> Member:
    return Member(role, 0, 0, pid=pid, connection=object() if connected else None)  # type: ignore[arg-type]


def sent(to: Member) -> list[Any]:
    return [to.outbox.get()[0] for _ in range(to.outbox.qsize())]  # type: ignore[index]


@pytest.mark.parametrize(
    ("role", "event"),
    [
        ("worker", ("worker_hung", 0, "did not answer for 8 s; ended")),
        ("server", ("server_hung", None, "server 0: did not answer for 8 s; ended")),
        ("observer", ("observer_hung", None, "did not answer for 8 s; ended")),
    ],
)
def test_one_that_does_not_answer_is_ended(role: str, event: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, answering = member(role), member("worker")
    watched = Watched(monkeypatch, silent, answering)
    watched.pass_time(TIMEOUT)
    assert sent(silent) == sent(answering) == []
    watched.pass_time(0.5)
    assert sent(silent) == sent(answering) == [m.Probe()]
    answering.heard_from()
    watched.pass_time(liveness.GRACE_SECONDS - 0.5)
    assert watched.killed == []
    watched.pass_time(0.5)
    assert watched.killed == [silent.name] and watched.events == [event]
    assert sent(silent) == [] and sent(answering) == [m.Probe()]


def test_a_supervisor_that_was_stopped_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, worker := member("worker"))
    watched.pass_time(TIMEOUT + 1)
    assert sent(worker) == [m.Probe()]
    watched.pass_time(1000, step=1000)  # it was stopped; the answer lies in the socket
    assert watched.killed == []
    worker.heard_from()
    watched.pass_time(TIMEOUT)
    assert watched.killed == [] and sent(worker) == []


def test_before_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was forked is ended; for one that was not, it is the nursery that hangs."""
    watched = Watched(monkeypatch, born := member("observer", connected=False))
    watched.pass_time(liveness.HELLO_SECONDS)
    assert watched.killed == [] and sent(born) == []
    watched.pass_time(0.5)
    assert watched.events == [("observer_hung", None, "said nothing after its start for 60 s; ended")]
    watched = Watched(monkeypatch, member("worker", connected=False, pid=0))
    watched.pass_time(liveness.HELLO_SECONDS)
    with pytest.raises(RunFailed, match=r"starts workers did not answer for 60 s, when asked for worker 0: .*; go on$"):
        watched.pass_time(0.5)
