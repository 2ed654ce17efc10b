"""Where collectives go by messages, the one that is hung is ended, and nobody who merely waits for it."""

from __future__ import annotations

import pytest

from torrential.worlds.local import messages as m
from torrential.worlds.local.complaints import Complaints
from torrential.worlds.local.crew import Member

WAITS, WAITS_NO_MORE = m.Suspect(-1, 10.0), m.Suspect(-1, 0.0)


class Role(Member):
    """One that only notes what it is told."""

    def __init__(self, rank: int) -> None:
        super().__init__("worker", rank, 0, heard=0.0)
        self.pings = 0
        self.ended = False

    def send(self, message: object, tensors: object = ()) -> None:
        assert message == m.Ping()
        self.pings += 1

    def kill(self) -> None:
        self.ended = True


class Scene:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("torrential.worlds.local.complaints.time.monotonic", lambda: self.now)
        self.workers = {rank: Role(rank) for rank in range(3)}
        self.events: list[tuple[str, int | None, str]] = []
        self.complaints = Complaints(self.workers, lambda *event: self.events.append(event))

    def look(self, after: float) -> bool:
        self.now += after
        return self.complaints.look()

    def ended(self) -> list[int]:
        return [rank for rank, worker in self.workers.items() if worker.ended]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_of_those_who_do_not_complain_the_one_that_does_not_answer_is_ended(scene: Scene) -> None:
    scene.complaints.hear(scene.workers[0], WAITS)
    scene.complaints.pong(scene.workers[2])  # it began to wait later
    assert not scene.look(1.9) and scene.ended() == []
    assert not scene.look(0.2) and scene.ended() == [1]
    assert scene.events == [("worker_hung", 1, "the others waited for it; ended")]


def test_one_that_answered_is_asked_again_while_somebody_complains(scene: Scene) -> None:
    scene.complaints.hear(scene.workers[0], WAITS)
    for rank in (1, 2):
        scene.complaints.pong(scene.workers[rank])
    assert not scene.look(2.1) and scene.ended() == []
    assert [worker.pings for worker in scene.workers.values()] == [2, 2, 2]
    scene.complaints.pong(scene.workers[1])
    assert not scene.look(2.1) and scene.ended() == [2]


def test_a_complaint_that_is_taken_back_has_no_consequences(scene: Scene) -> None:
    scene.complaints.hear(scene.workers[0], WAITS)
    scene.complaints.hear(scene.workers[0], WAITS_NO_MORE)
    assert not scene.look(2.1) and scene.ended() == []


def test_nobody_is_ended_who_waits_for_the_observer_or_is_finished(scene: Scene) -> None:
    scene.workers[1].delayed = scene.workers[2].left = True
    scene.complaints.hear(scene.workers[0], WAITS)
    assert not scene.look(2.1) and scene.ended() == []


def test_all_that_complain_wait_for_one_another(scene: Scene) -> None:
    for rank in (0, 1):
        scene.complaints.hear(scene.workers[rank], WAITS)
        for other in (1, 2):
            scene.complaints.pong(scene.workers[other])
        assert not scene.look(2.1)
    scene.complaints.hear(scene.workers[2], WAITS)
    assert scene.look(2.1) and scene.ended() == []
