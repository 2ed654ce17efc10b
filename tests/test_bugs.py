"""Regressions, each with the story of how it was found."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from command import CONTEXT
from torch import nn
from torch.utils.data import TensorDataset

import torrential as tt
from torrential import opening
from torrential.comm import wire
from torrential.errors import BadInput
from torrential.records import Event, read_records
from torrential.resolve import RunRequest
from torrential.worlds.local import messages
from torrential.worlds.local.link import ORPHANED, SupervisorLink

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch.nn.functional as F
from torch import nn
import torrential as tt
from torrential.tasks.digits import digits
data = digits()
task = tt.Task(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), loss=F.cross_entropy,
               train=data.train, validation=data.validation, test=data.test, epochs=3)
tt.train(task, out={out!r})
"""


def data(samples: int = 96) -> TensorDataset:
    inputs = torch.arange(samples) % 16
    return TensorDataset(inputs, inputs % 4)


def lookup(sparse: bool = False) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(16, 8, sparse=sparse), nn.Linear(8, 4))


def test_progress_is_shown_on_a_terminal_from_a_script(tmp_path: Path) -> None:
    """A newcomer ran the README's program in a terminal and saw nothing until the end: the live area that tt.train
    made was never started, and plain lines are not printed where there is one."""
    script = tmp_path / "ten_lines.py"
    script.write_text(SCRIPT.format(out=str(tmp_path / "run")))
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, script], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as done:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other side has closed
                break
            shown += piece
        os.close(ours)
    assert done.returncode == 0
    assert b"worker 0" in shown and b"/ 129" in shown


def test_a_tasks_own_target_counts(tmp_path: Path) -> None:
    """Two readers found that Task(target=...) was resolved and then dropped: such runs trained to the end."""
    task = tt.Task(
        model=lookup(), loss=F.cross_entropy, train=data(), validation=data(), test=data(), epochs=300, target=0.9
    )
    summary = tt.train(task, out=tmp_path / "run", progress=False).summary
    assert summary.target == 0.9 and summary.reached
    assert summary.steps < 300 * 3


@pytest.mark.parametrize("workers", [1, 2])
def test_sparse_gradients_over_sockets(workers: int, tmp_path: Path) -> None:
    """Found by attack: alone, a worker with a copy of its own gave autograd's sparse gradient to a fused optimizer."""
    task = tt.Task(model=lookup(sparse=True), loss=F.cross_entropy, train=data(), test=data(), epochs=2)
    result = tt.train(task, workers=workers, transport="tcp", out=tmp_path / "run", progress=False)
    assert result.summary.samples == 2 * 87  # a tenth is kept for validation


def test_a_slow_evaluation_is_no_hung_worker(tmp_path: Path) -> None:
    """Found by attack: the worker that waited for a free snapshot slot was taken for hung by the others, and killed."""

    def slow(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(0.7)
        return tt.accuracy(outputs, targets)

    task = tt.Task(model=lookup(), loss=F.cross_entropy, train=data(), test=data(), epochs=5, metric=slow)
    result = tt.train(task, workers=2, timeout=0.3, out=tmp_path / "run", progress=False)
    assert [r for r in result.history if isinstance(r, Event)] == []


def test_a_run_under_way_cannot_be_resumed(tmp_path: Path) -> None:
    """Found by attack: a second process resumed a running run, and both wrote over each other."""
    task = tt.Task(model=lookup(), loss=F.cross_entropy, train=data(), test=data(), epochs=1)
    job = opening.open_run(RunRequest(task=task, options={}), tmp_path / "run")
    with pytest.raises(BadInput, match="still going on"):
        opening.resume_run(job.directory, task)
    opening.unlock(job.directory)
    changed = tt.Task(model=lookup(), loss=F.cross_entropy, train=data(200), test=data(), epochs=1)
    with pytest.raises(BadInput, match="training samples: 87 then, 180 now"):
        opening.resume_run(job.directory, changed)


def test_a_model_that_freezes_itself(tmp_path: Path) -> None:
    """Found by attack: a parameter that stopped asking for gradients during training was sent as if it had never been
    trained, and the observer fell over it."""

    class Freezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head, self.calls = nn.Embedding(16, 8), nn.Linear(8, 4), 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.training and self.calls == 5:
                self.table.weight.requires_grad_(False)
            return self.head(self.table(inputs))

    task = tt.Task(model=Freezing, loss=F.cross_entropy, train=data(), test=data(), epochs=3)
    result = tt.train(task, workers=2, out=tmp_path / "run", progress=False)
    assert len(read_records(result.out / "records.jsonl")) == len(result.history)


RACE = """
import sys, threading
sys.setswitchinterval(1e-6)
from torrential.comm import wire
from torrential.worlds.local import messages
together = threading.Barrier(8)
def make():
    together.wait()
    wire.decoder(messages.Any)
threads = [threading.Thread(target=make) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
"""


def test_decoders_may_be_made_by_several_threads_at_once() -> None:
    """A supervisor once ended with SIGSEGV in the suite: workers that connected at the same moment made their decoders
    in two threads, and msgspec, looking up the same types twice, read a null pointer. This crashed 4 times in 12."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", RACE], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=40)
        assert done.returncode == 0


def send_to_nobody(err: str) -> None:
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), 2)
    link = object.__new__(SupervisorLink)  # without the thread that reads, which would notice as well, sooner or later
    ours, theirs = socket.socketpair()
    link._connection, link._sending = wire.Connection(ours, messages.Any), threading.Lock()
    link.send(messages.Alive())
    theirs.close()
    link.send(messages.Alive())


def test_a_role_that_has_lost_its_supervisor_ends_without_a_word(tmp_path: Path) -> None:
    """Found by random kills: when the supervisor was killed, a worker that was sending just then printed a traceback
    after the command's last line."""
    process = CONTEXT.Process(target=send_to_nobody, args=(str(tmp_path / "err"),))
    process.start()
    process.join(60)
    assert (process.exitcode, (tmp_path / "err").read_text()) == (ORPHANED, "")
