"""Progress on a terminal, in a file, and with numbers that make no sense."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from torrential.progress import ProgressDisplay, byte_count, duration, final_table, metric_value, number
from torrential.records import Evaluation, Event, Step, Summary


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    live: bool | None, workers: int = 2, total: int | None = 500, metric: str = "accuracy"
) -> tuple[ProgressDisplay, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=bool(live), width=120, height=40, color_system="standard")
    return ProgressDisplay(total, workers, metric, 0.97, console, live, clock), out, clock


def step(number: int, worker: int = 0, loss: float = 0.123, time: float | None = None) -> Step:
    return Step(
        worker=worker, step=number, epoch=number // 100, samples=100 * number, loss=loss,
        time=number / 10 if time is None else time, compute=0.8, communicate=0.15, wait=0.05, bytes_sent=10,
    )  # fmt: skip


def evaluation(number: int, value: float = 0.973) -> Evaluation:
    return Evaluation(
        split="validation", step=number, epoch=1, samples=100 * number, time=number / 10, value=value, loss=0.09
    )


def screen(progress: ProgressDisplay) -> str:
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(progress._area())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_live_area_shows_steps_loss_metric_rate_and_workers() -> None:
    progress, _, clock = make(live=True)
    with progress:
        assert "worker 1  starting" in screen(progress)
        for number in range(1, 51):
            clock.now = number / 10
            progress.record(step(number))
        progress.record(evaluation(50))
        progress.worker_state(1, "waiting")
        text = screen(progress)
    assert "step 50 / 500" in text and "0:00:45 left" in text
    assert "loss 0.1230 · validation accuracy 97.3 % (target 97 %) · 1,000 samples/s" in text
    assert "worker 0  training  ██████████▒░  compute 80 %  communicate 15 %  wait 5 %" in text
    assert "worker 1  waiting" in text


def test_many_workers_share_two_lines() -> None:
    progress, _, _ = make(live=True, workers=32)
    with progress:
        for worker in range(30):
            progress.record(step(1, worker))
        progress.record(Event(event="worker_lost", time=1.0, worker=3, step=1))
        text = screen(progress)
    assert "32 workers: 1 lost, 2 starting, 29 training" in text and "compute 80 %" in text
    assert len(text.splitlines()) == 4


def test_it_is_redrawn_at_most_eight_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, _, clock = make(live=True)
    drawn = 0

    def area() -> str:
        nonlocal drawn
        drawn += 1
        return ""

    monkeypatch.setattr(progress, "_area", area)
    with progress:
        for number in range(1, 2001):
            clock.now = number / 1000
            progress.record(step(number))
            progress.worker_state(0, "training")
            progress.tick()
    assert 12 <= drawn <= 17  # in two seconds


def test_events_and_messages_stay_above_the_live_area() -> None:
    progress, out, _ = make(live=True)
    with progress:
        progress.message("starting 2 workers [bold]")
        progress.record(Event(event="worker_lost", time=2.34, step=57, worker=1, detail="killed by signal 9"))
    assert "starting 2 workers [bold]" in out.getvalue()
    assert "2.3 s · worker lost · worker 1 · step 57 · killed by signal 9" in out.getvalue()
    progress.close()  # twice does no harm


@pytest.mark.parametrize("forced", [False, True])
def test_a_file_gets_plain_lines_at_most_every_two_seconds(forced: bool) -> None:
    progress, out, clock = make(live=False)
    if forced:
        progress._console = Console(file=out, force_terminal=True, width=40)
    with progress:
        progress.message("starting 2 workers")
        for number in range(1, 101):
            clock.now = number / 10
            progress.record(step(number))
            if number % 50 == 0:
                progress.record(evaluation(number))
        progress.record(Event(event="target_reached", time=10.0, step=100))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[0] == "starting 2 workers"
    assert lines[-1] == "10.0 s · target reached · step 100"
    assert sum("validation loss" in line for line in lines) == 2
    training = [line for line in lines if "samples/s" in line or line.startswith("step 1 ")]
    assert 4 <= len(training) <= 6
    assert training[1] == "step 21 / 500 · epoch 0 · loss 0.1230 · 1,000 samples/s · 0:00:48 left"


def test_a_pipe_is_not_a_terminal_whatever_the_environment_says() -> None:
    source = Path(__file__).parents[1]
    program = (
        "from rich.console import Console; from torrential.progress import ProgressDisplay\n"
        "with ProgressDisplay(5, 1, 'accuracy', None, Console(stderr=True)) as p: p.message('hello')"
    )
    environment = os.environ | {"FORCE_COLOR": "1", "PYTHONPATH": str(source)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("", "hello\n")


ODD = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300]


@pytest.mark.parametrize(("live", "total"), list(product([True, False], [None, 0, 3])))
def test_odd_numbers_never_raise(live: bool, total: int | None) -> None:
    progress, _, clock = make(live, workers=0, total=total, metric="perplexity")
    with progress:
        for a, b in product(ODD, ODD):
            clock.now += 3
            odd = dict(loss=a, time=b, compute=a, communicate=b, wait=a)
            progress.record(Step(worker=40, step=7, epoch=0, samples=-5, bytes_sent=0, **odd))
            progress.record(Evaluation(split="test", step=0, epoch=0, samples=0, time=a, value=b, loss=a))
            progress.record(Event(event="regrouped", time=a))
            progress.worker_state(-1, "unheard of")
            console = Console(file=io.StringIO())
            console.print(final_table(summary(seconds=a, value=b, target=a, time_to_target=b, staleness_mean=a)))


def summary(**changes: object) -> Summary:
    fields: dict[str, object] = dict(
        task="digits", strategy="downpour", world="local", workers=4, servers=2, seed=1, steps=900, samples=57600,
        seconds=12.0, metric="accuracy", value=0.9734, target=0.97, reached=True, time_to_target=10.25,
        bytes_sent=123_456_789, staleness_mean=2.5, staleness_max=7, events=1, out="runs/a",
    )  # fmt: skip
    return Summary(**fields | changes)  # type: ignore[arg-type]


def test_the_final_table_tells_how_it_ended() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(final_table(summary()))
    console.print(final_table(summary(reached=False, time_to_target=None, value=None, servers=0, seconds=0)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in (
        "downpour, 4 workers, 2 servers, world local", "97.34 %", "97 % reached after 10.25 s", "97 % not reached",
        "900 steps, 57,600 samples in 12.00 s, 4,800 samples/s", "123 MB", "2.500 on average, at most 7", "runs/a",
        "not measured", "test accuracy",
    ):  # fmt: skip
        assert part in text


def test_what_a_script_has_reported_is_not_said_to_be_of_test_data() -> None:
    console = Console(file=io.StringIO(), width=200)
    with ProgressDisplay(900, 4, "accuracy", None, console, live=False, clock=Clock(), reported=True) as progress:
        progress.record(Evaluation(split="validation", step=9, epoch=1, samples=90, time=1.0, value=0.5, loss=0.25))
    console.print(final_table(summary(reported=True)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "reported accuracy 50 % · reported loss 0.2500" in text and "reported accuracy  97.34 %" in text
    assert "test" not in text and "validation" not in text


def test_virtual_seconds_are_named_and_ours_are_beside_them() -> None:
    console = Console(file=io.StringIO(), width=200)
    with ProgressDisplay(900, 4, "accuracy", None, console, live=False, clock=Clock(), virtual=True) as progress:
        progress.record(Event(event="worker_lost", time=0.25, worker=1))
    console.print(final_table(summary(world="sim"), took=3.5))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("0.2500 virtual s · worker lost", "after 10.25 virtual s", "in 12.00 virtual s", "in 3.500 s of ours"):
        assert part in text


def test_the_final_table_counts_one_and_leaves_out_what_has_no_meaning() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(final_table(summary(strategy="allreduce", workers=1, servers=0, steps=1, staleness_mean=None)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "allreduce, 1 worker, world local" in text and "1 step, 57,600 samples" in text and "staleness" not in text


def test_numbers_are_written_as_a_person_would() -> None:
    assert [number(x) for x in (0.12345, 12.345, 1234.5, 0.0, math.nan, 1e-9)] == [
        "0.1235", "12.35", "1,234", "0", "nan", "1e-09",
    ]  # fmt: skip
    assert [metric_value("top-1 accuracy", x) for x in (0.97, 0.9731, 1.0, math.nan)] == [
        "97 %", "97.31 %", "100 %", "nan",
    ]  # fmt: skip
    assert metric_value("perplexity", 31.26) == "31.26"
    assert [duration(x) for x in (0, 59.6, 3725, math.nan, -1)] == ["0:00:00", "0:01:00", "1:02:05", "", ""]
    assert [byte_count(x) for x in (0, 999, 1500, 5e15)] == ["0 bytes", "999 bytes", "1.5 kB", "5e+03 TB"]
