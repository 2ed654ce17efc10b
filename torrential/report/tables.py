"""The numbers behind the figures, and how they came about, as text that can be selected and copied."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from torrential.progress import byte_count, metric_value, number
from torrential.report.marks import outcome, samples_per_second
from torrential.report.series import Work, metric_curve
from torrential.study.results import Entry, Run, Study


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]
    words: int = 1  # so many columns are words; numbers, on the right, follow


def trials(study: Study, works: dict[int, Work]) -> Table:
    """One row per trial; a column that no trial has anything for is left out."""
    rows = [
        {"entry": entry.name, "trial": run.directory.name, "seed": str(run.manifest.seed)}
        | _trial(study, run, works[id(run)])
        for entry in study.entries
        for run in entry.runs
    ]
    columns = [name for name in (rows[0] if rows else {}) if any(row[name] for row in rows)]
    return Table(columns, [[row[name] for name in columns] for row in rows], words=2)


def _trial(study: Study, run: Run, work: Work) -> dict[str, str]:
    summary, updates = run.summary, work.updates
    speed, total = samples_per_second(run), updates.staleness.total()
    mean = sum(value * times for value, times in updates.staleness.items()) / total if total else None
    _, values = metric_curve(run, "time")
    return {
        "time to target": outcome(run) if study.target is not None else "",
        f"test {study.metric}": "" if summary is None or summary.value is None else _metric(study, summary.value),
        f"validation {study.metric}": _metric(study, values[-1]) if len(values) else "",
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


def _metric(study: Study, value: float) -> str:
    return metric_value(study.metric, float(value))


def tuning(study: Study) -> Table:
    head = ["tried", "trials", *(["reached the target"] if study.target is not None else []), "mean seconds to it",
            f"mean test {study.metric}"]  # fmt: skip
    if study.target is None:
        head.remove("mean seconds to it")
    return Table(head, [_tuned(study, entry) for entry in study.tuning])


def _tuned(study: Study, entry: Entry) -> list[str]:
    times = [run.time_to_target for run in entry.runs if run.time_to_target is not None]
    values = [run.summary.value for run in entry.runs if run.summary and run.summary.value is not None]
    to_target = [f"{len(times)}", number(fmean(times)) if times else ""] if study.target is not None else []
    return [entry.name, f"{len(entry.runs)}", *to_target, _metric(study, fmean(values)) if values else ""]


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
    """What all trials had in common, and what each entry had; values that changed from trial to trial are listed."""
    configs = [[_flat(run.config) for run in entry.runs] for entry in study.entries]
    names = list(dict.fromkeys(name for entry in configs for config in entry for name in config))
    everywhere = {name: {config.get(name, "") for entry in configs for config in entry} for name in names}
    same = [[name, value] for name in names if len(everywhere[name]) == 1 for value in everywhere[name] if value]
    differ = [name for name in names if len(everywhere[name]) > 1]
    rows = [
        [entry.name, *(", ".join(dict.fromkeys(config.get(name, "") for config in own)) for name in differ)]
        for entry, own in zip(study.entries, configs, strict=True)
    ]
    return Table(["option", "value"], same, words=2), Table(["entry", *differ], rows, words=len(differ) + 1)


def evaluations(study: Study) -> list[str]:
    """How finely time is told."""
    found: dict[str, list[str]] = {}
    for entry in study.entries:
        gaps = [gap for run in entry.runs for gap in np.diff(metric_curve(run, "time")[0]) if gap > 0]
        if gaps:
            found.setdefault(f"{number(median(gaps))} s", []).append(entry.name)
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
    return number(value) if isinstance(value, float) else str(value)
