"""What a few trials can tell: their spread, and whether two ways of training differ in their times to the target.

A run that missed the target has no time; here it is infinite, which puts it behind all that reached it.

One test decides, and all that is said goes with it. The test is Mann and Whitney's: it looks at ranks only, so a missed
run needs no made-up time, and one that took ten times as long as the others weighs no more than any late one. Its
p-values are exact, ties included: all ways to deal the ranks to the two are counted. How many times sooner one is than
the other is the median of the ratios between any trial of the one and any of the other, and the interval is made of the
ratios that the test does not reject (Hodges and Lehmann), so it leaves out 1 where the test sees a difference.

Trials may be added until a difference is seen, if the looks are planned: there are at most LOOKS of them, and each
has an equal share of LEVEL. The chance that any look finds a difference that is not there is then at most LEVEL,
whenever the trials end: 3.2 % of 10,000 pairs that were alike, and 1.3 % of 3,000 studies of four entries. With all of
LEVEL at each of four looks it was 11.9 % of the pairs.
"""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05
FEWEST = 3  # trials that make a result
LOOKS = 4  # at most, where trials are added until a difference is seen

Samples = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """The spread of the trials that have a value; `median` is of all, missed ones included, and may be infinite."""

    count: int
    mean: float
    sd: float  # the standard deviation of the sample; NaN for a single one
    median: float


def spread(values: Sequence[float]) -> Spread:
    finite = [value for value in values if math.isfinite(value)]
    return Spread(
        count=len(finite),
        mean=statistics.mean(finite) if finite else math.nan,
        sd=statistics.stdev(finite) if len(finite) > 1 else math.nan,
        median=float(np.median(values)) if len(values) else math.nan,
    )


@dataclass(frozen=True)
class Difference:
    """The difference of two entries: how many times sooner the first is; infinite where most of the second missed."""

    ratio: float
    low: float  # the lower end of the confidence interval that goes with the test
    high: float  # its upper end
    p: float
    sooner: float  # the share of pairs of trials, one of each, in which the first was sooner; equal ones count half


def compare(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Difference:
    ratios = _ratios(first, second)
    low, high = interval(first, second, level)
    sooner = float((ratios > 1).mean() + (ratios == 1).mean() / 2)
    return Difference(float(np.median(ratios)), low, high, p_value(first, second), sooner)


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided, of the hypothesis that neither tends to be sooner."""
    ranks = doubled_ranks([*first, *second])
    ways = ways_to_sum(tuple(sorted(ranks)), len(first))
    mine = sum(ranks[: len(first)])
    tail = min(ways[: mine + 1].sum(), ways[mine:].sum()) / ways.sum()
    return min(1.0, 2 * float(tail))


def doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each among all; equal ones share the mean of theirs, so that twice it is whole."""
    ordered = sorted(values)
    return [bisect_left(ordered, value) + bisect_right(ordered, value) + 1 for value in values]


@functools.lru_cache(maxsize=64)
def ways_to_sum(numbers: tuple[int, ...], chosen: int) -> Samples:
    """The number of ways in which so many of the numbers add up to 0, 1, 2, ...; not to be changed, as it is kept."""
    ways: Samples = np.zeros((chosen + 1, sum(numbers) + 1))  # by how many were chosen
    ways[0, 0] = 1
    for number in numbers:
        ways[1:, number:] += ways[:-1, : ways.shape[1] - number].copy()
    found: Samples = ways[chosen]
    return found


def least_p(first: int, second: int) -> float:
    """The smallest p-value that so many trials can have, when all of one are sooner than all of the other."""
    return 2 / math.comb(first + second, first)


def trials_needed(pairs: int, level: float = LEVEL) -> int:
    """The trials of each entry with which any of so many comparisons can show a difference at all."""
    trials = 2
    while least_p(trials, trials) * pairs > level:
        trials += 1
    return trials


def looks(pairs: int, most: int) -> list[int]:
    """The numbers of trials after which so many comparisons are made: from the first that can show a difference to the
    most, by equal factors. Empty: the most are too few for any."""
    first = trials_needed(pairs, LEVEL / LOOKS)
    steps = (round(first * (most / first) ** (number / (LOOKS - 1))) for number in range(LOOKS))
    return sorted(set(steps)) if first <= most else []


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted for being several: the chance that any of them is below LEVEL by luck alone is at most LEVEL."""
    adjusted, most = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        most = max(most, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = most
    return adjusted


def corrected(p_values: Sequence[float], looks: int) -> list[float]:
    """The p-values, corrected after Holm for being several, and for being looked at up to so many times."""
    return [min(1.0, looks * p) for p in holm(p_values)]


def interval(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The confidence interval of the ratio second / first, with a confidence of at least 1 - level; (0, inf) where
    there are too few trials."""
    ratios, rejected = _ratios(first, second), _largest_rejected(len(first), len(second), level)
    return (0.0, math.inf) if rejected is None else (float(ratios[rejected]), float(ratios[-rejected - 1]))


@functools.cache
def _largest_rejected(first: int, second: int, level: float) -> int | None:
    """In how many of all pairs the first may be later for the test still to see that it is sooner; None: it never does.
    Without ties; with some, the interval is a little too wide."""
    ways = ways_to_sum(tuple(range(1, first + second + 1)), first)[first * (first + 1) // 2 :]
    rejected = np.flatnonzero(2 * ways.cumsum() / ways.sum() <= level)
    return int(rejected[-1]) if len(rejected) else None


def _ratios(first: Sequence[float], second: Sequence[float]) -> Samples:
    """second / first of all pairs, in ascending order; 1 where both are infinite, as then neither is sooner."""
    a, b = np.meshgrid(np.asarray(first, float), np.asarray(second, float))
    same = a == b
    with np.errstate(divide="ignore", over="ignore"):  # a time of zero, or next to it, makes an infinite ratio
        return np.sort(np.where(same, 1.0, b / np.where(same, 1.0, a)).ravel())
