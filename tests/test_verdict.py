"""What may be said of a study, and what it refuses to say."""

import json
import math
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from made_up import EPOCH, TARGET, config, question, run, shown, study

from torrential.records import Evaluation, Step
from torrential.study.intervals import unevenly_evaluated
from torrential.study.outlook import outlook
from torrential.study.results import Entry, Study
from torrential.study.show import cells, columns, to_json
from torrential.study.verdict import in_order, is_decided, judge
from torrential.study.watch import describe


def test_a_winner_in_words():
    verdict = judge(study({"allreduce": [6, 7, 8, 9, 8.5], "ssp": [3, 4, 4.5, 5, 3.5]}))
    assert verdict.sentences[0] == "ssp reached 90 % accuracy soonest (median 4.000 s, 5 trials)"
    (pair,) = verdict.pairs
    assert verdict.sentences[1:] == [pair.sentence]
    assert pair.sentence.startswith("ssp reached 90 % accuracy 2.00x sooner than allreduce (95 % CI 1.")
    assert pair.sentence.endswith(", 5 trials each)") and pair.differs and pair.p == pair.difference.p
    assert verdict.refused == [] and "once per epoch" in verdict.rules[0]


def test_a_ratio_has_as_many_digits_as_its_interval():
    verdict = judge(study({"slow": [2.041, 2.042, 2.043, 2.044], "quick": [1.0, 1.0001, 1.0002, 1.0003]}))
    assert verdict.sentences[1].startswith("quick reached 90 % accuracy 2.04x sooner than slow (95 % CI 2.04–2.04, ")


def test_who_is_like_the_soonest_need_not_be_like_one_another():
    times = {
        "a": [2.2, 2, 2, 2.3, 40, math.inf, 2.6, 2.2],
        "b": [3.2, 3.3, 3, 3.8, 3.4, 3.0, 3.3, 3.1],
        "c": [5.3, 6.3, 5.2, 5.3, 5.0, 5.9, 100, 5.4],
    }
    verdict = judge(study(times))
    assert verdict.sentences[0] == (
        "undecided: a was the soonest to 90 % accuracy here (median 2.250 s, 1 of 8 trials missed it), with no "
        "difference seen to b and c"
    )
    assert [pair.differs for pair in verdict.pairs] == [False, False, True]


def test_no_difference_in_words():
    verdict = judge(study({"a": [3, 4, 5, 6, 7], "b": [3.5, 4.5, 5.5, 6.5, 4.2], "c": [30, 40, 50, 60, 70]}))
    assert verdict.sentences[0] == (
        "undecided: b was the soonest to 90 % accuracy here (median 4.500 s, 5 trials), with no difference seen to a"
    )
    (said,) = (line for line in verdict.sentences if line.startswith("no difference seen between b and a (medians 4.5"))
    assert re.search(r"95 % CI of the ratio [\d.]+–[\d.]+ for these two alone, 5 trials each, p = ", said)
    assert said.endswith(" after correction for all comparisons)")
    assert any("Holm's correction for 3 comparisons" in rule for rule in verdict.rules)
    assert any(rule.startswith("entries are ranked by their median times") for rule in verdict.rules)
    assert [pair.p for pair in verdict.pairs] == pytest.approx([1.0, 3 * 2 / 252, 3 * 2 / 252], abs=0.4)


def test_the_soonest_is_the_one_with_the_smallest_median_as_the_test_is_by_ranks():
    """One trial that took 8.96 s among values under 1 once made another entry the soonest."""
    late, usual = [0.52, 0.61, 0.55, 0.58, 8.96, 0.57, 0.6], [0.81, 0.9, 0.78, 0.86, 0.83, 0.88, 0.79]
    verdict = judge(study({"usual": usual, "late": late}))
    assert verdict.sentences[0] == "late reached 90 % accuracy soonest (median 0.5800 s, 7 trials)"
    (pair,) = verdict.pairs
    assert pair.differs and pair.difference.low > 1 and pair.sentence.startswith("late reached 90 % accuracy 1.4")
    assert cells(study({}), verdict.rows[1])[1:4] == ["7 of 7", "0.580", "0.520–8.96"]
    assert in_order(verdict.rows) == [verdict.rows[1], verdict.rows[0]]


def test_every_difference_that_is_told_is_one_by_the_test_and_the_other_way_round():
    random = np.random.default_rng(5)
    for _ in range(25):
        times = {name: list(random.lognormal(shift, 0.3, 9)) for name, shift in (("a", 0), ("b", 0.35), ("c", 0.1))}
        verdict = judge(study(times))
        for pair in verdict.pairs:
            assert pair.first.time.median <= pair.second.time.median
            assert pair.differs == (pair.p <= 0.05) == (" sooner than " in pair.sentence)
            assert pair.difference.low > 1 or not pair.differs
        best = min(times, key=lambda name: np.median(times[name]))
        assert f"{best} reached" in verdict.sentences[0] or f": {best}" in verdict.sentences[0]


def test_medians_and_ranks_that_disagree_are_no_order():
    a, b = [4.9 + i / 1000 for i in range(25)] + [100.0 + i for i in range(24)], [1.0 + i / 1000 for i in range(24)]
    verdict = judge(study({"b": b + [5.0 + i / 1000 for i in range(25)], "a": a}))
    (pair,) = verdict.pairs
    assert pair.first.entry.name == "a" and pair.p <= 0.05 and pair.difference.sooner < 0.5 and not pair.differs
    assert pair.sentence.startswith("no order between a, which is first by its median, and b, which is by ranks (p = ")
    assert verdict.sentences[0] == (
        "undecided: a was the soonest to 90 % accuracy here (median 4.924 s, 49 trials), with no difference seen to b"
    )


def crashing(found: Study, at: float | str) -> Study:
    """The study on a cluster on which worker 2 crashes, and hosts are parted at once."""
    faults = [{"kind": "crash", "worker": 2, "at": at}, {"kind": "partition", "hosts": [0, 1], "at": 0.0}]
    for entry in found.entries:
        for one in entry.runs:
            one.manifest.config.update({"world": "sim", "settings": {"world": "sim"}, "cluster": {"faults": faults}})
    return found


def test_faults_that_came_too_late_for_some_trials_are_said():
    times = {"a": [5.0, 5.1, 5.2, 13.0, 4.9], "b": [6.0, 6.1, 6.2, 6.3, 6.4]}
    assert judge(crashing(study(times), 12.5)).sentences[-1] == (
        "the crash of worker 2 at 12.50 virtual s struck in 1 of 10 trials (a 1 of 5, b 0 of 5); the others had ended "
        "before"
    )
    assert judge(crashing(study(times), 20.0)).sentences[-1] == (
        "the crash of worker 2 at 20.00 virtual s struck in none of 10 trials: all had ended before"
    )
    struck = judge(crashing(study(times), 4.0)).sentences
    assert not any("struck" in line for line in struck)
    missed = judge(crashing(study({"a": [None] * 3}), 9.5)).sentences  # they trained for ten seconds
    assert not any("struck" in line for line in missed)
    few = judge(crashing(study({"a": [1.0]}), 9.5)).sentences
    assert few[0].startswith("not a result") and "struck in none of 1 trial:" in few[-1]


def test_a_fault_at_a_share_of_the_run_may_come_too_late_too():
    found = crashing(study({"allreduce": [5.0, 5.1], "ssp": [6.0, 6.1]}), "50 %")
    for one in found.entries[1].runs:
        one.manifest.config["epochs"] = 1  # all of which it needed, where the others needed one of ten
    assert judge(found).sentences[-1] == (
        "the crash of worker 2 at 50 % of the run struck in 2 of 4 trials (allreduce 0 of 2, ssp 2 of 2); the others "
        "had ended before"
    )


def test_trials_are_added_until_the_soonest_is_known():
    looks = [5, 8, 13, 20]
    clear = study({"a": [1.0, 1.1, 1.2, 1.3, 1.4], "b": [5.0, 5.1, 5.2, 5.3, 5.4]}, looks=looks)
    verdict = judge(clear)
    assert is_decided(clear) and verdict.sentences[0] == "a reached 90 % accuracy soonest (median 1.200 s, 5 trials)"
    assert verdict.pairs[0].p == pytest.approx(4 * 2 / 252)  # for four looks
    assert "looks planned after 5, 8, 13 and 20 of them; p-values are times 4" in " ".join(verdict.rules)
    close = {"a": [1.0, 1.1, 1.2, 1.3, 1.9], "b": [1.4, 1.5, 1.6, 1.7, 1.8]}
    assert judge(study(close)).refused == [] and not is_decided(study(close, looks=looks))
    assert judge(study(close, looks=looks)).sentences == [
        "not a result: undecided after 5 trials each, and up to 20 may be made; go on with: torrential compare "
        "--resume nowhere"
    ]
    once = judge(study({"a": [1.0, 1.1, 1.2, 1.3, 1.4], "b": [5.0, 5.1, 5.2, 5.3, 5.4]}, looks=[5]))
    assert once.pairs[0].p == pytest.approx(2 / 252) and "p-values are" not in " ".join(once.rules)  # one test
    last = study(close, looks=[5])
    assert is_decided(last) and "no difference seen" in judge(last).sentences[0]
    assert is_decided(study({"a": [None] * 5, "b": [None] * 5}, looks=looks))  # more of the same would tell nothing


def test_too_few_trials_to_tell():
    verdict = judge(study({"a": [1.0, 1.1, 1.2], "b": [5.0, 5.1, 5.2]}))
    assert verdict.sentences[0].startswith("undecided: a was the soonest to 90 % accuracy here (median 1.100 s")
    assert verdict.sentences[0].endswith("it takes 4 each")
    assert verdict.sentences[1].startswith(
        "not enough trials to tell a from b (medians 1.100 s and 5.100 s, 95 % CI of the ratio 0.00–∞, 3 trials each)"
    )


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
        "no entry reached 90 % accuracy; nearest on validation data: 80 %, by a",
        "neither a nor b reached 90 % accuracy (3 trials each)",
    ]
    few = judge(study({"a": [None] * 2, "b": [None] * 2}))
    assert few.sentences == [
        "not a result: 2 trials each, and at least 3 are needed",
        "no entry reached 90 % accuracy; nearest on validation data: 80 %, by a",
    ]
    assert judge(study({"a": [None], "b": [1.0]})).sentences[1:] == []


def simulated(found: Study) -> Study:
    return replace(found, entries=[replace(entry, world="sim") for entry in found.entries])


def test_seconds_of_a_simulated_cluster_are_called_virtual():
    found = simulated(study({"a": [1.0] * 5, "b": [2.0] * 5}))
    assert judge(found).sentences[0] == "a reached 90 % accuracy soonest (median 1.000 virtual s, 5 trials)"
    text = shown(found)
    assert "digits: virtual time to 90 % accuracy" in text and text.count("virtual s\n") + text.count("virtual s ") == 2
    assert columns(found)[2] == "median, virtual s" and columns(study({}))[2] == "median, s"
    both = replace(found, entries=[found.entries[0], *study({"b": [2.0]}).entries])
    assert columns(both)[2] == "median, s (sim: virtual)" and "digits: time to" in shown(both)
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


def test_a_run_is_not_shorter_than_its_time_to_the_target():
    """Not every step is on record, but all parameters that were evaluated are."""
    found = run(config("a"), 2.0, looks=1)
    found = replace(found, steps=[msgspec.structs.replace(step, time=step.time / 2) for step in found.steps])
    assert found.time_to_target == 2.0 and found.seconds == max(e.time for e in found.evaluations) >= 2.0


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
    assert verdict.refused[0].startswith("b was evaluated every 100 samples and a every 1,000: an entry that is")
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
        "samples) as was asked for: an entry that is evaluated more often reaches a target sooner by luck; ask for an "
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
    auto = ", or --trials auto to go on until it is decided"
    assert outlook(question(trials=2)) == [
        "2 entries, 2 trials each",
        f"fewer than 3 trials are not a result (asked for: 2); use --trials 4{auto}",
    ]
    assert outlook(question(trials=3))[1] == (
        f"3 trials each cannot show a difference: the least p that they can have is 0.1; use --trials 4{auto}"
    )
    four = question(strategies=["a,b,c,d"], trials=3)
    assert outlook(four)[1] == (
        "3 trials each cannot show a difference: the least p that they can have is 0.6 after Holm's "
        f"correction for 6 comparisons; use --trials 5{auto}"
    )
    assert outlook(question(strategies=["a,b,c,d"], trials=5)) == ["4 entries, 5 trials each"]
    assert outlook(question(strategies=["a"], trials=2))[1].endswith("(asked for: 2); use --trials 3")
    assert outlook(question(trials=2), python=True)[1].endswith(
        "use trials=4, or trials='auto' to go on until it is decided"
    )
    assert outlook(question(trials=20, auto=True)) == [
        "2 entries, 5 to 20 trials each",
        "trials are added until it is decided which is soonest; looked at after 5, 8, 13 and 20",
    ]
    assert "after 4 runs to tune lr" in outlook(question(tune={"lr": ["1", "2"]}))[0]
