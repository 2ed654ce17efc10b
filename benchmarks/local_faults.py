"""Kills workers and servers of runs that average rarely, elastically or without locks, and tells what it changed.

python -m benchmarks.local_faults --events 40

The strategies take turns: local, adacomm, diloco, streaming, easgd, fedavg and hogwild train the MLP on Fashion-MNIST
for two epochs with three workers (easgd with two servers, each a replica of the other). In every run one or two
processes are killed (SIGKILL) at random moments of training; with `restart` each of them is replaced, and its joining
is an event too. Runs are made until there were as many kills and joins as asked for.

A run is as it should be if the command ends with 0, its test accuracy is within a point of that of a run of the same
strategy that nobody disturbed, the samples are those of two epochs (of fedavg, whose clients drop out, as many at
least), and no process, shared memory or socket of it is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults import Run, reach_some_step, shared_files, summary_of
from torrential.records import Event

WORKERS, EPOCHS, SAMPLES = 3, 2, 110_000
POINT = 0.01
STRATEGIES: dict[str, list[str]] = {
    "local": ["period=8"],
    "adacomm": ["period=16", "interval=0.25"],
    "diloco": ["period=16", "outer_momentum=0.5"],
    "streaming": ["period=16", "outer_momentum=0.5"],
    "easgd": ["period=8", "momentum=0.5", "replicas=1"],
    "fedavg": ["clients=12", "local_steps=16"],
    "hogwild": ["period=16"],
}


def start(strategy: str, out: Path, restart: bool) -> Run:
    options = [*STRATEGIES[strategy], "threads=1", "schedule=cosine", f"restart={str(restart).lower()}"]
    given = ["fashion-mlp", "--strategy", strategy, "--workers", str(WORKERS), "--epochs", str(EPOCHS), "--seed", "1"]
    given += ["--servers", "2"] if strategy == "easgd" else []
    return Run(out, *given, *(word for option in options for word in ("--set", option)), "--out", str(out))


@contextlib.contextmanager
def ended(run: Run) -> Iterator[Run]:
    """The run, of which nothing is left if it fails or hangs."""
    try:
        yield run
    except BaseException:
        run.kill_all()
        raise


class Campaign:
    """Runs that are disturbed, and what they are compared with."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root, self.chance = root, chance
        self.undisturbed: dict[str, Any] = {}  # summaries, by strategy
        self.rows: list[dict[str, Any]] = []

    def events(self) -> int:
        return sum(row["kills"] + row["joins"] for row in self.rows)

    def expected(self, strategy: str) -> Any:
        if strategy not in self.undisturbed:
            with ended(start(strategy, self.root / f"undisturbed-{strategy}", restart=False)) as run:
                self.undisturbed[strategy] = summary_of(run)
        return self.undisturbed[strategy]

    def disturb(self) -> None:
        """Carry out one run, and note what came of it."""
        number = len(self.rows)
        strategy = list(STRATEGIES)[number % len(STRATEGIES)]
        restart = self.chance.random() < 0.6
        whole, out, files = self.expected(strategy), self.root / f"run-{number}", shared_files()
        with ended(start(strategy, out, restart)) as run:
            killed = self._kill_some(run, strategy, whole.steps)
            found = summary_of(run)
        joined = sum(isinstance(r, Event) and r.event.endswith("_joined") for r in run.records())
        off = found.value - whole.value
        wrong = [f"{found.metric} differs by {off:+.4f}"] * (abs(off) > POINT)
        wrong += [f"{found.samples:,} samples"] * (not fits(strategy, found.samples))
        wrong += run.leftovers(files)
        row = {"strategy": strategy, "restart": restart, "killed": killed, "kills": len(killed), "joins": joined}
        self.rows.append(row | {"value": found.value, "difference": off, "wrong": wrong})
        about = (
            f"{strategy:8} {'restart' if restart else '':8} killed {', '.join(killed) or 'nobody':22} {joined} joined"
        )
        print(
            f"{number + 1:3} {about}  {found.value:.4f} ({off:+.4f})  {'; '.join(wrong) or 'as it should be'}",
            flush=True,
        )
        if not wrong:
            shutil.rmtree(out)

    def _kill_some(self, run: Run, strategy: str, steps: int) -> list[str]:
        """Kill one process or two, one after the other, each at a random moment of the run."""
        moments = sorted(self.chance.uniform(0, 0.85) * steps for _ in range(self.chance.choice((1, 2))))
        killed: list[str] = []
        for moment in moments:
            reach_some_step(run, moment, self.chance.uniform(0, 0.2))
            there = {name: pid for pid, name in run.members().items()}
            servers = [f"tt-server-{n}" for n in range(2)] if strategy == "easgd" and self._filled(run, killed) else []
            victims = [name for name in [*(f"tt-worker-{n}" for n in range(WORKERS)), *servers] if name in there]
            if len([name for name in victims if "worker" in name]) < 2:
                continue
            victim = self.chance.choice(victims)
            os.kill(there[victim], signal.SIGKILL)
            killed.append(victim)
        return killed

    def _filled(self, run: Run, killed: list[str]) -> bool:
        """Whether all ranges have their replica: two servers at a time are not survived, and not meant to be."""
        filled = sum(isinstance(r, Event) and r.event == "server_filled" for r in run.records())
        return filled >= sum("server" in name for name in killed)


def fits(strategy: str, samples: int) -> bool:
    return samples >= SAMPLES if strategy == "fedavg" else samples == SAMPLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40, help="kills and joins together, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="local-faults-"))
    made = Campaign(root, random.Random(options.seed))
    while made.events() < options.events:
        made.disturb()
    wrong = [row for row in made.rows if row["wrong"]]
    kills = Counter(name.split("-")[1] for row in made.rows for name in row["killed"])
    worst = max(abs(row["difference"]) for row in made.rows)
    print(
        f"{made.events()} kills and joins ({dict(kills)}) in {len(made.rows)} runs, {len(made.rows) - len(wrong)} as "
        f"they should be; the largest difference in accuracy: {worst:.4f}"
    )
    if options.json is not None:
        values = {strategy: summary.value for strategy, summary in made.undisturbed.items()}
        options.json.write_text(json.dumps({"undisturbed": values, "runs": made.rows}, indent=1) + "\n")
    if wrong:
        sys.exit(f"see {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
