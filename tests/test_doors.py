"""What the current directory, strangers on this machine and other users cannot make a run do."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from command import Command
from conftest import kill_tree
from sockets import Listening, family, listening

from torrential.comm.admission import MOST_STRANGERS
from torrential.processes import start_helper

Cli = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = Path(sys.executable).with_name("torrential")
ROOT = Path(__file__).parents[1]


# -- the current directory ----------------------------------------------------------------------------------------
@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, full of modules with the names of others, each of which leaves its name when it is run."""
    place = tmp_path / "hostile"
    place.mkdir()
    line = "import os; open(os.path.dirname(os.path.abspath(__file__)) + '/executed', 'a').write(__name__ + '\\n')"
    for name in (*sys.stdlib_module_names, "msgspec", "torch", "numpy", "typer", "rich", "cloudpickle", "safetensors"):
        (place / f"{name}.py").write_text(f"{line}; raise SystemExit('{name} of the current directory')\n")
    monkeypatch.chdir(place)
    return place


def executed(place: Path) -> list[str]:
    path = place / "executed"
    return path.read_text().split() if path.exists() else []


def test_training_runs_no_code_of_the_current_directory(hostile: Path, tmp_path: Path) -> None:
    command = [COMMAND, "train", "digits", "--workers", "2", "--steps", "5", "--out", tmp_path / "out"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, executed(hostile)) == (0, []), ended.stderr


def test_neither_does_a_study(hostile: Path, tmp_path: Path, run_cli: Cli) -> None:
    asked = ["--strategies", "allreduce", "--workers", 2, "--trials", 1, "--steps", 5, "--target", 0.1]
    ended = run_cli("compare", "digits-mlp", *asked, "--out", tmp_path / "out")
    assert (ended.returncode, executed(hostile)) == (0, []), ended.stderr


def test_neither_do_the_processes_of_a_simulation(hostile: Path, tmp_path: Path, run_cli: Cli) -> None:
    words = ["digits-mlp", "--world", "sim", "--workers", "2", "--steps", "5", "--set", "processes=1", "--out"]
    ended = run_cli("train", *words, tmp_path / "out")
    assert (ended.returncode, executed(hostile)) == (0, []), ended.stderr


ENTRIES = {"__main__": ["--version"], "testing.__main__": ["--schedules", "1", "--jobs", "2"]}  # by module


@pytest.mark.parametrize("entry", ENTRIES)
def test_neither_does_python_m(entry: str, tmp_path: Path) -> None:
    """Of what Python itself imports first we know nothing; of ours nothing is found there, nor by what it starts."""
    for name in ("typer", "rich", "signal", "msgspec", "typing", "multiprocessing", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the current directory')\n")
    command = [sys.executable, "-m", f"torrential.{entry}".removesuffix(".__main__"), *ENTRIES[entry]]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_every_module_that_is_a_program_is_tried() -> None:
    package = ROOT / "torrential"
    programs = [f for f in package.rglob("*.py") if '__name__ == "__main__"' in f.read_text().partition("\nif ")[2]]
    assert {".".join(f.relative_to(package).with_suffix("").parts) for f in programs} == ENTRIES.keys()
    assert all("drop_current_directory()\n" in f.read_text() for f in programs)


def test_python_m_in_the_directory_of_the_package_itself() -> None:
    """It may be found nowhere else, so it stays on the path, after all others."""
    program = (
        "import sys; sys.path.insert(0, %r); from torrential.search_path import drop_current_directory as d; d(); "
        "print(sys.path.index(%r) > max(n for n, p in enumerate(sys.path) if 'site-packages' in p))"
    )
    command = [sys.executable, "-c", program % (str(ROOT), str(ROOT))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "True\n", ended.stderr


def test_a_helper_imports_as_the_process_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, odd = tmp_path / "beside", tmp_path / "with:colon"
    for place in (beside, odd, tmp_path / "colon"):
        place.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(beside), str(odd), *sys.path])
    said = tmp_path / "said"
    (beside / "telling.py").write_text(f"import sys\ndef main(): open({str(said)!r}, 'w').write(repr(sys.path))\n")
    process = start_helper("telling", [])
    assert process.wait(60) == 0
    assert said.read_text() == repr(sys.path[1:])


# -- strangers ----------------------------------------------------------------------------------------------------
class Begun:
    """A run in a process of its own, and those that it starts."""

    def __init__(self, place: Path, words: str) -> None:
        self._err = place / "err"
        self._command = Command([*words.split(), "--out", str(place / "run")], place / "out", self._err)
        self.pid = self._command.pid

    def until_it_ends(self) -> Iterator[list[Listening]]:
        """Again and again, what its processes listen on."""
        deadline = time.monotonic() + 60
        while self._command.poll() is None:
            assert time.monotonic() < deadline, f"it has not ended: {self._err.read_text()}"
            yield listening(family(self.pid))
            time.sleep(0.005)
        assert self._command.wait() == 0, self._err.read_text()

    def close(self) -> None:
        kill_tree(self.pid)
        self._command.wait()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[[str], Begun]]:
    begun: list[Begun] = []

    def one(words: str) -> Begun:
        begun.append(Begun(tmp_path, words))
        return begun[-1]

    yield one
    for each in begun:
        each.close()


@pytest.mark.parametrize(
    ("options", "listeners"),
    [
        ("--set algorithm=native", 2),  # Gloo's
        ("--set transport=tcp --set algorithm=ring", 2),
        ("--set transport=tcp --strategy ssp", 3),
        ("--set transport=unix --set algorithm=ring", 0),
        ("", 0),
    ],
)
def test_nothing_of_a_run_listens_beyond_this_machine(
    begin: Callable[[str], Begun], options: str, listeners: int
) -> None:
    run = begin(f"train digits-mlp --workers 2 --epochs 12 {options}")
    seen = {one for sockets in run.until_it_ends() for one in sockets}
    assert len(seen) == listeners
    assert [one for one in seen if not one.address.is_loopback] == []


@pytest.mark.parametrize("options", ["--set algorithm=ring", "--strategy ssp"])
def test_strangers_exhaust_nobody_who_trains(begin: Callable[[str], Begun], options: str) -> None:
    """200 connections to each process that listens, which say a byte now and then."""
    run = begin(f"train digits-mlp --workers 2 --epochs 10 --set transport=tcp {options}")
    lines: list[socket.socket] = []
    besieged: dict[int, tuple[int, int]] = {}  # descriptors and threads at most, beyond those before
    before: dict[int, tuple[int, int]] = {}
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.1):
            for line in lines:
                with contextlib.suppress(OSError):  # it was shown the door
                    line.send(b"x")

    talking = threading.Thread(target=trickle)
    talking.start()
    try:
        for sockets in run.until_it_ends():
            for pid, address, port in sockets:
                if pid not in before:
                    before[pid] = counts(pid)
                    lines += (socket.create_connection((str(address), port)) for _ in range(200))
                now = counts(pid)
                peak = besieged.get(pid, (0, 0))
                besieged[pid] = max(peak[0], now[0] - before[pid][0]), max(peak[1], now[1] - before[pid][1])
    finally:
        ended.set()
        talking.join()
        for line in lines:
            line.close()
    assert len(besieged) == len(lines) / 200 >= 2
    for descriptors, threads in besieged.values():
        assert descriptors <= MOST_STRANGERS + OWN and threads <= OWN, besieged


OWN = 20  # descriptors and threads that a process of a run needs for its own purposes


def counts(pid: int) -> tuple[int, int]:
    """How many descriptors and threads a process has."""
    with contextlib.suppress(OSError, psutil.NoSuchProcess):
        return len(os.listdir(f"/proc/{pid}/fd")), psutil.Process(pid).num_threads()
    return 0, 0
