"""What trials can tell: against scipy, and against samples whose truth is known."""

import itertools
import math

import numpy as np
import pytest
from made_up import study
from scipy import stats

from torrential.study import statistics
from torrential.study.verdict import judge

INF = math.inf
SLOW, QUICK = [5.1, 6.3, 5.8, 7.0, 6.1], [3.2, 2.9, 4.0, 3.7, 3.1]


def test_spread_is_of_those_that_have_a_time_and_the_median_of_all():
    found = statistics.spread([1.0, 2.0, 6.0, INF])
    assert (found.count, found.mean, found.median) == (3, 3.0, 4.0)
    assert found.sd == pytest.approx(np.std([1, 2, 6], ddof=1))
    assert statistics.spread([2.0, INF, INF]).median == INF
    assert math.isnan(statistics.spread([INF]).mean) and math.isnan(statistics.spread([1.0]).sd)


@pytest.mark.parametrize(
    ("first", "second"),
    [(QUICK, SLOW), ([1.0, 5.0, 2.0, 9.0], [3.0, 4.0, 8.0]), (SLOW, [5.0, 6.2, 6.0, 7.1, 5.9, 8.8])],
)
def test_without_ties_p_is_scipys_exact_one(first, second):
    known = stats.mannwhitneyu(first, second, method="exact").pvalue
    assert statistics.p_value(first, second) == pytest.approx(known)
    assert statistics.p_value(second, first) == pytest.approx(known)


def test_with_ties_p_is_what_counting_all_ways_gives():
    first, second = [1.0, 2.0, 2.0, 3.0], [2.0, 4.0, INF, INF]
    ranks = stats.rankdata([*first, *second])

    def far(values, other, axis=-1):
        return np.abs(values.mean(axis=axis) - other.mean(axis=axis))

    known = stats.permutation_test((ranks[:4], ranks[4:]), far, alternative="greater", n_resamples=10_000)
    assert statistics.p_value(first, second) == pytest.approx(known.pvalue)


def test_p_agrees_with_scipy_on_samples_of_many_sizes():
    random = np.random.default_rng(7)
    for _ in range(40):
        first, second = (random.lognormal(shift, 0.5, random.integers(2, 12)) for shift in (0, 0.4))
        known = stats.mannwhitneyu(first, second, method="exact").pvalue
        assert statistics.p_value(first, second) == pytest.approx(known)
    first, second = random.normal(0, 1, 40), random.normal(0.5, 1, 30)
    known = stats.mannwhitneyu(first, second, method="exact").pvalue
    assert statistics.p_value(first, second) == pytest.approx(known)


def test_missed_runs_rank_behind_all_others_whatever_time_they_would_have_needed():
    assert statistics.p_value([1, 2, 3, 4], [INF] * 4) == pytest.approx(2 / math.comb(8, 4))
    assert statistics.p_value([INF] * 5, [INF] * 5) == 1.0


@pytest.mark.parametrize(("trials", "level"), [(4, 0.05), (5, 0.05), (7, 0.0125), (12, 0.05), (20, 0.0125)])
def test_the_interval_is_what_the_test_does_not_reject(trials, level):
    random = np.random.default_rng(trials)
    first, second = random.lognormal(0, 0.3, trials), 1.5 * random.lognormal(0, 0.4, trials + 1)
    low, high = statistics.interval(first, second, level)
    for inside, outside in ((low * 1.0001, low / 1.0001), (high / 1.0001, high * 1.0001)):
        assert statistics.p_value(inside * first, second) > level >= statistics.p_value(outside * first, second)
    found = statistics.compare(first, second, level)
    assert (found.low, found.high) == (low, high) and low < found.ratio < high
    assert (found.low > 1) == (found.p <= level and found.sooner > 0.5)


def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    random = np.random.default_rng(0)
    for trials in (4, 5, 8):
        covered = 0
        for _ in range(300):
            first, second = random.lognormal(0, 0.3, trials), 2 * random.lognormal(0, 0.3, trials)
            low, high = statistics.interval(first, second)
            covered += low <= 2 <= high
        assert covered >= 0.93 * 300


def test_one_trial_that_took_ten_times_as_long_moves_neither_ratio_nor_order():
    late = [0.52, 0.61, 0.55, 0.58, 8.96]
    usual = [0.81, 0.9, 0.78, 0.86, 0.83]
    found = statistics.compare(late, usual)
    assert found.ratio == pytest.approx(1.45, abs=0.1) and found.sooner == 20 / 25
    assert np.mean(late) > np.mean(usual) and statistics.spread(late).median < statistics.spread(usual).median


def test_intervals_with_missed_runs():
    found = statistics.compare([1, 2, 3, 4, 5], [6, 7, 8, 9, INF])
    assert found.ratio == 3 and 1 < found.low < found.ratio
    assert found.high > 4 and found.sooner == 1.0
    assert statistics.compare([1, 2, 3], [INF] * 3).ratio == INF
    assert statistics.compare([INF] * 3, [INF] * 3).ratio == 1.0
    assert statistics.compare([INF] * 3, [INF] * 3).sooner == 0.5
    assert statistics.compare([1.0], [2.0]).low == 0 and statistics.compare([1.0], [2.0]).high == INF
    assert statistics.interval(QUICK[:3], SLOW[:3]) == (0, INF)  # three trials reject nothing


def test_holm_by_hand():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9, 0.001]) == pytest.approx([1.0, 1.0, 0.003])
    assert statistics.holm([]) == []


def test_how_many_trials_can_show_a_difference_at_all():
    assert [statistics.trials_needed(pairs) for pairs in (1, 3, 6, 10)] == [4, 5, 5, 6]
    assert statistics.least_p(5, 5) == pytest.approx(statistics.p_value(QUICK, SLOW))
    for pairs in (1, 3, 6, 10):
        trials = statistics.trials_needed(pairs)
        assert pairs * statistics.least_p(trials, trials) <= statistics.LEVEL
        assert pairs * statistics.least_p(trials - 1, trials - 1) > statistics.LEVEL


@pytest.mark.parametrize(
    ("pairs", "most", "planned"),
    [(1, 20, [5, 8, 13, 20]), (6, 20, [7, 10, 14, 20]), (1, 5, [5]), (1, 6, [5, 6]), (1, 4, []), (15, 6, [])],
)
def test_where_trials_are_added_every_look_can_show_a_difference(pairs, most, planned):
    assert statistics.looks(pairs, most) == planned and len(planned) <= statistics.LOOKS
    for trials in planned:
        assert statistics.LOOKS * pairs * statistics.least_p(trials, trials) <= statistics.LEVEL


def adding_trials(entries: list[np.ndarray], most: int, looked: int = statistics.LOOKS) -> tuple[int, bool]:
    """As a study does that goes on until one entry differs from all others: after how many trials it ends, and whether
    any two then differ. `looked`: by which p-values are corrected."""
    looks = statistics.looks(math.comb(len(entries), 2), most)
    for trials in looks:
        pairs = list(itertools.combinations([own[:trials] for own in entries], 2))
        p = statistics.corrected([statistics.p_value(*pair) for pair in pairs], looked)
        best = min(range(len(entries)), key=lambda i: np.median(entries[i][:trials]))
        of_best = [p for p, pair in zip(p, itertools.combinations(range(len(entries)), 2), strict=True) if best in pair]
        if max(of_best) <= statistics.LEVEL or trials == looks[-1]:
            return trials, min(p) <= statistics.LEVEL
    raise AssertionError("the last look ends it")


@pytest.mark.parametrize(("entries", "studies"), [(2, 1000), (4, 200)])
def test_adding_trials_until_it_is_decided_invents_no_winner(entries, studies):
    """Of entries that are alike: in 3.2 % of 10,000 studies of two, and 1.3 % of 3,000 of four. Two that are looked at
    as often with the whole level each time: 11.9 %."""
    random = np.random.default_rng(entries)
    found = [[random.lognormal(1, 0.3, 20) for _ in range(entries)] for _ in range(studies)]
    assert sum(adding_trials(times, 20)[1] for times in found) <= 0.05 * studies
    if entries == 2:
        assert sum(adding_trials(times, 20, looked=1)[1] for times in found) > 0.08 * studies


def test_adding_trials_ends_early_where_the_difference_is_large_and_finds_smaller_ones_later():
    random = np.random.default_rng(0)
    found = {}
    for factor in (3, 1.4):
        ends = [
            adding_trials([random.lognormal(1, 0.3, 20), factor * random.lognormal(1, 0.3, 20)], 20) for _ in range(100)
        ]
        found[factor] = np.mean([trials for trials, _ in ends]), sum(differ for _, differ in ends)
    assert found[3][0] < 6 and found[3][1] == 100
    assert 10 < found[1.4][0] < 18 and found[1.4][1] >= 75


@pytest.mark.parametrize("trials", [5, 8])
def test_a_winner_is_found(trials):
    random = np.random.default_rng(trials)
    right = 0
    for _ in range(100):
        times = {
            name: list(mean * random.lognormal(0, 0.12, trials)) for name, mean in (("a", 3), ("b", 6), ("c", 6.0))
        }
        right += judge(study(times)).sentences[0].startswith("a reached 90 % accuracy soonest")
    assert right >= 95


@pytest.mark.parametrize(("entries", "times"), [(2, 300), (4, 100)])
def test_no_winner_is_invented(entries, times):
    """Of 1,000 times, in 24 to 40."""
    random = np.random.default_rng(0)
    right = 0
    for _ in range(times):
        verdict = judge(study({name: list(random.lognormal(1, 0.3, 5)) for name in "abcd"[:entries]}))
        right += "no difference seen" in verdict.sentences[0] and not any(pair.differs for pair in verdict.pairs)
    assert right >= 0.95 * times


def test_no_winner_is_invented_from_few_looks():
    """Times that are whole epochs, and so have many ties, fool tests that trust in a bell curve."""
    random = np.random.default_rng(3)
    wrong = 0
    for _ in range(100):
        times = {name: list(random.integers(3, 5, 5) * (1 + 0.01 * random.normal(size=5))) for name in "abc"}
        wrong += any(pair.differs for pair in judge(study(times)).pairs)
    assert wrong <= 5
