"""Few descriptors: a line that says so, before anything is started where that can be known."""

import errno
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import torrential as tt
from torrential.descriptors import EACH_ROLE, OWN, check_descriptors, explained
from torrential.errors import BadInput, RunFailed
from torrential.study.ask import StudyRequest
from torrential.study.question import make_question

COMMAND = Path(sys.executable).with_name("torrential")


def limited(limit: str, *words: object) -> subprocess.CompletedProcess[str]:
    """A command where no more than so many files may be open."""
    shell = ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *map(str, words)]
    return subprocess.run(shell, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("words", ["train digits --workers 2 --out", "bench allreduce --plot"])
def test_a_run_on_processes_is_refused_in_one_line(words: str, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    ended = limited("-n 24", COMMAND, *words.split(), out)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: too few open files are allowed (limit: 24, needed: about ")
    assert line.endswith("; raise the limit: ulimit -n 1024")
    assert not out.exists()


@pytest.mark.parametrize(("workers", "strategy"), [(2, "allreduce"), (2, "bsp"), (12, "allreduce")])
def test_as_many_as_were_said_are_enough(workers: int, strategy: str, tmp_path: Path) -> None:
    words = (
        f"train digits --workers {workers} --strategy {strategy} --batch-size 9999999 --out {tmp_path / 'out'}".split()
    )
    said = limited("-n 24", COMMAND, *words).stderr
    needed = int(said.partition("needed: about ")[2].partition(")")[0])
    assert needed > OWN + EACH_ROLE * workers
    ended = limited(f"-n {needed}", COMMAND, *words)  # what is wrong with it is seen after the descriptors
    assert ended.returncode == 2 and "the joined batch is larger than the training set" in ended.stderr


def test_a_study_is_refused_before_it_has_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    asked = StudyRequest(task="digits-mlp", strategies=["allreduce"], target=0.5, trials=3, workers=[2])
    with pytest.raises(BadInput, match=r"^allreduce: too few open files are allowed \(limit: 24, needed: about \d+\)"):
        make_question(asked, [])


def test_a_simulation_that_needs_more_says_so(tmp_path: Path) -> None:
    words = ["digits-mlp", "--world", "sim", "--set", "processes=1", "--steps", 5, "--out", tmp_path / "out"]
    ended = limited("-n 10", COMMAND, "train", *words)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: too many open files (limit: 10); raise the limit: ulimit -n 1024; ")


def test_a_limit_that_the_process_may_raise_itself_is_none() -> None:
    program = (
        "import resource; from torrential.descriptors import *; raise_limit(); check_descriptors(1); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ended = limited("-Sn 24 && ulimit -Hn 1000", sys.executable, "-c", program)
    assert ended.stdout == "1000 1000\n", ended.stderr


def test_many_workers_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    check_descriptors(64)
    with pytest.raises(BadInput, match=r"limit: 1024, needed: about \d+\); raise the limit: ulimit -n 2048"):
        check_descriptors(128)


@pytest.mark.parametrize(
    ("strategy", "roles", "options"),
    [
        ("allreduce", 3, {}),
        ("allreduce", 3, {"transport": "tcp", "algorithm": "ring"}),
        ("allreduce", 3, {"algorithm": "native"}),
        ("bsp", 5, {"servers": 2}),
    ],
)
def test_a_run_takes_no_more_than_is_asked_for(
    strategy: str, roles: int, options: dict[str, Any], tmp_path: Path
) -> None:
    before, most, over = len(os.listdir("/proc/self/fd")), 0, threading.Event()

    def count() -> None:
        nonlocal most
        while not over.wait(0.002):
            most = max(most, len(os.listdir("/proc/self/fd")))

    counting = threading.Thread(target=count)
    counting.start()
    try:
        tt.train(
            "digits", strategy, workers=3, steps=9, evaluate_every=2, out=tmp_path / "out", progress=False, **options
        )
    finally:
        over.set()
        counting.join()
    assert before < most <= before + OWN + EACH_ROLE * roles


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        OSError(errno.ENFILE, os.strerror(errno.ENFILE), "/dev/null"),
        ImportError(f"libtorch.so: cannot open shared object file: {os.strerror(errno.EMFILE)}"),
    ],
)
def test_wherever_there_are_none_left_it_is_said(error: Exception) -> None:
    with (
        pytest.raises(RunFailed, match=r"^too many open files \(limit: \d+\); raise the limit: ulimit -n \d+$"),
        explained(),
    ):
        raise error


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "", "x"), ImportError("no module"), ValueError()])
def test_other_errors_are_left_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, explained():
        raise error
    assert raised.value is error
