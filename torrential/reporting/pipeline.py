"""One step of a pipeline: who did what when, as far as a trace of the run tells."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from torrential.reporting.marks import Figure, Trace, safe, short
from torrential.reporting.pipeline_trace import PipelineStep, PipelineTrace, message_seconds, predicted, read_trace
from torrential.reporting.tables import Table
from torrential.study.results import Run, Study

KINDS = {  # what is drawn, in which colour and pattern
    "forward": ("#0072B2", ""),
    "backward": ("#009E73", ""),
    "weight gradient": ("#56B4E9", "\\"),
    "communicate": ("#E69F00", "/"),
    "idle": ("#CC79A7", "."),
}
MOST_NUMBERED = 600  # parts of a figure with the numbers of their microbatches on them
NAME = "trace.json"


@dataclass(frozen=True)
class PipelineView:
    """One run's pipeline as the page shows it."""

    text: str
    figure: Figure
    table: Table


def pipeline_views(study: Study) -> dict[str, PipelineView | str]:
    """The pipelines of all runs that have a trace, by the run's name; or what is wrong with the trace, in words."""
    found: dict[str, PipelineView | str] = {}
    for run in (run for entry in study.entries for run in entry.runs):
        stages = run.config.get("options", {}).get("stages")
        if not isinstance(stages, int) or not (run.directory / NAME).exists():
            continue
        try:
            trace = read_trace(run.directory / NAME, stages)
        except (OSError, msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
            found[run.directory.name] = f"{NAME} of {run.directory.name} cannot be read ({error}); trace the run again"
            continue
        if trace is not None:
            found[run.directory.name] = _view(run, trace)
    return found


def _view(run: Run, trace: PipelineTrace) -> PipelineView:
    step = trace.typical
    return PipelineView(_words(run, trace, step), _figure(run, step), _table(trace, step))


def _words(run: Run, trace: PipelineTrace, step: PipelineStep) -> str:
    order = str(run.config.get("options", {}).get("order", run.config.get("strategy", "")))  # or that of its name
    workers, microbatches = len(step.workers), len({doing.microbatch for doing in step.doings})
    said = f"{run.directory.name}: step {step.number:,}, the one of median length. "
    said += f"Workers do not compute for {100 * step.bubble:.1f} % of it. "
    if (rehearsed := predicted(step, order)) is None:
        return said
    message = message_seconds(step)
    said += f"Predicted: {100 * rehearsed.bubble:.1f} %, by a rehearsal of {order} with the forwards and backwards of "
    said += f"this step and {1e3 * message:.2f} ms for a message; "
    chunks = 1 + max(doing.chunk for doing in step.doings)
    equal = (workers - 1) / (chunks * microbatches + workers - 1)
    return said + f"{100 * equal:.1f} % if all stages were equally slow and messages free."


def _figure(run: Run, step: PipelineStep) -> Figure:
    rows = {worker: row for row, worker in enumerate(step.workers)}
    parts: dict[str, list[tuple[int, float, float, str]]] = {kind: [] for kind in KINDS}
    for doing in step.doings:
        row, begin = rows[doing.worker], doing.begin - step.begin
        number = f"{doing.microbatch}" if not doing.chunk else f"{doing.microbatch}.{doing.chunk}"
        waits = max(0.0, min(doing.waited, doing.end - doing.begin)) if not doing.computes else 0.0
        if waits:
            parts["idle"].append((row, begin, waits, number))
        kind = next((kind for kind in KINDS if doing.what.startswith(kind)), "communicate")
        parts[kind].append((row, begin + waits, doing.end - doing.begin - waits, number))
    numbered = len(step.doings) <= MOST_NUMBERED
    sim = run.config.get("world") == "sim"
    layout = {
        "height": 150 + max(90, 44 * len(rows)),
        "barmode": "overlay",
        "xaxis": {"title": {"text": f"{'simulated ' * sim}milliseconds since the step began"}},
        "yaxis": {
            "title": {"text": "worker"}, "autorange": "reversed", "tickvals": list(rows.values()),
            "ticktext": [str(worker) for worker in rows], "zeroline": False, "showgrid": False,
        },
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
    }  # fmt: skip
    return {"data": [_bars(kind, found, numbered) for kind, found in parts.items() if found], "layout": layout}


def _bars(kind: str, parts: list[tuple[int, float, float, str]], numbered: bool) -> Trace:
    colour, shape = KINDS[kind]
    pattern = {"shape": shape, "fillmode": "overlay", "fgcolor": "#ffffff", "solidity": 0.2, "size": 6}
    texts = [number for *_, number in parts]
    computes = kind not in ("communicate", "idle")
    return {
        "type": "bar", "orientation": "h", "name": kind, "y": [row for row, *_ in parts], "width": 0.6,
        "base": short(1e3 * begin for _, begin, _, _ in parts), "x": short(1e3 * took for _, _, took, _ in parts),
        "marker": {"color": colour, "pattern": pattern, "line": {"width": 0.5, "color": "#ffffff"}},
        "text": texts if numbered and computes else None, "textposition": "inside", "insidetextanchor": "middle",
        "textangle": 0, "textfont": {"color": "#ffffff"}, "customdata": texts,
        "hovertemplate": f"{safe(kind)}, microbatch %{{customdata}}: %{{x:,.3~r}} ms<extra>worker %{{y}}</extra>",
    }  # fmt: skip


def _table(trace: PipelineTrace, step: PipelineStep) -> Table:
    """A row for each worker: its share of the step, and its memory where that is on record."""
    head = ["worker", "forward ms", "backward ms", "communicate ms", "idle ms"]
    sized = any(worker in trace.memory for worker in step.workers)
    rows = []
    for worker in step.workers:
        mine = [doing for doing in step.doings if doing.worker == worker]
        forward = sum(d.end - d.begin for d in mine if d.what == "forward")
        busy = sum(d.end - d.begin for d in mine if d.computes)
        waited = sum(d.waited for d in mine if not d.computes)
        moved = sum(d.end - d.begin for d in mine if not d.computes) - waited
        idle = step.seconds - busy - moved
        row = [str(worker), *(f"{1e3 * value:.2f}" for value in (forward, busy - forward, moved, idle))]
        size = trace.memory.get(worker, {})
        rows.append(row + [f"{size[key]:.0f}" if key in size else "–" for key in ("pss", "peak") if sized])
    return Table(head + ["memory MB", "at its peak"] * sized, rows)
