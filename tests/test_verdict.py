"""What may be said of a study, and what it refuses to say."""

import json
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from made_up import EPOCH, TARGET, config, question, run, shown, study

from torrential.records import Evaluation, Step
from torrential.study.intervals import unevenly_evaluated
from torrential.study.results import Entry, Study
from torrential.study.show import columns, to_json
from torrential.study.verdict import judge, outlook
from torrential.study.watch import describe


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
