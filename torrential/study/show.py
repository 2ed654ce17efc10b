"""What a study says: a table and sentences for a person, a JSON object for a program, a CSV file for a spreadsheet."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torrential.progress import byte_count, final_metric, metric_value, number
from torrential.records import replace_file
from torrential.study import tuning
from torrential.study.results import Entry, Run, Study, unit_of_time
from torrential.study.statistics import Spread
from torrential.study.verdict import MISSES, Pair, Row, Verdict
from torrential.terminal import printable

DISPENSABLE = ("options", "all", "worker-s", "sent", "range")  # left out in this order where the table is too wide
NAME = 12  # characters of an entry's name that have room in any case
TRIALS = "trials.csv"


def show(study: Study, verdict: Verdict, console: Console) -> None:
    """Everything a person wants to know, as far as the console is wide enough."""
    console.print(_table(study, verdict, console))
    for line in verdict.sentences:
        console.print(Text(line, style="bold yellow" if verdict.refused else "bold"), soft_wrap=True, highlight=False)
    for line in verdict.rules:
        console.print(Text(line, style="dim"), soft_wrap=True, highlight=False)
    for line in study.problems:
        console.print(Text(line, style="yellow"), soft_wrap=True, highlight=False)


def _table(study: Study, verdict: Verdict, console: Console) -> RenderableType:
    rows = [dict(zip(columns(study), cells(study, row), strict=True)) for row in verdict.rows]
    shown, left_out = columns(study), list[str]()
    unbounded = console.options.update(width=sys.maxsize)
    table = _drawn(title(study, verdict), shown, rows)
    for name in DISPENSABLE:
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
        found = [column for column in shown if column.split(",")[0] == name]
        left_out += [name] * len(found)
        shown = [column for column in shown if column not in found]
        table = _drawn(title(study, verdict), shown, rows)
    words = [legend(study, verdict, left_out)]
    if left_out:
        words.append(f"left out, as the terminal is narrow, but on the page: {', '.join(left_out)}")
    return Group(table, Text("; ".join(filter(None, words)), style="dim"))


def _drawn(title: str, shown: list[str], rows: list[dict[str, str]]) -> Table:
    """Only names of entries are ever folded."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(title), title_style="italic")
    for name in shown:
        head = Text(name.replace(", ", ",\n").replace("test ", "test\n").replace("reported ", "reported\n"))
        if name == "entry":
            table.add_column(head, overflow="fold", min_width=NAME)
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in shown))
    return table


def title(study: Study, verdict: Verdict) -> str:
    if study.target is None:
        return f"{study.task}: no target, so no time to one"
    label = " (not a result)" if verdict.refused else ""
    time = "virtual time" if _unit(study) == unit_of_time("sim") else "time"
    return f"{study.task}: {time} to {metric_value(study.metric, study.target)} {study.metric}{label}"


def _unit(study: Study) -> str:
    units = {unit_of_time(entry.world) for entry in study.entries}
    return "s (sim: virtual)" if len(units) > 1 else units.pop() if units else "s"


def columns(study: Study) -> list[str]:
    """The columns of the table that has a line for each entry."""
    s, value = _unit(study), final_metric(study.metric, study.own_loop)
    if study.target is None:
        return ["entry", "ended", f"trained, {s}", value, "options"]
    times = ["reached", f"median, {s}", "range", f"all, {s}"]
    return ["entry", *times, "worker-s", "sent", value, "options"]


def legend(study: Study, verdict: Verdict, left_out: Sequence[str] = ()) -> str:
    sums = [] if study.target is None else [name for name in ("worker-s", "sent") if name not in left_out]
    words = [f"{', '.join(sums)}: by workers until the target, medians"] if sums else []
    if study.target is None:
        words.append("trained: the median")
    words.append(f"{final_metric(study.metric, study.own_loop)}: mean ± standard deviation")
    if "options" not in left_out:
        words.append("options: that were set for the entry")
    if any(row.missed >= MISSES and math.isfinite(row.time.median) for row in verdict.rows):
        words.append(f"*: {MISSES} or more missed, so these times are no result")
    return "; ".join(words)


def cells(study: Study, row: Row) -> list[str]:
    star = "*" if row.missed >= MISSES and math.isfinite(row.time.median) else ""
    times = [_short(time) if math.isfinite(time) else "missed" for time in row.times]
    tuned = "".join(f" {name}={value}" for name, value in row.entry.tuned.items())
    name = row.entry.name + (f" (tuned:{tuned})" if tuned else "")
    value, options = _metric_spread(study.metric, row.value), str(row.options)
    if study.target is None:
        return [name, f"{row.trials} of {len(row.entry.runs)}", _or_dash(row.seconds.median), value, options]
    return [
        name,
        f"{row.reached} of {row.trials}",
        _or_dash(row.time.median) + star,
        _range(row.times),
        " ".join(times) if row.reached else "all missed" if times else "–",
        _or_dash(row.worker_seconds.median),
        byte_count(row.bytes_sent.median) if math.isfinite(row.bytes_sent.median) else "–",
        value,
        options,
    ]


def _range(times: Sequence[float]) -> str:
    """The least and the most; a miss is the most."""
    if not times or not math.isfinite(min(times)):
        return "–"
    most = _short(max(times)) if math.isfinite(max(times)) else "missed"
    return f"{_short(min(times))}–{most}" if len(times) > 1 else _short(min(times))


def _metric_spread(metric: str, of: Spread) -> str:
    if not of.count:
        return "–"
    mean = metric_value(metric, of.mean)
    return mean if math.isnan(of.sd) else f"{mean.removesuffix(' %')} ± {metric_value(metric, of.sd)}"


def _or_dash(value: float) -> str:
    return _short(value) if math.isfinite(value) else "–"


def _short(value: float) -> str:
    """Three significant digits: trials do not tell more."""
    return f"{value:#.3g}".rstrip(".") if 0.001 <= abs(value) < 1000 else number(value)


# -- for programs -----------------------------------------------------------------------------------------------------
def to_json(study: Study, verdict: Verdict, report: Path | None) -> str:
    """One object on one line; what is not a finite number is null."""
    runs, seconds = tuning.cost(study)
    shown = {
        "task": study.task,
        "metric": study.metric,
        "target": study.target,
        "trials": study.trials,
        "looks": study.looks,
        "interval": study.interval,
        "measured": study.measured,
        "result": not verdict.refused,
        "verdict": verdict.sentences,
        "rules": verdict.rules,
        "entries": [_row(row) for row in verdict.rows],
        "pairs": [_pair(pair) for pair in verdict.pairs],
        "tuning": {"runs": runs, "worker_seconds": seconds},
        "problems": study.problems,
        "out": str(study.directory),
        "report": None if report is None else str(report),
    }
    return msgspec.json.encode(shown).decode()  # msgspec writes what is not finite as null


def _row(row: Row) -> dict[str, Any]:
    entry = row.entry
    return {
        "name": entry.name,
        "strategy": entry.strategy,
        "options": entry.options,
        "tuned": entry.tuned,
        "workers": entry.workers,
        "servers": entry.servers,
        "world": entry.world,
        "cluster": entry.cluster,
        "trials": row.trials,
        "reached": row.reached,
        "missed": row.missed,
        "times": row.times,
        "time": row.time,
        "stability": row.stability,
        "worker_seconds": row.worker_seconds,
        "bytes_sent": row.bytes_sent,
        "value": row.value,
        "seconds": row.seconds,
        "interval": row.interval,
        "options_set": row.options,
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "first": pair.first.entry.name,
        "second": pair.second.entry.name,
        "ratio": pair.difference.ratio,
        "low": pair.difference.low,
        "high": pair.difference.high,
        "sooner": pair.difference.sooner,
        "p": pair.difference.p,
        "p_holm": pair.p,
        "differs": pair.differs,
        "sentence": pair.sentence,
    }


def write_csv(study: Study) -> Path:
    """A line for each run."""
    text = io.StringIO()
    lines = [_line("trial", entry, run) for entry in study.entries for run in entry.runs]
    lines += [_line("tuning", entry, run) for entry in study.tuning for run in entry.runs]
    if lines:
        writer = csv.DictWriter(text, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    path = study.directory / TRIALS
    replace_file(path, printable(text.getvalue()).encode())
    return path


def _outcome(run: Run) -> str:
    if not run.finished:
        return "failed" if run.failed else "cut off"
    return "diverged" if run.diverged else "missed" if run.time_to_target is None else "reached"


def _line(kind: str, entry: Entry, run: Run) -> dict[str, Any]:
    time, summary = run.time_to_target, run.summary
    return {
        "kind": kind,
        "entry": entry.name,
        "strategy": entry.strategy,
        "options": "+".join(f"{name}={value}" for name, value in entry.options.items()),
        "workers": entry.workers,
        "servers": entry.servers,
        "world": entry.world,
        "cluster": entry.cluster,
        "seed": run.manifest.seed,
        "outcome": _outcome(run),
        "time_to_target": time,
        "worker_seconds": None if time is None else entry.workers * time,
        "bytes_to_target": run.bytes_to_target,
        "steps": None if summary is None else summary.steps,
        "samples": None if summary is None else summary.samples,
        "seconds": run.seconds,
        "value": None if summary is None else summary.value,
        "staleness_mean": None if summary is None else summary.staleness_mean,
        "directory": str(run.directory),
        "problem": run.problem,
    }
