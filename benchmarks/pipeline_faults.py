"""Kills workers of `pipeline` at random moments, and tells what it changed.

python -m benchmarks.pipeline_faults --kills 60

Every run trains a perceptron with batch norm and dropout on digits, in float64: one or two pipelines of two to four
stages, in one of the three orders. One or two workers are killed (SIGKILL), whatever they are doing; without `restart`
a neighbour runs their stages from then on, with it they are replaced. Two workers of which one keeps the copy of the
other are not killed at a time, for that loses a stage.

Nothing may be lost: every sample is used once in every epoch, all tensors of the last checkpoint's model are those of
an undisturbed run of the same kind to TOLERANCE, and no process or shared memory is left behind. A worker that runs two
stages runs the same layers on the same microbatches with the same random draws; only sums may come in another order,
which float64 keeps some seven digits below the tolerance.

Told: seconds from a kill until the record of a later step is in the file, looked for every two milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.faults import PATIENCE_SECONDS, Run, shared_files, steps_taken
from torrential.records import Event, Step, Summary
from torrential.stages.pipelines import neighbour

TASK = """
import dataclasses, torch
from torch import nn
from torch.utils.data import TensorDataset
from torrential.tasks import load_task

given = load_task("digits-mlp")

def double(data):
    columns = [torch.stack([torch.as_tensor(item[i]) for item in data]) for i in (0, 1)]
    return TensorDataset(columns[0].double(), columns[1])

def model():
    widths = [64, 64, 64, 64, 64, 64, 64, 64]
    hidden = [[nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh()] for a, b in zip(widths, widths[1:])]
    layers = [nn.Flatten(), *(layer for row in hidden for layer in row), nn.Dropout(0.2), nn.Linear(64, 10)]
    return nn.Sequential(*layers).double()

task = dataclasses.replace(
    given, name="digits-stages", model=model, train=double(given.train), validation=double(given.validation),
    test=double(given.test), batch_size=50,
)
"""
EPOCHS = 12
SAMPLES = 1350 * EPOCHS
TOLERANCE = 1e-9  # the largest difference of any number in the model
PAUSE_SECONDS = 0.2  # at most, between the record of a step and a kill: records come that often
ORDERS = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True)
class Kind:
    """What is trained: everything that decides the undisturbed result."""

    pipelines: int
    stages: int
    order: str

    def arguments(self) -> list[str]:
        options = [f"stages={self.stages}", f"order={self.order}", "microbatches=4", "threads=1"]
        options += ["chunks=2"] if self.order == "interleaved" else []
        given = ["--strategy", "pipeline", "--workers", str(self.pipelines * self.stages), "--epochs", str(EPOCHS)]
        return given + [word for option in options for word in ("--set", option)]

    def __str__(self) -> str:
        return f"{self.pipelines} x {self.stages} stages {self.order}"


def draw_kind(chance: random.Random) -> Kind:
    return Kind(chance.choice((1, 2)), chance.choice((2, 3, 4)), chance.choice(ORDERS))


def copy_of(worker: int, stages: int) -> int:
    """The worker that keeps a copy of this one's stage."""
    return worker - worker % stages + neighbour(worker % stages, stages)


@dataclass
class Campaign:
    """Runs that are disturbed, what they are compared with, and what was seen."""

    root: Path
    chance: random.Random
    expected: dict[Kind, dict[str, Any]] = field(default_factory=dict)
    steps: dict[Kind, int] = field(default_factory=dict)
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # by restart
    worst: float = 0.0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)

    def start(self, kind: Kind, name: str, restart: bool = False) -> Run:
        out = self.root / name
        task, how = str(self.root / "task.py"), ["--set", f"restart={str(restart).lower()}", "--out", str(out)]
        return Run(out, task, *kind.arguments(), *how)

    def undisturbed(self, kind: Kind) -> dict[str, Any]:
        if kind not in self.expected:
            run = self.start(kind, f"undisturbed-{kind}".replace(" ", "-"))
            if run.process.wait(PATIENCE_SECONDS):
                sys.exit(f"an undisturbed run failed; see {run.log}")
            self.expected[kind], self.steps[kind] = model_of(run.out), steps_taken(run.records())
        return self.expected[kind]

    # -- a disturbed run --------------------------------------------------------------------------------------------
    def disturb(self, number: int) -> None:
        kind, restart = draw_kind(self.chance), self.chance.random() < 0.5
        expected = self.undisturbed(kind)
        files, run = shared_files(), self.start(kind, f"run-{number}", restart)
        try:
            killed = self.kill_some(run, kind, restart)
        except SystemExit as hung:
            self.wrong.append(f"{kind}: {hung}")
            print(f"{number:4} {kind}, restart={restart}: {hung}", flush=True)
            return
        wrong = self.objections(run, kind, expected) + run.leftovers(files)
        ended = ", ".join(f"{worker} ({'end' if took is None else f'{took:.3f} s'})" for worker, took in killed)
        print(
            f"{number:4} {kind!s:24} {'restart' if restart else '':8} killed {ended or 'nobody':28} "
            f"{', '.join(wrong) or 'as it should be'}",
            flush=True,
        )
        if wrong:
            self.wrong.append(f"run {number}: {', '.join(wrong)}")
        else:
            shutil.rmtree(run.out)

    def kill_some(self, run: Run, kind: Kind, restart: bool) -> list[tuple[int, float | None]]:
        """Kill one worker or two, one after the other; each with the seconds to the next step, if there was one."""
        killed: list[tuple[int, float | None]] = []
        for _ in range(self.chance.choice((1, 1, 2))):
            gone = [] if restart else [worker for worker, _ in killed]
            out = {other for worker in gone for other in keepers(worker, kind.stages)} | set(gone)
            victims = [worker for worker in range(kind.pipelines * kind.stages) if worker not in out]
            if not victims:
                break
            victim, at = self.chance.choice(victims), self.chance.uniform(0, 1) * self.steps[kind]
            if not run.until(functools.partial(has_come_to, at, len(killed) if restart else 0)):
                break
            time.sleep(self.chance.uniform(0, PAUSE_SECONDS))
            pids = [pid for pid, name in run.members().items() if name == f"tt-worker-{victim}"]
            if not pids:
                break
            began, before = time.monotonic(), regroupings(run.records())
            os.kill(pids[0], signal.SIGKILL)
            self.kills += 1
            took = None
            if run.until(functools.partial(has_gone_on, before)):
                took = time.monotonic() - began
                self.seconds[restart].append(took)
            killed.append((victim, took))
        return killed

    def objections(self, run: Run, kind: Kind, expected: dict[str, Any]) -> list[str]:
        code = run.process.wait(PATIENCE_SECONDS)
        last = next((r for r in run.records() if isinstance(r, Summary)), None)
        if code or last is None:
            return [f"exit status {code}; see {run.log}"]
        wrong = []
        if (last.samples, last.steps) != (SAMPLES, self.steps[kind]):
            wrong.append(f"{last.samples} samples in {last.steps} steps")
        found = model_of(run.out)
        off = {name: float((found[name] - tensor).abs().max()) for name, tensor in expected.items()}
        self.worst = max(self.worst, *off.values())
        wrong += [f"{name} is off by {value:.3g}" for name, value in off.items() if not value <= TOLERANCE][:3]
        return wrong


def keepers(worker: int, stages: int) -> set[int]:
    """The worker that has a copy of this one's stage, and those of whose stages this one has a copy."""
    first = worker - worker % stages
    return {copy_of(worker, stages)} | {w for w in range(first, first + stages) if copy_of(w, stages) == worker}


def has_come_to(step: float, replaced: int, records: list[Any]) -> bool:
    joined = [i for i, r in enumerate(records) if isinstance(r, Event) and r.event == "worker_joined"]
    return steps_taken(records) >= step and len(joined) >= replaced and after(records, joined[-1] if replaced else -1)


def after(records: list[Any], place: int) -> bool:
    """Whether a step was recorded after this place: whoever has joined has what it needs by then."""
    return place < 0 or any(isinstance(r, Step) for r in records[place:])


def regroupings(records: list[Any]) -> int:
    return sum(isinstance(r, Event) and r.event == "regrouped" for r in records)


def has_gone_on(before: int, records: list[Any]) -> bool:
    places = [i for i, r in enumerate(records) if isinstance(r, Event) and r.event == "regrouped"]
    return len(places) > before and after(records, places[before])


def model_of(out: Path) -> dict[str, Any]:
    """The tensors of the last checkpoint."""
    newest = max((out / "checkpoints").glob("step-*"), key=lambda path: path.name)
    return load_file(newest / "model.safetensors")


def told(seconds: list[float]) -> str:
    if not seconds:
        return "nobody was killed"
    return f"median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s ({len(seconds)} kills)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="pipeline-faults-"))
    (root / "task.py").write_text(TASK)
    made = Campaign(root, random.Random(options.seed))
    runs = 0
    while made.kills < options.kills:
        runs += 1
        made.disturb(runs)
    print(f"{made.kills} kills in {runs} runs, {runs - len(made.wrong)} as they should be")
    print(f"the largest difference from an undisturbed run: {made.worst:.3g}")
    print(f"next step without a replacement: {told(made.seconds[False])}")
    print(f"next step where there will be one: {told(made.seconds[True])}")
    if made.wrong:
        sys.exit("\n".join([*made.wrong, f"see {root}"]))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
