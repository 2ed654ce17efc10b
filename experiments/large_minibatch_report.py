"""Reads the runs of `experiments.large_minibatch` and writes its table, its numbers and its picture.

The error of a run is 100 - accuracy in percent on validation data, the median over the last 5 epochs, as in the paper;
the test error is that of the final parameters, for test data is read once. Over seeds: mean ± standard deviation. A run
whose loss turned NaN or infinite has diverged: it is counted and shown, and in no mean.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torrential.records import MANIFEST, RECORDS, Evaluation, read_manifest, read_records, replace_file

OUTCOME = "outcome.json"
_LAST_EPOCHS = 5


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    epochs: int
    seeds: int
    base_batch: int
    batches: list[int]
    warmup: float  # epochs
    lr: float  # the task's, for its own batch
    task_batch: int
    samples: int

    @property
    def base_rate(self) -> float:
        """For the base batch: the task's, in proportion."""
        return self.lr * self.base_batch / self.task_batch

    @classmethod
    def load(cls, path: Path) -> Settings:
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def dump(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def fixed(self) -> dict[str, Any]:
        """What all runs of one experiment have in common; batches and seeds may be added."""
        return {k: v for k, v in msgspec.structs.asdict(self).items() if k not in ("batches", "seeds")}


@dataclass(frozen=True)
class Configuration:
    kind: str  # "batch" for the sweep, else what is different
    batch: int  # in total, at the start
    rate: float  # after warm-up
    about: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.batch}"


@dataclass(frozen=True)
class Run:
    seed: int
    outcome: str  # finished, diverged
    message: str
    seconds: float
    steps: int
    validation_errors: list[float]  # by epoch
    test_error: float | None

    @property
    def error(self) -> float | None:
        if self.outcome != "finished":
            return None
        return statistics.median(self.validation_errors[-_LAST_EPOCHS:])


@dataclass(frozen=True)
class Spread:
    mean: float
    deviation: float  # 0 for a single value

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        if not values:
            return None
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}"


@dataclass(frozen=True)
class Result:
    configuration: Configuration
    runs: list[Run]

    @property
    def error(self) -> Spread | None:
        return Spread.of([run.error for run in self.runs if run.error is not None])

    @property
    def test_error(self) -> Spread | None:
        finished = [run.test_error for run in self.runs if run.outcome == "finished"]
        return Spread.of([error for error in finished if error is not None])

    @property
    def diverged(self) -> int:
        return sum(run.outcome == "diverged" for run in self.runs)


def read_results(runs: Path, configurations: list[Configuration], seeds: int) -> list[Result]:
    """One for each configuration, with the runs that ended."""
    return [
        Result(
            c, [read_run(path, seed) for seed in range(seeds) if (path := runs / f"{c.name}-{seed}/{OUTCOME}").exists()]
        )
        for c in configurations
    ]


def read_run(outcome: Path, seed: int) -> Run:
    records = outcome.with_name(RECORDS)
    evaluations = [r for r in read_records(records) if isinstance(r, Evaluation)] if records.exists() else []
    validation = {e.epoch: 100 * (1 - e.value) for e in evaluations if e.split == "validation"}
    test = [100 * (1 - e.value) for e in evaluations if e.split == "test"]
    return Run(
        seed=seed,
        **json.loads(outcome.read_bytes()),
        steps=max((e.step for e in evaluations), default=0),
        validation_errors=[error for _, error in sorted(validation.items())],
        test_error=test[-1] if test else None,
    )


def write_report(out: Path, settings: Settings, top: int | None, results: list[Result]) -> None:
    found = [result for result in results if result.runs]
    replace_file(out / "table.md", _table(out, settings, top, found).encode())
    replace_file(out / "results.json", json.dumps(_numbers(settings, top, found), indent=1).encode())
    _draw(out / "error_vs_batch.png", settings, found)


def _table(out: Path, settings: Settings, top: int | None, results: list[Result]) -> str:
    lines = [
        f"Task `{settings.task}`, {settings.samples:,} training samples, {settings.epochs} epochs, warm-up "
        f"{settings.warmup:.2g}, batch norm over {settings.base_batch}. Errors in %: validation is the median over the "
        f"last {_LAST_EPOCHS} epochs, test that of the final parameters; mean ± standard deviation over seeds.",
        "",
        *_machine(out),
        "| configuration | batch | rate | steps | validation error | test error | runs | diverged |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        c = result.configuration
        steps = max(run.steps for run in result.runs)
        error, test = result.error or "diverged", result.test_error or "–"
        about = f"{c.about} ({c.kind})" if c.kind != "batch" else c.about
        lines.append(
            f"| {about} | {c.batch} | {c.rate:.3g} | {steps} | {error} | {test} | {len(result.runs)} "
            f"| {result.diverged or ''} |"
        )
    lines += ["", f"Top batch, where parts of the recipe were left out: {top or 'not decided yet'}."]
    lines += [
        f"Diverged: {result.configuration.name}, seed {run.seed}: {run.message.partition(';')[0]}."
        for result in results
        for run in result.runs
        if run.outcome == "diverged"
    ]
    return "\n".join(lines) + "\n"


def _machine(out: Path) -> list[str]:
    manifest = next(iter(sorted(out.glob(f"runs/*/{MANIFEST}"))), None)
    if manifest is None:
        return []
    about = read_manifest(manifest.parent)
    gpus = ", ".join(about.hardware["gpus"]) or "no GPU"
    cpu = f"{about.hardware['cores']} cores of {about.hardware['cpu']}"
    return [f"{cpu}; {gpus}; torch {about.versions['torch']}; torrential {about.torrential}; {about.created}.", ""]


def _numbers(settings: Settings, top: int | None, results: list[Result]) -> dict[str, Any]:
    return {
        "settings": msgspec.structs.asdict(settings),
        "top": top,
        "configurations": [
            {
                "name": result.configuration.name,
                **vars(result.configuration),
                "error": vars(result.error) if result.error else None,
                "test_error": vars(result.test_error) if result.test_error else None,
                "diverged": result.diverged,
                "runs": [vars(run) | {"error": run.error} for run in result.runs],
            }
            for result in results
        ],
    }


def _draw(path: Path, settings: Settings, results: list[Result]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is missing; pip install 'torrential[plot]', then --report", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="total batch", ylabel="validation error (%)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")  # the differences that matter are at the bottom
    for axis, marks in ((axes.xaxis, settings.batches), (axes.yaxis, (7, 8, 9, 10, 12, 15, 20, 30, 50, 90))):
        axis.set_ticks(marks, [f"{mark:,}" for mark in marks])
        axis.set_minor_formatter(lambda *_: "")
    points = [(r.configuration, r.error) for r in results if r.error]
    sweep = [(c.batch, e.mean, e.deviation) for c, e in points if c.kind == "batch"]
    if sweep:
        x, y, deviations = zip(*sweep, strict=True)
        axes.errorbar(x, y, deviations, marker="o", capsize=3, color="black", label="the whole recipe")
    kinds = dict.fromkeys(c.kind for c, _ in points if c.kind != "batch")
    for place, (marker, kind) in enumerate(zip("sv^<>DPXpdh*", kinds, strict=False), start=1):
        aside = 1.03**place  # so that those of one batch stand side by side
        own = [(c.batch * aside, e.mean, e.deviation) for c, e in points if c.kind == kind]
        x, y, deviations = zip(*own, strict=True)
        axes.errorbar(x, y, deviations, marker=marker, linestyle="none", capsize=3, label=kind)
    ceiling = max((e.mean for _, e in points), default=1.0)
    for result in results:
        if result.diverged:
            axes.plot(result.configuration.batch, ceiling, "rx", markersize=10)
            words = f"{result.configuration.kind}: {result.diverged} diverged"
            axes.annotate(words, (result.configuration.batch, ceiling), rotation=30, fontsize=7)
    axes.set_title(f"{settings.task}, {settings.epochs} epochs, mean ± deviation over seeds")
    if points:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
