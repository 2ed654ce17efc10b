"""What a study says, in numbers and in words, and what it may not say.

The rules, after MLPerf's: time to the target is the measure; all trials count, missed ones too, and never the best of
several; fewer than three are not a result; nor is a mean time of which two runs are missing; all entries are
evaluated at one interval, which is shown (study/intervals.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torrential.progress import metric_value, number
from torrential.study import statistics
from torrential.study.ask import ComputeTime, Question, grid
from torrential.study.intervals import interval, observed, unevenly_evaluated
from torrential.study.results import Entry, Study, unit_of_time
from torrential.study.statistics import LEVEL, Difference, Spread, spread
from torrential.study.tuning import at_the_edge, best_value, cost

FEWEST = 3  # trials that make a result
MISSES = 2  # from which on the times of an entry are no result
MANY_PAIRS = 6  # with more, words are about the soonest against the others


@dataclass(frozen=True)
class Row:
    """One entry, over its trials that ended by themselves."""

    entry: Entry
    trials: int
    missed: int  # of them, the diverged ones included
    times: list[float]  # to the target, in seconds; infinite: missed
    time: Spread
    worker_seconds: Spread  # to the target, as are the bytes
    bytes_sent: Spread
    value: Spread  # of the metric on test data
    seconds: Spread  # of training, whether or not there was a target
    interval: float  # samples between two evaluations until the target, in the median; 0: there were none
    options: int  # that somebody had to set

    @property
    def reached(self) -> int:
        return self.trials - self.missed

    @property
    def stability(self) -> float:
        """The spread of times to the target over their mean; NaN if fewer than two runs reached it."""
        return self.time.sd / self.time.mean


@dataclass(frozen=True)
class Pair:
    """Two entries compared; `first` is the one that was sooner here."""

    first: Row
    second: Row
    difference: Difference
    p: float  # after Holm's correction for all pairs of the study
    sentence: str = ""

    @property
    def quotable(self) -> bool:
        """Whether how many times sooner can be said: not if two runs of an entry are without a time."""
        return max(self.first.missed, self.second.missed) < MISSES and math.isfinite(self.difference.ratio)

    @property
    def differs(self) -> bool:
        return self.p <= LEVEL and (not self.quotable or self.difference.low > 1)


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
    if not refused:
        sentences = [_answer(study, rows, pairs), *(pair.sentence for pair in _worth_saying(rows, pairs))]
    else:
        sentences = [f"not a result: {why}" for why in refused]
        if study.target is not None and any(row.trials for row in rows) and not any(row.reached for row in rows):
            sentences.append(_nobody(study))
    return Verdict(rows, pairs, sentences, _rules(study, pairs), refused)


def verdict_sentences(study: Study) -> list[str]:
    """The answer, and the rules under which it was found."""
    verdict = judge(study)
    return verdict.sentences + verdict.rules


def outlook(question: Question) -> list[str]:
    """What can be known before the first run."""
    asked, entries = question.asked, len(question.entries)
    runs = f"{entries} entr{'y' if entries == 1 else 'ies'}, {_count(asked.trials, 'trial')} each"
    if tried := len(list(grid(asked.tune))):
        runs += f", after {entries * tried * asked.tune_trials} runs to tune {', '.join(asked.tune)}"
    needed = statistics.trials_needed(entries * (entries - 1) // 2) if entries > 1 else FEWEST
    lines = [runs]
    if asked.trials < FEWEST:
        lines.append(f"fewer than {FEWEST} trials are not a result")
    elif asked.trials < needed:
        lines.append(f"so few trials cannot show any difference between {entries} entries: it takes {needed} each")
    return lines + _measured(question.measured)


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
    for first, second in itertools.combinations([row for row in rows if row.trials], 2):
        if soonest([first, second]) is second:
            first, second = second, first
        found.append((first, second, statistics.compare(first.times, second.times)))
    adjusted = statistics.holm([difference.p for _, _, difference in found])
    pairs = [Pair(*of, p) for of, p in zip(found, adjusted, strict=True)]
    return [Pair(p.first, p.second, p.difference, p.p, _sentence(study, p, len(pairs))) for p in pairs]


# -- rules ------------------------------------------------------------------------------------------------------------
def _refused(study: Study, rows: list[Row]) -> list[str]:
    """Why there is no result to report."""
    if study.target is None:
        return [_without_target(study)]
    why = []
    none = [row.entry.name for row in rows if not row.trials]
    if none and not study.asked:
        why.append(f"no run of {_and(none)} has come to its end")
    elif study.trials < FEWEST:
        why.append(f"{_count(study.trials, 'trial')} each, and at least {FEWEST} are needed")
    behind = [f"{row.entry.name} {row.trials}" for row in rows if row.trials < study.trials]
    if behind:
        why.append(f"of {study.trials} trials each, some are not done ({', '.join(behind)})")
    return why + unevenly_evaluated(study)


def _without_target(study: Study) -> str:
    remedy = "train with --target, or use torrential compare"
    if all(run.config.get("target") is None for entry in study.entries for run in entry.runs):
        return f"there was no target, and so there is no time to one; {remedy}"
    return f"there is no target that all runs share, and so no time to it; {remedy}"


def _measured(times: Sequence[ComputeTime]) -> list[str]:
    """How long a sample takes where the cluster leaves that open."""
    if not times:
        return []
    each = [f"{time.seconds_per_sample:g} s {_in_batches(time) if len(times) > 1 else ''}".strip() for time in times]
    return [
        f"a sample takes a simulated worker {_and(each)}, measured once, when the study was begun, for all its runs"
    ]


def _in_batches(time: ComputeTime) -> str:
    return f"in batches of {time.batch_size}" + (f" with {time.threads} threads" if time.threads > 1 else "")


def _rules(study: Study, pairs: list[Pair]) -> list[str]:
    when = "to be evaluated" if study.asked and unevenly_evaluated(study) else "evaluated"
    counted = "" if study.target is None else " to the parameters that got there"
    rules = [f"{when} {interval(study)}; time counts from the first touch of data{counted}"]
    if len(pairs) > 1:
        rules.append(f"differences are tested by ranks (Mann-Whitney), Holm's correction for {len(pairs)} comparisons")
    elif pairs:
        rules.append("differences are tested by ranks (Mann-Whitney)")
    rules += _measured(study.measured)
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
    trials = _count(best.trials, "trial")
    average = f"{_seconds(best)} on average, {trials}"
    if best.missed >= MISSES:
        average = f"{best.missed} of {trials} missed it, so there is no time to report"
    elif best.missed:
        average = f"{_seconds(best)} on average of {best.reached} that reached it, {trials}"
    if len(rows) == 1:
        return f"{best.entry.name} reached {target} in {best.reached} of {trials} ({average})"
    rivals = [_other(pair, best) for pair in pairs if best in (pair.first, pair.second) and not pair.differs]
    if not rivals:
        return f"{best.entry.name} reached {target} soonest ({average})"
    if not _can_tell(pairs):
        return f"undecided: {best.entry.name} was the soonest to {target} here ({average}), but {_too_few(pairs)}"
    there = [row.entry.name for row in rivals if row.reached]
    never = [row.entry.name for row in rivals if not row.reached]
    chance = f"; {_and(never)} never reached it, which may be chance" if never else ""
    if not there:
        return f"{best.entry.name} was the soonest to {target} here ({average}){chance}"
    if any(pair.differs and {pair.first.entry.name, pair.second.entry.name} <= set(there) for pair in pairs):
        return f"soonest to {target}: {best.entry.name}, with no difference seen between it and {_and(there)}{chance}"
    return f"soonest to {target}, with no difference seen between them: {_and([best.entry.name, *there])}{chance}"


def _seconds(row: Row) -> str:
    return f"{number(row.time.mean)} {unit_of_time(row.entry.world)}"


def _nobody(study: Study) -> str:
    return f"nobody reached {_target(study)}{_nearest(study)}"


def _nearest(study: Study) -> str:
    """Who came nearest on validation data, as far as is known."""
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


def soonest(rows: list[Row]) -> Row | None:
    """By the mean; where a run has no time, by the median."""
    tried = [row for row in rows if row.trials]
    by_median = any(row.missed for row in tried)
    return min(
        tried,
        key=lambda row: (row.time.median, row.missed, row.time.mean) if by_median else (row.time.mean, 0, 0.0),
        default=None,
    )


def _sentence(study: Study, pair: Pair, pairs: int) -> str:
    first, second, of = pair.first, pair.second, pair.difference
    a, b, target = first.entry.name, second.entry.name, _target(study)
    trials = f"{_count(first.trials, 'trial')} each"
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
    here = f"{a} {_times(of.ratio)} sooner here, {_ci(of)}, {trials}" if pair.quotable else often
    if statistics.least_p(first.trials, second.trials) * pairs > LEVEL:
        return f"not enough trials to tell {a} from {b} ({here})"
    return f"no difference seen between {a} and {b} ({here}, p = {pair.p:.2g})"


def _worth_saying(rows: list[Row], pairs: list[Pair]) -> list[Pair]:
    best = soonest(rows)
    if not _can_tell(pairs) and len(pairs) > 1:
        return []  # the answer has said so
    return pairs if len(pairs) <= MANY_PAIRS else [pair for pair in pairs if best in (pair.first, pair.second)]


def _can_tell(pairs: list[Pair]) -> bool:
    return any(statistics.least_p(p.first.trials, p.second.trials) * len(pairs) <= LEVEL for p in pairs)


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
    return f"{ratio:.1f}x" if ratio >= 1.95 else f"{ratio:.2f}x"


def _ci(of: Difference) -> str:
    high = "∞" if math.isinf(of.high) else f"{of.high:.2f}"
    return f"95 % CI {of.low:.2f}–{high}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
