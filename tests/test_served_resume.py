"""Runs with servers that are killed and resumed, and processes of theirs that hang: real ones."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable

import pytest
from safetensors.torch import load_file

import torrential as tt
from tests import test_faults
from tests.test_faults import Run, checkpoints
from torrential.records import Evaluation, Summary

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
    run.until(lambda: list(run.out.glob("checkpoints/step-*")), "a checkpoint")
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
