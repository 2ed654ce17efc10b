"""Who computed when, who died and who joined: one trial at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from torrential.records import Event
from torrential.reporting import series
from torrential.reporting.marks import COLOURS, Figure, Trace, safe, short
from torrential.study.results import Run, Study

LOOKS = {
    "worker_lost": ("x", "#D55E00"),
    "worker_hung": ("cross", "#D55E00"),
    "worker_joined": ("triangle-up", "#009E73"),
}
OTHER_SYMBOLS = ("diamond", "square", "circle", "star", "hexagon")
CELLS = 250_000  # of all timelines together
SLOW = 2.0  # times as long per update as the median worker: a straggler


def timeline(run: Run, work: series.StepColumns, bins: int) -> Figure | None:
    """Who computed when, with deaths and joins; a row per worker, or per block of workers where there are many."""
    if not run.steps:
        return None
    activity = series.activity(work, bins)
    slow = series.slowness(work)
    centres = (activity.edges[:-1] + activity.edges[1:]) / 2
    heat = {
        "type": "heatmap", "x": short(centres), "y": list(range(len(activity.rows))),
        "z": _percent(activity.compute), "customdata": _percent(activity.communicate), "zmin": 0, "zmax": 100,
        "colorscale": "Cividis", "hoverongaps": False, "ygap": 2 if len(activity.rows) <= 32 else 0,
        "colorbar": {"title": {"text": "computing, %", "side": "right", "font": {"size": 12}}, "thickness": 10,
                     "outlinewidth": 0},
        "hovertemplate": "after %{x:,.4~r} s: computing %{z} %, communicating %{customdata} %<extra></extra>",
    }  # fmt: skip
    rows = len(activity.rows)
    above = -max(1.0, rows / 16)  # where events of no worker are shown
    events = _event_traces(run.events, activity, above)
    layout = {
        "height": 150 + min(460, max(90, 26 * rows)),
        "xaxis": {"title": {"text": "simulated seconds" if run.config.get("world") == "sim" else "seconds"}},
        "yaxis": _worker_axis(activity, slow, above if events else None),
        "showlegend": bool(events),
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    return {"data": [heat, *events], "layout": layout}


def _worker_axis(activity: series.Activity, slow: dict[int, float], above: float | None) -> dict[str, Any]:
    """Named: every row while there is room, else some of them, and all stragglers."""
    every = -(-len(activity.rows) // 24)
    factors = [max(slow.get(worker, 0.0) for worker in workers) for workers in activity.rows]
    named = [row for row, factor in enumerate(factors) if row % every == 0 or factor >= SLOW]
    ticks: dict[float, str] = {} if above is None else {above: "run"}
    ticks |= {row: _worker_label(activity.rows[row], factors[row]) for row in named}
    return {
        "title": {"text": "worker"}, "autorange": "reversed", "tickvals": list(ticks), "ticktext": list(ticks.values()),
        "zeroline": False, "showgrid": False,
    }  # fmt: skip


def _worker_label(workers: range, factor: float) -> str:
    name = f"{workers[0]}" if len(workers) == 1 else f"{workers[0]}–{workers[-1]}"
    return f"{name} ({factor:.1f} ×)" if factor >= SLOW else name


def _event_traces(events: list[Event], activity: series.Activity, above: float) -> list[Trace]:
    """The traces of events: those of a worker on its row, all others on a row of their own above."""
    kinds: dict[str, list[tuple[Event, float]]] = {}
    for event in events:
        row = None if event.worker is None else activity.row_of(event.worker)
        kinds.setdefault(event.event, []).append((event, above if row is None else row))
    traces = []
    for i, (kind, found) in enumerate(sorted(kinds.items())):
        texts = [safe(event_words(event)) for event, _ in found]
        symbol, colour = LOOKS.get(kind, (OTHER_SYMBOLS[i % 5], COLOURS[i % 7]))
        marker = {"symbol": symbol, "size": 12, "color": colour, "line": {"width": 1.5, "color": "#ffffff"}}
        traces.append(
            {"type": "scatter", "mode": "markers", "name": safe(kind.replace("_", " ")), "text": texts,
             "x": short(event.time for event, _ in found), "y": [row for _, row in found], "marker": marker,
             "cliponaxis": False, "hovertemplate": "%{text}<extra></extra>"}
        )  # fmt: skip
    return traces


def event_words(event: Event) -> str:
    about = [f"worker {event.worker}"] if event.worker is not None else []
    about += [f"step {event.step:,}"] if event.step is not None else []
    return " · ".join([f"{event.time:.2f} s", event.event.replace("_", " "), *about, *filter(None, [event.detail])])


def timeline_bins(study: Study) -> int:
    """The number of bins with which all timelines of a study stay within CELLS."""
    rows = sum(
        min(series.MOST_ROWS, int(run.config.get("workers", 1))) for entry in study.entries for run in entry.runs
    )
    return max(30, min(240, CELLS // max(1, rows)))


def _percent(shares: series.Floats) -> list[list[int | None]]:
    rows = np.rint(100 * shares)
    return [[None if np.isnan(value) else int(value) for value in row] for row in rows]
