"""Kills workers, and whole runs, at random moments, and tells what it cost.

python -m benchmarks.faults --kills 20 --model digits --transport shared
python -m benchmarks.faults --whole 10

    --kills N    N runs of two workers; in each a worker is killed (SIGKILL) at a random moment. Told: seconds from the
                 kill to the next completed step, the final accuracy against a run without kills, samples lost,
                 whatever the run left behind.
    --whole N    one run, killed as a whole and resumed, N times over; it must end in the bytes of one left alone.

The next step is taken as completed when its record is in the file, looked for every two milliseconds, so the writing
of the record and the look are included.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from torrential.records import Evaluation, Event, Step, Summary, read_records

WORKERS = 2
LOOK_SECONDS = 0.002
PATIENCE_SECONDS = 120.0
MODELS = {
    "digits": ["digits", "--epochs", "20", "--set", "schedule=cosine"],
    "fashion": ["fashion-mlp", "--epochs", "4", "--set", "schedule=cosine"],
    "digits-mlp": ["digits-mlp", "--epochs", "60"],
    "mlp": [str(Path(__file__).with_name("models.py")) + ":mlp", "--steps", "40"],
}


class Family:
    """A process and its descendants."""

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.seen: set[int] = {self.process.pid}
        self.sockets: set[int] = set()  # inodes of those that were open when members were looked at

    def members(self) -> dict[int, str]:
        """Processes by pid, each with the name it gave itself (tt-worker-0, tt-observer)."""
        names = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(OSError):
                    names[process.pid] = Path(f"/proc/{process.pid}/comm").read_text().strip()
                    self.sockets |= open_sockets(process.pid)
        self.seen |= names.keys()
        return names

    def kill_all(self) -> None:
        for pid in [self.process.pid, *self.members()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def leftovers(self, files_before: set[str]) -> list[str]:
        """What is still there three seconds after the end."""
        deadline = time.monotonic() + 3
        while True:
            left = [f"process {pid}" for pid in sorted(self.seen) if psutil.pid_exists(pid) and not _zombie(pid)]
            left += sorted(shared_files() - files_before)
            left += [f"socket {inode}" for inode in sorted(self.sockets & sockets_of_all())]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


class Run(Family):
    def __init__(self, out: Path, *args: str, command: str = "train") -> None:
        self.out = out
        super().__init__(out.with_suffix(".log"), "torrential", command, *args)

    def records(self) -> list[Any]:
        path = self.out / "records.jsonl"
        return read_records(path) if path.exists() else []

    def until(self, condition: Callable[[list[Any]], bool]) -> bool:
        """Look until the records are so; False if the run ends before."""
        path, size = self.out / "records.jsonl", -1
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                size = now
                if condition(self.records()):
                    return True
            if ended:
                return False
            time.sleep(LOOK_SECONDS)
        self.kill_all()
        raise SystemExit(f"hung for {PATIENCE_SECONDS:.0f} s; see {self.log} and {self.out}")

    def worker(self, rank: int) -> int | None:
        """The process of a worker; None if it has ended."""
        return next((pid for pid, name in self.members().items() if name == f"tt-worker-{rank}"), None)


def _zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def shared_files() -> set[str]:
    """Named shared memory. Semaphores of Python's pools are left out: no run has any; other programs' come and go."""
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def open_sockets(pid: int) -> set[int]:
    """The inodes of a process's sockets."""
    links = [os.readlink(file) for file in os.scandir(f"/proc/{pid}/fd")]
    return {int(link[8:-1]) for link in links if link.startswith("socket:[")}


def sockets_of_all() -> set[int]:
    """The inodes of all sockets of the network namespace: of Unix, and of TCP over both kinds of addresses."""
    found = set[int]()
    for kind, column in (("unix", 6), ("tcp", 9), ("tcp6", 9)):
        lines = Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
        found |= {int(words[column]) for words in map(str.split, lines) if len(words) > column}
    return found - {0}


def steps_taken(records: list[Any]) -> int:
    return max((r.step for r in records if isinstance(r, Step)), default=0)


def reach_some_step(run: Run, step: float, then_seconds: float) -> int:
    """Wait for a step and a little longer, since records come only every 0.2 s; which step that was, about."""
    run.until(lambda records: steps_taken(records) >= max(1, step))
    time.sleep(then_seconds)
    return steps_taken(run.records())


def step_after_regrouping(records: list[Any]) -> bool:
    at = [i for i, r in enumerate(records) if isinstance(r, Event) and r.event == "regrouped"]
    return bool(at) and any(isinstance(r, Step) for r in records[at[-1] :])


def summary_of(run: Run) -> Summary:
    code = run.process.wait(PATIENCE_SECONDS)
    records = run.records()
    if code or not records or not isinstance(records[-1], Summary):
        raise SystemExit(f"the run failed (exit status {code}); see {run.log} and {run.out}")
    return records[-1]


def arguments(options: argparse.Namespace) -> list[str]:
    return [*MODELS[options.model], "--workers", str(WORKERS), "--set", f"transport={options.transport}"]


def undisturbed(options: argparse.Namespace, out: Path) -> tuple[Run, Summary]:
    run = Run(out, *arguments(options), "--out", str(out))
    return run, summary_of(run)


# -- one worker dies ----------------------------------------------------------------------------------------------
def kill_workers(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    chance = random.Random(options.seed)
    _, whole = undisturbed(options, root / "undisturbed")
    rows: list[dict[str, Any]] = []
    print(
        f"without kills: {whole.metric} {whole.value:.4f}, {whole.samples} samples, {whole.seconds:.2f} s of training"
    )
    print(f"{'kill':>4} {'worker':>6} {'at':>6} {'step after s':>12} {'value':>7} {'samples':>8}  left behind")
    while len(rows) < options.kills:
        number = len(rows) + 1
        out = root / f"kill-{number}"
        files = shared_files()
        run = Run(out, *arguments(options), "--out", str(out))
        victim = chance.randrange(WORKERS)
        step = reach_some_step(run, chance.uniform(0, 0.8) * whole.steps, chance.uniform(0, 0.2))
        process, killed = run.worker(victim), time.monotonic()
        if process is None:  # the run was over first
            summary_of(run)
            shutil.rmtree(out)
            continue
        os.kill(process, signal.SIGKILL)
        recovered = time.monotonic() - killed if run.until(step_after_regrouping) else None
        summary = summary_of(run)
        lost = [r.worker for r in run.records() if isinstance(r, Event) and r.event == "worker_lost"]
        left = run.leftovers(files)
        row = {
            "worker": victim,
            "about_step": step,
            "step_after_seconds": recovered,
            "value": summary.value,
            "samples": summary.samples,
            "noticed": lost == [victim],
            "left": left,
        }
        rows.append(row)
        shown = "-" if recovered is None else f"{recovered:.3f}"
        print(
            f"{number:4} {victim:6} {step:6} {shown:>12} {summary.value:7.4f} {summary.samples:8}  "
            f"{', '.join(left) or 'nothing'}",
            flush=True,
        )
        shutil.rmtree(out)
    times = [r["step_after_seconds"] for r in rows if r["step_after_seconds"] is not None]
    print(f"next step after the kill: median {statistics.median(times):.3f} s, worst {max(times):.3f} s")
    worst = max(abs(r["value"] - whole.value) for r in rows)
    print(f"{whole.metric} differs by {worst:.4f} at most; {sum(bool(r['left']) for r in rows)} runs left something")
    return {
        "value_without_kills": whole.value,
        "samples_without_kills": whole.samples,
        "median_seconds": statistics.median(times),
        "worst_seconds": max(times),
        "worst_difference": worst,
        "kills": rows,
    }


# -- everything dies ----------------------------------------------------------------------------------------------
def kill_whole_runs(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    chance = random.Random(options.seed)
    plain, whole = undisturbed(options, root / "undisturbed-whole")
    expected = checkpoint_digest(plain.out)
    rows: list[dict[str, Any]] = []
    print(f"{'kill':>4} {'at step':>8} {'resumed from step':>18} {'same bytes':>10}")
    for number in range(1, options.whole + 1):
        out = root / f"whole-{number}"
        run = Run(out, *arguments(options), "--out", str(out))
        step = reach_some_step(run, chance.uniform(0, 1) * whole.steps, chance.uniform(0, 0.3))
        over = run.process.poll() is not None
        run.kill_all()
        if not over and not any(isinstance(r, Summary) for r in run.records()):
            run = Run(out, "--resume", str(out))
        summary_of(run)
        resumed = [r.step for r in run.records() if isinstance(r, Event) and r.event == "resumed"]
        evaluated = [(r.split, r.step) for r in run.records() if isinstance(r, Evaluation)]
        same = checkpoint_digest(out) == expected and len(evaluated) == len(set(evaluated))
        rows.append({"about_step": step, "resumed_from": resumed, "same": same})
        print(f"{number:4} {step:8} {resumed[0] if resumed else 'the start':>18} {same!s:>10}", flush=True)
        if same:
            shutil.rmtree(out)
    print(f"{sum(r['same'] for r in rows)} of {len(rows)} ended in the bytes of the run left alone")
    return {"runs": rows, "all_same": all(r["same"] for r in rows)}


def checkpoint_digest(out: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((out / "checkpoints").rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(out)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="runs in which one worker is killed")
    parser.add_argument("--whole", type=int, default=0, help="runs killed as a whole and resumed")
    parser.add_argument("--model", choices=MODELS, default="digits")
    parser.add_argument("--transport", choices=["shared", "unix", "tcp"], default="shared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = parser.parse_args()
    if options.kills + options.whole < 1:
        parser.error("nothing to do: give --kills N or --whole N")
    root = Path(tempfile.mkdtemp(prefix="faults-")) if options.keep is None else options.keep
    root.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"model": options.model, "transport": options.transport, "seed": options.seed}
    if options.kills:
        result["workers"] = kill_workers(options, root)
    if options.whole:
        result["whole"] = kill_whole_runs(options, root)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.keep is None:
        shutil.rmtree(root)
    if options.whole and not result["whole"]["all_same"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
