"""What trials can tell: against scipy, and against samples whose truth is known."""

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


def test_what_is_cut_off_is_by_students_t():
    for trials in (2, 3, 5, 20):
        wider = math.sqrt(trials / (trials - 1)) * stats.t.ppf(0.975, 2 * (trials - 1))
        assert statistics.tail_share(trials) == pytest.approx(stats.norm.cdf(-wider))


def test_missed_runs_rank_behind_all_others_whatever_time_they_would_have_needed():
    assert statistics.p_value([1, 2, 3, 4], [INF] * 4) == pytest.approx(2 / math.comb(8, 4))
    assert statistics.p_value([INF] * 5, [INF] * 5) == 1.0


@pytest.mark.parametrize("of", ["means", "medians"])
def test_the_interval_is_scipys_percentile_bootstrap_at_a_wider_level(of):
    middle = np.mean if of == "means" else np.median
    level = 1 - 2 * statistics.tail_share(5)
    known = stats.bootstrap(
        (SLOW, QUICK),
        lambda slow, quick, axis=-1: middle(slow, axis=axis) / middle(quick, axis=axis),
        confidence_level=level,
        n_resamples=20_000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert level > 0.95
    assert statistics.interval(QUICK, SLOW, of) == pytest.approx((known.low, known.high), rel=0.03)


def test_the_interval_covers_the_true_ratio_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        first, second = random.lognormal(0, 0.3, 5), 2 * random.lognormal(0, 0.3, 5)
        low, high = statistics.interval(first, second, "means")
        covered += low <= 2 <= high
    assert covered >= 0.9 * 300  # the plain percentile bootstrap: about 0.87


def test_intervals_with_missed_runs():
    found = statistics.compare([1, 2, 3, 4, 5], [6, 7, 8, 9, INF])
    assert found.of == "medians" and found.ratio == pytest.approx(8 / 3) and 1 < found.low < found.ratio
    assert found.high > 4
    assert statistics.compare([1, 2, 3], [INF] * 3).ratio == INF
    assert statistics.compare([INF] * 3, [INF] * 3).ratio == 1.0
    assert statistics.compare([1.0], [2.0]).low == 0 and statistics.compare([1.0], [2.0]).high == INF


def test_holm_by_hand():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9, 0.001]) == pytest.approx([1.0, 1.0, 0.003])
    assert statistics.holm([]) == []


def test_how_many_trials_can_show_a_difference_at_all():
    assert [statistics.trials_needed(pairs) for pairs in (1, 3, 6, 10)] == [4, 5, 5, 6]
    assert statistics.least_p(5, 5) == pytest.approx(statistics.p_value(QUICK, SLOW))


@pytest.mark.parametrize("trials", [5, 8])
def test_a_winner_is_found(trials, monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    random = np.random.default_rng(trials)
    right = 0
    for _ in range(100):
        times = {
            name: list(mean * random.lognormal(0, 0.12, trials)) for name, mean in (("a", 3), ("b", 6), ("c", 6.0))
        }
        right += judge(study(times)).sentences[0].startswith("a reached 90 % accuracy soonest")
    assert right >= 95


@pytest.mark.parametrize(("entries", "times"), [(2, 300), (4, 100)])
def test_no_winner_is_invented(entries, times, monkeypatch):
    """Of 1,000 times, in 24 to 40."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    random = np.random.default_rng(0)
    right = 0
    for _ in range(times):
        verdict = judge(study({name: list(random.lognormal(1, 0.3, 5)) for name in "abcd"[:entries]}))
        right += "no difference seen" in verdict.sentences[0] and not any(pair.differs for pair in verdict.pairs)
    assert right >= 0.95 * times


def test_no_winner_is_invented_from_few_looks(monkeypatch):
    """Times that are whole epochs, and so have many ties, fool tests that trust in a bell curve."""
    monkeypatch.setattr(statistics, "RESAMPLES", 1000)
    random = np.random.default_rng(3)
    wrong = 0
    for _ in range(100):
        times = {name: list(random.integers(3, 5, 5) * (1 + 0.01 * random.normal(size=5))) for name in "abc"}
        wrong += any(pair.differs for pair in judge(study(times)).pairs)
    assert wrong <= 5
