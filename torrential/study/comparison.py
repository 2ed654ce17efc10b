"""What `tt.compare` returns: the verdict of a study as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torrential.study.results import Study
from torrential.study.verdict import Pair, Row, judge, winner


@dataclass(frozen=True)
class EntryOutcome:
    """One way of training, over its trials. Times are seconds to the target, virtual ones in a simulation; infinite for
    a trial that missed it."""

    name: str  # unique in the study: "ssp:staleness=3 · 4 workers"
    strategy: str
    options: dict[str, Any]  # those that were set for this entry
    workers: int
    servers: int
    trials: int
    reached: int  # trials that reached the target
    times: tuple[float, ...]  # seconds to the target, of each trial
    median: float
    least: float
    most: float
    value: float  # the mean of the metric on test data; NaN: there is none


@dataclass(frozen=True)
class PairOutcome:
    """Two entries compared, the one with the smaller median first."""

    first: str
    second: str
    ratio: float  # how many times sooner the first reached the target
    low: float  # the lower end of the 95 % confidence interval of the ratio
    high: float  # its upper end
    p: float  # the p-value, corrected for the number of comparisons
    differs: bool  # whether the test sees a difference
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """The verdict of a study."""

    task: str
    metric: str
    target: float | None
    entries: tuple[EntryOutcome, ...]
    pairs: tuple[PairOutcome, ...]  # empty where it is not a result
    soonest: str | None  # the entry that was sooner than every other; None: that is undecided
    sentence: str  # the answer
    remarks: tuple[str, ...]  # what else is to be said: of pairs, of faults
    rules: tuple[str, ...]  # under which it was found
    result: bool  # whether it may be reported as one: enough trials, all of them done, evaluated alike
    directory: Path

    def __str__(self) -> str:
        return self.sentence


def comparison_of(study: Study) -> Comparison:
    verdict = judge(study)
    first = winner(verdict)
    return Comparison(
        task=study.task,
        metric=study.metric,
        target=study.target,
        entries=tuple(map(_entry, verdict.rows)),
        pairs=tuple(map(_pair, verdict.pairs)),
        soonest=None if first is None else first.entry.name,
        sentence=verdict.sentences[0],
        remarks=tuple(verdict.sentences[1:]),
        rules=tuple(verdict.rules),
        result=not verdict.refused,
        directory=study.directory,
    )


def _entry(row: Row) -> EntryOutcome:
    entry = row.entry
    return EntryOutcome(
        name=entry.name,
        strategy=entry.strategy,
        options=entry.options,
        workers=entry.workers,
        servers=entry.servers,
        trials=row.trials,
        reached=row.reached,
        times=tuple(row.times),
        median=row.time.median,
        least=min(row.times, default=row.time.median),
        most=max(row.times, default=row.time.median),
        value=row.value.mean,
    )


def _pair(pair: Pair) -> PairOutcome:
    of = pair.difference
    return PairOutcome(
        first=pair.first.entry.name,
        second=pair.second.entry.name,
        ratio=of.ratio,
        low=of.low,
        high=of.high,
        p=pair.p,
        differs=pair.differs,
        sentence=pair.sentence,
    )
