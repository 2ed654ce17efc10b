"""Real processes, really killed: a run goes on, or can be resumed, whatever is taken from it and whenever."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from command import Command

from torrential import run as running
from torrential.comm.protocol import address_of
from torrential.errors import RunFailed
from torrential.membership import liveness
from torrential.membership.roles import Who
from torrential.records import Evaluation, Event, Record, Step, Summary, read_records
from torrential.worlds.local import warm
from torrential.worlds.local.crew import Process
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.supervisor import _Supervision

pytestmark = pytest.mark.timeout(120)

SAMPLES, TESTED = 1350, 297  # of digits, for training and for the last word


class Run:
    """`torrential train ...` as a process, and what can be seen of it from outside."""

    def __init__(self, out: Path, *args: str) -> None:
        self.out = out
        log = out.with_suffix(".log")
        self.process = Command(["train", *args], log, log, {"COLUMNS": "200"})

    def roles(self) -> dict[str, psutil.Process]:
        """By the name that each process has given itself: tt-worker-0, tt-observer, ..."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(OSError, psutil.NoSuchProcess):
                    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
                    if name.startswith("tt-") and process.status() != psutil.STATUS_ZOMBIE:
                        found[name] = process
        return found

    def records(self) -> list[Record]:
        path = self.out / "records.jsonl"
        return read_records(path) if path.exists() else []

    def steps(self) -> int:
        return max((r.step for r in self.records() if isinstance(r, Step)), default=0)

    def events(self, name: str) -> list[Event]:
        return [r for r in self.records() if isinstance(r, Event) and r.event == name]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.said()}"
            time.sleep(0.01)

    def until_training(self, step: int = 1) -> None:
        self.until(lambda: self.steps() >= step, f"step {step}")

    def kill(self, role: str, sig: int = signal.SIGKILL) -> None:
        self.roles()[role].send_signal(sig)

    def wait(self, seconds: float = 30) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.said()}", pytrace=False)

    def said(self) -> str:
        return self.out.with_suffix(".log").read_text()

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in [*root.children(recursive=True), root]:
                process.kill()
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*args: object, name: str = "run", resume: bool = False) -> Run:
        out = tmp_path / name
        where = ["--resume", str(out)] if resume else ["--out", str(out)]
        runs.append(Run(out, *map(str, args), *where))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def check_complete(run: Run, epochs: int, value: float = 0.9) -> Summary:
    """It ended well: every sample of every epoch was used once, and every epoch was evaluated once."""
    assert run.wait() == 0, run.said()
    records = run.records()
    check_no_duplicates(records)
    evaluations = [r for r in records if isinstance(r, Evaluation)]
    assert [e.samples for e in evaluations] == [*(SAMPLES * (i + 1) for i in range(epochs)), SAMPLES * epochs]
    assert [e.split for e in evaluations] == ["validation"] * epochs + ["test"]
    summary = records[-1]
    assert isinstance(summary, Summary)
    assert summary.samples == epochs * SAMPLES
    assert summary.value is not None and summary.value >= value
    return summary


def check_no_duplicates(records: list[Record]) -> None:
    seen = collections.Counter[tuple[object, ...]]()
    for record in records:
        if isinstance(record, Step):
            seen["step", record.worker, record.step] += 1
        elif isinstance(record, Evaluation):
            seen["evaluation", record.split, record.step] += 1
        elif isinstance(record, Summary):
            seen["summary"] += 1
    assert not [key for key, count in seen.items() if count > 1]


def checkpoints(run: Run) -> dict[str, bytes]:
    root = run.out / "checkpoints"
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


# -- a worker dies ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "task", "workers", "options"),
    [
        (0, "digits-mlp", 2, ["transport=shared"]),
        (1, "digits", 3, ["transport=tcp"]),
        (2, "digits-mlp", 2, ["algorithm=native"]),
    ],
)
def test_a_killed_worker_costs_nothing_but_its_hands(
    start: Callable[..., Run], case: int, task: str, workers: int, options: list[str]
) -> None:
    moment = random.Random(case)
    epochs = 20 if task == "digits-mlp" else 10
    sets = [word for option in options for word in ("--set", option)]
    run = start(task, "--workers", workers, "--epochs", epochs, *sets)
    run.until_training(moment.randrange(1, 40))
    time.sleep(moment.random() * 0.1)
    victim = moment.randrange(workers)
    run.kill(f"tt-worker-{victim}")
    check_complete(run, epochs)
    assert [e.worker for e in run.events("worker_lost")] == [victim]
    others = ", ".join(str(r) for r in range(workers) if r != victim)
    assert [e.detail for e in run.events("regrouped")] == [f"workers {others}"]


@pytest.mark.parametrize("algorithm", ["hierarchical"])  # messages and memory
def test_a_death_is_survived_with_any_kind_of_algorithm(start: Callable[..., Run], algorithm: str) -> None:
    sets = ["--set", f"algorithm={algorithm}"]
    if algorithm == "hierarchical":
        sets += ["--set", "hosts=2"]
    run = start("digits-mlp", "--workers", 3, "--epochs", 10, *sets)
    run.until_training(10)
    run.kill("tt-worker-0")  # the root of the naive one, the first of its host
    check_complete(run, 10)
    assert [e.worker for e in run.events("worker_lost")] == [0]
    assert run.events("regrouped")[-1].detail == "workers 1, 2"


@pytest.mark.parametrize("algorithm", ["ring"])
def test_a_hung_worker_is_found_where_all_wait_for_one_another(start: Callable[..., Run], algorithm: str) -> None:
    run = start("digits-mlp", "--workers", 3, "--epochs", 10, "--set", "timeout=1", "--set", f"algorithm={algorithm}")
    run.until_training(5)
    run.kill("tt-worker-1", signal.SIGSTOP)
    check_complete(run, 10)
    assert {e.worker for e in run.events("worker_hung")} == {1}  # two may have named it
    assert [e.worker for e in run.events("worker_lost")] == [1]


def test_workers_may_die_until_one_is_left(start: Callable[..., Run]) -> None:
    run = start("digits", "--workers", 3, "--epochs", 4)
    run.until_training(2)
    run.kill("tt-worker-0")
    run.until(lambda: run.events("regrouped"), "regrouping")
    run.kill("tt-worker-2")
    check_complete(run, 4)
    assert [e.worker for e in run.events("worker_lost")] == [0, 2]
    assert run.events("regrouped")[-1].detail == "workers 1"


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_replacement_joins_at_a_step_boundary(start: Callable[..., Run], transport: str) -> None:
    run = start(
        "digits-mlp", "--workers", 2, "--epochs", 40, "--set", f"transport={transport}", "--set", "restart=true"
    )
    run.until_training(20)
    run.kill("tt-worker-0")
    check_complete(run, 40)
    assert [e.worker for e in run.events("worker_lost")] == [0]
    assert [e.worker for e in run.events("worker_joined")] == [0]
    assert run.events("regrouped")[-1].detail == "workers 0, 1"
    joined = run.events("worker_joined")[0].step
    assert joined is not None
    late = {r.worker for r in run.records() if isinstance(r, Step) and r.step > joined + 1}
    assert late == {0, 1}


def test_a_hung_worker_is_named_and_ended(start: Callable[..., Run]) -> None:
    run = start("digits-mlp", "--workers", 2, "--epochs", 10, "--set", "timeout=1")
    run.until_training(5)
    run.kill("tt-worker-1", signal.SIGSTOP)
    check_complete(run, 10)
    assert [e.worker for e in run.events("worker_hung")] == [1]
    assert "worker 0 waited" in run.events("worker_hung")[0].detail
    assert [e.worker for e in run.events("worker_lost")] == [1]


SELF_KILLER = '''
import os, signal, time
from pathlib import Path
import torch
from torch import nn
import torch.nn.functional as F
import torrential as tt

digits = tt.load_task("digits-mlp")
HERE = Path(__file__).parent


class Fragile(nn.Module):
    """Worker 0 dies while it takes the snapshot of a given epoch: the others have left that step behind them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, images):
        if self.training:
            self.seen += len(images)
        return self.layer(images.flatten(1))

    def named_buffers(self, *args, **kwargs):
        about = self.training and int(self.seen) >= {samples}
        if about and Path("/proc/self/comm").read_text().strip() == "tt-worker-0":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().named_buffers(*args, **kwargs)


task = tt.Task(
    name="fragile", model=Fragile, loss=F.cross_entropy, train=digits.train, validation=digits.validation,
    test=digits.test, optimizer=tt.optimizer("sgd", lr=0.05, momentum=0.9), batch_size=32, epochs=3,
)
'''


def test_an_evaluation_is_not_lost_with_the_worker_that_was_to_hand_it_over(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """The first member gives the snapshot; whoever is first after its death must give it again. Here it is the last."""
    file = tmp_path / "fragile.py"
    file.write_text(SELF_KILLER.replace("{samples}", str(SAMPLES * 3 // 2)))
    run = start(file, "--workers", 2)
    check_complete(run, 3, value=0.8)
    assert [e.worker for e in run.events("worker_lost")] == [0]


# -- somebody else dies -------------------------------------------------------------------------------------------
def test_the_observer_may_die(start: Callable[..., Run]) -> None:
    run = start("digits-mlp", "--workers", 2, "--epochs", 30)
    run.until_training(5)
    run.kill("tt-observer")
    check_complete(run, 30)
    assert len(run.events("observer_lost")) == 1 and not run.events("worker_lost")


def test_an_observer_that_is_stopped_is_named_ended_and_replaced(start: Callable[..., Run]) -> None:
    run = start("digits-mlp", "--workers", 2, "--epochs", 10, "--set", "timeout=1")
    run.until_training(5)
    run.kill("tt-observer", signal.SIGSTOP)
    check_complete(run, 10)
    (hung,) = run.events("observer_hung")
    assert hung.detail.startswith("did not answer for ")
    assert len(run.events("observer_lost")) == 1 and not run.events("worker_lost")


def test_a_worker_that_is_stopped_and_that_nobody_waits_for_is_found(start: Callable[..., Run]) -> None:
    run = start("digits-mlp", "--epochs", 1000, "--set", "timeout=1")
    run.until_training(5)
    run.kill("tt-worker-0", signal.SIGSTOP)
    assert run.wait() == 1
    (hung,) = run.events("worker_hung")
    assert hung.worker == 0 and hung.detail.startswith("did not answer for ")
    assert "error: all workers are gone (worker 0 was ended by SIGKILL); " in run.said()


def test_a_command_that_was_stopped_takes_nobody_for_hung(start: Callable[..., Run]) -> None:
    """As with Ctrl-Z and fg: workers run on until one of them waits for the supervisor, and others for that one."""
    run = start("digits-mlp", "--workers", 2, "--epochs", 60, "--set", "timeout=1", "--set", "evaluate_every=20")
    run.until_training(5)
    supervisor = psutil.Process(run.process.pid).children()[0]
    supervisor.suspend()
    time.sleep(3.0)
    supervisor.resume()
    assert run.wait(60) == 0, run.said()
    assert run.events("worker_hung") == [] and run.events("worker_lost") == []


def test_a_nursery_that_is_stopped_at_the_start_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = running.Launch

    def stopped() -> Launch:
        launched = launch()
        os.kill(launched._pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        return launched

    monkeypatch.setattr(running, "Launch", stopped)
    monkeypatch.setattr(liveness, "HELLO_SECONDS", 0.5)
    monkeypatch.setattr(warm, "END_SECONDS", 0.1)
    with pytest.raises(RunFailed, match=r"the process that starts workers did not answer for \d+ s, when asked for "):
        running.train("digits-mlp", workers=2, timeout=0.5, out=tmp_path / "run", progress=False)


def test_the_observer_may_die_after_a_worker_has(start: Callable[..., Run]) -> None:
    """Its successor must know that nothing more will come from that worker."""
    run = start("digits", "--workers", 2, "--epochs", 8)
    run.until_training(5)
    run.kill("tt-worker-1")
    run.until(lambda: run.events("regrouped"), "regrouping")
    run.kill("tt-observer")
    check_complete(run, 8)


def test_the_observer_may_die_before_its_last_word(start: Callable[..., Run], tmp_path: Path) -> None:
    """Between the last checkpoint and the test set's evaluation."""
    file = tmp_path / "task.py"
    file.write_text(
        "import os, signal, torrential as tt\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "digits = tt.load_task('digits-mlp')\n"
        "once = Path(__file__).with_name('once')\n"
        "def metric(outputs, targets):\n"
        f"    if len(targets) == {TESTED} and not once.exists():\n"
        "        once.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return tt.accuracy(outputs, targets)\n"
        "task = replace(digits, metric=metric)\n"
    )
    run = start(file, "--workers", 2, "--epochs", 10)
    check_complete(run, 10)
    assert len(run.events("observer_lost")) == 1


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_everything_and_says_how_to_go_on(start: Callable[..., Run], sig: int, code: int) -> None:
    run = start("digits-mlp", "--workers", 2, "--epochs", 1000)
    run.until_training(30)
    run.process.send_signal(sig)
    assert run.wait(5) == code, run.said()
    assert f"torrential train --resume {run.out}" in run.said()
    assert "Traceback" not in run.said()


@pytest.mark.parametrize("stopped", [None, "nursery", "tt-worker-1"])
def test_nothing_outlives_a_killed_command(start: Callable[..., Run], stopped: str | None) -> None:
    """Not even what was stopped, and so cannot end by itself."""
    run = start("digits-mlp", "--workers", 2, "--epochs", 1000)
    run.until_training(10)
    (supervisor,) = psutil.Process(run.process.pid).children()
    (nursery,) = supervisor.children()
    family = [supervisor, *supervisor.children(recursive=True)]
    assert len(family) == 5  # supervisor, nursery, two workers, observer
    if stopped is not None:
        (nursery if stopped == "nursery" else run.roles()[stopped]).suspend()
    run.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


@pytest.mark.parametrize("helper", ["launch.Launch", "warm.Warm"])
def test_a_helper_that_is_stopped_while_it_loads_torch_ends_with_its_parent(helper: str) -> None:
    module, name = helper.split(".")
    program = f"import sys; from torrential.worlds.local.{module} import {name}; helper = {name}(); sys.stdin.read()"
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 40
        while not (children := psutil.Process(parent.pid).children()) or "torch" not in mapped(children[0]):
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.01)
        children[0].suspend()
    finally:
        parent.kill()
        parent.communicate()
    assert not psutil.wait_procs(children, timeout=10)[1]


def mapped(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/maps").read_text()
    return ""


def test_a_command_whose_work_was_killed_says_so(start: Callable[..., Run]) -> None:
    run = start("digits-mlp", "--workers", 2, "--epochs", 1000)
    run.until_training(10)
    psutil.Process(run.process.pid).children()[0].kill()
    assert run.wait() == 128 + signal.SIGKILL
    assert "error: the command was ended by SIGKILL; what a run had recorded is in its directory" in run.said()


# -- everything dies ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("task", "epochs"), [("digits", 5)])
def test_a_run_killed_again_and_again_ends_in_the_same_bytes(start: Callable[..., Run], task: str, epochs: int) -> None:
    """Killed twice, and the second time the newest checkpoint is damaged, too: the one before it must do."""
    undisturbed = start(task, "--workers", 2, "--epochs", epochs, name="undisturbed")
    check_complete(undisturbed, epochs)
    moment = random.Random(task)
    run = start(task, "--workers", 2, "--epochs", epochs)
    run.until_training(25 + moment.randrange(10))
    time.sleep(moment.random() * 0.1)
    run.end()
    run = start(resume=True)
    run.until(lambda: evaluated(run) >= 3, "the third epoch's end")
    run.end()
    older, newer = sorted(run.out.glob("checkpoints/step-*"))[-2:]
    model = newer / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    run = start(resume=True)
    check_complete(run, epochs)
    assert "skipped a damaged checkpoint" in run.said()
    assert run.events("resumed")[-1].step == int(older.name.removeprefix("step-"))
    assert checkpoints(run) == checkpoints(undisturbed)


def evaluated(run: Run) -> int:
    return sum(isinstance(r, Evaluation) for r in run.records())


def test_a_role_that_dies_before_its_first_word_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an attacker: the replacement joined the processes that were being gone through."""
    who = [Who(address_of("server", 0), life) for life in (0, 1)]
    host: Any = SimpleNamespace(number=0)
    supervision = object.__new__(_Supervision)
    supervision._statuses, supervision._closed = {}, {}
    supervision._crew = SimpleNamespace(processes={who[0]: Process(who[0], host)})  # type: ignore[assignment]

    def replace(self: _Supervision, process: Process, how: Any) -> None:
        assert (process.who, how) == (who[0], "was ended by SIGKILL")
        self._crew.processes[who[1]] = Process(who[1], host)

    monkeypatch.setattr(_Supervision, "_lost", replace)
    supervision._ended(who[0], -signal.SIGKILL)
    assert list(supervision._crew.processes) == who
