"""What more workers are worth, where several counts ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from torrential.config import label_of
from torrential.reporting.marks import Figure, Key, Trace, keys, safe, samples_per_second, short, time_name
from torrential.study.results import Entry, Study


def scaling_groups(study: Study) -> list[tuple[str, list[Entry]]]:
    """Entries that differ in the number of workers, and perhaps in servers and what tuning chose; several each."""
    groups: dict[str, list[Entry]] = {}
    for entry in study.entries:
        options = "+".join(f"{name}={value}" for name, value in entry.options.items() if name not in entry.tuned)
        where = [part for part in (entry.world if entry.world != "local" else "", entry.cluster) if part]
        groups.setdefault(" · ".join([f"{label_of(entry.strategy)}:{options}".rstrip(":"), *where]), []).append(entry)
    return [
        (name, sorted(entries, key=lambda entry: entry.workers))
        for name, entries in groups.items()
        if len({entry.workers for entry in entries}) > 1
    ]


def scaling(study: Study, value: str) -> Figure | None:
    """The "time" to the target, or the "speed" in samples a second, against workers; trials as points."""
    if value == "time" and study.target is None:
        return None
    groups = scaling_groups(study)
    traces: list[Trace] = []
    for key, (_, entries) in zip(keys((name for name, _ in groups), "s"), groups, strict=True):
        every = [(entry.workers, _values(entry, value)) for entry in entries]
        found = [(workers, values) for workers, values in every if any(map(math.isfinite, values))]
        if found:
            traces += _scaling_traces(found, key, value)
    if not traces:
        return None
    counts = sorted({entry.workers for _, entries in groups for entry in entries})
    title = f"{time_name(study)} to the target" if value == "time" else "samples a second"
    xaxis = {"title": {"text": "workers"}, "type": "log"} | _ticks(counts)
    drawn = [v for trace in traces for v in trace["y"] if v]
    yaxis = {"title": {"text": title}, "type": "log"} | _ticks(_one_two_five(min(drawn), max(drawn)))
    return {"data": traces, "layout": {"height": 400, "xaxis": xaxis, "yaxis": yaxis}}


def _ticks(values: Sequence[float]) -> dict[str, Any]:
    return {"tickvals": list(values), "ticktext": [f"{value:,g}" for value in values]}


def _one_two_five(low: float, high: float) -> list[float]:
    """Marks for a logarithmic axis, from at or below the lowest value to at or above the highest."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    below = max((mark for mark in marks if mark <= low), default=low)
    return [mark for mark in marks if below <= mark <= min(m for m in [*marks, high] if m >= high)]


def _values(entry: Entry, value: str) -> list[float]:
    """The values of an entry's finished trials; a time that is missed is infinite."""
    if value == "time":
        return [math.inf if run.time_to_target is None else run.time_to_target for run in entry.finished]
    return [speed for run in entry.finished if (speed := samples_per_second(run)) is not None]


def _scaling_traces(found: list[tuple[int, list[float]]], key: Key, value: str) -> list[Trace]:
    common = {"type": "scatter", "meta": key.key, "name": safe(key.name)}
    unit = "s" if value == "time" else "samples/s"
    hover = f"%{{x}} workers: %{{y:,.4~r}} {unit}<extra>{safe(key.name)}</extra>"
    line = {"color": key.colour, "dash": key.dash, "width": 2.5}
    workers = [count for count, _ in found]
    middles = [median(values) for _, values in found]
    first, base = next(((n, m) for n, m in zip(workers, middles, strict=True) if math.isfinite(m)), (1, math.inf))
    ideal = [base * ((first / n) if value == "time" else (n / first)) for n in workers]
    points = [(count, v) for count, values in found for v in values if math.isfinite(v)]
    return [
        common | {"mode": "lines", "x": workers, "y": short(ideal), "hoverinfo": "skip", "opacity": 0.8,
                  "line": {"color": key.colour, "dash": "dot", "width": 1.5}},
        common | {"mode": "lines", "x": workers, "y": short(middles), "line": line, "hovertemplate": hover},
        common | {"mode": "markers", "x": [n for n, _ in points], "y": short(v for _, v in points),
                  "marker": {"color": key.colour, "size": 7}, "hovertemplate": hover},
    ]  # fmt: skip
