"""The figures as plotly.js takes them: plain dictionaries. Colours of text and grid come from the page's theme.

A trace that belongs to an entry of the legend carries that entry's key in `meta`, by which the page hides and shows it.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, median
from typing import Any

import numpy as np

from torrential.progress import metric_value, number
from torrential.reporting import series
from torrential.reporting.marks import Figure, Key, Trace, entry_keys, outcome, safe, short, time_name, unbroken
from torrential.study.results import Entry, Run, Study

Works = dict[int, series.StepColumns]  # by id() of the run

PART_COLOURS = {"compute": "#0072B2", "communicate": "#E69F00", "wait": "#CC79A7"}
PART_PATTERNS = {"compute": "", "communicate": "/", "wait": "."}
CURVE_POINTS = 400  # of one trial
ROW_PIXELS = 58  # of one entry among bars


def metric_curves(study: Study, against: str, figure: str | None = None) -> Figure | None:
    """The curves of the metric, or of a figure of the task's own."""
    traces: list[Trace] = []
    for entry, key in zip(study.entries, entry_keys(study), strict=True):
        curves = [(run, series.metric_curve(run, against, figure)) for run in entry.runs]
        traces += _curves([(run, curve) for run, curve in curves if len(curve[0])], key, against)
    if not traces:
        return None
    title, name = time_name(study) if against == "time" else "samples", figure or study.metric
    layout: dict[str, Any] = {
        "height": 460,
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": safe(name)}, "tickformat": ".0%" if "accuracy" in name else ""},
    }
    if study.target is not None and figure is None:
        layout |= _target_line(study)
    return {"data": traces, "layout": layout}


def _curves(curves: list[tuple[Run, series.Curve]], key: Key, against: str) -> list[Trace]:
    """All trials thin, the median of those that ended thick with a band of the middle half; a single trial is thick
    itself."""
    unit = " s" if against == "time" else " samples"
    hover = f"%{{y}} after %{{x:,.4~r}}{unit}<extra>{safe(key.name)}</extra>"
    common = {"type": "scatter", "meta": key.key, "name": safe(key.name), "hovertemplate": hover}
    ended = [(run, curve) for run, curve in curves if run.finished]
    summary = series.band([curve for _, curve in ended], [run.time_to_target is not None for run, _ in ended])
    thick = {"color": key.colour, "width": 2.5, "dash": key.dash}
    traces: list[Trace] = []
    if summary is not None:
        grid, middle, low, high = summary
        outline = {"x": short([*grid, *grid[::-1]]), "y": short([*high, *low[::-1]])}
        fill = {"mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": key.colour + "2e"}
        traces.append(common | outline | fill | {"hoverinfo": "skip", "hovertemplate": None})
    for _, curve in curves:
        x, y = series.thin(curve, CURVE_POINTS)
        line = thick if len(curves) == 1 else {"color": key.colour, "width": 1}
        mode = "lines+markers" if len(x) == 1 or (len(curves) == 1 and len(x) <= 60) else "lines"
        style = {"mode": mode, "line": line, "marker": {"size": 5}, "opacity": 1.0 if len(curves) == 1 else 0.45}
        traces.append(common | {"x": short(x), "y": short(y)} | style)
    if summary is not None:
        traces.append(common | {"mode": "lines", "x": short(grid), "y": short(middle), "line": thick})
    return traces


def _target_line(study: Study) -> dict[str, Any]:
    assert study.target is not None
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": study.target, "y1": study.target}
    words = {"text": f"target {safe(metric_value(study.metric, study.target))}", "xref": "paper", "x": 1}
    place = {"xanchor": "right", "yanchor": "top", "y": study.target, "showarrow": False}
    return {"shapes": [line | {"line": {"width": 1, "dash": "dash"}}], "annotations": [words | place]}


def target_bars(study: Study, works: Works) -> Figure | None:
    """A bar to the median over all finished trials, a miss being later than anything; none if the median is a miss."""
    runs = [run for entry in study.entries for run in entry.runs]
    if study.target is None or not any(run.finished for run in runs):
        return None
    times = [run.time_to_target for run in runs if run.time_to_target is not None]
    longest = max(times or [works[id(run)].seconds for run in runs]) or 1.0
    edge = longest * 1.12
    traces: list[Trace] = []
    for row, (entry, key) in enumerate(zip(study.entries, entry_keys(study), strict=True)):
        reached = [math.inf if run.time_to_target is None else run.time_to_target for run in entry.finished]
        if reached and math.isfinite(middle := median(reached)):
            text = f"median {number(middle)} s<extra>{safe(entry.name)}</extra>"
            bar = {"type": "bar", "orientation": "h", "x": short([middle]), "y": [row], "width": 0.34}
            traces.append(bar | {"marker": {"color": key.colour + "80"}, "hovertemplate": text})
        if entry.runs:
            traces.append(_trial_points(entry, row, edge, key))
    labels = [_row_label(_target_words(entry), row) for row, entry in enumerate(study.entries)]
    missed = len(times) < len(runs)
    if missed:
        labels.append(_edge_label(edge))
    layout = _rows_layout(len(study.entries), f"{time_name(study)} to {metric_value(study.metric, study.target)}")
    layout["xaxis"] |= {"range": [0, (edge if missed else longest) * 1.06]}
    return {"data": traces, "layout": layout | {"annotations": labels}}


def _target_words(entry: Entry) -> str:
    missed = Counter("missed" if run.finished else "not ended" for run in entry.runs if run.time_to_target is None)
    words = [unbroken(f"{count} of {len(entry.runs)} {how}") for how, count in missed.items()]
    return ": ".join([entry.name, *filter(None, [", ".join(words)])])


def _trial_points(entry: Entry, row: int, edge: float, key: Key) -> Trace:
    """Circles; a cross at the edge for a miss, an open one for a trial that has not ended."""
    spread = np.linspace(-0.12, 0.12, len(entry.runs)) if len(entry.runs) > 1 else np.zeros(1)
    texts = [f"{safe(run.directory.name)}: {outcome(run)}" for run in entry.runs]
    times = [edge if run.time_to_target is None else run.time_to_target for run in entry.runs]
    symbols = ["circle" if run.time_to_target is not None else "x" if run.finished else "x-open" for run in entry.runs]
    marker = {"color": key.colour, "size": 9, "symbol": symbols, "line": {"width": 1, "color": "#ffffff"}}
    style = {"type": "scatter", "mode": "markers", "marker": marker, "text": texts, "cliponaxis": False}
    hover = f"%{{text}}<extra>{safe(entry.name)}</extra>"
    return style | {"x": short(times), "y": short(row + spread), "hovertemplate": hover}


def time_spent(study: Study, works: Works) -> Figure | None:
    rows = [
        (entry, [series.seconds_spent(works[id(run)]) for run in entry.runs if run.steps]) for entry in study.entries
    ]
    rows = [(entry, spent) for entry, spent in rows if spent]
    if not rows:
        return None
    traces: list[Trace] = []
    means = [{part: fmean(each[part] for each in spent) for part in series.PARTS} for _, spent in rows]
    for part in series.PARTS:
        seconds = [mean[part] for mean in means]
        percent = [100 * mean[part] / (sum(mean.values()) or 1.0) for mean in means]
        style = {"color": PART_COLOURS[part], "pattern": _pattern(part)}
        traces.append(
            {"type": "bar", "orientation": "h", "name": part, "x": short(seconds), "y": list(range(len(rows))),
             "width": 0.34, "marker": style, "customdata": short(percent),
             "hovertemplate": f"{part} %{{x:,.4~r}} s, %{{customdata:.1f}} %<extra></extra>"}
        )  # fmt: skip
    labels = [_row_label(_spent_words(entry.name, mean), i)
              for i, ((entry, _), mean) in enumerate(zip(rows, means, strict=True))]  # fmt: skip
    layout = _rows_layout(len(rows), f"{time_name(study)} of the average worker")
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"}
    layout["height"] += 30
    return {
        "data": traces,
        "layout": layout | {"annotations": labels, "barmode": "stack", "showlegend": True, "legend": legend},
    }


def _pattern(part: str) -> dict[str, Any]:
    """The pattern of a part, so that parts are recognised without their colours."""
    return {"shape": PART_PATTERNS[part], "fillmode": "overlay", "fgcolor": "#ffffff", "solidity": 0.2, "size": 8}


def _spent_words(name: str, mean: dict[str, float]) -> str:
    total = sum(mean.values()) or 1.0
    percents = " / ".join(f"{100 * mean[part] / total:.0f}" for part in series.PARTS)
    return f"{name}: {unbroken(percents + ' %')}"


def staleness(study: Study, works: Works) -> Figure | None:
    """The figure of staleness; None where no update was ever stale."""
    totals = [sum((works[id(run)].updates.staleness for run in entry.runs), Counter[int]()) for entry in study.entries]
    if not any(value > 0 for total in totals for value in total):
        return None
    largest = max(value for total in totals for value in total)
    traces: list[Trace] = []
    for key, total in zip(entry_keys(study), totals, strict=True):
        if not total:
            continue
        x, y = series.shares_at_most(total)
        x, y = np.append(x, largest), np.append(y, 1.0)  # a line to the end for every entry
        hover = f"%{{y:.1%}} at most %{{x}}<extra>{safe(key.name)}</extra>"
        line = {"color": key.colour, "dash": key.dash, "width": 2.5, "shape": "hv"}
        traces.append(
            {"type": "scatter", "mode": "lines", "x": short(x), "y": short(y), "line": line,
             "cliponaxis": False, "meta": key.key, "name": safe(key.name), "hovertemplate": hover}
        )  # fmt: skip
    layout = {
        "height": 400,
        "xaxis": {"title": {"text": "staleness"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "updates at most as stale"}, "tickformat": ".0%", "range": [0, 1.03]},
    }
    return {"data": traces, "layout": layout}


def periods(study: Study) -> Figure | None:
    """The local steps between two averages against time; None where no run has changed them."""
    traces: list[Trace] = []
    for entry, key in zip(study.entries, entry_keys(study), strict=True):
        hover = f"%{{y}} steps from %{{x:,.4~r}} s on<extra>{safe(key.name)}</extra>"
        line = {"color": key.colour, "dash": key.dash, "width": 1.5, "shape": "hv"}
        for x, y in filter(lambda curve: len(curve[0]), map(series.periods, entry.runs)):
            traces.append(
                {"type": "scatter", "mode": "lines", "x": short(x), "y": short(y), "line": line,
                 "meta": key.key, "name": safe(key.name), "hovertemplate": hover}
            )  # fmt: skip
    layout = {
        "height": 300,
        "xaxis": {"title": {"text": time_name(study)}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "local steps"}, "rangemode": "tozero"},
    }
    return {"data": traces, "layout": layout} if traces else None


def _rows_layout(rows: int, title: str) -> dict[str, Any]:
    """The layout of horizontal bars with the names above them, which leaves a phone all its width for the bars."""
    return {
        "height": 80 + ROW_PIXELS * rows,
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {
            "range": [rows - 0.6, -0.75],
            "showticklabels": False,
            "ticks": "",
            "showgrid": False,
            "zeroline": False,
        },
    }


def _row_label(text: str, row: int) -> dict[str, Any]:
    place = {"xref": "paper", "x": 0, "xanchor": "left", "y": row - 0.2, "yanchor": "bottom"}
    return place | {"text": safe(text), "showarrow": False, "borderpad": 0, "align": "left"}


def _edge_label(edge: float) -> dict[str, Any]:
    place = {"x": edge, "xanchor": "center", "yref": "paper", "y": 1, "yanchor": "bottom"}
    return place | {"text": "missed", "showarrow": False}
