"""The live page: the report of runs that still go on, kept up to date with their records.

A browser asks twice a second for what has changed since it last asked. Records are read, and figures drawn, only then:
a page that is not open costs nothing. Changes are told item by item: the page's text, each figure, each timeline.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torrential.errors import BadInput
from torrential.records import MANIFEST
from torrential.reporting import page, series
from torrential.reporting.figures import Works
from torrential.reporting.now import Now, now
from torrential.reporting.timeline import timeline, timeline_bins
from torrential.study.plan import RUNS
from torrential.study.read import read_runs, read_study
from torrential.study.results import STUDY, Entry, Run, Study
from torrential.study.tail import RunTails
from torrential.study.verdict import Verdict, judge

LEAST_SECONDS = 0.3  # between two looks at the records
REST = 4.0  # seconds between two looks, for each second of a processor that the last one took
UNJUDGED = Verdict([], [], [], [], [])

Item = tuple[str, str]  # its kind ("html", "figures" or "timelines"), and its name


@dataclass(frozen=True)
class PageView:
    """One of the things that the page can show: a study, or the runs of one task."""

    id: str
    name: str
    directory: Path
    task: str | None
    changed: float = 0.0  # when a run was last begun in it, in seconds since 1970


class LiveStudy:
    """The runs of one directory as they are at this moment. What has not changed is not computed again."""

    def __init__(self, view: PageView) -> None:
        self._view, self.tails = view, RunTails()
        self._study: Study | None = None
        self._now: Now | None = None
        self._views: list[PageView] = []
        self._judged: tuple[list[Any], Verdict] = ([], UNJUDGED)
        self._works: dict[Path, tuple[Run, series.StepColumns]] = {}
        self._timelines: dict[Path, tuple[Run, int, page.TimelineTrial | None]] = {}
        self._numbers: dict[Path, int] = {}  # of trials, in the order in which they were first seen

    def look(self, views: list[PageView]) -> dict[Item, Any] | None:
        """All items of the page; None where nothing has changed since the last look."""
        self.tails.begin()
        read = read_study if self._view.task is None else read_runs
        study = read(self._view.directory, self._view.task, self.tails)
        works = self._columns(study)
        state = now(study, works, self._age)
        same = self._study is not None and _runs(study) == _runs(self._study)
        if same and (state, views) == (self._now, self._views):
            return None
        verdict = self._verdict(study)
        sections, trials = page.figure_sections(study, works), self._trials(study, works)
        contents = page.contents(study, works, verdict, sections, trials, self._newest(study))
        items: dict[Item, Any] = {
            ("html", "html"): page.template("body.html").render(contents | {"live": True, "now": state, "views": views})
        }
        items |= {("figures", name): figure for section in sections for name, figure in section.figures.items()}
        items |= {("timelines", trial.id): trial.figure for trial in trials}
        self._study, self._now, self._views = (
            study,
            state,
            views,
        )  # the old runs live until here, so their ids are not used again
        return items

    def forget(self) -> None:
        """At the next look, everything has changed."""
        self._study = None

    def _age(self, run: Run) -> float:
        return max(0.0, time.time() - self.tails.written(run.directory))

    def _columns(self, study: Study) -> Works:
        """The columns of all runs. Those of a run that has more records now are extended."""
        found: dict[Path, tuple[Run, series.StepColumns]] = {}
        for run in (run for entry in (*study.entries, *study.tuning) for run in entry.runs):
            old, columns = self._works.get(run.directory, (None, None))
            if columns is None or old is not run:
                columns = series.work(run, columns if old is not None and old.steps is run.steps else None)
            found[run.directory] = run, columns
        self._works = found
        return {id(run): columns for run, columns in found.values()}

    def _verdict(self, study: Study) -> Verdict:
        """Of a study that was asked for; looked for again when another trial has begun or ended."""
        key = [(entry.name, len(entry.runs), [id(run) for run in entry.finished]) for entry in study.entries]
        if study.asked and self._judged[0] != key and any(entry.finished for entry in study.entries):
            self._judged = key, judge(study)
        return self._judged[1]

    def _trials(self, study: Study, works: Works) -> list[page.TimelineTrial]:
        bins = timeline_bins(study)
        found: dict[Path, tuple[Run, int, page.TimelineTrial | None]] = {}
        for entry in study.entries:
            for run in entry.runs:
                old = self._timelines.get(run.directory)
                same = old is not None and old[0] is run and old[1] == bins
                found[run.directory] = old if old and same else (run, bins, self._trial(entry, run, works, bins))
        self._timelines = found
        return [trial for _, _, trial in found.values() if trial is not None]

    def _trial(self, entry: Entry, run: Run, works: Works, bins: int) -> page.TimelineTrial | None:
        figure = timeline(run, works[id(run)], bins)
        number = self._numbers.setdefault(run.directory, len(self._numbers))
        newest_first = run.events[: -page.EVENTS_LISTED - 1 : -1]
        return None if figure is None else page.timeline_trial(f"t{number}", entry, run, figure, newest_first)

    def _newest(self, study: Study) -> str:
        """The trial that was written to last."""
        found = [(self.tails.written(run.directory), trial.id) for run, _, trial in self._timelines.values() if trial]
        return max(found)[1] if found else ""


class LiveView:
    """A view with the version of each of its items: the number of the look that changed it."""

    def __init__(self, view: PageView, versions: Iterator[int]) -> None:
        self._view, self._versions = view, versions
        self._live = LiveStudy(view)
        self._next = 0.0
        self._items: dict[Item, tuple[int, msgspec.Raw]] = {}

    def refresh(self, views: list[PageView], at_once: bool) -> None:
        """Look at the records; unless `at_once`, not if that was a moment ago or would take too much of the machine."""
        if time.monotonic() < self._next and not at_once:
            return
        began = time.thread_time()
        try:
            items = self._live.look(views)
        except (BadInput, OSError) as error:  # there may be runs, or the directory again, at the next look
            items = {("html", "html"): self._without_runs(error)}
            self._live.forget()
        if items is not None:
            self._keep({item: msgspec.Raw(msgspec.json.encode(value)) for item, value in items.items()})
        took = time.thread_time() - began
        self._next = time.monotonic() + (0.0 if self._live.tails.behind else max(LEAST_SECONDS, REST * took))

    def _without_runs(self, error: Exception) -> str:
        directory = self._view.directory
        words = str(error) if os.path.isdir(directory) else f"{directory} is gone; it is shown again when it is back"
        return page.template("waiting.html").render(directory=directory, words=words)

    def _keep(self, encoded: dict[Item, msgspec.Raw]) -> None:
        version = next(self._versions)
        old = self._items
        self._items = {
            item: old[item] if item in old and bytes(old[item][1]) == bytes(value) else (version, value)
            for item, value in encoded.items()
        }

    def since(self, version: int) -> dict[str, Any]:
        """What a page that has seen this version lacks."""
        new: dict[str, Any] = {"figures": {}, "timelines": {}}
        for (kind, name), (changed, value) in self._items.items():
            if changed > version and kind == "html":
                new["html"] = value
            elif changed > version:
                new[kind][name] = value
        newest = max((changed for changed, _ in self._items.values()), default=0)
        return new | {"version": newest, "behind": self._live.tails.behind}


class LivePage:
    """All views of a directory, for any number of browsers."""

    def __init__(self, directory: Path, task: str | None = None) -> None:
        self._directory, self._task = directory, task
        self._versions = itertools.count(1)
        self._manifests = RunTails()
        self._lives: dict[PageView, LiveView] = {}
        self._lock = threading.Lock()

    def shell(self) -> str:
        """The page before it shows anything: it asks for that itself."""
        scripts = ["const REPORT = {figures: {}, timelines: {}};", page.own("page.js"), page.own("live.js")]
        return page.shell(self._directory.resolve().name, scripts, live=True)

    def changes(self, asked: str, shown: str, version: int, last: bool = False) -> bytes:
        """The answer to a page that has been asked to show a view ("": the newest), and shows one at a version. With
        `last`, it is told that there will be no other answer."""
        with self._lock:
            views = self._views()
            view = next((each for each in views if each.id == asked), max(views, key=lambda each: each.changed))
            key = PageView(view.id, "", view.directory, view.task)
            live = self._lives.setdefault(key, LiveView(key, self._versions))
            live.refresh(views, at_once=last)
            new = live.since(version if shown == view.id else 0)
            return msgspec.json.encode(new | {"view": view.id, "last": last})

    def _views(self) -> list[PageView]:
        whole = [PageView("all", self._directory.name, self._directory, self._task)]
        if any(os.path.exists(self._directory / name) for name in (STUDY, MANIFEST)):
            return whole
        try:
            inside = sorted(self._directory.iterdir())
        except OSError:  # a look will say what is wrong
            return whole
        self._manifests.begin()
        studies = [place for place in inside if os.path.exists(place / STUDY)]
        found = [PageView(f"study {place.name}", place.name, place, None, _changed(place / RUNS)) for place in studies]
        return [*self._views_of_tasks(inside), *found] or whole

    def _views_of_tasks(self, inside: list[Path]) -> list[PageView]:
        counts, begun = Counter[str](), dict[str, float]()
        for place in inside:
            if not os.path.exists(place / MANIFEST):
                continue
            try:
                task = str(self._manifests.manifest(place).config["task"])
            except BadInput:
                continue  # named among what cannot be used
            counts[task] += 1
            begun[task] = max(begun.get(task, 0.0), self._manifests.written(place))
        return [
            PageView(
                f"task {task}",
                f"{task} ({count} {'run' if count == 1 else 'runs'})",
                self._directory,
                task,
                begun[task],
            )
            for task, count in counts.items()
            if self._task in (None, task)
        ]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _runs(study: Study) -> list[tuple[str, list[int]]]:
    return [(entry.name, [id(run) for run in entry.runs]) for entry in (*study.entries, *study.tuning)]
