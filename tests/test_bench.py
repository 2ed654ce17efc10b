"""`torrential bench allreduce` on real processes: what it counts and says, never how long things take."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from torrential.bench.allreduce import Result, ask
from torrential.bench.estimate import plan
from torrential.bench.member import Calibrated, Measured, News, Picked, contenders
from torrential.bench.show import BenchmarkProgress
from torrential.comm.costs import Fitted, machine
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.schedules.base import Costs
from torrential.errors import BadInput
from torrential.records import Event

Run = Callable[..., subprocess.CompletedProcess[str]]
MESSAGES = list(ALGORITHMS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torrential"


def result(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_algorithm_at_every_size(run_cli: Run, cache: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    done = run_cli("bench", "allreduce", "--sizes", "4KB,1000", "--rounds", 2, "--json", "--plot", plot)
    found = result(done)
    assert (found["workers"], found["transport"], found["rounds"]) == (2, "shared", 2)
    assert set(found) == set(Result.__struct_fields__)
    assert [row["bytes"] for row in found["rows"]] == [1000, 4000]
    for row in found["rows"]:
        assert list(row["ms"]) == ["shared", "native", *MESSAGES, "auto"] == list(row["predicted_ms"])
        assert min(*row["ms"].values(), *row["predicted_ms"].values()) > 0
        assert min(row["auto_over_best"], row["auto_over_gloo"], row["auto_over_picked"]) > 0
        assert row["picked"] == "shared" and row["ms"][row["best"]] == min(row["ms"].values())
        assert all(low <= row["ms"][name] <= high for name, (low, high) in row["spread_ms"].items())
    assert "µs a message" in done.stderr and "4 kB" in done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    (kept,) = cache.iterdir()
    assert set(json.loads(kept.read_text())["measured"]) == {*MESSAGES, "native", "shared"}
    stamp = kept.stat().st_mtime_ns
    said = "36 measurements (2 sizes, 9 algorithms, 2 rounds); costs of 2 workers are measured first, for about 6 s"
    assert done.stderr.startswith(said) and "\nabout 0:00:0" in done.stderr
    second = run_cli("bench", "allreduce", "--sizes", "1KB", "--rounds", 1, "--json")
    assert second.stderr.startswith(
        "9 measurements (1 size, 9 algorithms, 1 round): about 0:00:00, by the costs measured"
    )
    again = result(second)
    assert again["fitted"] == found["fitted"] and kept.stat().st_mtime_ns == stamp  # known, not measured again


@pytest.mark.parametrize("transport", ["tcp"])
def test_auto_picks_among_messages(run_cli: Run, transport: str) -> None:
    names = ["ring", "auto"]
    args = ("--transport", transport, "--algorithms", ",".join(names), "--sizes", "1KB,64KB", "--rounds", 1)
    found = result(run_cli("bench", "allreduce", "--workers", 3, *args, "--json"))
    assert found["fitted"]["transport"] == transport and found["workers"] == 3
    for row in found["rows"]:
        assert list(row["ms"]) == names and row["auto_over_gloo"] is None and row["picked"] in MESSAGES
        assert (row["auto_over_picked"] is None) == (row["picked"] != "ring")


BAD = [
    ({"workers": 0}, "--workers must be at least 2 (given: 0)"),
    ({"workers": 1}, "--workers must be at least 2 (given: 1)"),
    ({"workers": 2000}, "--workers can be 1024 at most (given: 2000)"),
    ({"rounds": 0}, "--rounds must be at least 1 (given: 0)"),
    ({"algorithms": "rign"}, "no algorithm named 'rign'; did you mean 'ring'?"),
    ({"algorithms": "ring,"}, "no algorithm named ''"),
    ({"algorithms": "gloo"}, "Gloo is called native here; use --algorithms native"),
    ({"algorithms": "hierarchical,ring"}, "train with --set algorithm=hierarchical --set hosts=2"),
    ({"sizes": "4PB"}, "(given: '4PB'); try 64KB"),
    ({"sizes": "1KB,,2KB"}, "(given: '')"),
    ({"sizes": "0"}, "(given: '0')"),
    ({"sizes": "-4KB"}, "(given: '-4KB')"),
    ({"transport": "udp"}, "no transport named 'udp'"),
    ({"transport": "tcp", "algorithms": "shared"}, "shared needs --transport shared (given: tcp)"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_bad_input_is_named(change: dict[str, Any], said: str) -> None:
    good = {"workers": 2, "sizes": "1KB", "transport": "shared", "algorithms": None, "rounds": 1, "fresh": False}
    with pytest.raises(BadInput) as caught:
        ask(**good | change)
    assert said in str(caught.value)


SAID = [
    (["--workers", "many"], "given: 'many'"),
    (["--algorithms", "rign"], "no algorithm named 'rign'; did you mean 'ring'?"),
    (["--plot", "picture.pdf"], "--plot writes PNG files (given: picture.pdf); try picture.png"),
    (["--plot", "/nowhere/at/all.png"], "there is no directory /nowhere/at"),
]


@pytest.mark.parametrize(("args", "said"), SAID)
def test_bad_input_is_one_clear_message(run_cli: Run, args: list[str], said: str) -> None:
    done = run_cli("bench", "allreduce", *args, env={"HOME": "/dev/null/home"})  # nothing has a word beside it
    assert done.returncode == 2 and said in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout and len(done.stderr.splitlines()) == 1


def test_without_matplotlib_the_message_says_what_to_install(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such thing')")
    done = run_cli("bench", "allreduce", "--plot", "a.png", env={"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"})
    assert done.returncode == 2 and "pip install 'torrential[plot]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_has_examples(run_cli: Run) -> None:
    done = run_cli("bench", "allreduce", "--help")
    assert done.returncode == 0 and "torrential bench allreduce --workers 4" in done.stdout
    assert "allreduce" in run_cli("bench", "--help").stdout


def test_sizes_are_sorted_once_each_and_whole_numbers_of_elements() -> None:
    asked = ask(2, "1MB, 4kb,1003B,4000", "shared", "auto,ring,auto", 3, False)
    assert asked.sizes == [1000, 4000, 1_000_000] and asked.algorithms == ["auto", "ring"] and asked.cells == 18


def evenly(seconds: float) -> Fitted:
    """Costs with which every all-reduce of a kilobyte takes so long, and any other in proportion to its size."""
    measured = {name: [(1000, seconds), (1_000_000, 1000 * seconds)] for name in contenders(True)}
    lines = {name: (0.0, seconds / 1000) for name in contenders(True) if name not in ALGORITHMS}
    return Fitted(
        machine=machine(),
        transport="unix",
        members=4,
        when="",
        costs=Costs(0.0, seconds, 0.0),
        lines=lines,
        measured=measured,
    )


def test_how_long_it_takes_is_planned_call_by_call() -> None:
    """A block is repeated for 15 ms; before the rounds each is called once to check it and three times to time it."""
    asked = ask(4, "1KB,1MB", "shared", "native,shared,auto", 5, False)
    planned = plan(asked, evenly(0.0001))
    assert set(planned.blocks) == {(size, name) for size in (1000, 1_000_000) for name in ("native", "shared", "auto")}
    assert planned.blocks[1000, "native"] == pytest.approx(0.0001 * (1 + 150), rel=0.01)
    assert planned.blocks[1_000_000, "auto"] == pytest.approx(0.1 * 2)
    assert planned.checks == pytest.approx({1000: 3 * 4 * 0.0001, 1_000_000: 3 * 4 * 0.1})
    assert planned.total == pytest.approx(1.2012 + 5 * 3 * (0.2 + 0.0151), rel=0.01)


@pytest.mark.parametrize("live", [True, False])
def test_how_long_it_takes_is_said_before_and_while_it_goes_on(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements count by the time they take: half of them, the small ones, are a fourteenth of it."""
    now = 0.0
    console = Console(file=StringIO(), width=110, force_terminal=live)
    watching = BenchmarkProgress(
        ask(4, "1KB,1MB", "shared", "native,shared", 20, False), console, live, clock=lambda: now
    )

    def hear(news: News) -> None:
        watching.record(Event(event="bench", time=now, detail=msgspec.json.encode(news).decode()))

    now = 10.0
    hear(Calibrated(evenly(0.0001)))  # so that the rest takes 0.6 and 8.8 s
    for size, each in ((1000, 0.015), (1_000_000, 0.2)):
        hear(Picked(size, "shared"))
        now += 8 * size * 1e-7
        for _ in range(20):
            for name in ("native", "shared"):
                now += each
                hear(Measured(size, name, each))
        now += 3
        watching.tick()
        now -= 3
    watching.close()
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    first = "80 measurements (2 sizes, 2 algorithms, 20 rounds); costs of 4 workers are measured first, for about 6 s"
    assert text.startswith(first) and "about 0:00:09 to go" in text
    assert ("━" in text) == live and "1 kB shared · 40 / 80 measured" in text
    assert "0:00:06 left" in text and "1 MB shared · 80 / 80 measured" in text  # 8.8 s, three of which have passed


@pytest.mark.parametrize("number", [signal.SIGKILL])
def test_nothing_is_left_however_it_ends(number: signal.Signals) -> None:
    """conftest.py looks for processes and files left behind."""
    command = [sys.executable, "-m", "torrential", "bench", "allreduce", "--rounds", "1000", "--sizes", "1KB"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        parent = psutil.Process(process.pid)
        deadline = time.monotonic() + 40
        while sum(p.name().startswith("tt-worker") for p in parent.children(recursive=True)) < 2:
            assert time.monotonic() < deadline, "no workers came up"
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
        code = process.wait(20)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]


def test_a_worker_that_dies_is_an_error_not_a_number(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torrential", "bench", "allreduce", "--rounds", "1000", "--sizes", "1KB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        deadline = time.monotonic() + 40
        while not (found := [p for p in parent.children(recursive=True) if p.name() == "tt-worker-1"]):
            assert time.monotonic() < deadline, "no worker came up"
            time.sleep(0.05)
        time.sleep(2)
        found[0].kill()
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and not out
    assert "worker 1 died; nothing was measured" in err and "Traceback" not in err
