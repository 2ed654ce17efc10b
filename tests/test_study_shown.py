"""A study in tables, files and on the terminal while it runs."""

import csv
import itertools
import json
from datetime import datetime
from io import StringIO

import numpy as np
import pytest
from made_up import TARGET, Unseen, config, content, fake, manifest, question, shown, study, write_run
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torrential import records
from torrential.study.conduct import conduct, is_finished
from torrential.study.directory import open_directory
from torrential.study.plan import Trial, reported_trials
from torrential.study.read import read_run, read_study
from torrential.study.show import to_json, write_csv
from torrential.study.tensorboard import write_events
from torrential.study.verdict import judge
from torrential.study.watch import StudyProgress


def test_the_table_has_all_points_and_labels_what_is_no_result():
    text = shown(study({"a": [1.0, 2.0, 3.0, None, None], "b": [3.0, 4.0, 5.0, 6.0, 7.0], "c": [1.0, *[None] * 4]}))
    assert "1.00 2.00 3.00 missed missed" in text and "3 of 5" in text and " 3.00*" in text and "1.00–missed" in text
    assert "3.00 4.00 5.00 6.00 7.00" in text and "3.00–7.00" in text and "not a result" not in text
    assert "1 of 5" in text and "–*" not in text  # the median of c is a miss
    assert "(not a result)" in shown(study({"a": [1.0], "b": [2.0]}))
    never = shown(study({"a": [None] * 3}))
    assert "all missed" in never and "*" not in never


ALL = ["entry", "reached", "median", "range", "all", "worker-s", "sent", "test", "options"]


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (140, []),
        (115, ["options"]),
        (100, ["options", "all"]),
        (90, ["options", "all"]),
        (80, ["options", "all", "worker-s"]),
        (60, ["options", "all", "worker-s", "sent", "range"]),
    ],
)
def test_the_table_fits_the_terminal(width, left_out):
    found = study({"allreduce · 8 workers": [6.0, 7, 8, 9, 8.5], "ssp:staleness=3": [3.0, 4, 4.5, 5, 3.5]})
    lines = shown(found, width).split("\nssp:staleness=3 reached")[0].splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    head = " ".join(lines[2:4])
    assert [name for name in ALL if f" {name}" in head] == [name for name in ALL if name not in left_out]
    assert any("allreduce · 8 workers" in line and " 8.00 " in line and "95 ± 0 %" in line for line in lines)
    said = " ".join(" ".join(lines).split())
    assert (f"on the page: {', '.join(left_out)}" in said) == bool(left_out)


def test_a_long_name_is_folded_where_nothing_else_can_be_left_out():
    text = shown(study({"ssp:" + "+".join(f"option{i}={i}" for i in range(9)): [1.0, 2.0, 3.0]}), 60)
    row = next(line for line in text.splitlines() if "3 of 3" in line)
    assert row.strip().startswith("ssp:") and " 2.00 " in row and "95 ± 0 %" in row and len(row) <= 60


def test_runs_without_a_target_are_shown_by_what_they_have(tmp_path):
    write_run(tmp_path / "whole", config(target=None, seed=1), None)
    write_run(tmp_path / "cut", config("ssp", target=None, seed=2), None)
    path = tmp_path / "cut" / records.RECORDS
    path.write_bytes(path.read_bytes()[:-100])
    found = read_study(tmp_path)
    assert judge(found).sentences == [
        "not a result: there was no target, and so there is no time to one; train with --target, or use torrential "
        "compare"
    ]
    text = shown(found)
    assert "digits: no target, so no time to one" in text
    assert "trained" in text and "1 of 1" in text and "10.0" in text and "95 %" in text and "0 of 1" in text
    assert not any(words in text for words in ("missed", "reached", "until the target", "trials each"))


def test_runs_of_map_reduce_are_not_asked_for_a_target(tmp_path):
    write_run(tmp_path / "sums", config("torrential.strategies.map_reduce:MapReduce", target=None), None)
    assert judge(read_study(tmp_path)).sentences == [
        "not a result: map-reduce trains no model, so there is nothing to reach; what it found is what tt.map_reduce "
        "returned"
    ]


def test_runs_that_have_not_ended_are_no_trials(tmp_path):
    write_run(tmp_path / "cut", config(), 1.0)
    path = tmp_path / "cut" / records.RECORDS
    path.write_bytes(path.read_bytes()[:-100])
    assert judge(read_study(tmp_path)).sentences == ["not a result: no run of allreduce has come to its end"]


def test_json_and_csv(tmp_path):
    what = question()
    open_directory(tmp_path, what)
    found = conduct(what, tmp_path, lambda trial: fake(trial, None if trial.seed % 2 else 1.5), Unseen())
    text = to_json(found, judge(found), tmp_path / "report.html")
    told = json.loads(text)
    assert "\n" not in text and told["result"] and told["out"] == str(tmp_path)
    assert [entry["reached"] + entry["missed"] for entry in told["entries"]] == [3, 3]
    assert sum(entry["times"].count(None) for entry in told["entries"]) == sum(e["missed"] for e in told["entries"])
    lines = list(csv.DictReader(StringIO(write_csv(found).read_text())))
    assert len(lines) == 6 and {line["outcome"] for line in lines} <= {"reached", "missed"}
    assert {line["time_to_target"] for line in lines if line["outcome"] == "reached"} == {"1.5"}
    assert len({line["seed"] for line in lines}) == 6


def test_event_files_of_a_study(tmp_path):
    what = question(trials=2, tune={"lr": ["0.1", "0.3"]})
    open_directory(tmp_path, what)
    found = conduct(what, tmp_path, fake, Unseen())
    write_events(found)
    files = sorted(path.parent.name for path in write_events(found).rglob("*tfevents*"))
    assert len(files) == 8 and files[:2] == ["allreduce-1", "allreduce-2"] and files[-1] == "tuning-ssp-lr=0.3-1"
    first = found.entries[0].runs[0]
    shown = EventAccumulator(str(tmp_path / "tensorboard" / first.directory.name)).Reload()
    points = [(e.step, e.wall_time, e.value) for e in shown.Scalars("validation/accuracy")]
    began = datetime.fromisoformat(first.manifest.created).timestamp()
    assert points == [(e.samples, began + e.time, np.float32(e.value)) for e in first.validation] and points
    assert sorted(shown.Tags()["scalars"]) == [
        "test/accuracy", "test/loss", "train/loss", "validation/accuracy", "validation/loss",
    ]  # fmt: skip


def test_progress_in_plain_lines(tmp_path):
    what = question()
    open_directory(tmp_path, what)
    now = itertools.count(step=10.0)
    console = Console(file=StringIO(), width=200)
    watching = StudyProgress("accuracy", TARGET, console, clock=lambda: next(now))
    first = reported_trials(what, tmp_path, {})[0]
    fake(first)

    def one(trial: Trial) -> None:
        listener = watching.listen(100)
        for record in content(first.directory):
            listener.record(record)
        fake(trial, None if trial.entry == "ssp" else 1.5, diverged=trial.entry == "ssp" and trial.number == 2)

    conduct(what, tmp_path, one, watching)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "1 of 6 runs are there already" and len(lines) == 6
    assert lines[1].startswith("2 / 6 · ") and lines[1].endswith(" left") and not lines[-1].endswith("left")
    assert any("allreduce, trial 3: 90 % accuracy after 1.500 s, test accuracy 95 %" in line for line in lines)
    assert any("ssp, trial 2: missed 90 % accuracy, diverged" in line for line in lines)


def test_a_live_area_names_the_run_and_the_time_left(tmp_path):
    console = Console(file=StringIO(), width=100, force_terminal=True)
    now = 0.0
    watching = StudyProgress("accuracy", TARGET, console, live=True, clock=lambda: now)
    watching.planned(4, 1)
    first, second = reported_trials(question(), tmp_path, {})[:2]
    watching.begins(first)
    fake(first)
    now = 30.0
    watching.ended(first)
    watching.begins(second)
    listener = watching.listen(900)
    for record in content(first.directory):
        now += 1
        listener.record(record)
    watching.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run 3 / 4" in text and "0:00:50 left" in text
    assert f"{second.entry}, trial 1 · step 200 / 900 · validation accuracy 91 % (target 90 %)" in text


def test_a_run_without_records_is_cut_off(tmp_path):
    directory = tmp_path / "bare"
    directory.mkdir()
    records.write_manifest(directory, manifest(config()))
    assert not read_run(directory).finished and not is_finished(directory)
