"""Studies made up for tests of what reads them: learning curves, deaths, stragglers and staleness without training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from torrential.records import Evaluation, Event, Manifest, Step, Summary
from torrential.study.results import Entry, Run, Study

TARGET = 0.95


def make_study(entries: list[Entry], **different: Any) -> Study:
    given = {
        "directory": Path("studies/digits"),
        "task": "digits",
        "metric": "accuracy",
        "target": TARGET,
        "trials": 3,
        "entries": entries,
        "tuning": [],
        "command": ["torrential", "compare", "digits", "--strategies", "bsp,ssp", "--set", "slow=1:4 "],
        "problems": [],
    }
    return Study(**given | different)


def make_entry(
    strategy: str, workers: int = 4, trials: int = 3, options: dict[str, Any] | None = None, **run: Any
) -> Entry:
    options = options or {}
    name = f"{strategy}{''.join(f':{k}={v}' for k, v in options.items())} · {workers} workers"
    runs = [make_run(f"{strategy}-{workers}-{trial}", strategy, workers, seed=trial, **run) for trial in range(trials)]
    return Entry(name, strategy, options, workers, 0, "local", "", runs)


def make_run(
    name: str,
    strategy: str,
    workers: int,
    seed: int,
    rate: float = 1.0,  # of learning
    best: float = 0.99,
    seconds: float = 12.0,
    slow: dict[int, float] | None = None,
    stale: int | None = None,  # the largest staleness; None: not recorded
    lost: bool = False,
    cut: bool = False,
) -> Run:
    random, slow = Random(f"{name} {seed}"), slow or {}
    rate *= random.uniform(0.85, 1.15)
    values = [(t, best - (best - 0.1) * 2.7 ** (-rate * t) + random.gauss(0, 0.004)) for t in _every(seconds, 0.5)]
    evaluations = [
        Evaluation(split="validation", step=int(t * 50), epoch=int(t), samples=int(t * 800 * workers), time=t,
                   value=value, loss=1 - value) for t, value in values
    ]  # fmt: skip
    steps = [step for worker in range(workers) for step in _steps(worker, workers, seconds, slow, stale, lost, random)]
    reached = next((t for t, value in values if value >= TARGET), None)
    events = [] if not lost else [
        Event(event="worker_lost", time=seconds / 3, step=200, worker=1),
        Event(event="regrouped", time=seconds / 3, detail="workers 0, 2, 3"),
        Event(event="worker_joined", time=seconds / 2, step=300, worker=1),
    ]  # fmt: skip
    summary = Summary(
        task="digits", strategy=strategy, world="local", workers=workers, servers=0, seed=seed,
        steps=int(seconds * 50), samples=int(seconds * 800 * workers), seconds=seconds, metric="accuracy",
        value=values[-1][1], target=TARGET, reached=reached is not None, time_to_target=reached,
        bytes_sent=123_456_789, staleness_mean=0.0, staleness_max=0, events=len(events), out=name,
    )  # fmt: skip
    steps.sort(key=lambda step: step.time)
    return Run(
        Path("runs") / name, _manifest(strategy, workers, seed), steps, evaluations, events, None if cut else summary
    )


def _every(seconds: float, gap: float) -> list[float]:
    return [gap * i for i in range(1, round(seconds / gap) + 1)]


def _steps(
    worker: int, workers: int, seconds: float, slow: dict[int, float], stale: int | None, lost: bool, random: Random
) -> list[Step]:
    slowest = max(slow.values(), default=1.0)
    counts, steps = Counter[int](), []
    for t in _every(seconds, 0.2):
        if lost and worker == 1 and seconds / 3 < t < seconds / 2:
            counts.clear()  # its replacement counts anew
            continue
        share = 0.85 * slow.get(worker, 1.0) / slowest * random.uniform(0.9, 1.0)
        communicate = 0.1 * random.uniform(0.5, 1.0)
        if stale is not None:
            counts.update(min(stale, int(random.expovariate(2 / (stale + 1)))) for _ in range(5))
        steps.append(
            Step(worker=worker, step=int(t * 50), epoch=int(t), samples=int(t * 800 * workers), loss=1 / (1 + t),
                 time=t, compute=0.2 * share, communicate=0.2 * communicate, wait=0.2 * (1 - share - communicate),
                 bytes_sent=int(t * 1e6), staleness=dict(counts), dropped=0)
        )  # fmt: skip
    return steps


def _manifest(strategy: str, workers: int, seed: int) -> Manifest:
    return Manifest(
        torrential="0.1.0",
        config={
            "task": "digits",
            "strategy": strategy,
            "options": {"push_every": 1},
            "world": "local",
            "workers": workers,
            "servers": 0,
            "target": TARGET,
            "batch_size": 16,
            "lr": 0.05,
            "seed": seed,
            "settings": {"transport": "shared", "slow": None, "evaluate_every": 25},
        },
        versions={"python": "3.11.7", "torch": "2.13.0"},
        hardware={"cpu": "A Processor", "cores": 2, "memory": 25_274_793_984, "gpus": []},
        seed=seed,
        created=f"2026-11-15T07:12:3{seed}+00:00",
        command=["torrential", "train", "digits", "--seed", str(seed)],
    )


def full_study() -> Study:
    """One that has something for every section of a report."""
    entries = [
        make_entry("allreduce", workers=2, rate=0.35),
        make_entry("allreduce", workers=4, rate=0.6, slow={3: 4.0}),
        make_entry("allreduce", workers=8, rate=1.0),
        make_entry("ssp", options={"staleness": 3}, rate=0.7, stale=3, lost=True),
        make_entry("downpour", rate=0.6, best=0.953, stale=24, slow={2: 3.0}),
    ]
    return make_study(entries, tuning=[make_entry("ssp", trials=1, options={"lr": 0.1}, rate=0.9)])
