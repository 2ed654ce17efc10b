"""One self-contained page about a study: a file that needs no network, made from records and from nothing else.

The page may run its own scripts and no other, and may fetch nothing: its security policy names them by their hashes.
Text from records is escaped by the template; inside the page's data, and inside plotly's texts, by `data_script` and
`marks.safe`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from torrential.errors import BadInput
from torrential.progress import metric_value
from torrential.records import Event, replace_file
from torrential.reporting import figures, scaling, series, tables
from torrential.reporting.figures import Works
from torrential.reporting.marks import Figure, Key, entry_keys, keys, unbroken
from torrential.reporting.pipeline import pipeline_views
from torrential.reporting.timeline import event_words, timeline, timeline_bins
from torrential.study.read import read_study
from torrential.study.results import REPORT, Entry, Run, Study
from torrential.study.show import legend, write_csv
from torrential.study.statistics import FEWEST
from torrential.study.verdict import Verdict, judge
from torrential.version import __version__

EVENTS_LISTED = 200  # of one trial


@dataclass(frozen=True)
class Section:
    """A heading, what the reader sees there, and figures with the legend that shows and hides their parts."""

    id: str
    title: str
    text: str
    figures: dict[str, Figure]
    legend: list[Key] = field(default_factory=list)
    table: tables.Table | None = None


@dataclass(frozen=True)
class TimelineTrial:
    """A trial that the timeline can show."""

    id: str
    name: str
    entry: str
    figure: Figure
    events: list[str]
    changes: int  # events that are about a worker: deaths, joins
    more: int  # events that are not listed


def report(directory: str | os.PathLike[str], task: str | None = None) -> Path:
    """Write what the runs in a directory show as a page, report.html, and as a table, trials.csv; returns the page's
    path. The directory is a study's, one of runs, or a run's; `task` chooses among runs of several tasks."""
    study = read_study(Path(directory), task)
    page = study.directory / REPORT
    write_report(study, page)
    write_csv(study)
    return page


def write_report(study: Study, path: Path) -> None:
    if not any(entry.runs for entry in study.entries):
        raise BadInput(f"{study.directory} has no runs to report on; name a study, or a directory of runs")
    replace_file(path, render(study).encode())


def render(study: Study) -> str:
    """The whole page."""
    verdict = judge(study)
    works = {id(run): series.work(run) for entry in study.entries for run in entry.runs}
    sections = [*figure_sections(study, works), *pipeline_sections(study)]
    trials = timeline_trials(study, works)
    drawn = {name: figure for section in sections for name, figure in section.figures.items()}
    data = data_script({"figures": drawn, "timelines": {trial.id: trial.figure for trial in trials}})
    first = max(trials, key=lambda trial: trial.changes).id if trials else ""
    return shell(study.task, [data, own("page.js")], **contents(study, works, verdict, sections, trials, first))


def shell(title: str, scripts: list[str], **given: Any) -> str:
    """A document with plotly and these scripts, which may run no others; `given` is for the templates."""
    scripts = [plotly_script(), *scripts]
    return template("page.html").render(
        title=title,
        style=Markup(own("page.css")),
        scripts=[Markup(script) for script in scripts],
        policy=" ".join(f"'{_hash(script)}'" for script in scripts),
        **{"live": False, "version": __version__, **given},
    )


def contents(
    study: Study,
    works: Works,
    verdict: Verdict,
    sections: list[Section],
    trials: list[TimelineTrial],
    first: str,  # the trial whose timeline is shown at first
) -> dict[str, Any]:
    """What body.html shows."""
    return {
        "study": study,
        "target": "" if study.target is None else metric_value(study.metric, study.target),
        "refused": bool(verdict.refused),
        "verdict": [sentence(study, text) for text in verdict.sentences],
        "rules": [sentence(study, text) for text in verdict.rules],
        "entries": tables.entries(study, verdict),
        "legend": sentence(study, legend(study, verdict)),
        "sections": sections,
        "trials": trials,
        "first": first,
        "table": tables.trials(study, works),
        "pairs": tables.pairs(verdict),
        "portions": tables.portions(study),
        "tuning": tables.tuning(study) if study.tuning else None,
        "commands": tables.commands(study),
        "machines": tables.machines(study),
        "options": tables.options(study),
        "evaluations": tables.evaluations(study),
        "fewest": FEWEST,
        "version": __version__,
        "views": [],
    }


def template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(own),
    )


def figure_sections(study: Study, works: Works) -> list[Section]:
    """The sections with figures, in the page's order; what a study has no records for has no section."""
    items = entry_keys(study)
    own = series.figure_names((run for entry in study.entries for run in entry.runs), study.metric)
    groups = keys((name for name, _ in scaling.scaling_groups(study)), "s")
    target = "" if study.target is None else metric_value(study.metric, study.target)
    kept = "; a trial that has reached the target keeps its last value" if target else ""
    bands = f"Thick: the median over trials, with the middle half of them around it{kept}. Thin: trials."
    found: list[tuple[str, str, str, dict[str, Figure | None], list[Key]]] = [
        ("time", f"{study.metric} against time", bands, {"against-time": figures.metric_curves(study, "time")}, items),
        ("samples", f"{study.metric} against samples", bands + " What is left when time does not count.",
         {"against-samples": figures.metric_curves(study, "samples")}, items),
        ("figures", "Figures of the task's own", bands,
         {f"figure-{n}": figures.metric_curves(study, "samples", name) for n, name in enumerate(own)}, items),
        ("target", f"Time to {target}",
         "Bars: the median of finished trials, a miss being later than anything; no bar where that is a miss. Points: "
         "trials.",
         {"to-target": figures.target_bars(study, works)}, []),
        ("spent", "Where the time went",
         "Of the average worker, mean over trials. After the name: per cent computing / communicating / waiting.",
         {"time-spent": figures.time_spent(study, works)}, []),
        ("staleness", "Staleness",
         "How many updates by others came between a worker's read and its push, over all updates of all trials.",
         {"stale": figures.staleness(study, works)}, items),
        ("periods", "Steps between averages",
         "Local steps between two averages, where the strategy chooses them: a line for each trial.",
         {"periods": figures.periods(study)}, items),
        ("scaling", "More workers",
         "Lines: medians of the trials shown as points, a miss being later than anything; none where that is a miss. "
         "Dotted: each worker worth as much as the first ones.",
         {"scaling-time": scaling.scaling(study, "time"), "scaling-speed": scaling.scaling(study, "speed")}, groups),
    ]  # fmt: skip
    sections = []
    for name, title, text, drawn, named in found:
        there = {key: figure for key, figure in drawn.items() if figure is not None}
        if there:
            shown = {trace.get("meta") for figure in there.values() for trace in figure["data"]}
            used = [item for item in named if item.key in shown]
            sections.append(Section(name, title[0].upper() + title[1:], text, there, used))
    return sections


def pipeline_sections(study: Study) -> list[Section]:
    """A section for each run of a pipeline that was traced."""
    found = []
    for number, view in enumerate(pipeline_views(study).values()):
        name, title = f"pipeline-{number}", "One step of the pipeline"
        if isinstance(view, str):
            found.append(Section(name, title, view, {}))
        else:
            found.append(Section(name, title, view.text, {f"{name}-step": view.figure}, table=view.table))
    return found


def timeline_trials(study: Study, works: Works) -> list[TimelineTrial]:
    bins = timeline_bins(study)
    found: list[TimelineTrial] = []
    for entry in study.entries:
        for run in entry.runs:
            if (figure := timeline(run, works[id(run)], bins)) is not None:
                found.append(timeline_trial(f"t{len(found)}", entry, run, figure, run.events[:EVENTS_LISTED]))
    return found


def timeline_trial(id: str, entry: Entry, run: Run, figure: Figure, listed: list[Event]) -> TimelineTrial:
    changes = sum(event.worker is not None for event in run.events)
    words = [event_words(event) for event in listed]
    return TimelineTrial(id, run.directory.name, entry.name, figure, words, changes, len(run.events) - len(listed))


def sentence(study: Study, text: str) -> str:
    """The text with a capital letter, unless it begins with the name of an entry."""
    named = any(text.startswith(entry.name) for entry in study.entries)
    return (text if named else text[:1].upper() + text[1:]).replace("p = ", unbroken("p = ")) + "."


def data_script(data: Any) -> str:
    """Assigned by a script of its own; "<" never appears, so no text in it can end the script."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f"const REPORT = {text};"


def plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def own(name: str) -> str:
    return files("torrential.reporting").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
