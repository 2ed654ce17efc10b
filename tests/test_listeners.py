"""Listeners hear what is on record, in threads of their own; what they do to themselves is no harm to a run."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.errors import BadInput
from torrential.listeners import delivery
from torrential.listeners.base import RunHandle
from torrential.records import RECORDS, Evaluation, Event, Record, Step, Summary, read_records
from torrential.strategies import STRATEGIES

WORLDS: dict[str, dict[str, Any]] = {
    "local": {},
    "sim": {"world": "sim", "cluster": {"compute": {"seconds_per_sample": 1e-3}}},
}


def a_task(**different: Any) -> tt.Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(90, 6, generator=generator)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    given = {"model": lambda: nn.Linear(6, 2), "loss": F.cross_entropy, "train": data, "test": data, "validation": data}
    return tt.Task(**given | {"batch_size": 8, "epochs": 3, "name": "sums"} | different)


class Hears(tt.Listener):
    """Notes everything, and where it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.heard: list[Record] = []
        self.where: set[tuple[int, int]] = set()

    def begin(self, run: tt.RunHandle) -> None:
        self.run = run
        self._note("begin")

    def record(self, record: Record) -> None:
        self._note("record")
        self.heard.append(record)

    def end(self) -> None:
        self._note("end")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.where.add((os.getpid(), threading.get_ident()))


@pytest.mark.parametrize("world", WORLDS)
def test_a_listener_hears_every_record_in_its_own_thread(world: str, tmp_path: Path) -> None:
    first, second = Hears(), Hears()
    result = tt.train(
        a_task(), workers=2, out=tmp_path / "run", progress=False, listeners=[first, second], **WORLDS[world]
    )
    assert first.heard == second.heard == read_records(tmp_path / "run" / RECORDS) == result.history
    assert isinstance(first.heard[-1], Summary)
    assert first.calls == ["begin", *["record"] * len(first.heard), "end"]
    (at,), (at_too,) = first.where, second.where
    assert at[0] == os.getpid() and len({at[1], at_too[1], threading.get_ident()}) == 3
    assert first.run.directory == tmp_path / "run" and first.run.metric == "accuracy" and first.run.maximize
    assert first.run.config.epochs == 3 and list(first.run.history) == []


class Blocked(tt.Listener):
    """Does not get on with its first record before the run has written its last."""

    def begin(self, run: tt.RunHandle) -> None:
        self._path, self.before = run.directory / RECORDS, 0

    def record(self, record: Record) -> None:
        while not (self._path.exists() and b'"summary"' in self._path.read_bytes()):
            time.sleep(0.02)
            self.before += 1


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_does_not_wait_for_its_listeners(world: str, tmp_path: Path) -> None:
    blocked, hears = Blocked(), Hears()
    result = tt.train(a_task(), out=tmp_path / "run", progress=False, listeners=[blocked, hears], **WORLDS[world])
    assert hears.heard == result.history and blocked.before > 0


class Fails(tt.Listener):
    def __init__(self, at: str, error: BaseException) -> None:
        self._at, self._error, self.calls = at, error, 0

    def begin(self, run: tt.RunHandle) -> None:
        self._call("begin")

    def record(self, record: Record) -> None:
        self._call("record")

    def end(self) -> None:
        self._call("end")

    def _call(self, method: str) -> None:
        self.calls += 1
        if method == self._at:
            raise self._error


@pytest.mark.parametrize("at", ["begin", "record", "end"])
def test_a_listener_that_raises_is_left_out(at: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails, exits, hears = Fails(at, ValueError("oh\nno")), Fails(at, SystemExit(3)), Hears()
    result = tt.train(a_task(), out=tmp_path, progress=False, listeners=[fails, exits, hears], **WORLDS["sim"])
    assert hears.heard == result.history and result.summary.steps == 36
    lines = sorted(line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert lines[1].startswith(f"warning: {at} of the listener Fails raised ValueError: oh no ({__file__}:")
    assert lines[1].endswith("); it hears nothing any more, and the run goes on") and "SystemExit: 3" in lines[0]
    assert len(lines) == 2
    assert fails.calls == {"begin": 1, "record": 2, "end": 2 + len(result.history)}[at]


# -- a listener that cannot keep up -----------------------------------------------------------------------------------
def a_step(number: int) -> Step:
    place = {"worker": 0, "step": number, "epoch": 0, "samples": 8 * number, "time": float(number)}
    return Step(loss=1.0, compute=1.0, communicate=0.0, wait=0.0, bytes_sent=0, **place)


def an_evaluation(number: int, value: float = 0.5, split: str = "validation") -> Evaluation:
    place = {"step": number, "epoch": number, "samples": 8 * number, "time": float(number)}
    return Evaluation(split=split, value=value, loss=1.0, **place)


class Waits(Hears):
    """Takes the first record, and nothing more before `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.has_one = threading.Event(), threading.Event()

    def record(self, record: Record) -> None:
        self.has_one.set()
        assert self.go.wait(30)
        super().record(record)


@pytest.fixture
def deliver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Waits], tuple[delivery.Deliveries, list[str]]]:
    """What delivers to a listener that has taken its first record; and what is said of it."""
    monkeypatch.setattr(delivery, "WAITING", 4)

    def made(listener: Waits) -> tuple[delivery.Deliveries, list[str]]:
        said: list[str] = []
        found = delivery.Deliveries([listener], RunHandle(tmp_path, None, "accuracy", True, []), said.append)  # type: ignore[arg-type]
        found.record(a_step(0))
        assert listener.has_one.wait(30)
        return found, said

    return made


def test_few_records_wait_for_a_slow_listener(deliver: Callable[..., Any]) -> None:
    listener = Waits()
    deliveries, said = deliver(listener)
    for number in range(1, 11):
        deliveries.record(a_step(number))  # four wait, six are left out
    for number in range(10):
        deliveries.record(an_evaluation(number))  # four more wait
    listener.go.set()
    deliveries.close(failed=False)
    assert listener.heard == [a_step(n) for n in range(5)] + [an_evaluation(n) for n in range(4)]
    assert said == ["warning: the listener Waits could not keep up; 12 records were not given to it"]


@pytest.mark.parametrize(("failed", "limit"), [(False, "END_SECONDS"), (True, "FAILED_SECONDS")])
def test_at_the_end_a_listener_has_so_much_time(
    failed: bool, limit: str, deliver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, limit, 0.1)
    listener = Waits()
    deliveries, said = deliver(listener)
    deliveries.record(a_step(1))
    deliveries.record(a_step(2))
    deliveries.close(failed=failed)
    assert len(said) == 1 and said[0].startswith("warning: the listener Waits was not done 0 s after the end of the")
    assert said[0].endswith("run; 2 records were not given to it")
    (thread,) = (t for t in threading.enumerate() if t.name == "listener Waits")
    listener.go.set()
    thread.join(30)
    assert listener.heard == [a_step(0)] and listener.calls[-1] == "end"


# -- stopping ---------------------------------------------------------------------------------------------------------
MANY = 5000  # epochs, which take longer than a thread needs to wake up


class Stops(tt.Listener):
    def __init__(self, after: int) -> None:
        self._after = after

    def begin(self, run: tt.RunHandle) -> None:
        self._run = run

    def record(self, record: Record) -> None:
        if isinstance(record, Evaluation) and record.epoch >= self._after:
            self._run.stop("that will do")
            self._run.stop("and for another reason")


class Slow(TensorDataset):
    """Takes a while, so that a run lasts longer than a thread needs to wake up."""

    def augment(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return inputs


def slow_task(epochs: int) -> tt.Task:
    task = a_task()
    assert isinstance(task.train, TensorDataset)
    return dataclasses.replace(task, train=Slow(*task.train.tensors), epochs=epochs)


SIMULATED = [(n, "sim") for n, k in STRATEGIES.items() if "sim" in k.worlds and k().has_whole_model()]


@pytest.mark.timeout(120)  # a busy machine lets a thread wait for its turn
@pytest.mark.parametrize(("strategy", "world"), [*SIMULATED, ("allreduce", "local"), ("downpour", "local")])
def test_a_listener_stops_a_run_which_can_go_on(strategy: str, world: str, tmp_path: Path) -> None:
    given = {"workers": 2, "progress": False, **WORLDS[world]}
    stopped = tt.train(slow_task(MANY), strategy, out=tmp_path / "run", listeners=[Stops(1)], **given)
    (event,) = (r for r in stopped.history if isinstance(r, Event) and r.event == "stopped")
    assert event.detail == "that will do"
    assert isinstance(stopped.history[-1], Summary) and stopped.summary.samples < MANY * 90
    last = [r for r in stopped.history if isinstance(r, Evaluation)][-2:]
    assert [r.split for r in last] == ["validation", "test"] and last[0].step == last[1].step == stopped.summary.steps
    done = stopped.summary.samples // 90
    onward = tt.train(slow_task(MANY), resume=tmp_path / "run", epochs=done + 1, progress=False)
    assert onward.summary.samples == (done + 1) * 90
    assert [r for r in onward.history if r in stopped.history] == [
        r for r in stopped.history if not isinstance(r, Summary) and (r.step is None or r.step <= stopped.summary.steps)
    ]


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [object()],
            r"a listener has a method record\(record\) \(given: <object .*; derive its class from tt.Listener",
        ),
        ([Hears], r"a listener is an object, not a class \(given: Hears\); write Hears\(\)"),
        (Hears(), r"listeners is a list of objects \(given: .*; write listeners=\[\.\.\.\]"),
    ],
)
def test_what_is_no_listener(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        tt.train(a_task(), out=tmp_path / "run", listeners=given)
    assert not (tmp_path / "run").exists()


def test_any_object_with_a_method_record_will_do(tmp_path: Path) -> None:
    class Counts:
        count = 0

        def record(self, record: Record) -> None:
            self.count += 1

    counts = Counts()
    result = tt.train(a_task(), out=tmp_path, progress=False, listeners=[counts], **WORLDS["sim"])
    assert counts.count == len(result.history)
