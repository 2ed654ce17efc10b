"""What a study says, in numbers and in words, and what it may not say.

The rules, after MLPerf's: time to the target is the measure; all trials count, missed ones too, and never the best of
several; fewer than three are not a result; nor is the time of an entry of which two runs missed; all entries are
evaluated at one interval, which is shown (study/intervals.py). Entries are ordered by their median times, which a
single late run does not move, and told apart by ranks (study/statistics.py).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from statistics import fmean

from torrential.progress import counted, metric_value, number
from torrential.study import statistics
from torrential.study.faults import late_faults
from torrential.study.intervals import interval, observed, unevenly_evaluated
from torrential.study.outlook import listed, measured
from torrential.study.results import Entry, Study, unit_of_time
from torrential.study.statistics import FEWEST, LEVEL, Difference, Spread, doubled_ranks, spread
from torrential.study.tuning import at_the_edge, best_value, cost

MISSES = 2  # from which on the times of an entry are no result
MANY_PAIRS = 6  # with more, words are about the soonest against the others


@dataclass(frozen=True)
class Row:
    """One entry of the verdict, over its trials that ended by themselves."""

    entry: Entry
    trials: int
    missed: int  # trials that missed the target, the diverged ones included
    times: list[float]  # seconds to the target; infinite: missed
    time: Spread
    worker_seconds: Spread  # spent until the target, as are the bytes
    bytes_sent: Spread
    value: Spread  # the metric on test data
    seconds: Spread  # the time of training, whether or not there was a target
    interval: float  # samples between two evaluations until the target, in the median; 0: there were none
    options: int  # the number of options that were set by hand

    @property
    def reached(self) -> int:
        return self.trials - self.missed

    @property
    def stability(self) -> float:
        """The spread of times to the target over their mean; NaN if fewer than two runs reached it, or all at once."""
        return self.time.sd / self.time.mean if self.time.mean else math.nan


@dataclass(frozen=True)
class Pair:
    """Two entries compared; `first` is the one with the smaller median time."""

    first: Row
    second: Row
    difference: Difference
    p: float  # corrected for all pairs of the study, after Holm, and for its looks
    sentence: str = ""

    @property
    def quotable(self) -> bool:
        """Whether how many times sooner can be said: not if two runs of an entry are without a time."""
        return max(self.first.missed, self.second.missed) < MISSES and math.isfinite(self.difference.ratio)

    @property
    def differs(self) -> bool:
        """Whether the first is sooner than the second by the test, and not only in the median."""
        of = self.difference
        return self.p <= LEVEL and (of.low > 1 if self.quotable else of.sooner > 0.5)


@dataclass(frozen=True)
class Verdict:
    rows: list[Row]  # in the order of the study
    pairs: list[Pair]
    sentences: list[str]  # the answer first
    rules: list[str]  # under which it was found
    refused: list[str]  # why it is not a result; empty: it is one


def judge(study: Study) -> Verdict:
    rows = [_row(entry) for entry in study.entries]
    refused = _refused(study, rows)
    pairs = [] if refused else _pairs(study, rows)
    if not refused and not _is_decided(study, rows, pairs):
        refused, pairs = [_undecided(study)], []
    if not refused:
        sentences = [_answer(study, rows, pairs), *(pair.sentence for pair in _worth_saying(study, rows, pairs))]
    else:
        sentences = [f"not a result: {why}" for why in refused]
        if study.target is not None and any(row.trials for row in rows) and not any(row.reached for row in rows):
            sentences.append(_nobody(study))
    return Verdict(rows, pairs, sentences + late_faults(study), _rules(study, pairs), refused)


def is_decided(study: Study) -> bool:
    """Whether more trials are of no use: it is decided which entry is soonest, or there are as many as there may be, or
    none can help."""
    rows = [_row(entry) for entry in study.entries]
    return bool(_refused(study, rows)) or _is_decided(study, rows, _pairs(study, rows))


def _is_decided(study: Study, rows: list[Row], pairs: list[Pair]) -> bool:
    if not study.looks or study.trials == study.looks[-1]:
        return True
    best = soonest(rows)
    return best is None or not best.reached or not _rivals(best, pairs)


# -- numbers ----------------------------------------------------------------------------------------------------------
def _row(entry: Entry) -> Row:
    runs = entry.finished
    times = [math.inf if run.time_to_target is None else run.time_to_target for run in runs]
    values = [math.nan if run.summary is None or run.summary.value is None else run.summary.value for run in runs]
    return Row(
        entry=entry,
        trials=len(runs),
        missed=sum(time == math.inf for time in times),
        times=times,
        time=spread(times),
        worker_seconds=spread([entry.workers * time for time in times]),
        bytes_sent=spread([math.inf if run.bytes_to_target is None else run.bytes_to_target for run in runs]),
        value=spread([value for value in values if math.isfinite(value)]),
        seconds=spread([run.seconds for run in runs]),
        interval=observed(entry),
        options=len(entry.options),
    )


def _pairs(study: Study, rows: list[Row]) -> list[Pair]:
    found = []
    places = {id(row): place for place, row in enumerate(in_order(rows))}
    looks = _looks(study)
    for two in itertools.combinations([row for row in rows if row.trials], 2):
        first, second = sorted(two, key=lambda row: places[id(row)])
        found.append((first, second, statistics.compare(first.times, second.times, LEVEL / looks)))
    corrected = statistics.corrected([difference.p for _, _, difference in found], looks)
    pairs = [Pair(*of, p) for of, p in zip(found, corrected, strict=True)]
    return [replace(pair, sentence=_sentence(study, pair, looks * len(pairs))) for pair in pairs]


def _corrected(looks: int) -> str:
    if looks == 1:
        return ""
    return (
        f"; p-values are times {looks}, and intervals are wider, so that looking often finds no more differences by "
        "chance than one look would"
    )


def _looks(study: Study) -> int:
    """The number of looks at the data by which p-values are corrected."""
    return len(study.looks) or 1


def in_order(rows: list[Row]) -> list[Row]:
    """Those with trials, the soonest first: by the median time, a miss being later than any; of equals the one that
    missed less, or whose trials rank lower among all."""
    tried = [row for row in rows if row.trials]
    ranks = iter(doubled_ranks([time for row in tried for time in row.times]))
    mean_ranks = {id(row): fmean(itertools.islice(ranks, row.trials)) for row in tried}
    return sorted(tried, key=lambda row: (row.time.median, row.missed, mean_ranks[id(row)]))


def soonest(rows: list[Row]) -> Row | None:
    return next(iter(in_order(rows)), None)


def winner(verdict: Verdict) -> Row | None:
    """The entry that was sooner than every other, as far as the test can tell; None: that is undecided."""
    best = None if verdict.refused else soonest(verdict.rows)
    return best if best is not None and best.reached and not _rivals(best, verdict.pairs) else None


def _rivals(best: Row, pairs: list[Pair]) -> list[Row]:
    """Entries that may be as soon as the one with the smallest median."""
    return [_other(pair, best) for pair in pairs if best in (pair.first, pair.second) and not pair.differs]


# -- rules ------------------------------------------------------------------------------------------------------------
def _refused(study: Study, rows: list[Row]) -> list[str]:
    """Why there is no result to report."""
    if study.target is None:
        return [_without_target(study)]
    why = []
    none = [row.entry.name for row in rows if not row.trials]
    if none and not study.asked:
        why.append(f"no run of {listed(none)} has come to its end")
    elif study.trials < FEWEST:
        why.append(f"{counted(study.trials, 'trial')} each, and at least {FEWEST} are needed")
    behind = [f"{row.entry.name} {row.trials}" for row in rows if row.trials < study.trials]
    if behind:
        why.append(f"of {study.trials} trials each, some are not done ({', '.join(behind)})")
    return why + unevenly_evaluated(study)


def _without_target(study: Study) -> str:
    runs = [run for entry in study.entries for run in entry.runs]
    if runs and all(run.config.get("strategy", "").endswith(":MapReduce") for run in runs):
        return "map-reduce trains no model, so there is nothing to reach; what it found is what tt.map_reduce returned"
    remedy = "train with --target, or use torrential compare"
    if all(run.config.get("target") is None for run in runs):
        return f"there was no target, and so there is no time to one; {remedy}"
    return f"there is no target that all runs share, and so no time to it; {remedy}"


def _rules(study: Study, pairs: list[Pair]) -> list[str]:
    when = "to be evaluated" if study.asked and unevenly_evaluated(study) else "evaluated"
    counted = "" if study.target is None else " to the parameters that got there"
    rules = [f"{when} {interval(study)}; time counts from the first touch of data{counted}"]
    if pairs:
        several = f", Holm's correction for {len(pairs)} comparisons" if len(pairs) > 1 else ""
        rules.append(
            "entries are ranked by their median times, a miss being later than any time, and differences are tested "
            f"by ranks (Mann-Whitney{several}); how many times sooner is the median over all pairs of trials, with the "
            "interval of that test" + (" for the one pair, which is not corrected" if several else "")
        )
    if study.looks:
        rules.append(
            "trials were added until it was decided which entry is soonest, or to the most, with looks planned after "
            f"{listed([str(trials) for trials in study.looks])} of them" + _corrected(_looks(study))
        )
    rules += measured(study.measured)
    if study.tuning:
        runs, seconds = cost(study)
        rules.append(
            f"tuning, decided on validation data, took {runs} runs and {number(seconds)} worker-seconds, "
            "the same number of runs for every entry"
        )
    for entry in study.entries:
        if edge := at_the_edge(study, entry):
            rules.append(f"{entry.name}: {', '.join(edge)} is the last value that was tried; one beyond may be better")
    return rules


# -- words ------------------------------------------------------------------------------------------------------------
def _answer(study: Study, rows: list[Row], pairs: list[Pair]) -> str:
    target, best = _target(study), soonest(rows)
    if best is None or not best.reached:
        return _nobody(study)
    trials = counted(best.trials, "trial")
    time = f"median {_seconds(best)}, {trials}"
    if best.missed >= MISSES:
        time = f"{best.missed} of {trials} missed it, so there is no time to report"
    elif best.missed:
        time = f"median {_seconds(best)}, {best.missed} of {trials} missed it"
    if len(rows) == 1:
        return f"{best.entry.name} reached {target} in {best.reached} of {trials} ({time})"
    rivals = _rivals(best, pairs)
    if not rivals:
        return f"{best.entry.name} reached {target} soonest ({time})"
    if not _can_tell(study, pairs):
        return f"undecided: {best.entry.name} was the soonest to {target} here ({time}), but {_too_few(pairs)}"
    there = [row.entry.name for row in rivals if row.reached]
    never = [row.entry.name for row in rivals if not row.reached]
    chance = f"; {listed(never)} never reached it, which may be chance" if never else ""
    if not there:
        return f"{best.entry.name} was the soonest to {target} here ({time}){chance}"
    alike = f"with no difference seen to {listed(there)}"
    return f"undecided: {best.entry.name} was the soonest to {target} here ({time}), {alike}{chance}"


def _seconds(row: Row) -> str:
    return f"{number(row.time.median)} {unit_of_time(row.entry.world)}"


def _nobody(study: Study) -> str:
    return f"no entry reached {_target(study)}{_nearest(study)}"


def _undecided(study: Study) -> str:
    return (
        f"undecided after {counted(study.trials, 'trial')} each, and up to {study.looks[-1]} may be made; "
        f"go on with: torrential compare --resume {study.directory}"
    )


def _nearest(study: Study) -> str:
    """The entry that came nearest to the target on validation data, as far as is known."""
    found = [
        (value, entry.name)
        for entry in study.entries
        for run in entry.finished
        if (value := best_value(run, study.maximize)) is not None
    ]
    if not found:
        return ""
    value, name = (max if study.maximize else min)(found, key=lambda each: each[0])
    return f"; nearest on validation data: {metric_value(study.metric, value)}, by {name}"


def _sentence(study: Study, pair: Pair, corrections: int) -> str:
    """The sentence about two entries; a p-value is multiplied by as much as `corrections`."""
    first, second, of = pair.first, pair.second, pair.difference
    a, b, target = first.entry.name, second.entry.name, _target(study)
    trials = f"{counted(first.trials, 'trial')} each"
    if first.trials != second.trials:
        trials = f"{first.trials} and {second.trials} trials"
    if not first.reached and not second.reached:
        return f"neither {a} nor {b} reached {target} ({trials})"
    often = (
        f"{a} reached {target} in {first.reached} of {first.trials} trials, {b} in {second.reached} of {second.trials}"
    )
    if pair.differs:
        if not pair.quotable:
            return f"{often}: a difference (p = {pair.p:.2g})"
        missed = f"; {often}" if first.missed or second.missed else ""
        return f"{a} reached {target} {_times(of.ratio)} sooner than {b} ({_ci(of)}, {trials}){missed}"
    medians = f"medians {_seconds(first)} and {_seconds(second)}"
    alone = " for these two alone" if corrections > 1 else ""  # p is corrected for all pairs and looks
    here = f"{medians}, {_ci(of, ' of the ratio')}{alone}, {trials}" if pair.quotable else often
    if statistics.least_p(first.trials, second.trials) * corrections > LEVEL:
        return f"not enough trials to tell {a} from {b} ({here})"
    if pair.p <= LEVEL and of.sooner < 0.5:
        return f"no order between {a}, which is first by its median, and {b}, which is by ranks (p = {pair.p:.2g})"
    corrected = " after correction for all comparisons" if corrections > 1 else ""
    return f"no difference seen between {a} and {b} ({here}, p = {pair.p:.2g}{corrected})"


def _worth_saying(study: Study, rows: list[Row], pairs: list[Pair]) -> list[Pair]:
    best = soonest(rows)
    if not _can_tell(study, pairs) and len(pairs) > 1:
        return []  # the answer has said so
    return pairs if len(pairs) <= MANY_PAIRS else [pair for pair in pairs if best in (pair.first, pair.second)]


def _can_tell(study: Study, pairs: list[Pair]) -> bool:
    corrections = _looks(study) * len(pairs)
    return any(statistics.least_p(p.first.trials, p.second.trials) * corrections <= LEVEL for p in pairs)


def _too_few(pairs: list[Pair]) -> str:
    needed = statistics.trials_needed(len(pairs))
    several = f" between {len(pairs)} pairs" if len(pairs) > 1 else ""
    return f"so few trials cannot show a difference{several}: it takes {needed} each"


def _other(pair: Pair, row: Row) -> Row:
    return pair.second if pair.first is row else pair.first


def _target(study: Study) -> str:
    assert study.target is not None
    return f"{metric_value(study.metric, study.target)} {study.metric}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"  # to as many digits as its interval, of which it would seem to lie outside else


def _ci(difference: Difference, of: str = "") -> str:
    high = "∞" if math.isinf(difference.high) else f"{difference.high:.2f}"
    return f"95 % CI{of} {difference.low:.2f}–{high}"
