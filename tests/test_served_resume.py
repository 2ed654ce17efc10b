"""Runs with servers that are killed and resumed, and processes of theirs that hang: real ones."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence

import pytest
from safetensors.torch import load_file

import torrential as tt
from tests import test_faults
from tests.test_faults import Run, checkpoints, evaluated
from torrential.comm.protocol import SERVERS
from torrential.records import Evaluation, Summary
from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Member
from torrential.worlds.local.doubts import Doubts

pytestmark = pytest.mark.timeout(120)
start = test_faults.start
SAMPLES = 1350  # of digits


def kill_and_resume(start: Callable[..., Run], *args: object) -> Run:
    """The supervisor is killed, without a word to anybody, some time after the first checkpoint."""
    run = start(*args)
    run.until(lambda: list(run.out.glob("checkpoints/step-*")), "checkpoint")
    time.sleep(0.05)
    run.process.kill()
    run.process.wait()
    return start(resume=True)


def summary_of(run: Run) -> Summary:
    assert run.wait() == 0, run.said()
    evaluations = [(r.split, r.step) for r in run.records() if isinstance(r, Evaluation)]
    assert len(evaluations) == len(set(evaluations))
    (summary,) = (r for r in run.records() if isinstance(r, Summary))
    return summary


@pytest.mark.parametrize(
    "how",
    [("bsp", "--workers", 2, "--servers", 2), ("downpour", "--servers", 2, "--set", "transport=unix")],
    ids=lambda how: how[0],
)
def test_a_resumed_run_ends_in_the_same_bytes(start: Callable[..., Run], how: tuple[object, ...]) -> None:
    args = ("digits-mlp", "--epochs", 4, "--set", "threads=1", "--strategy", *how)
    undisturbed = start(*args, name="undisturbed")
    summary_of(undisturbed)
    run = kill_and_resume(start, *args)
    assert summary_of(run).samples == 4 * SAMPLES
    assert len(run.events("resumed")) == 1
    assert checkpoints(run) == checkpoints(undisturbed)


@pytest.mark.parametrize("strategy", ["ssp", "backup"])
def test_a_run_that_is_resumed_uses_every_sample_once(start: Callable[..., Run], strategy: str) -> None:
    run = kill_and_resume(
        start, "digits-mlp", "--epochs", 4, "--workers", 3, "--servers", 2, "--strategy", strategy, "--lr", 0.02
    )
    summary = summary_of(run)
    assert summary.samples == 4 * SAMPLES and summary.value is not None and summary.value >= 0.8
    newest = max(run.out.glob("checkpoints/step-*"))
    state = json.loads((newest / "state.json").read_text())
    assert state["dealer"]["used"] == {str(epoch): SAMPLES for epoch in range(4)}
    model = tt.load_task("digits-mlp").model()
    model.load_state_dict(load_file(newest / "model.safetensors"))
    names = {name.rpartition("/")[0] for name in load_file(newest / "optimizer.safetensors")}
    assert names == {name for name, _ in model.named_parameters()}


def test_the_only_server_is_lost_and_the_message_says_how_to_go_on(start: Callable[..., Run]) -> None:
    run = start("digits-mlp", "--strategy", "downpour", "--epochs", 100, "--workers", 2)
    run.until(lambda: evaluated(run) >= 1, "an evaluation")
    run.kill("tt-server-0")
    assert run.wait() == 1
    assert "server 0 held the only copy" in run.said()
    assert f"torrential train --resume {run.out}" in run.said()


# -- hung processes -------------------------------------------------------------------------------------------------
def test_the_one_that_is_hung_is_named_and_ended(start: Callable[..., Run]) -> None:
    """A server, for which all workers wait; then a worker, for which the servers do."""
    run = start("digits-mlp", "--strategy", "bsp", "--workers", 3, "--servers", 2, "--epochs", 20, "--set", "timeout=1")
    run.until_training(20)
    run.kill("tt-server-0", signal.SIGSTOP)
    run.until(lambda: run.events("server_lost"), "the server's end")
    run.kill("tt-worker-1", signal.SIGSTOP)
    assert summary_of(run).samples == 20 * SAMPLES
    assert [e.detail.partition(":")[0] for e in run.events("server_hung")] == ["server 0"]
    assert [e.worker for e in run.events("worker_hung")] == [1]
    assert [e.worker for e in run.events("worker_lost")] == [1] and len(run.events("server_lost")) == 1


class Role(Member):
    """One that only notes what it is told."""

    def __init__(self, role: str, rank: int) -> None:
        super().__init__(role, rank, 0, heard=0.0)
        self.told: list[object] = []
        self.ended = False

    def send(self, message: object, tensors: object = ()) -> None:
        self.told.append(message)

    def kill(self) -> None:
        self.ended = True


class Scene:
    """Three workers and two servers, and a clock; a role is hung after 10 seconds, and has 2 to answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("torrential.worlds.local.doubts.time.monotonic", lambda: self.now)
        self.workers = {rank: Role("worker", rank) for rank in range(3)}
        self.servers = {number: Role("server", number) for number in range(2)}
        self.events: list[tuple[str, int | None, str]] = []
        self.doubts = Doubts(10.0, self.workers, self.servers, lambda *event: self.events.append(event))

    def look(self, after: float, awaited: Sequence[Role] = ()) -> bool:
        self.now += after
        return self.doubts.look(list(self.workers.values()), list(awaited))

    def ended(self) -> list[str]:
        return [role.name for role in [*self.workers.values(), *self.servers.values()] if role.ended]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_server_that_does_not_answer_is_hung(scene: Scene) -> None:
    for server in (0, 1):
        scene.doubts.suspect(scene.workers[2], m.Suspect(SERVERS + server, 10.0))
    scene.doubts.pong(scene.servers[0], m.Pong([(SERVERS + 1, 30.0)]), [])
    assert not scene.look(1.9) and not scene.events
    assert not scene.look(0.2) and scene.ended() == ["server 1"]
    assert scene.events == [("server_hung", None, "server 1: worker 2 waited 10 s for it; ended")]


def test_a_worker_that_servers_wait_for_is_hung_if_it_does_not_answer(scene: Scene) -> None:
    scene.doubts.suspect(scene.workers[0], m.Suspect(SERVERS, 10.0))
    scene.doubts.pong(scene.servers[0], m.Pong([(1, 9.0), (2, 11.0)]), [])  # worker 1 has been heard of since
    assert scene.workers[1].told == [] and scene.workers[2].told == [m.Ping()]
    scene.look(2.1)
    assert scene.ended() == ["worker 2"]
    assert scene.events == [("worker_hung", 2, "server 0 waited 11 s for it; ended")]


def test_whoever_waits_itself_is_not_hung_nor_is_one_that_the_observer_keeps_waiting(scene: Scene) -> None:
    scene.workers[1].delayed = True
    scene.doubts.suspect(scene.workers[0], m.Suspect(SERVERS, 10.0))
    scene.doubts.pong(scene.servers[0], m.Pong([(1, 11.0), (2, 11.0)]), [])
    scene.doubts.pong(scene.workers[2], m.Pong(), [])
    scene.look(50.0)
    assert scene.ended() == [] and scene.events == []


def test_those_who_are_finished_wait_for_nobody_who_is_hung(scene: Scene) -> None:
    scene.workers[0].heard = 95.0
    assert not scene.look(0.0, [scene.workers[0], scene.workers[1]])
    assert not scene.look(2.1, [scene.workers[0], scene.workers[1]]) and scene.ended() == ["worker 1"]


def test_a_run_in_which_all_wait_and_nobody_is_hung_is_given_up(scene: Scene) -> None:
    for seconds in range(0, 16, 2):
        for worker in scene.workers.values():
            scene.doubts.suspect(worker, m.Suspect(SERVERS, 10.0 + seconds))
        scene.doubts.pong(scene.servers[0], m.Pong([(rank, 1.0) for rank in range(3)]), [])
        stuck = scene.look(2.0)
        assert stuck == (seconds + 2.0 > 14.0)
    assert scene.ended() == []
