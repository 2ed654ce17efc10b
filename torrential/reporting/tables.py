"""The numbers behind the figures, and how they came about, as text that can be selected and copied."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from torrential.progress import byte_count, final_metric, metric_value, number
from torrential.reporting.marks import outcome, samples_per_second
from torrential.reporting.series import StepColumns, metric_curve
from torrential.study import show
from torrential.study.results import Entry, Run, Study, unit_of_time
from torrential.study.tuning import best_value
from torrential.study.verdict import Verdict

SECTIONS = ("options.", "settings.", "recipe.")  # of a configuration; no two options have the same name


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]
    words: int = 1  # so many columns are words; numbers, on the right, follow


def entries(study: Study, verdict: Verdict) -> Table:
    """The table from which the verdict was found, as the terminal shows it."""
    return Table(show.columns(study), [show.cells(study, row) for row in verdict.rows])


def pairs(verdict: Verdict) -> Table:
    """Every two entries compared, the one that was sooner here first."""
    rows = []
    for pair in verdict.pairs:
        of = pair.difference
        times = [f"{of.ratio:.2f}", f"{of.low:.2f}–{of.high:.2f}".replace("inf", "∞")] if pair.quotable else ["–", "–"]
        seen = "yes" if pair.differs else "none seen"
        rows.append([pair.first.entry.name, pair.second.entry.name, *times, f"{pair.p:.2g}", seen])
    return Table(["sooner here", "than", "times", "95 % CI", "p", "difference"], rows, words=2)


def trials(study: Study, works: dict[int, StepColumns]) -> Table:
    """One row per trial; a column that no trial has anything for is left out."""
    rows = [
        {"entry": entry.name, "trial": run.directory.name, "seed": str(run.manifest.seed)}
        | _trial(study, run, works[id(run)])
        for entry in study.entries
        for run in entry.runs
    ]
    columns = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    return Table(columns, [[row[name] for name in columns] for row in rows], words=2)


def _last_values(study: Study, run: Run) -> dict[str, str]:
    """The last values of the metric: of a task on test and validation data, of a script what it has reported."""
    _, values = metric_curve(run, "time")
    newest = _metric(study, values[-1]) if len(values) else ""
    if study.own_loop:
        return {final_metric(study.metric, reported=True): newest}
    final = None if run.summary is None else run.summary.value
    on_test = "" if final is None else _metric(study, final)
    return {final_metric(study.metric, reported=False): on_test, f"validation {study.metric}": newest}


def _trial(study: Study, run: Run, work: StepColumns) -> dict[str, str]:
    summary, updates = run.summary, work.updates
    speed, total = samples_per_second(run), updates.staleness.total()
    mean = sum(value * times for value, times in updates.staleness.items()) / total if total else None
    return {
        "time to target": outcome(run) if study.target is not None else "",
        **_last_values(study, run),
        "steps": f"{summary.steps:,}" if summary else "",
        "samples": f"{summary.samples:,}" if summary else "",
        "seconds": number(work.seconds),
        "samples/s": "" if speed is None else f"{speed:,.0f}",
        "sent": byte_count(summary.bytes_sent) if summary and summary.bytes_sent else "",
        "mean staleness": "" if mean is None else number(mean),
        "largest staleness": f"{max(updates.staleness):,}" if total else "",
        "dropped": f"{updates.dropped:,}" if updates.dropped else "",
        "events": f"{len(run.events):,}" if run.events else "",
        "remarks": run.problem,
    }


def portions(study: Study) -> Table:
    """What became of batches that a coordinator cut into portions, for each trial that had such."""
    rows = []
    for entry in study.entries:
        for run in (run for run in entry.runs if run.batches):
            seconds = sum(batch.seconds for batch in run.batches)
            idle: dict[int, float] = {}
            for batch in run.batches:
                for worker, own in batch.idle.items():
                    idle[worker] = idle.get(worker, 0.0) + own
            most = max(idle, key=lambda worker: idle[worker], default=None)
            whole = seconds * max(1, entry.workers)
            rows.append(
                [
                    entry.name,
                    run.directory.name,
                    f"{len(run.batches):,}",
                    number(median(batch.seconds for batch in run.batches)),
                    f"{sum(batch.portions for batch in run.batches):,}",
                    f"{sum(batch.copies for batch in run.batches):,}",
                    f"{sum(batch.wasted for batch in run.batches):,}",
                    f"{sum(idle.values()) / whole:.0%}" if whole else "",
                    f"{most} ({idle[most] / seconds:.0%})" if most is not None and seconds else "",
                ]
            )
    heads = ["batches", "seconds each", "portions", "copies", "thrown away", "workers idle", "most idle worker"]
    return Table(["entry", "trial", *heads], rows, words=2)


def _metric(study: Study, value: float) -> str:
    return metric_value(study.metric, float(value))


def tuning(study: Study) -> Table:
    """The values that were tried on validation data, what they cost, and which were chosen."""
    found = ["reached the target", "median seconds", f"best validation {study.metric}"]
    return Table(["tried", "trials", *found, "worker-s", ""], [_tuned(study, entry) for entry in study.tuning])


def _tuned(study: Study, entry: Entry) -> list[str]:
    times = [math.inf if run.time_to_target is None else run.time_to_target for run in entry.finished]
    reached = [time for time in times if math.isfinite(time)]
    middle = median(times) if times else math.inf
    best = [value for run in entry.finished if (value := best_value(run, study.maximize)) is not None]
    return [
        entry.name,
        f"{len(times)}",
        f"{len(reached)}",
        number(middle) if math.isfinite(middle) else "–",
        _metric(study, statistics.mean(best)) if best else "–",
        number(entry.workers * sum(run.seconds for run in entry.finished)),
        "chosen" if entry.name in (_chosen(other) for other in study.entries) else "",
    ]


def _chosen(entry: Entry) -> str:
    """The name that an entry has among those tried."""
    return f"{entry.name} · " + " ".join(f"{name}={value}" for name, value in entry.tuned.items())


def commands(study: Study) -> list[str]:
    """The study's own, or those of its runs, as they can be pasted into a shell."""
    own = [study.command] if study.command else [run.manifest.command for run in _runs(study)]
    return list(dict.fromkeys(shlex.join(command) for command in own))


def machines(study: Study) -> Table:
    """Versions and hardware; where trials differ, every value with the number of trials that had it."""
    facts: list[dict[str, str]] = []
    for run in _runs(study):
        hardware = dict(run.manifest.hardware)
        if isinstance(hardware.get("memory"), int):
            hardware["memory"] = byte_count(hardware["memory"])
        facts.append(_flat({"torrential": run.manifest.torrential} | run.manifest.versions | hardware))
    rows = []
    for name in dict.fromkeys(name for fact in facts for name in fact):
        values = [fact.get(name, "") for fact in facts]
        each = {value: values.count(value) for value in dict.fromkeys(values)}
        shown = [f"{value or 'none'} ({times} trials)" if len(each) > 1 else value for value, times in each.items()]
        rows.append([name, "; ".join(shown)])
    created = sorted(run.manifest.created for run in _runs(study))
    rows.append(["first run begun", created[0]])
    if created[-1] != created[0]:
        rows.append(["last run begun", created[-1]])
    return Table(["", ""], [row for row in rows if row[1]], words=2)


def options(study: Study) -> tuple[Table, Table]:
    """The options that all trials had in common, and those of each entry; values that changed from trial to trial are
    listed."""
    configs = [[_named(_flat(run.config)) for run in entry.runs] for entry in study.entries]
    names = list(dict.fromkeys(name for entry in configs for config in entry for name in config))
    everywhere = {name: {config.get(name, "") for entry in configs for config in entry} for name in names}
    same = [[name, value] for name in names if len(everywhere[name]) == 1 for value in everywhere[name] if value]
    differ = [name for name in names if len(everywhere[name]) > 1]
    rows = [
        [name, *(", ".join(dict.fromkeys(config.get(name, "") for config in own)) for own in configs)]
        for name in differ
    ]
    heads = ["option", *(entry.name for entry in study.entries)]
    return Table(["option", "value"], same, words=2), Table(heads, rows, words=len(heads))


def _named(config: dict[str, str]) -> dict[str, str]:
    """The options as they are given after --set; without seeds, which are with the trials, and without those that are
    listed again because they were changed."""
    plain = {name: value for name, value in config.items() if name != "seed" and not name.startswith("changed.")}
    for section in SECTIONS:
        plain = {name.removeprefix(section): value for name, value in plain.items()}
    return plain


def evaluations(study: Study) -> list[str]:
    """The intervals between evaluations: times to the target are no finer than that."""
    found: dict[str, list[str]] = {}
    for entry in study.entries:
        gaps = [gap for run in entry.runs for gap in np.diff(metric_curve(run, "time")[0]) if gap > 0]
        if gaps:
            found.setdefault(f"{number(median(gaps))} {unit_of_time(entry.world)}", []).append(entry.name)
    if not found:
        return []
    each = [f"{gap} ({', '.join(names)})" if len(found) > 1 else gap for gap, names in found.items()]
    return [f"From one evaluation to the next, in the median: {'; '.join(each)}. No time to a target is more exact."]


def _runs(study: Study) -> list[Run]:
    return [run for entry in study.entries for run in entry.runs]


def _flat(tree: dict[str, Any]) -> dict[str, str]:
    return dict(_leaves(tree, ""))


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
