"""Runs many commands, several at a time: one small training run cannot fill a GPU, or a machine of many cores."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    name: str
    command: list[str]


@dataclass(frozen=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


def run_all(
    jobs: Iterable[Job],
    *,
    at_once: int,
    deadline: float,
    logs: Path,
    expected: Callable[[str], float | None],
    ended: Callable[[Job, bool, float], None],
) -> list[Job]:
    """Runs them in order and gives those that were not started, because they would not have ended in time.

    `deadline` is in time.monotonic's seconds, and `expected` tells how many seconds a job will take (None: unknown, and
    it is started). `ended` hears of each one: whether it exited with 0, and the seconds estimated to be left for all.
    What a job prints goes to a file of its name in `logs`. However this ends, no job is left running.
    """
    waiting, running = list(jobs), list[_Running]()
    logs.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            fitting = [job for job in waiting if time.monotonic() + (expected(job.name) or 0.0) <= deadline]
            for job in fitting[: at_once - len(running)]:
                waiting.remove(job)
                with open(logs / f"{job.name}.log", "wb") as log:
                    started = subprocess.Popen(job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                running.append(_Running(job, started))
            if not running:
                break
            time.sleep(_LOOK_SECONDS)
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                ended(one.job, one.process.returncode == 0, _left(running, waiting, at_once, expected))
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.wait()
    return waiting


def run_missing(
    commands: Mapping[str, list[str]],
    *,
    out: Path,
    at_once: int,
    deadline: float,
    expected: Callable[[str], float | None],
    came: Callable[[str], str | None],
) -> list[str]:
    """Runs those of which nothing has come yet, and tells how each ended; gives the names of those that
    failed. `came` is what came of a run in words, or None. Their logs are in OUT/logs."""
    todo = [Job(name, command) for name, command in commands.items() if came(name) is None]
    failed, done = list[str](), 0

    def ended(job: Job, well: bool, left: float) -> None:
        nonlocal done
        done += 1
        said = came(job.name)
        if said is None:
            failed.append(job.name)
            said = f"failed: {last_line(out / 'logs' / f'{job.name}.log')}"
        print(f"[{done}/{len(todo)}] {job.name}: {said} · {left / 60:.1f} min left", file=sys.stderr, flush=True)

    skipped = run_all(todo, at_once=at_once, deadline=deadline, logs=out / "logs", expected=expected, ended=ended)
    if skipped:
        print(f"no time for {len(skipped)} of {len(todo)} runs; call again to go on", file=sys.stderr)
    return failed


def options(description: str | None, out: str) -> argparse.ArgumentParser:
    """Of an experiment that is many runs: where they go, how many at once, and for how long."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=out)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing that would not end within this")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--report", action="store_true", help="only write the table of what is there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def _left(running: list[_Running], waiting: list[Job], at_once: int, expected: Callable[[str], float | None]) -> float:
    now = time.monotonic()
    begun = [max(0.0, (expected(r.job.name) or 0.0) - (now - r.began)) for r in running]
    later = [expected(job.name) or 0.0 for job in waiting]
    return max([sum(begun + later) / at_once, *begun, *later])


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(it said nothing)"
