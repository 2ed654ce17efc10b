"""The report of a study: what its page holds, what it leaves out, and that nothing in records can break out of it."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest
from studies import TARGET, full_study, make_entry, make_run, make_study

from torrential.errors import BadInput
from torrential.records import Event
from torrential.reporting import figures, page, scaling, series, tables
from torrential.reporting.marks import outcome
from torrential.reporting.page import write_report
from torrential.reporting.timeline import timeline, timeline_bins
from torrential.study.results import DIVERGED, Entry, Study
from torrential.study.verdict import judge

EVERYTHING = ["verdict", "time", "samples", "target", "spent", "staleness", "scaling", "timeline", "trials", "setup"]


class Page(HTMLParser):
    """Sections, scripts, tags and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.sections.append(str(dict(attrs)["id"]))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words += data

    @property
    def data(self) -> Any:
        return msgspec.json.decode(self.scripts[1].removeprefix("const REPORT = ").removesuffix(";"))


def render(study: Study) -> Page:
    return Page(page.render(study))


def works(study: Study) -> figures.Works:
    return {id(run): series.work(run) for entry in study.entries for run in entry.runs}


@pytest.fixture(scope="module")
def full() -> Page:
    return render(full_study())


# -- the page ---------------------------------------------------------------------------------------------------------
def test_a_full_study_has_every_section_in_order(full: Page) -> None:
    assert full.sections == EVERYTHING
    ids = [attrs["id"] for _, attrs in full.tags if attrs.get("class") == "figure"]
    drawn = ["against-time", "against-samples", "to-target", "time-spent", "stale", "scaling-time", "scaling-speed"]
    assert ids == [*drawn, "workers"]
    assert list(full.data["figures"]) == drawn
    assert len(full.data["timelines"]) == 15


def test_the_page_fetches_nothing_and_runs_only_its_own_scripts(full: Page) -> None:
    assert [tag for tag, _ in full.tags if tag in ("link", "img", "iframe", "object", "base")] == []
    assert [attrs for tag, attrs in full.tags if tag == "script" and attrs] == []  # no src
    assert len(full.scripts) == 3 and full.scripts[0].count("* plotly.js v") == 1
    policy = next(attrs["content"] for _, attrs in full.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "script-src " + " ".join(f"'{page._hash(script)}'" for script in full.scripts) in policy


def test_the_file_is_written_whole_and_small(tmp_path: Path) -> None:
    write_report(full_study(), tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").stat().st_size < 6_000_000  # plotly.js is 4.8 of it
    assert page.render(full_study()) == (tmp_path / "report.html").read_text()  # the same records, the same page


def test_a_study_without_runs_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="studies/digits has no runs to report on; name a study"):
        write_report(make_study([Entry("bsp", "bsp", {}, 2, 1, "local", "")]), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_left_out() -> None:
    bare = replace(make_run("bsp-1", "bsp", 2, seed=1), steps=[], events=[])
    found = render(make_study([Entry("bsp", "bsp", {}, 2, 1, "local", "", [bare])], target=None))
    assert found.sections == ["verdict", "time", "samples", "trials", "setup"]
    assert "Tried beforehand" not in found.words
    none = replace(bare, evaluations=[], summary=None)
    found = render(make_study([Entry("bsp", "bsp", {}, 2, 1, "local", "", [none])], target=None))
    assert found.sections == ["verdict", "trials", "setup"]
    fresh = render(make_study([make_entry("allreduce")]))  # no staleness on record, one number of workers
    assert fresh.sections == [name for name in EVERYTHING if name not in ("staleness", "scaling")]
    assert [attrs for _, attrs in fresh.tags if attrs.get("class") == "events"] == []


def test_fewer_than_three_trials_are_not_a_result() -> None:
    def boxes(found: Page) -> list[str | None]:
        return [attrs["class"] for _, attrs in found.tags if attrs.get("class") in ("refused", "answer")]

    few = render(make_study([make_entry("bsp", trials=2)], trials=2))
    assert boxes(few) == ["refused"] and "Not a result: 2 trials each" in few.words
    enough = render(make_study([make_entry("bsp", trials=3)]))
    assert boxes(enough) == ["answer"] and "Not a result" not in enough.words


def test_the_page_says_how_it_was_made(full: Page) -> None:
    assert "torrential compare digits --strategies bsp,ssp --set 'slow=1:4 '" in full.words
    for fact in ("A Processor", "25.3 GB", "2.13.0", "2026-11-15T07:12:30+00:00", "evaluate_every"):
        assert fact in full.words
    assert "From one evaluation to the next, in the median: 0.5000 s." in full.words
    assert "Fewer than 3 are not a result." in full.words
    alone = render(make_study([make_entry("bsp")], command=[]))
    assert [f"torrential train digits --seed {seed}" in alone.words for seed in range(3)] == [True] * 3


def test_the_page_of_a_simulated_study_says_that_seconds_are_virtual() -> None:
    entry = make_entry("bsp")
    runs = [
        replace(
            run, manifest=msgspec.structs.replace(run.manifest, config=run.config | {"world": "sim", "samples": 1600})
        )
        for run in entry.runs
    ]
    found = render(make_study([replace(entry, world="sim", runs=runs)], asked=True))
    assert "median, virtual s" in found.words and "all, virtual s" in found.words
    assert "(median " in found.words and " virtual s, 3 trials)" in found.words
    assert all(outcome(run) in found.words and outcome(run).endswith(" virtual s") for run in runs)
    assert "Torrential study: 1 entry, 3 trials each" in found.words


def test_the_page_of_runs_without_a_target_says_so() -> None:
    found = render(make_study([make_entry("bsp", trials=2)], target=None, trials=2))
    assert "Torrential report: 2 runs, in 1 way" in found.words and "asked for" not in found.words
    assert "no time to" in found.words and "trained, s" in found.words
    assert not any(words in found.words for words in ("missed", "reached", "Fewer than"))


# -- hostile text -----------------------------------------------------------------------------------------------------
EVIL = '</script><script>alert("evil")</script><img src=x onerror=alert(1)>&amp;\u2028{{ 7 * 7 }}'


def hostile_study() -> Study:
    """EVIL wherever a record has text."""
    entry = make_entry("ssp", stale=3, lost=True)
    runs = [
        replace(
            run,
            directory=Path("runs") / EVIL.replace("/", "∕") / f"{EVIL.replace('/', '∕')}{i}",
            events=[Event(event=EVIL, time=1.0, worker=0, detail=EVIL), *run.events],
            manifest=msgspec.structs.replace(
                run.manifest,
                command=[EVIL],
                versions={EVIL: EVIL},
                hardware={EVIL: [EVIL]},
                config=run.config | {EVIL: EVIL, "options": {EVIL: EVIL}},
            ),
            problem=EVIL,
        )
        for i, run in enumerate(entry.runs)
    ]
    bad = replace(entry, name=EVIL, strategy=EVIL, options={EVIL: EVIL}, cluster=EVIL, runs=runs)
    other = replace(bad, name=EVIL + "2", workers=2)
    return make_study([bad, other], task=EVIL, metric=EVIL, command=[EVIL], problems=[EVIL], tuning=[bad])


def test_text_from_records_stays_text(full: Page) -> None:
    found = render(hostile_study())
    assert found.sections == EVERYTHING
    assert Counter(tag for tag, _ in found.tags).keys() <= Counter(tag for tag, _ in full.tags).keys()
    assert len(found.scripts) == 3
    assert not any(name.startswith("on") for _, attrs in found.tags for name in attrs)
    assert found.words.count('<script>alert("evil")') > 20 and "49" not in re.findall(
        r"\{\{.*?\}\}|\b49\b", found.words
    )
    assert not set("<>&\u2028") & set(found.scripts[1])
    texts = [text for text in strings(found.data) if "alert(1)" in text]
    assert texts and all("<img" not in text and "&lt;img" in text for text in texts)  # plotly reads some HTML itself


def strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield name
            yield from strings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from strings(value)


# -- figures ----------------------------------------------------------------------------------------------------------
def test_every_trial_is_a_point_and_a_miss_is_at_the_edge() -> None:
    good, bad = make_entry("bsp", rate=1.0), make_entry("ssp", best=0.9)
    cut = replace(bad, runs=[*bad.runs, make_run("cut", "ssp", 4, seed=9, cut=True)])
    diverged = replace(cut.runs[-1], events=[Event(event=DIVERGED, time=3.0)])
    study = make_study([good, replace(cut, runs=[*cut.runs, diverged])])
    figure = figures.target_bars(study, works(study))
    assert figure is not None
    bar, reached, missed = figure["data"]  # the second entry has no bar
    times = [run.time_to_target for run in good.runs]
    assert bar["type"] == "bar" and bar["x"] == [sorted(t for t in times if t)[1]]
    assert reached["x"] == times and reached["marker"]["symbol"] == ["circle"] * 3
    assert missed["marker"]["symbol"] == ["x", "x", "x", "x-open", "x"]
    (edge,) = set(missed["x"])
    assert max(t for t in times if t) < edge < figure["layout"]["xaxis"]["range"][1]
    assert [text.split(": ")[1] for text in missed["text"]] == [*["missed"] * 3, "not ended", "diverged"]
    labels = [label["text"].replace("\xa0", " ") for label in figure["layout"]["annotations"]]
    assert labels == ["bsp · 4 workers", "ssp · 4 workers: 4 of 5 missed, 1 of 5 not ended", "missed"]


def test_half_missed_is_no_median() -> None:
    runs = [*make_entry("bsp", trials=1).runs, *make_entry("bsp", trials=1, best=0.5).runs]
    study = make_study([replace(make_entry("bsp"), runs=runs)])
    figure = figures.target_bars(study, works(study))
    assert figure is not None and [trace["type"] for trace in figure["data"]] == ["scatter"]


def test_a_band_is_where_all_trials_have_values() -> None:
    long = (np.array([0.0, 10.0]), np.array([0.0, 1.0]))
    short = (np.array([2.0, 4.0]), np.array([0.4, 0.6]))
    found = series.band([long, short], [False, False], points=3)
    assert found is not None
    grid, median, low, high = found
    assert grid.tolist() == [2.0, 3.0, 4.0]
    assert median == pytest.approx([0.3, 0.4, 0.5])
    assert median - low == pytest.approx([0.05] * 3) and high - median == pytest.approx([0.05] * 3)
    late = (np.array([11.0]), np.array([1.0]))
    assert series.band([long], [False]) is None and series.band([long, late], [False, True]) is None


@pytest.mark.parametrize(("arrived", "end"), [([True, True], 10.0), ([False, True], 10.0), ([True, False], 4.0)])
def test_a_trial_that_arrived_keeps_its_last_value_and_no_other(arrived: list[bool], end: float) -> None:
    long = (np.array([0.0, 10.0]), np.array([0.0, 1.0]))
    short = (np.array([2.0, 4.0]), np.array([0.4, 0.6]))
    found = series.band([long, short], arrived, points=2)
    assert found is not None and found[0].tolist() == [2.0, end]
    assert found[1][1] == pytest.approx((end / 10 + 0.6) / 2)


def test_the_thick_line_comes_to_the_target_when_half_of_the_trials_have() -> None:
    """So it does at the median time, whatever one late trial does."""
    arrives = [1.0, 2.0, 3.0, 4.0, 50.0]
    curves = [(np.array([0.0, time - 1e-6, time]), np.array([0.5, 0.5, 0.9])) for time in arrives]
    found = series.band(curves, [True] * 5, points=50_001)
    assert found is not None
    grid, median, low, _ = found
    assert grid[np.argmax(median >= 0.9)] == pytest.approx(3.0, abs=0.01)
    assert grid[np.argmax(low >= 0.9)] == pytest.approx(4.0, abs=0.01)


def test_a_trial_that_was_cut_off_is_drawn_and_in_no_median() -> None:
    entry = make_entry("bsp", trials=3)
    cut = replace(entry, runs=[*entry.runs[:2], make_run("bsp-3", "bsp", 4, seed=3, best=0.5, seconds=2.0, cut=True)])
    whole, partly = (
        figures.metric_curves(make_study([replace(entry, runs=runs)]), "time") for runs in (entry.runs[:2], cut.runs)
    )
    assert whole is not None and partly is not None
    assert len(partly["data"]) == len(whole["data"]) + 1
    assert partly["data"][-1] == whole["data"][-1]


def test_figures_of_the_tasks_own_have_curves_of_their_own() -> None:
    plain = make_entry("bsp", trials=2)
    runs = [
        replace(run, evaluations=[
            msgspec.structs.replace(e, figures={"<b>right</b>": e.value / 2, "accuracy": e.value})
            for e in run.evaluations
        ])
        for run in plain.runs
    ]  # fmt: skip
    study = make_study([replace(plain, runs=runs)])
    assert series.figure_names(runs, "accuracy") == ["<b>right</b>"]
    x, y = series.metric_curve(runs[0], "samples", "<b>right</b>")
    whole = series.metric_curve(runs[0], "samples")
    assert x.tolist() == whole[0].tolist() and y.tolist() == (whole[1] / 2).tolist()
    works = {id(run): series.work(run) for run in runs}
    sections = {section.id: section for section in page.figure_sections(study, works)}
    assert list(sections["figures"].figures) == ["figure-0"]
    assert "shapes" not in sections["figures"].figures["figure-0"]["layout"], "the target is of the metric"
    bare = make_study([plain])
    assert "figures" not in {s.id for s in page.figure_sections(bare, {id(r): series.work(r) for r in plain.runs})}


def test_thinning_keeps_ends_and_spikes() -> None:
    y = np.zeros(10_000)
    y[1234], y[4321], y[5000] = 9.0, -9.0, np.nan
    x, thin = series.thin((np.arange(10_000.0), y), 400)
    assert len(x) <= 402 and x[0] == 0 and x[-1] == 9999 and (np.diff(x) > 0).all()
    assert thin[x == 1234] == 9.0 and thin[x == 4321] == -9.0
    few = (np.arange(5.0), np.arange(5.0))
    assert series.thin(few, 400) is few


def test_counts_of_a_replaced_worker_add_up() -> None:
    run = make_run("ssp-1", "ssp", 4, seed=1, stale=3, lost=True)
    found = series.work(run).updates
    assert found.staleness.total() == 5 * len(run.steps)  # five updates a record, in the records as made
    assert found.by_worker[1] == 5 * sum(step.worker == 1 for step in run.steps)
    assert max(found.staleness) == 3


def test_the_periods_that_a_run_has_chosen_are_drawn() -> None:
    run = make_run("adacomm-1", "adacomm", 2, seed=1)
    chosen = [(2.0, "8 to 4"), (5.0, "4 to 1")]
    events = [Event(event="period", time=t, detail=f"{said} local steps between averages") for t, said in chosen]
    run = replace(run, events=events)
    times, values = series.periods(run)
    assert times[:3].tolist() == [0.0, 2.0, 5.0] and times[3] == max(step.time for step in run.steps)
    assert values.tolist() == [8, 4, 1, 1]
    study = make_study([Entry("adacomm", "adacomm", {}, 2, 0, "local", "", [run]), make_entry("allreduce")])
    found = render(study)
    assert "periods" in found.sections and len(found.data["figures"]["periods"]["data"]) == 1


def test_staleness_is_a_share_of_updates() -> None:
    x, y = series.shares_at_most(Counter({0: 1, 5: 2, 2: 1}))
    assert x.tolist() == [0, 2, 5] and y.tolist() == [0.25, 0.5, 1.0]


def test_activity_shows_who_was_there() -> None:
    run = make_run("ssp-1", "ssp", 4, seed=1, lost=True, seconds=12.0)
    found = series.activity(series.work(run), bins=60)  # a bin is one record
    assert found.rows == [range(i, i + 1) for i in range(4)] and found.edges[-1] == pytest.approx(12.0)
    away = np.isnan(found.compute)
    assert not away[[0, 2, 3]].any()
    assert np.flatnonzero(away[1]).tolist() == list(range(20, 29))  # between 4 s and 5.8 s
    records = {(step.worker, round(step.time / 0.2) - 1): step.compute / 0.2 for step in run.steps}
    assert found.compute[2] == pytest.approx([records[2, i] for i in range(60)], abs=1e-6)


def test_many_workers_share_rows() -> None:
    run = make_run("big", "ssp", 200, seed=1, seconds=2.0)
    found = series.activity(series.work(run), bins=30)
    assert found.compute.shape == (50, 30) and found.rows[0] == range(4) and found.row_of(199) == 49
    assert timeline_bins(make_study([make_entry("bsp", workers=64, trials=1, seconds=0.4)] * 200)) == 30


@pytest.mark.parametrize("stale", [None, 24])
def test_a_straggler_is_named(stale: int | None) -> None:
    run = make_run("bsp-1", "bsp", 4, seed=1, slow={3: 4.0}, stale=stale, lost=True)
    figure = timeline(run, series.work(run), bins=40)
    assert figure is not None
    axis = figure["layout"]["yaxis"]
    assert axis["ticktext"][:4] == ["run", "0", "1", "2"] and re.fullmatch(r"3 \([34]\.\d ×\)", axis["ticktext"][4])
    names = {trace["name"]: trace["y"] for trace in figure["data"][1:]}
    assert names == {"regrouped": [-1.0], "worker joined": [1], "worker lost": [1]}


def test_time_spent_adds_up() -> None:
    study = make_study([make_entry("bsp", slow={3: 4.0})])
    figure = figures.time_spent(study, works(study))
    assert figure is not None
    assert [trace["name"] for trace in figure["data"]] == ["compute", "communicate", "wait"]
    assert sum(trace["x"][0] for trace in figure["data"]) == pytest.approx(12.0, rel=1e-4)


def test_a_miss_counts_in_what_more_workers_are_worth() -> None:
    """As it does in the verdict: a median that is a miss has no place on the line, and its trials that arrived have."""

    def missing(entry: Entry, misses: int) -> Entry:
        runs = [
            replace(
                run, summary=msgspec.structs.replace(run.summary, time_to_target=None) if i < misses else run.summary
            )
            for i, run in enumerate(entry.runs)
            if run.summary is not None
        ]
        return replace(entry, runs=runs)

    entries = [missing(make_entry("bsp", workers=n), misses) for n, misses in ((2, 2), (4, 1), (8, 0))]
    figure = scaling.scaling(make_study(entries), "time")
    assert figure is not None
    ideal, line, points = figure["data"]
    times = [[run.time_to_target for run in entry.runs if run.time_to_target is not None] for entry in entries]
    assert line["x"] == [2, 4, 8] and line["y"][0] is None
    assert line["y"][1] == pytest.approx(max(times[1]), rel=1e-5) and line["y"][2] == pytest.approx(
        median(times[2]), rel=1e-5
    )
    assert ideal["y"] == pytest.approx([2 * line["y"][1], line["y"][1], line["y"][1] / 2], rel=1e-5)
    assert points["x"] == [2, 4, 4, 8, 8, 8]


def test_scaling_needs_several_counts_of_workers() -> None:
    study = full_study()
    assert [(name, [e.workers for e in entries]) for name, entries in scaling.scaling_groups(study)] == [
        ("allreduce", [2, 4, 8])
    ]
    figure = scaling.scaling(study, "speed")
    assert figure is not None
    ideal, medians, points = figure["data"]
    assert medians["y"] == ideal["y"] == [1600, 3200, 6400] and len(points["x"]) == 9
    assert scaling.scaling(make_study([make_entry("bsp")]), "speed") is None
    assert scaling.scaling(replace(study, target=None), "time") is None


def test_colours_of_a_legend_repeat_late(full: Page) -> None:
    from torrential.reporting.marks import keys

    assert len({(key.colour, key.dash) for key in keys(map(str, range(42)), "e")}) == 42


def test_the_table_holds_every_trial_and_no_empty_column() -> None:
    study = full_study()
    table = tables.trials(study, works(study))
    assert len(table.rows) == 15 and "dropped" not in table.head and "remarks" not in table.head
    row = dict(zip(table.head, table.rows[9], strict=True))
    assert (
        row["entry"] == "ssp:staleness=3 · 4 workers" and row["trial"] == "ssp-4-0" and row["largest staleness"] == "3"
    )
    assert row["samples/s"] == "3,200" and row["events"] == "3" and row["sent"] == "123 MB"


def test_options_are_told_apart() -> None:
    common, own = tables.options(full_study())
    assert ["batch_size", "16"] in common.rows and ["evaluate_every", "25"] in common.rows
    assert own.head == ["option", *(entry.name for entry in full_study().entries)]
    assert own.rows[0] == ["strategy", "allreduce", "allreduce", "allreduce", "ssp", "downpour"]
    assert own.rows[1] == ["workers", "2", "4", "8", "4", "4"]


def test_entries_have_their_numbers_beside_the_verdict(full: Page) -> None:
    study = full_study()
    table = tables.entries(study, judge(study))
    assert table.head[:5] == ["entry", "reached", "median, s", "range", "all, s"] and len(table.rows) == 5
    assert all(cell in full.words for row in table.rows for cell in row)
    assert "Evaluated at intervals of the runs' own" in full.words


def test_every_pair_is_in_a_table_where_there_are_several() -> None:
    rates = {"bsp": 0.3, "ssp": 1.0, "backup": 0.9}
    study = make_study([make_entry(name, trials=5, rate=rate) for name, rate in rates.items()], trials=5)
    table = tables.pairs(judge(study))
    assert [row[-1] for row in table.rows] == ["yes", "yes", "none seen"]
    assert table.rows[0][:2] == ["ssp · 4 workers", "bsp · 4 workers"] and float(table.rows[0][2]) > 1.5
    found = render(study)
    assert found.sections.index("pairs") == found.sections.index("setup") - 1
    assert "pairs" not in render(make_study(study.entries[:2], trials=5)).sections
    missed = make_study([make_entry("bsp", trials=5, best=0.5), *study.entries[1:]], trials=5)
    assert tables.pairs(judge(missed)).rows[0][2:4] == ["–", "–"]


def test_what_was_tried_on_validation_data_and_what_was_chosen() -> None:
    ssp = replace(make_entry("ssp"), name="ssp", tuned={"lr": "0.1"})
    tried = [
        replace(make_entry("ssp", trials=2, rate=r), name=f"ssp · lr={lr}") for lr, r in (("0.1", 1.0), ("1", 0.1))
    ]
    table = tables.tuning(make_study([ssp], tuning=tried))
    assert [row[0] for row in table.rows] == ["ssp · lr=0.1", "ssp · lr=1"]
    assert [row[1:3] for row in table.rows] == [["2", "2"], ["2", "0"]]
    assert [row[-1] for row in table.rows] == ["chosen", ""] and table.rows[1][3] == "–"
    assert table.rows[0][5] == "96.00"  # seconds of 4 workers, in two runs of 12 s
    assert not any("test" in name for name in table.head)


def test_values_that_are_no_numbers_draw_nothing() -> None:
    run = make_run("bsp-1", "bsp", 2, seed=1)
    broken = [msgspec.structs.replace(evaluation, value=float("nan")) for evaluation in run.evaluations]
    study = make_study([replace(make_entry("bsp", workers=2), runs=[replace(run, evaluations=broken)])])
    assert render(study).data["figures"]["against-time"]["data"][0]["y"] == [None] * 24
    assert study.target == TARGET
