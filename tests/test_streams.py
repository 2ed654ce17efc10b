"""Whoever reads what a command prints may leave: the run goes on to its end, and its records are complete."""

from __future__ import annotations

import errno
import io
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command import CLOSED_PIPE, CONTEXT, Command, forked_nursery
from made_up import config, write_run

from torrential import run, streams
from torrential.records import Evaluation, Summary, read_records
from torrential.terminal import standard_error
from torrential.testing.command import main

pytestmark = pytest.mark.timeout(120)

EPOCHS = 5
CHATTY = f"""
import torch, torrential as tt
from dataclasses import replace
from torch import nn

digits = tt.load_task("digits-mlp")

class Chatty(nn.Sequential):
    def forward(self, images):
        print("a model that tells of every batch " * 50, flush=True)
        return super().forward(images)

task = replace(digits, epochs={EPOCHS}, model=lambda: Chatty(nn.Flatten(), nn.Linear(64, 10)))
"""


def check_complete(out: Path) -> None:
    kept = read_records(out / "records.jsonl")
    assert [r.split for r in kept if isinstance(r, Evaluation)] == ["validation"] * EPOCHS + ["test"]
    assert isinstance(kept[-1], Summary)


class Reader:
    """The reading end of something, which leaves after a few bytes."""

    def __init__(self, reading: int, few: int) -> None:
        self.read = b""
        self._thread = threading.Thread(target=self._follow, args=(reading, few))
        self._thread.start()

    def _follow(self, reading: int, few: int) -> None:
        while len(self.read) < few:
            self.read += os.read(reading, few - len(self.read))
        os.close(reading)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("world", ["local", "sim"])
def test_a_pipe_whose_reader_leaves(world: str, tmp_path: Path) -> None:
    """Standard output and error both, as in `2>&1 | head`; workers print there, too."""
    (tmp_path / "task.py").write_text(CHATTY)
    reading, writing = os.pipe()
    pipe, out = Path(f"/proc/{os.getpid()}/fd/{writing}"), tmp_path / "run"
    process = Command(
        ["train", str(tmp_path / "task.py"), "--workers", "2", "--world", world, "--out", str(out)], pipe, pipe
    )
    reader = Reader(reading, 4000)
    reader.join()
    os.close(writing)
    assert process.wait(60) == (0 if world == "local" else 128 + signal.SIGPIPE)  # a simulation prints by itself
    check_complete(out)
    assert b"run directory: " in reader.read


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """Its own, so that the kernel hangs up, too."""
    terminal, other = pty.openpty()
    out = tmp_path / "run"
    words = ["train", "digits-mlp", "--workers", "2", "--epochs", str(EPOCHS), "--out", str(out)]
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "torrential", *words],
        stdin=other,
        stdout=other,
        stderr=other,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(other)
    reader = Reader(terminal, 600)
    reader.join()
    assert process.wait(60) == 0
    check_complete(out)
    assert b"worker 1" in reader.read


def test_a_full_disk_behind_standard_output(tmp_path: Path) -> None:
    out, err = tmp_path / "run", tmp_path / "err"
    process = Command(
        ["train", "digits-mlp", "--epochs", str(EPOCHS), "--set", "threads=1", "--json", "--out", str(out)],
        Path("/dev/full"),
        err,
    )
    assert process.wait(60) == 1
    check_complete(out)
    assert err.read_text().splitlines()[-1] == (
        "error: standard output: No space left on device; write it elsewhere (the records of a run are complete "
        "all the same)"
    )


@pytest.mark.parametrize("words", ["tasks", "strategies", "strategies ssp", "train --help", "report RUN"])
def test_commands_that_print_end_as_others_do_when_nobody_reads(words: str, tmp_path: Path) -> None:
    write_run(tmp_path / "RUN", config(), 1.0)
    err = tmp_path / "err"
    process = Command(words.replace("RUN", str(tmp_path / "RUN")).split(), CLOSED_PIPE, err)
    assert process.wait(60) == 128 + signal.SIGPIPE
    said = err.read_text()
    assert "Traceback" not in said and "error" not in said
    assert words == "report RUN" or said == ""


def sweep(err: str) -> None:
    for number, path in ((1, "/dev/full"), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["python -m torrential.testing", "--seed", "3"]
    main()


@pytest.mark.parametrize("words", ["--show-completion bash", "--help", "python -m torrential.testing"])
def test_what_is_lost_to_a_full_disk_is_said_by_whatever_prints(words: str, tmp_path: Path) -> None:
    err = tmp_path / "err"
    if words.startswith("python"):
        process = CONTEXT.Process(target=sweep, args=(str(err),))
        process.start()
        process.join(60)
        code = process.exitcode
    else:
        code = Command(words.split(), Path("/dev/full"), err).wait(60)
    said = err.read_text().splitlines()
    assert (code, len(said)) == (1, 1), said
    assert said[0].startswith("error: standard output: No space left on device; write it elsewhere")


def test_a_study_goes_on_when_nobody_reads(tmp_path: Path) -> None:
    out = tmp_path / "study"
    words = ["compare", "digits-mlp", "--strategies", "allreduce", "--cluster", "laptop", "--workers", "8"]
    words += ["--trials", "2", "--steps", "4", "--target", "0.9", "--out", str(out), "--json"]
    assert Command(words, CLOSED_PIPE, CLOSED_PIPE).wait(60) == 128 + signal.SIGPIPE
    assert len(list(out.glob("runs/*/records.jsonl"))) == 2 and (out / "report.html").exists()


def train_without_stderr(out: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 2)
    sys.stderr = sys.__stderr__
    run.Launch = forked_nursery  # type: ignore[assignment, misc]
    assert run.train("digits-mlp", epochs=EPOCHS, threads=1, out=out).summary.samples == EPOCHS * 1350


def test_a_program_that_trains_goes_on_too(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=train_without_stderr, args=(str(tmp_path / "run"),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    check_complete(tmp_path / "run")


# -- a stream by itself -----------------------------------------------------------------------------------------------
def test_a_lost_stream_is_silent_and_knows_why() -> None:
    reading, writing = os.pipe()
    stream = streams.kept(writing, sys.__stdout__)
    stream.write("heard\n")
    assert streams.why_lost(stream) is None and os.read(reading, 100) == b"heard\n"
    os.close(reading)
    for _ in range(3):
        stream.write("not heard\n")
        lost = streams.why_lost(stream)
        assert lost is not None and lost.errno == errno.EPIPE
    os.close(writing)


def test_a_stream_that_does_not_block_loses_nothing() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    stream = streams.kept(writing, sys.__stdout__)
    writer = threading.Thread(target=lambda: stream.write("x" * 1_000_000) and stream.flush())
    writer.start()
    read = 0
    while read < 1_000_000:
        read += len(os.read(reading, 65536))
    writer.join(10)
    assert streams.why_lost(stream) is None
    os.close(reading)
    os.close(writing)


def test_a_stream_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's, for example."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert standard_error().file is sys.stderr and streams.why_lost(sys.stderr) is None


def no_streams(path: str) -> None:
    for number in (0, 1, 2):
        os.close(number)
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    streams.keep()
    assert min(os.pipe()) > 2
    print("lost")
    Path(path).write_text(str(streams.why_lost(sys.stdout)))


def test_streams_that_were_closed_from_the_beginning(tmp_path: Path) -> None:
    process = CONTEXT.Process(target=no_streams, args=(str(tmp_path / "why"),))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and "Bad file descriptor" in (tmp_path / "why").read_text()
