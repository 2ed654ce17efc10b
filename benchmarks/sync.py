"""Synchronous training in samples per second: torrential against DDP, plain loops, and what this machine can give.

python -m benchmarks.sync --model mlp --workers 2 --steps 60 --rounds 5

    plain1          one process, one thread, a plain loop
    plain2threads   one process, two threads, the batches of two workers joined
    alone           --workers processes that never communicate: the bound
    ddp             torch's DistributedDataParallel over Gloo
    ours            `torrential train --workers N`; ours1: one worker
    ours+local      the same with `--strategy local` and a period of 8; a step is then a round of 8
    loop            `torrential launch benchmarks/own_loop.py --workers N`: the same in a script's own loop
    NAME+malloc     the same with torrential's malloc settings, which the C library leaves to each program
    ddp+tuned       DDP with every option that makes it faster here
    ours+late       nothing is summed before backward is over; also ours+tcp, ours+tcp+late, ours+native, ...

Where a contender ran with and without +late, the share of communication that overlap hides behind backward is told:
the time it saves per step, divided by the time of communication per step when nothing overlaps. With all cores busy
there is nothing to gain, unless workers wait for something else than a core. That is what a slow link is for:

python -m benchmarks.sync --model deep --link 2gbit --contenders ours+tcp,ours+tcp+late --steps 20 --rounds 3

    --link RATE     all TCP between the workers shares this rate (benchmarks/link.py; needs root)

All have one thread per process (but plain2threads), the same model, batch, and fused optimizer. Every round starts
each contender anew, one after the other; ratios are medians of the ratios within a round. Round 0 is not timed: it
takes the memory, because reading that from the system slows a run down by some per cent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import link
from benchmarks.contender import Part
from benchmarks.memory import MemoryWatch
from benchmarks.models import WORKLOADS
from torrential.records import RECORDS, Evaluation, Step, describe_machine, read_records

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = "plain1,plain1+malloc,plain2threads,alone,alone+malloc,ddp,ddp+tuned,ours,ours1,loop"
OURS = {
    "late": ["--set", "overlap=false"],
    "unix": ["--set", "transport=unix"],
    "tcp": ["--set", "transport=tcp"],
    "native": ["--set", "algorithm=native"],
    "local": ["--strategy", "local", "--set", "period=8", "--set", "inner=keep"],
}
NEVER = 10**9  # steps between two snapshots
TIMEOUT_SECONDS = 600.0
POLL_SECONDS = 0.005
TABLE_WIDTH = 130

R = TypeVar("R", Step, Evaluation)


@dataclass(frozen=True)
class Options:
    model: str = "mlp"
    workers: int = 2
    steps: int = 60
    warmup: int = 5
    optimizer: str = "sgd"
    batch_size: int | None = None  # per worker; the model's own by default

    @property
    def batch(self) -> int:
        return self.batch_size or WORKLOADS[self.model].batch_size


@dataclass(frozen=True)
class Outcome:
    rate: float  # samples per second, all workers together
    steps: float  # of one worker that were timed
    first_step: float  # seconds from the command to the end of the first step
    memory: int | None  # bytes of the whole process tree, if asked for: the median in the second half of training
    peak: int | None  # the highest from start to end; ours then holds the last snapshot, evaluated and saved
    shares: dict[str, float] | None = None  # of time: compute, communicate, wait


def measure(name: str, options: Options, memory: bool = False) -> Outcome:
    """Start a contender, let it train, and see it end."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        kind, *flags = name.split("+")
        if kind in ("ours", "ours1", "loop"):
            return _ours(
                options, 1 if kind == "ours1" else options.workers, flags, Path(directory), memory, kind == "loop"
            )
        return _other(kind, flags, options, Path(directory), memory)


# -- torrential, by its command line ----------------------------------------------------------------------------------
def _ours(options: Options, workers: int, flags: list[str], directory: Path, sample: bool, loop: bool) -> Outcome:
    if not {*flags} <= OURS.keys():
        raise SystemExit(f"no variant {'+'.join(flags)!r} of ours; there are {', '.join(OURS)}")
    task = options.model if options.optimizer == "sgd" else f"{options.model}_{options.optimizer}"
    out = directory / "run"
    command = [
        *(sys.executable, "-m", "torrential"),
        *(
            ["launch", str(ROOT / "benchmarks/own_loop.py")]
            if loop
            else ["train", f"{ROOT / 'benchmarks/models.py'}:{task}"]
        ),
        *("--workers", str(workers), "--steps", str(options.steps), "--json", "--out", str(out)),
        *("--set", "threads=1", "--set", f"evaluate_every={NEVER}"),
        *([] if loop else ["--device", "cpu", "--batch-size", str(options.batch)]),
        *(word for flag in flags for word in OURS[flag]),
        *(["--", options.model, options.optimizer, str(options.batch)] if loop else []),
    ]
    began = time.monotonic()
    with open(directory / "log", "w+") as log:
        process = _start(command, log, stdout=log)
        with _ended([process]), MemoryWatch([process.pid] if sample else []) as memory:
            while process.poll() is None and not _records(out, Step):
                time.sleep(POLL_SECONDS)
            seen = time.monotonic()
            _finish(process, log)
    steps = _records(out, Step)
    zero = seen - steps[0].time  # the run's clock on ours
    mine = [s for s in steps if s.worker == 0]
    last = mine[-1]
    assert all(e.step == last.step for e in _records(out, Evaluation)), "a snapshot fell into the timed part"
    warm = [s for s in mine if options.warmup <= s.step < last.step]
    if not warm:
        raise SystemExit(f"--steps {options.steps} is too few to time anything; use more")
    first = warm[0]
    timed = [s for s in steps if first.step < s.step <= last.step]
    parts = {part: sum(getattr(s, part) for s in timed) for part in ("compute", "communicate", "wait")}
    return Outcome(
        rate=(last.samples - first.samples) / (last.time - first.time),
        steps=last.step - first.step,
        first_step=seen - began,
        memory=memory.typical(zero + (mine[0].time + last.time) / 2, zero + last.time),
        peak=memory.highest(),
        shares={part: seconds / sum(parts.values()) for part, seconds in parts.items()},
    )


def _records(out: Path, kind: type[R]) -> list[R]:
    path = out / RECORDS
    return [r for r in read_records(path) if isinstance(r, kind)] if path.exists() else []


# -- the others ---------------------------------------------------------------------------------------------------
def _other(kind: str, flags: list[str], options: Options, directory: Path, sample: bool) -> Outcome:
    plain = re.fullmatch(r"plain(\d+)(threads)?", kind)
    if not (plain or kind in ("alone", "ddp")) or not {*flags} <= {"malloc", "tuned"}:
        raise SystemExit(f"no contender {'+'.join([kind, *flags])!r}; there are {CONTENDERS}")
    threads = int(plain[1]) if plain else 1
    workers = 1 if plain else options.workers
    began = time.monotonic()
    with open(directory / "log", "w+") as log:
        processes = [
            _start(
                [sys.executable, "-m", "benchmarks.contender", json.dumps(asdict(part))],
                log,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for part in (
                Part(
                    model=options.model,
                    optimizer=options.optimizer,
                    steps=options.steps,
                    threads=threads,
                    batch_size=threads * options.batch,
                    rank=rank,
                    workers=workers,
                    store=str(directory / "store") if kind == "ddp" else "",
                    malloc="malloc" in flags,
                    tuned="tuned" in flags,
                )
                for rank in range(workers)
            )
        ]
        with _ended(processes), MemoryWatch([p.pid for p in processes] if sample else []) as memory:
            for process in processes:  # nobody takes a step before all can
                if _out(process).readline().strip() != "ready":
                    _finish(process, log)
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            lines = [_out(process).readline() for process in processes]
            for process in processes:
                _finish(process, log)
    reports = [json.loads(line) for line in lines]
    ends = [report["ends"] for report in reports]
    start = max(e[options.warmup - 1] for e in ends)
    end = min(e[-1] for e in ends)
    done = [float(np.interp(end, e, range(len(e))) - np.interp(start, e, range(len(e)))) for e in ends]
    return Outcome(
        rate=sum(done) * reports[0]["batch"] / (end - start),
        steps=sum(done) / workers,
        first_step=max(e[0] for e in ends) - began,
        memory=memory.typical((min(e[0] for e in ends) + end) / 2, end),
        peak=memory.highest(),
    )


def _out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _start(command: list[str], log: IO[str], **streams: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, cwd=ROOT, env=env, stderr=log, text=True, **streams)


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """None of them outlives the block, whatever ends it."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()  # does nothing to one that has ended
        for process in processes:
            process.wait(TIMEOUT_SECONDS)


def _finish(process: subprocess.Popen[str], log: IO[str]) -> None:
    if code := process.wait(TIMEOUT_SECONDS):
        log.seek(0)
        raise SystemExit(f"{log.read()[-3000:]}\na contender failed (exit status {code}); see above")


# -- results ------------------------------------------------------------------------------------------------------
def machine() -> dict[str, Any]:
    versions, hardware = describe_machine()
    return {
        "cpu": hardware["cpu"],
        "cores": hardware["cores"],
        "torch": versions["torch"],
        "python": versions["python"],
        "load": os.getloadavg()[0],
    }


def describe(machine: dict[str, Any]) -> str:
    return "{cpu}, {cores} cores, torch {torch}, python {python}, load {load:.2f}".format(**machine)


def ratio(ours: list[Outcome], theirs: list[Outcome] | None) -> float | None:
    """The median over the rounds of the ratio of rates."""
    return median(a.rate / b.rate for a, b in zip(ours, theirs, strict=False)) if ours and theirs else None


def table(results: dict[str, list[Outcome]], first: dict[str, Outcome], options: Options) -> Table:
    shown = Table(title=f"{options.model}, {options.workers} workers, {options.optimizer}")
    shown.add_column("contender")
    for column in (
        "samples/s",
        "min–max",
        "× alone",
        "× alone+malloc",
        "× ddp",
        "first step",
        "memory (peak)",
        "compute/comm/wait",
    ):
        shown.add_column(column, justify="right")
    for name, outcomes in results.items():
        if not outcomes:
            continue
        rates = [o.rate for o in outcomes]
        memory, peak = first[name].memory, first[name].peak
        ratios = [ratio(outcomes, results.get(other)) for other in ("alone", "alone+malloc", "ddp")]
        shares = outcomes[-1].shares
        shown.add_row(
            name,
            f"{median(rates):,.0f}",
            f"{min(rates):,.0f}–{max(rates):,.0f}",
            *("" if r is None else f"{r:.2f}" for r in ratios),
            f"{median(o.first_step for o in outcomes):.2f} s",
            f"{memory / 1e9:.2f} ({peak / 1e9:.2f}) GB" if memory and peak else "",
            " / ".join(f"{share:.0%}" for share in shares.values()) if shares else "",
        )
    return shown


@dataclass(frozen=True)
class Overlap:
    """What it gains, in seconds per step: medians over the rounds."""

    step: float
    late: float  # a step in which communication begins when backward is over
    communication: float  # in such a step, waiting for the other workers included
    hidden: float  # share of communication

    def __str__(self) -> str:
        return (
            f"a step takes {1e3 * self.step:.0f} ms; {1e3 * self.late:.0f} ms when nothing is sent before backward is "
            f"over, {1e3 * self.communication:.0f} of them communication; overlap hides {self.hidden:.0%} of it"
        )


def overlap(early: list[Outcome], late: list[Outcome], samples: int) -> Overlap:
    """`samples`: of all workers in one step."""
    rounds = []
    for a, b in zip(early, late, strict=True):
        assert b.shares is not None
        communication = (b.shares["communicate"] + b.shares["wait"]) * samples / b.rate
        rounds.append((samples / a.rate, samples / b.rate, communication))
    steps, late_steps, communications = zip(*rounds, strict=True)
    hidden = median((late - step) / communication for step, late, communication in rounds)
    return Overlap(median(steps), median(late_steps), median(communications), hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(WORKLOADS), default="mlp")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--batch-size", type=int, help="per worker; the model's own by default")
    parser.add_argument("--contenders", default=CONTENDERS)
    parser.add_argument("--link", metavar="RATE", help="over a loopback of this rate, as in 2gbit or 500mbit")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    given = parser.parse_args()
    if not 1 <= given.warmup < given.steps:
        parser.error("--warmup must be at least 1 and below --steps")
    options = Options(given.model, given.workers, given.steps, given.warmup, given.optimizer, given.batch_size)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
        if given.link:
            link.enter(given.link)
            os.environ["XDG_CACHE_HOME"] = cache  # what messages cost on this link is of no use elsewhere
        compare(options, given.contenders.split(","), given.rounds, given.link, given.json)


def compare(options: Options, names: list[str], rounds: int, rate: str | None, file: Path | None) -> None:
    console, host = Console(), machine()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(describe(host) + (f", over a link of {rate}" if rate else ""), highlight=False, soft_wrap=True)
    first = {name: measure(name, options, memory=True) for name in names}
    results: dict[str, list[Outcome]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            results[name].append(measure(name, options))
            console.print(f"round {number + 1}  {name:14} {results[name][-1].rate:8,.0f} samples/s", highlight=False)
        if file:
            rows = {name: [asdict(o) for o in outcomes] for name, outcomes in results.items()}
            memory = {name: [o.memory, o.peak] for name, o in first.items()}
            found = {"machine": host, "link": rate, "options": asdict(options), "memory": memory, "results": rows}
            file.write_text(json.dumps(found, indent=2) + "\n")
    console.print(table(results, first, options))
    samples = options.workers * options.batch
    for name in names:
        if f"{name}+late" in names:
            gain = overlap(results[name], results[f"{name}+late"], samples)
            console.print(f"{name}: {gain}", highlight=False, soft_wrap=True)
    console.print(f"load at the end {os.getloadavg()[0]:.2f}", highlight=False)


if __name__ == "__main__":
    main()
