"""Studies of made-up runs: what is asked, in which order it is run, what survives kills, and how it is read."""

import contextlib
import itertools
import math
import os
import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from made_up import Unseen, asked, config, content, fake, manifest, question, write_run

from torrential import records
from torrential.config import LocalSettings, SimSettings
from torrential.errors import BadInput
from torrential.records import Evaluation
from torrential.study.ask import check_asked, make_specs, split_entries, split_tune
from torrential.study.conduct import conduct, is_finished
from torrential.study.directory import locked, open_directory, read_question
from torrential.study.plan import Trial, reported_trials, tuning_trials
from torrential.study.read import read_study
from torrential.study.results import STUDY
from torrential.study.verdict import judge


# -- what is asked ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("allreduce,ssp", [("allreduce", {}), ("ssp", {})]),
        ("a, b:x=1+y=2 ,c", [("a", {}), ("b", {"x": "1", "y": "2"}), ("c", {})]),
        ("a:x=1,y=2,b:x=1;y=2", [("a", {"x": "1", "y": "2"}), ("b", {"x": "1", "y": "2"})]),
        ("a:milestones=0.5,0.75,b", [("a", {"milestones": "0.5,0.75"}), ("b", {})]),
        ("a:slow=1:4,3:2+lr=1e+5,b", [("a", {"slow": "1:4,3:2", "lr": "1e+5"}), ("b", {})]),
        ("a:push-every=5", [("a", {"push_every": "5"})]),
    ],
)
def test_entries_and_their_own_options(text, entries):
    assert split_entries([text]) == entries


def test_every_strategy_on_every_number_of_workers_and_cluster():
    specs = make_specs(asked(strategies=["allreduce", "ssp:staleness=1+lr=0.5,bsp:workers=8"], workers=[2, 4]))
    assert [spec.name for spec in specs] == [
        "allreduce · 2 workers",
        "allreduce · 4 workers",
        "ssp:staleness=1+lr=0.5 · 2 workers",
        "ssp:staleness=1+lr=0.5 · 4 workers",
        "bsp:workers=8",
    ]
    assert [spec.workers for spec in specs] == [2, 4, 2, 4, 8]
    assert (specs[2].lr, specs[2].options) == (0.5, {"staleness": "1"})
    assert len({spec.slug for spec in specs}) == 5
    simulated = make_specs(asked(world="sim", clusters=["laptop", "somewhere/mine.toml"]))
    assert [spec.name for spec in simulated][:2] == ["allreduce · laptop", "allreduce · mine"]
    assert [spec.cluster for spec in simulated][:2] == ["laptop", "somewhere/mine.toml"]


def test_names_that_differ_in_signs_only_get_directories_of_their_own():
    slugs = [spec.slug for spec in make_specs(asked(strategies=["a:x=1+y=2,a:x=1-y=2,a:" + "x=1+" * 40 + "z=1"]))]
    assert len(set(slugs)) == 3 and max(map(len, slugs)) < 80


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({"strategies": [""]}, "NAME[:option=value"),
        ({"strategies": ["ssp:staleness"]}, "name=value"),
        ({"strategies": ["ssp,ssp"]}, "the entry ssp is there twice"),
        ({"strategies": ["ssp:epochs=3"]}, "epochs is the same for all entries"),
        ({"strategies": ["ssp:evaluate_every=3"]}, "evaluate_every is the same for all"),
        ({"strategies": ["ssp:lr=much"]}, "lr must be a number (given: 'much')"),
        ({"trials": 0}, "--trials must be at least 1 (given: 0)"),
        ({"workers": [2, 0]}, "--workers must be at least 1 (given: 0)"),
        ({"workers": [2, 2]}, "--workers names a number twice (given: 2,2)"),
        ({"target": math.nan}, "--target must be a finite number"),
        ({"lr": 0.1, "tune": {"lr": ["1", "2"]}}, "lr is both set and tuned"),
        ({"strategies": ["ssp:lr=1"], "tune": {"lr": ["1", "2"]}}, "lr is tuned, and set for ssp"),
    ],
)
def test_questions_that_cannot_be_asked(different, words):
    with pytest.raises(BadInput) as error:
        check_asked(asked(**different))
        make_specs(asked(**different))
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=1", "lr=1,1", "=1,2", "seed=1,2", "workers=1,2"])
def test_what_cannot_be_tuned(text):
    with pytest.raises(BadInput, match="--tune"):
        split_tune([text])


# -- order and seeds --------------------------------------------------------------------------------------------------
def test_runs_take_turns_in_an_order_of_their_own_with_fresh_seeds(tmp_path):
    what = question(strategies=["allreduce,ssp,bsp,backup"], trials=6)
    planned = reported_trials(what, tmp_path, {})
    assert [trial.number for trial in planned] == sorted(trial.number for trial in planned)  # trial by trial
    turns = [tuple(trial.entry for trial in planned[i : i + 4]) for i in range(0, 24, 4)]
    assert all(set(turn) == {"allreduce", "ssp", "bsp", "backup"} for turn in turns) and len(set(turns)) > 3
    assert len({trial.seed for trial in planned}) == 24 and max(trial.seed for trial in planned) < 2**31
    assert planned == reported_trials(what, tmp_path, {})
    others = reported_trials(question(strategies=["allreduce,ssp,bsp,backup"], trials=6, seed=1), tmp_path, {})
    assert not {trial.seed for trial in planned} & {trial.seed for trial in others}


def test_every_entry_tries_the_same_values_as_often(tmp_path):
    what = question(tune={"lr": ["0.1", "0.3"], "staleness": ["1", "2"]}, tune_trials=2)
    planned = tuning_trials(what, tmp_path)
    counts = Counter((trial.entry, tuple(trial.values.items())) for trial in planned)
    assert len(counts) == 2 * 4 and set(counts.values()) == {2}
    assert len({trial.seed for trial in planned} | {t.seed for t in reported_trials(what, tmp_path, {})}) == 16 + 6
    assert planned[0].spec.lr == float(planned[0].values["lr"])


# -- carrying it out --------------------------------------------------------------------------------------------------
class Killed(BaseException):
    pass


@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment_nothing_is_repeated_and_nothing_lost(seed, tmp_path, monkeypatch):
    """Every write of a run, and every file of a run that is removed, is a moment to be killed at."""
    random = Random(seed)
    kept: dict[Path, bytes] = {}  # records of runs that came to their end

    def maybe_killed() -> None:
        if random.random() < 0.03:
            raise Killed

    def remove(directory: Path) -> None:
        assert directory not in kept
        for path in [*sorted(directory.rglob("*"), reverse=True), directory]:
            maybe_killed()
            path.rmdir() if path.is_dir() else path.unlink()

    def one(trial: Trial) -> None:
        assert trial.directory not in kept
        try:
            fake(trial, pause=maybe_killed)
        finally:
            if is_finished(trial.directory):
                kept[trial.directory] = (trial.directory / records.RECORDS).read_bytes()

    monkeypatch.setattr(shutil, "rmtree", remove)
    what = question(trials=2, tune={"lr": ["0.1", "0.3"]})
    open_directory(tmp_path / "study", what)
    for calls in itertools.count(1):
        assert calls < 500
        with contextlib.suppress(Killed):
            found = conduct(what, tmp_path / "study", one, Unseen())
            break
    assert calls > 3
    assert [len(entry.finished) for entry in (*found.entries, *found.tuning)] == [2, 2, 1, 1, 1, 1]
    assert len(kept) == 8 and found.problems == []
    assert all((place / records.RECORDS).read_bytes() == before for place, before in kept.items())
    conduct(what, tmp_path / "study", lambda trial: pytest.fail(f"{trial.title} was repeated"), Unseen())


TIMES = {  # of two entries that are told apart after eight trials, and not after five
    "allreduce": [2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8],
    "ssp": [1.1, 1.2, 1.3, 1.4, 2.45, 1.5, 1.6, 1.7],
}


def test_trials_are_added_until_it_is_decided(tmp_path):
    what = question(trials=20, auto=True)
    open_directory(tmp_path, what)
    made: list[int] = []
    seen: list[tuple[int, ...]] = []

    def one(trial: Trial) -> None:
        made.append(trial.number)
        fake(trial, TIMES[trial.entry][trial.number - 1])

    watch = Unseen()
    watch.planned = lambda *of: seen.append(of)
    watch.goes_on = lambda *of: seen.append(of)
    found = conduct(what, tmp_path, one, watch)
    assert made == sorted([*range(1, 9)] * 2) and seen == [(10, 0), (16, 5, 8)]
    assert (found.trials, found.looks) == (8, [5, 8, 13, 20])
    assert judge(found).sentences[0] == "ssp reached 90 % accuracy soonest (median 1.450 s, 8 trials)"
    again = conduct(what, tmp_path, lambda trial: pytest.fail(f"{trial.title} was repeated"), Unseen())
    assert judge(again).sentences == judge(found).sentences


def test_trials_are_added_up_to_the_most_and_no_further(tmp_path):
    alike = question(trials=9, auto=True)
    open_directory(tmp_path, alike)
    found = conduct(alike, tmp_path, lambda trial: fake(trial, 1 + trial.seed / 2**31), Unseen())
    assert found.trials == 9 and [len(entry.finished) for entry in found.entries] == [9, 9]
    assert "no difference seen" in judge(found).sentences[0]


@pytest.mark.parametrize("seed", range(8))
def test_trials_that_are_added_survive_kills(seed, tmp_path):
    """Whenever it is killed, a study goes on to the same looks, makes no run twice and no run too many."""
    random = Random(seed)
    what = question(trials=20, auto=True)
    open_directory(tmp_path, what)
    kept: dict[Path, bytes] = {}

    def maybe_killed() -> None:
        if random.random() < 0.01:
            raise Killed

    def one(trial: Trial) -> None:
        assert trial.directory not in kept
        try:
            fake(trial, TIMES[trial.entry][trial.number - 1], pause=maybe_killed)
        finally:
            if is_finished(trial.directory):
                kept[trial.directory] = (trial.directory / records.RECORDS).read_bytes()

    for calls in itertools.count(1):
        assert calls < 500
        with contextlib.suppress(Killed):
            found = conduct(what, tmp_path, one, Unseen())
            break
        under_way = judge(read_study(tmp_path))
        assert under_way.refused and under_way.pairs == []  # no verdict between two looks, nor at one that is undecided
    assert calls > 3 and len(kept) == 16
    assert all((place / records.RECORDS).read_bytes() == before for place, before in kept.items())
    assert found.trials == 8 and not judge(found).refused and found.problems == []


def test_a_run_whose_last_words_were_on_disk_when_it_was_killed_counts(tmp_path):
    what = question(trials=1)
    open_directory(tmp_path, what)
    first = reported_trials(what, tmp_path, {})[0]
    fake(first)
    again: list[str] = []
    conduct(what, tmp_path, lambda trial: (again.append(trial.entry), fake(trial))[0], Unseen())
    assert again == [reported_trials(what, tmp_path, {})[1].entry]


def test_tuning_is_decided_on_validation_data_alone_and_its_cost_is_said(tmp_path):
    what = question(tune={"lr": ["0.1", "0.3", "1"]})
    open_directory(tmp_path, what)
    times = {"0.1": 4.0, "0.3": 2.0, "1": None}
    used: dict[str, set[float | None]] = {"allreduce": set(), "ssp": set()}

    def one(trial: Trial) -> None:
        if trial.values:
            value = 0.99 if trial.values["lr"] == "0.1" else 0.5  # test data would choose another
            fake(trial, times[trial.values["lr"]], value=value, diverged=trial.values["lr"] == "1")
        else:
            used[trial.entry].add(trial.spec.lr)
            fake(trial)

    found = conduct(what, tmp_path, one, Unseen())
    assert used == {"allreduce": {0.3}, "ssp": {0.3}}
    assert [entry.tuned for entry in found.entries] == [{"lr": "0.3"}] * 2
    assert [entry.options for entry in found.entries] == [{"lr": "0.3"}] * 2
    seconds = 2 * 2 * (4 + 2 + 10)  # entries, workers, and a run without time to the target trains for ten seconds
    assert f"took 6 runs and {seconds}.00 worker-seconds" in " ".join(judge(found).rules)


@pytest.mark.parametrize(("reaching", "chosen"), [((), "0.3"), (("1",), "1")])
def test_without_a_time_to_the_target_the_best_validation_value_decides(tmp_path, reaching, chosen, monkeypatch):
    what = question(trials=1, tune={"lr": ["0.1", "0.3", "1"]})
    open_directory(tmp_path, what)

    def one(trial: Trial) -> None:
        lr = trial.values.get("lr")
        fake(trial, 9.0 if lr in reaching else None)
        if lr == "0.3":  # almost there
            path = trial.directory / records.RECORDS
            path.write_text(path.read_text().replace('"value":0.8,', '"value":0.89,'))

    assert conduct(what, tmp_path, one, Unseen()).entries[0].tuned == {"lr": chosen}


def test_the_last_value_tried_is_pointed_out(tmp_path):
    what = question(trials=1, tune={"lr": ["0.1", "0.3", "1"]})
    open_directory(tmp_path, what)
    found = conduct(what, tmp_path, lambda trial: fake(trial, 2 - trial.spec.lr), Unseen())
    assert "ssp: lr=1 is the last value that was tried" in " ".join(judge(found).rules)


# -- one question a directory -----------------------------------------------------------------------------------------
def test_another_question_is_refused_and_the_same_one_is_not(tmp_path):
    what = question()
    assert open_directory(tmp_path / "a", what) == what == read_question(tmp_path / "a")
    later = msgspec.structs.replace(what, created="later", command=["otherwise"])
    assert open_directory(tmp_path / "a", later) == what
    with pytest.raises(BadInput) as error:
        open_directory(tmp_path / "a", question(trials=5, set={"slow": "1:4"}))
    assert "holds another study (trials: 3 there, 5 asked; set: nothing there, slow=1:4 asked); " in str(error.value)
    assert "the number of trials is fixed before the first run, as adding some after a look" in str(error.value)
    with pytest.raises(BadInput) as error:
        open_directory(tmp_path / "a", question(set={"slow": "1:4"}))
    assert str(error.value).endswith("(set: nothing there, slow=1:4 asked); choose another --out")
    changed = msgspec.structs.replace(what, digest="other")
    with pytest.raises(BadInput, match="the task's file has changed"):
        open_directory(tmp_path / "a", changed)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").touch()
    with pytest.raises(BadInput, match="is not empty"):
        open_directory(tmp_path / "b", what)


def test_what_killed_processes_left_half_written_is_no_obstacle(tmp_path):
    dead, alive = 2**22 + 1, os.getpid()  # the first is above any process's number
    for name in (f".writable-{dead}", f".{STUDY}.tmp-{dead}", f".report.html.tmp-{dead}"):
        (tmp_path / name).write_text("{")
    open_directory(tmp_path, question())
    assert os.listdir(tmp_path) == [STUDY]
    (tmp_path / f".report.html.tmp-{dead}").write_text("<html>")
    (tmp_path / f".report.html.tmp-{alive}").write_text("<html>")
    open_directory(tmp_path, question())
    assert sorted(os.listdir(tmp_path)) == [f".report.html.tmp-{alive}", STUDY]


def test_one_process_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(BadInput, match="is still going on"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is damaged"), ('{"format":7}', "has format 7"), ("[]", "has format None"), ('{"format":1}', "is damaged")],
)
def test_a_question_that_cannot_be_read(tmp_path, text, words):
    (tmp_path / STUDY).write_text(text)
    with pytest.raises(BadInput, match=words):
        read_study(tmp_path)


# -- reading ----------------------------------------------------------------------------------------------------------
def test_a_plain_directory_of_runs(tmp_path):
    for i in range(3):
        write_run(tmp_path / f"a{i}", config("allreduce", seed=i), 1.0 + i)
        write_run(tmp_path / f"s{i}", config("ssp", seed=i, options={"staleness": 7}, servers=1), 2.0 + i)
    write_run(tmp_path / "slow", config("allreduce", settings=LocalSettings(slow="1:4")), 3.0)
    (tmp_path / "notes").mkdir()
    found = read_study(tmp_path)
    assert {entry.name: len(entry.runs) for entry in found.entries} == {
        "allreduce": 3,
        "allreduce:slow=1:4": 1,
        "ssp:staleness=7": 3,
    }
    assert (found.task, found.metric, found.target, found.trials, found.asked) == ("digits", "accuracy", 0.9, 1, False)
    assert found.maximize and found.problems == []


def test_a_rate_is_named_where_runs_of_one_strategy_differ_in_it(tmp_path):
    """A strategy may have a rate of its own, which nobody has set."""
    for name, given in {
        "a": config("allreduce"),
        "d": config("downpour", lr=0.01),
        "s": config("downpour", lr=0.02),
    }.items():
        write_run(tmp_path / name, given, 1.0)
    names = [entry.name for entry in read_study(tmp_path).entries]
    assert names == ["allreduce", "downpour:lr=0.01", "downpour:lr=0.02"]


def test_one_run(tmp_path):
    write_run(tmp_path / "one", config(), 2.0)
    found = read_study(tmp_path / "one")
    assert [len(entry.runs) for entry in found.entries] == [1]
    assert judge(found).sentences == ["not a result: 1 trial each, and at least 3 are needed"]


def test_records_cut_off_in_the_middle_of_a_line(tmp_path):
    write_run(tmp_path / "whole", config(seed=1), 2.0)
    write_run(tmp_path / "cut", config(seed=2), 2.0)
    path = tmp_path / "cut" / records.RECORDS
    path.write_bytes(path.read_bytes()[:-100])
    found = read_study(tmp_path)
    assert "end in the middle of a line" in found.problems[0] and str(tmp_path / "cut") in found.problems[0]
    assert [(len(entry.runs), len(entry.finished)) for entry in found.entries] == [(2, 1)]
    assert found.entries[0].runs[0].evaluations  # what was there is shown


def test_a_run_that_failed_says_why_until_it_is_resumed_and_only_with_its_task(tmp_path):
    write_run(tmp_path / "good", config(seed=1), 2.0)
    write_run(tmp_path / "other", config(task="fashion"), 2.0)
    write_run(tmp_path / "bad", config(seed=2), 2.0)
    path = tmp_path / "bad" / records.RECORDS
    records.trim_records(path, 10**6)  # all but the end
    last = max(record.time for record in records.read_records(path))
    records.note_end(tmp_path / "bad", records.FAILED, "the loss turned nan; lower --lr")
    found = read_study(tmp_path, "digits")
    assert found.problems == [f"{tmp_path / 'bad'}: failed: the loss turned nan; lower --lr; it does not count"]
    (failed,) = [run for entry in found.entries for run in entry.runs if not run.finished]
    assert failed.events[-1] == records.Event(event="failed", time=last, detail="the loss turned nan; lower --lr")
    assert read_study(tmp_path, "fashion").problems == []
    with records.RecordWriter(path) as writer:
        writer.write(records.Event(event="resumed", time=last))
    assert "cut off, or is going on" in read_study(tmp_path, "digits").problems[0]


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path):
    for name in ("good", "future", "broken", "odd", "unknown"):
        write_run(tmp_path / name, config("newest" if name == "unknown" else "ssp"), 2.0)
    future = msgspec.structs.replace(manifest(config()), format=99)
    records.write_manifest(tmp_path / "future", future)
    (tmp_path / "broken" / records.RECORDS).write_text('{"kind":"of another version"}\n{}\n')
    records.write_manifest(tmp_path / "odd", msgspec.structs.replace(manifest(config()), config={"task": "digits"}))
    found = read_study(tmp_path)
    said = "\n".join(found.problems)
    assert [entry.name for entry in found.entries] == ["ssp", "newest"]
    assert "format 99" in said and "line 1 of" in said and "another version, or damaged" in said
    assert "no strategy 'newest'" in said and len(found.problems) == 4


def test_directories_without_a_study(tmp_path):
    with pytest.raises(BadInput, match="there is no directory"):
        read_study(tmp_path / "nothing")
    with pytest.raises(BadInput, match="there is no run in"):
        read_study(tmp_path)
    open_directory(tmp_path / "mine", question())
    with pytest.raises(BadInput, match=r"holds studies \(mine\); name one"):
        read_study(tmp_path)


def test_runs_that_failed_do_not_decide_which_task_is_shown(tmp_path):
    write_run(tmp_path / "a", config(), 1.0)
    for seed in range(2):
        write_run(tmp_path / f"failed-{seed}", config(task="fashion", seed=seed), None)
        lines = (tmp_path / f"failed-{seed}" / records.RECORDS).read_bytes().splitlines(keepends=True)
        (tmp_path / f"failed-{seed}" / records.RECORDS).write_bytes(b"".join(lines[:-1]))
    found = read_study(tmp_path)
    assert found.task == "digits" and "shown are the 1 of digits, and not those of fashion (2)" in found.problems[0]


def test_runs_in_several_worlds_are_named_by_their_world(tmp_path):
    write_run(tmp_path / "a", config(), 1.0)
    write_run(tmp_path / "b", config(world="sim", settings=SimSettings()), 1.0)
    assert [entry.name for entry in read_study(tmp_path).entries] == ["allreduce", "allreduce · simulated"]


def test_of_several_tasks_one_is_shown_and_any_can_be_chosen(tmp_path):
    write_run(tmp_path / "a", config(), 1.0)
    write_run(tmp_path / "b", config(task="fashion"), 1.0)
    write_run(tmp_path / "c", config(task="fashion", seed=1), 2.0)
    found = read_study(tmp_path)
    assert found.task == "fashion" and [len(entry.runs) for entry in found.entries] == [2]
    said = "shown are the 2 of fashion, and not those of digits (1); choose with --task NAME"
    assert found.problems == [f"{tmp_path} holds runs of several tasks, which cannot be compared: {said}"]
    for task, runs in (("digits", 1), ("fashion", 2)):
        found = read_study(tmp_path, task)
        assert found.task == task and [len(entry.runs) for entry in found.entries] == [runs] and not found.problems
    with pytest.raises(
        BadInput, match=r"no task in .* named 'fashoin'; did you mean 'fashion'\? known: digits, fashion"
    ):
        read_study(tmp_path, "fashoin")


def test_the_task_of_a_study_is_given(tmp_path):
    what = question()
    open_directory(tmp_path, what)
    conduct(what, tmp_path, fake, Unseen())
    assert read_study(tmp_path, "digits").task == "digits"
    with pytest.raises(BadInput, match=r"no task in .* named 'fashion'; known: digits"):
        read_study(tmp_path, "fashion")


@pytest.mark.parametrize("text", ["{", '{"format": 7}'])
def test_runs_whose_question_cannot_be_read_are_shown(text, tmp_path):
    what = question()
    open_directory(tmp_path, what)
    conduct(what, tmp_path, fake, Unseen())
    (tmp_path / STUDY).write_text(text)
    found = read_study(tmp_path)
    assert [len(entry.finished) for entry in found.entries] == [3, 3] and not found.asked
    assert found.problems[0].endswith("; its runs are shown, but not the study's question")
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(BadInput, match=STUDY):
        read_study(tmp_path)


def test_different_targets_are_not_judged_by(tmp_path):
    write_run(tmp_path / "a", config(target=0.9), 1.0)
    write_run(tmp_path / "b", config(target=0.8), 1.0)
    found = read_study(tmp_path)
    assert found.target is None and "different targets (0.8, 0.9)" in found.problems[0]
    assert "no target that all runs share" in judge(found).sentences[0]


def test_the_direction_of_a_metric_is_seen_in_who_reached_it(tmp_path):
    def less(record: Any) -> Any:
        return msgspec.structs.replace(record, value=1.8 - record.value) if isinstance(record, Evaluation) else record

    for name, time in (("reached", 1.0), ("missed", None)):
        write_run(tmp_path / name, config(), time)
        found = [less(record) for record in content(tmp_path / name)]
        (tmp_path / name / records.RECORDS).write_bytes(b"".join(records.encode(r) + b"\n" for r in found))
        assert not read_study(tmp_path / name).maximize
