"""Kills workers, servers and the coordinator of `sandblaster` at random moments, and tells what it changed.

python -m benchmarks.portion_faults --runs 30

Every run trains digits-mlp in float64 with two workers and two servers, each range on both; one to three processes are
killed (SIGKILL), and workers are started again. Nothing may be lost: the objective after the last step is that of an
undisturbed run beyond rounding, every batch had all its portions, and no process or memory is left behind.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.campaign import Disturb, campaign
from benchmarks.faults import PATIENCE_SECONDS, Run, shared_files, steps_taken
from torrential.comm.protocol import COORDINATORS
from torrential.records import Event, Step, Work

TASK = """
import dataclasses, torch
from torrential.tasks import load_task
from torch.utils.data import TensorDataset

given = load_task("digits-mlp")

def double(data):
    columns = [torch.stack([torch.as_tensor(item[i]) for item in data]) for i in (0, 1)]
    return TensorDataset(columns[0].double(), columns[1])

task = dataclasses.replace(
    given, name="digits-double", model=lambda: given.model().double(), train=double(given.train),
    validation=double(given.validation) if given.validation is not None else None, test=double(given.test),
)
"""
STEPS = 25  # later, rounding is amplified to more than is tolerated
ARGUMENTS = ["--strategy", "sandblaster", "--workers", "2", "--servers", "2", "--steps", str(STEPS), "--epochs", "200"]
SETTINGS = ["--set", "threads=1", "--set", "replicas=1", "--set", "restart=true"]


def outcome(run: Run) -> tuple[int, float, int]:
    """The exit status, the objective after the last step, and the steps taken."""
    code = run.process.wait(PATIENCE_SECONDS)
    steps = [r for r in run.records() if isinstance(r, Step) and r.worker >= COORDINATORS]
    return code, steps[-1].loss if steps else float("nan"), steps_taken(run.records())


def _has_come_to(step: float, records: list[Any]) -> bool:
    return steps_taken(records) >= step


def start(root: Path, name: str) -> Run:
    return Run(root / name, str(root / "task.py"), *ARGUMENTS, *SETTINGS, "--out", str(root / name))


def disturbed(number: int, root: Path, chance: random.Random, expected: float) -> list[str]:
    files, run, killed = shared_files(), start(root, f"run-{number}"), list[str]()
    for _ in range(chance.randint(1, 3)):
        victim = chance.choice(["tt-worker-0", "tt-worker-1", "tt-server-0", "tt-server-1", "tt-coord-0", "tt-coord-0"])
        at = chance.uniform(0, STEPS * 0.8)
        if not run.until(functools.partial(_has_come_to, at)):
            break
        time.sleep(chance.uniform(0, 0.15))
        if victim.startswith("tt-server") and any(name.startswith("tt-server") for name in killed):
            continue  # one replica survives one server
        pids = [pid for pid, name in run.members().items() if name == victim]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        killed += [victim] * bool(pids)
    code, value, steps = outcome(run)
    works = [r for r in run.records() if isinstance(r, Work)]
    events = [r.event for r in run.records() if isinstance(r, Event)]
    wrong = [f"exit status {code}"] * bool(code) + [f"{steps} steps"] * (steps != STEPS)
    if not abs(value - expected) <= 1e-6 * abs(expected):
        wrong.append(f"objective {value:.12g} instead of {expected:.12g}")
    wrong += run.leftovers(files)
    copies, wasted = sum(w.copies for w in works), sum(w.wasted for w in works)
    print(
        f"{number:4} killed {' '.join(killed) or 'nobody':40} lost {sum('lost' in e for e in events)}  "
        f"objective {value:.12g}  {copies} copies, {wasted} thrown away  {', '.join(wrong) or 'as it should be'}",
        flush=True,
    )
    if not wrong:
        shutil.rmtree(run.out)
    return wrong


def prepare(root: Path) -> Disturb:
    """Make the run that nobody disturbs, whose objective all others are to have."""
    (root / "task.py").write_text(TASK)
    code, expected, steps = outcome(start(root, "undisturbed"))
    if code or steps != STEPS:
        sys.exit(f"the undisturbed run failed; see {root}")
    print(f"undisturbed: objective {expected:.12g}")
    return functools.partial(disturbed, expected=expected)


if __name__ == "__main__":
    campaign(__doc__, "portion-faults", "runs", "as they should be", prepare)
