"""Studies of made-up runs: what is asked, in which order it is run, what survives kills, and what may be said of it."""

import contextlib
import csv
import itertools
import json
import math
import os
import shutil
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from made_up import EPOCH, TARGET, config, content, manifest, run, study, write_run
from rich.console import Console

from torrential import records
from torrential.config import Settings
from torrential.errors import BadInput
from torrential.records import Evaluation, Step
from torrential.study.ask import Asked, Question, check_asked, make_specs, split_entries, split_tune
from torrential.study.conduct import conduct, is_finished
from torrential.study.directory import locked, open_directory, read_question
from torrential.study.plan import Trial, reported_trials, tuning_trials
from torrential.study.read import read_run, read_study
from torrential.study.results import STUDY, Entry, Study
from torrential.study.show import columns, show, to_json, write_csv
from torrential.study.tensorboard import event_file, write_events
from torrential.study.verdict import judge, outlook, unevenly_evaluated
from torrential.study.watch import Watching, describe


def asked(**different: Any) -> Asked:
    given = {"task": "digits", "strategies": ["allreduce,ssp"], "target": TARGET, "trials": 3, "workers": [2]}
    return Asked(**given | different)


def question(**different: Any) -> Question:
    what = asked(**different)
    return Question(
        torrential="0.1.0",
        digest="",
        created="2026-01-01T00:00:00+00:00",
        command=["torrential", "compare"],
        asked=what,
        entries=make_specs(what),
        task="digits",
        metric="accuracy",
        maximize=True,
        interval=None,
    )


class Unseen:
    def planned(self, runs: int, done: int) -> None: ...

    def begins(self, trial: Trial) -> None: ...

    def ended(self, trial: Trial) -> None: ...


def fake(trial: Trial, time: float | None = 1.0, **how: Any) -> None:
    spec = trial.spec
    write_run(trial.directory, config(spec.strategy, workers=spec.workers, seed=trial.seed), time, **how)


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


def test_of_two_that_begin_at_once_the_first_puts_the_question(tmp_path, monkeypatch):
    """Both have found an empty directory."""
    link = os.link

    def late(half: Path, place: Path) -> None:
        place.write_bytes(msgspec.json.encode(question()))
        link(half, place)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(BadInput, match="holds another study"):
        open_directory(tmp_path, question(set={"slow": "1:4"}))
    assert read_question(tmp_path) == question()
    assert os.listdir(tmp_path) == [STUDY]


def test_one_process_at_a_time(tmp_path):
    open_directory(tmp_path, question())
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


# -- what may be said -------------------------------------------------------------------------------------------------
def test_a_winner_in_words():
    verdict = judge(study({"allreduce": [6, 7, 8, 9, 8.5], "ssp": [3, 4, 4.5, 5, 3.5]}))
    assert verdict.sentences[0] == "ssp reached 90 % accuracy soonest (4.000 s on average, 5 trials)"
    (pair,) = verdict.pairs
    assert verdict.sentences[1:] == [pair.sentence]
    assert pair.sentence.startswith("ssp reached 90 % accuracy 1.93x sooner than allreduce (95 % CI 1.")
    assert pair.sentence.endswith(", 5 trials each)") and pair.differs and pair.p == pair.difference.p
    assert verdict.refused == [] and "once per epoch" in verdict.rules[0]


def test_who_is_like_the_soonest_need_not_be_like_one_another():
    times = {
        "a": [2.2, 2, 2, 2.3, 40, math.inf, 2.6, 2.2],
        "b": [3.2, 3.3, 3, 3.8, 3.4, 3.0, 3.3, 3.1],
        "c": [5.3, 6.3, 5.2, 5.3, 5.0, 5.9, 100, 5.4],
    }
    verdict = judge(study(times))
    assert verdict.sentences[0] == "soonest to 90 % accuracy: a, with no difference seen between it and b and c"
    assert [pair.differs for pair in verdict.pairs] == [False, False, True]


def test_no_difference_in_words():
    verdict = judge(study({"a": [3, 4, 5, 6, 7], "b": [3.5, 4.5, 5.5, 6.5, 4.2], "c": [30, 40, 50, 60, 70]}))
    assert verdict.sentences[0] == "soonest to 90 % accuracy, with no difference seen between them: b and a"
    assert any(line.startswith("no difference seen between b and a (b 1.03x sooner here") for line in verdict.sentences)
    assert any("Holm's correction for 3 comparisons" in rule for rule in verdict.rules)
    assert [pair.p for pair in verdict.pairs] == pytest.approx([1.0, 3 * 2 / 252, 3 * 2 / 252], abs=0.4)


def test_too_few_trials_to_tell():
    verdict = judge(study({"a": [1.0, 1.1, 1.2], "b": [5.0, 5.1, 5.2]}))
    assert verdict.sentences[0].startswith("undecided: a was the soonest to 90 % accuracy here (1.100 s on average")
    assert verdict.sentences[0].endswith("it takes 4 each")
    assert verdict.sentences[1].startswith("not enough trials to tell a from b (a 4.6x sooner here")


def test_missed_runs_count_and_are_shown():
    verdict = judge(study({"a": [3, 4, 5, 3.5, 4.5], "b": [8, None, 9, 10, 8.5], "c": [7, None, 8, None, None]}))
    assert [(row.reached, row.missed) for row in verdict.rows] == [(5, 0), (4, 1), (2, 3)]
    said = {(pair.first.entry.name, pair.second.entry.name): pair.sentence for pair in verdict.pairs}
    assert "sooner than b" in said["a", "b"] and "b in 4 of 5" in said["a", "b"]
    assert said["a", "c"].startswith("a reached 90 % accuracy in 5 of 5 trials, c in 2 of 5: a difference (p = 0.0")
    assert "sooner" not in said["a", "c"]  # no time is claimed for an entry that missed twice
    assert said["b", "c"].startswith("no difference seen between b and c (b reached")


def test_nobody_reached_it():
    verdict = judge(study({"a": [None] * 3, "b": [None] * 3}))
    assert verdict.sentences == [
        "nobody reached 90 % accuracy; nearest on validation data: 80 %, by a",
        "neither a nor b reached 90 % accuracy (3 trials each)",
    ]
    few = judge(study({"a": [None] * 2, "b": [None] * 2}))
    assert few.sentences == [
        "not a result: 2 trials each, and at least 3 are needed",
        "nobody reached 90 % accuracy; nearest on validation data: 80 %, by a",
    ]
    assert judge(study({"a": [None], "b": [1.0]})).sentences[1:] == []


def simulated(found: Study) -> Study:
    return replace(found, entries=[replace(entry, world="sim") for entry in found.entries])


def test_seconds_of_a_simulated_cluster_are_called_virtual():
    found = simulated(study({"a": [1.0] * 5, "b": [2.0] * 5}))
    assert judge(found).sentences[0] == "a reached 90 % accuracy soonest (1.000 virtual s on average, 5 trials)"
    text = shown(found)
    assert "digits: virtual time to 90 % accuracy" in text and text.count("virtual s\n") + text.count("virtual s ") == 3
    assert columns(found)[2] == "mean ± sd, virtual s" and columns(study({}))[2] == "mean ± sd, s"
    both = replace(found, entries=[found.entries[0], *study({"b": [2.0]}).entries])
    assert columns(both)[2] == "mean ± sd, s (sim: virtual)" and "digits: time to" in shown(both)
    one = run(config("a", world="sim"), 1.5)
    assert describe(one, "accuracy", TARGET).startswith("90 % accuracy after 1.500 virtual s")


def test_costs_and_stability():
    row = judge(study({"a": [2.0, 4.0, None]})).rows[0]
    assert row.worker_seconds.mean == 6.0 and row.bytes_sent.mean == 200
    assert row.stability == pytest.approx(math.sqrt(2) / 3)
    assert row.times == [2.0, 4.0, math.inf]


def test_bytes_are_counted_up_to_the_target_and_not_to_the_record_before_it():
    """Records are a few a second: a short run has one at its first step, and one at its end."""
    one = run(config("downpour"), 2.0, looks=2)  # the target is met at 2,000 samples
    place = {"step": 1, "epoch": 1, "time": 0.1, "loss": 0.1, "compute": 0.1, "communicate": 0.0, "wait": 0.0}

    def step(worker: int, samples: int, sent: int) -> Step:
        return Step(worker=worker, samples=samples, bytes_sent=sent, **place)

    first = [step(0, 100, 10), step(0, 4100, 4010)]  # 10, and 1,900 of the 4,000 samples between
    assert replace(one, steps=first).bytes_to_target == 10 + 1900
    late = [step(1, 4000, 800)]  # nothing on record before the target
    assert replace(one, steps=[*first, *late]).bytes_to_target == 1910 + 400
    early = [step(2, 1000, 500), step(2, 1500, 700)]  # it died before the target
    assert replace(one, steps=[*early, *first]).bytes_to_target == 1910 + 700
    replaced = [step(2, 1000, 500), step(2, 1800, 100), step(2, 2200, 300)]  # the counter starts anew
    assert replace(one, steps=replaced).bytes_to_target == 500 + 100 + 100
    gone_back = [step(2, 3000, 600), step(2, 2500, 700)]  # resumed from a checkpoint
    assert replace(one, steps=gone_back).bytes_to_target == 400
    assert replace(one, steps=first, summary=None).bytes_to_target is None


def test_the_harness_refuses_to_report():
    """T19.1: fewer runs than asked for; fewer than three; evaluated more often than declared; two failures."""
    assert judge(study({"a": [1.0, 2.0], "b": [1.0, 2.0]})).sentences == [
        "not a result: 2 trials each, and at least 3 are needed"
    ]
    behind = judge(study({"a": [1.0] * 5, "b": [1.0] * 4}))
    assert behind.sentences == ["not a result: of 5 trials each, some are not done (b 4)"] and behind.pairs == []
    often = [run(config("a"), 1.0, looks=8) for _ in range(3)]
    for one in often:
        one.config["samples"] = 10 * EPOCH  # so there were looks every tenth of an epoch
    finer = judge(study({}, entries=[Entry("a", "a", {}, 2, 0, "local", "", often)], trials=3))
    assert finer.sentences == ["not a result: a was evaluated more often than declared (once per epoch)"]
    failures = judge(study({"a": [1.0, 1.1, 1.2, 1.3, 1.4], "b": [9.0, 9.1, 9.2, None, None]}))
    assert "sooner" not in failures.pairs[0].sentence and "b in 3 of 5" in failures.pairs[0].sentence
    least = judge(study({"a": [1.0, 1.1, 1.2, None, None], "b": [None] * 5})).sentences[0]
    assert least == (
        "a was the soonest to 90 % accuracy here (2 of 5 trials missed it, so there is no time to report); "
        "b never reached it, which may be chance"
    )


def test_diverged_runs_are_missed_runs():
    runs = [run(config("a"), None, diverged=True) for _ in range(3)]
    row = judge(study({}, entries=[Entry("a", "a", {}, 2, 0, "local", "", runs)], trials=3)).rows[0]
    assert (row.trials, row.missed, row.value.count) == (3, 3, 0)


def test_who_looks_more_often_sees_a_lucky_crossing_sooner():
    """T19.3: on noisy curves of the same learning, ten times as many looks make the measured time shorter; so the
    interval is disclosed, and entries with different ones are not compared."""
    random = np.random.default_rng(0)
    times = np.arange(1, 1001) / 100
    shorter = []
    for _ in range(200):
        curve = 1 - np.exp(-times / 3) + random.normal(0, 0.02, 1000)
        rare, often = (
            float(times[every - 1 :: every][np.argmax(curve[every - 1 :: every] >= TARGET)]) for every in (100, 10)
        )
        shorter.append(rare - often)
    assert min(shorter) >= 0  # all looks of the one are looks of the other
    assert 0.5 < np.mean(shorter) < 1.2  # of about 7 s: nearly a tenth, without learning any faster
    rare, often = ([run(config(n, seed=i), 1.0, looks=k) for i in range(3)] for n, k in (("a", 2), ("b", 20)))
    for one in often:
        one.evaluations[:] = [squeezed(e) for e in one.evaluations]
    entries = [Entry(n, n, {}, 2, 0, "local", "", runs) for n, runs in (("a", rare), ("b", often))]
    verdict = judge(study({}, entries=entries, trials=3, asked=False))
    assert verdict.refused[0].startswith("b was evaluated every 100 samples and a every 1,000: whoever is looked at")
    assert unevenly_evaluated(study({}, entries=[entries[0]], trials=3, asked=False)) == []


def evaluated(name: str, epochs: int) -> Entry:
    """Of three runs, once in so many epochs, until the target and once more."""
    runs = []
    for seed in range(3):
        one = run(config(name, seed=seed), 2.0, looks=3)
        one.evaluations[:] = [msgspec.structs.replace(e, samples=epochs * e.samples) for e in one.evaluations]
        late = msgspec.structs.replace(one.evaluations[2], time=9.0, samples=100 * EPOCH)
        one.evaluations.append(late)  # of a snapshot that was under way
        runs.append(one)
    return Entry(name, name, {}, 2, 0, "local", "", runs)


def test_a_study_is_held_to_the_interval_that_was_asked_for():
    """A snapshot of servers needs a mark of every worker, so many workers may be evaluated more rarely."""
    even, rare = evaluated("allreduce", 1), evaluated("ssp", 5)
    assert judge(study({}, entries=[even], trials=3)).refused == []
    found = study({}, entries=[even, rare], trials=3)
    verdict = judge(found)
    assert verdict.sentences == [
        "not a result: ssp was evaluated every 5,000 samples and allreduce every 1,000, not once per epoch (1,000 "
        "samples) as was asked for: whoever is looked at more often reaches a target sooner by luck; ask for an "
        "interval that all can keep, with --set evaluate_every"
    ]
    assert verdict.rules[0].startswith("to be evaluated once per epoch; ") and verdict.pairs == []
    told = json.loads(to_json(found, verdict, None))
    assert not told["result"] and [entry["interval"] for entry in told["entries"]] == [1000, 5000]
    assert "(not a result)" in shown(found)
    alone = judge(study({}, entries=[rare, evaluated("downpour", 5)], trials=3)).refused
    assert len(alone) == 1 and "ssp was evaluated every 5,000 samples, not once per epoch" in alone[0]
    assert judge(study({}, entries=[rare], trials=3, interval=5000)).refused == []
    between = judge(study({}, entries=[even, evaluated("ssp", 2)], trials=3, interval=1400)).refused
    assert len(between) == 1 and "ssp was evaluated every 2,000 samples and allreduce every 1,000" in between[0]
    finer = judge(study({}, entries=[even, rare], trials=3, interval=500)).refused
    assert "ssp was evaluated every 5,000 samples and allreduce every 1,000, not every 500 samples as was" in finer[0]


def test_that_a_run_ends_is_no_evaluation_out_of_turn():
    """Of runs that miss, the last evaluation comes when the samples are spent."""
    missed = [run(config("a", seed=i), None, looks=2) for i in range(3)]
    for one in missed:
        place = one.evaluations[1]
        one.evaluations[1] = msgspec.structs.replace(place, samples=EPOCH + 10)
    found = study({}, entries=[Entry("a", "a", {}, 2, 0, "local", "", missed), evaluated("b", 1)], trials=3)
    assert [row.interval for row in judge(found).rows] == [1000, 1000] and judge(found).refused == []


def squeezed(evaluation: Evaluation) -> Evaluation:
    return msgspec.structs.replace(evaluation, samples=evaluation.samples // 10)


def test_what_can_be_known_before_the_first_run():
    assert outlook(question(trials=5)) == ["2 entries, 5 trials each"]
    assert outlook(question(trials=2))[1] == "fewer than 3 trials are not a result"
    assert "it takes 5 each" in outlook(question(strategies=["a,b,c"], trials=4))[1]
    assert "after 4 runs to tune lr" in outlook(question(tune={"lr": ["1", "2"]}))[0]


# -- reading ----------------------------------------------------------------------------------------------------------
def test_a_plain_directory_of_runs(tmp_path):
    for i in range(3):
        write_run(tmp_path / f"a{i}", config("allreduce", seed=i), 1.0 + i)
        write_run(tmp_path / f"s{i}", config("ssp", seed=i, options={"staleness": 7}, servers=1), 2.0 + i)
    write_run(tmp_path / "slow", config("allreduce", settings=Settings(slow="1:4")), 3.0)
    (tmp_path / "notes").mkdir()
    found = read_study(tmp_path)
    assert {entry.name: len(entry.runs) for entry in found.entries} == {
        "allreduce": 3,
        "allreduce:slow=1:4": 1,
        "ssp:staleness=7": 3,
    }
    assert (found.task, found.metric, found.target, found.trials, found.asked) == ("digits", "accuracy", 0.9, 1, False)
    assert found.maximize and found.problems == []


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
    write_run(tmp_path / "two" / "a", config(), 1.0)
    write_run(tmp_path / "two" / "b", config(task="fashion"), 1.0)
    write_run(tmp_path / "two" / "c", config(task="fashion", seed=1), 2.0)
    found = read_study(tmp_path / "two")
    assert found.task == "fashion" and [len(entry.runs) for entry in found.entries] == [2]
    assert "shown are the 2 of fashion and not the 1 of digits; keep them apart" in found.problems[0]


@pytest.mark.parametrize("text", ["{", '{"format": 7}'])
def test_runs_whose_question_cannot_be_read_are_shown(text, tmp_path):
    what = question()
    open_directory(tmp_path, what)
    conduct(what, tmp_path, fake, Unseen())
    (tmp_path / STUDY).write_text(text)
    found = read_study(tmp_path)
    assert [len(entry.finished) for entry in found.entries] == [3, 3] and not found.asked
    assert found.problems[0].endswith("; its runs are shown, but not what was asked")
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


# -- shown ------------------------------------------------------------------------------------------------------------
def shown(found: Study, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    show(found, judge(found), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_all_points_and_labels_what_is_no_result():
    text = shown(study({"a": [1.0, 2.0, None, None], "b": [3.0, 4.0, 5.0, 6.0]}))
    assert "1.00 2.00 missed missed" in text and "2 of 4" in text and "1.50 ± 0.707*" in text
    assert "3.00 4.00 5.00 6.00" in text and "not a result" not in text
    assert "(not a result)" in shown(study({"a": [1.0], "b": [2.0]}))
    never = shown(study({"a": [None] * 3}))
    assert "all missed" in never and "*" not in never


ALL = ["entry", "reached", "mean ± sd", "median", "all", "worker-s", "sent", "test", "options"]


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (140, []),
        (115, ["options"]),
        (100, ["options", "all"]),
        (90, ["options", "all"]),
        (80, ["options", "all", "worker-s"]),
        (60, ["options", "all", "worker-s", "sent", "median"]),
    ],
)
def test_the_table_fits_the_terminal(width, left_out):
    found = study({"allreduce · 8 workers": [6.0, 7, 8, 9, 8.5], "ssp:staleness=3": [3.0, 4, 4.5, 5, 3.5]})
    lines = shown(found, width).split("\nssp:staleness=3 reached")[0].splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    head = " ".join(lines[2:4])
    assert [name for name in ALL if f" {name}" in head] == [name for name in ALL if name not in left_out]
    assert any("allreduce · 8 workers" in line and "7.70 ± 1.20" in line and "95 ± 0 %" in line for line in lines)
    said = " ".join(" ".join(lines).split())
    assert (f"on the page: {', '.join(left_out)}" in said) == bool(left_out)


def test_a_long_name_is_folded_where_nothing_else_can_be_left_out():
    text = shown(study({"ssp:" + "+".join(f"option{i}={i}" for i in range(9)): [1.0, 2.0, 3.0]}), 60)
    row = next(line for line in text.splitlines() if "3 of 3" in line)
    assert row.strip().startswith("ssp:") and "2.00 ± 1.00" in row and "95 ± 0 %" in row and len(row) <= 60


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


# What TensorBoard 2.21 itself writes for the version and two scalars.
EVENTS = (
    "1800000000000000a37f4b2209000000406e55da411a0d627261696e2e4576656e743a32c3486dfc"
    "2a00000000000000ae8d91f509000060406e55da4110e8072a1c0a1a0a1376616c69646174696f6e2f6163637572616379150000003f3b97ab2d"
    "2600000000000000734fe30009000060406e55da4110e8072a180a160a0f76616c69646174696f6e2f6c6f7373150000803ec78018b3"
)


def test_event_files_are_as_tensorboard_writes_them(tmp_path):
    place = {"split": "validation", "step": 50, "epoch": 1, "samples": 1000, "time": 1.5}
    one = run(config("ssp"), 1.0)
    few = replace(one, steps=[], evaluations=[Evaluation(value=0.5, loss=0.25, **place)])
    assert event_file(few, "accuracy").hex() == EVENTS
    what = question(trials=2, tune={"lr": ["0.1", "0.3"]})
    open_directory(tmp_path, what)
    found = conduct(what, tmp_path, fake, Unseen())
    write_events(found)
    files = sorted(path.parent.name for path in write_events(found).rglob("*tfevents*"))
    assert len(files) == 8 and files[:2] == ["allreduce-1", "allreduce-2"] and files[-1] == "tuning-ssp-lr=0.3-1"
    tags = event_file(one, "accuracy")
    assert all(tag in tags for tag in (b"train/loss of worker 1", b"validation/accuracy", b"test/loss"))


def test_progress_in_plain_lines(tmp_path):
    what = question()
    open_directory(tmp_path, what)
    now = itertools.count(step=10.0)
    console = Console(file=StringIO(), width=200)
    watching = Watching("accuracy", TARGET, console, clock=lambda: next(now))
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
    watching = Watching("accuracy", TARGET, console, live=True, clock=lambda: now)
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
