"""What can be known of a study before its first run: how many runs there are, and whether they can decide anything."""

from __future__ import annotations

from collections.abc import Sequence

from torrential.progress import counted
from torrential.study import statistics
from torrential.study.ask import ComputeTime, Question, grid
from torrential.study.plan import looks, pairs_of
from torrential.study.statistics import FEWEST


def outlook(question: Question, python: bool = False) -> list[str]:
    """Lines that are said before the first run. `python`: advice is on arguments of a function, not on options."""
    asked, entries = question.asked, len(question.entries)
    trials = counted(asked.trials, "trial")
    if asked.auto:
        trials = f"{looks(question)[0]} to {trials}"
    lines = [f"{entries} entr{'y' if entries == 1 else 'ies'}, {trials} each"]
    if tried := len(list(grid(asked.tune))):
        lines[0] += f", after {entries * tried * asked.tune_trials} runs to tune {', '.join(asked.tune)}"
    if asked.auto:
        moments = listed([str(number) for number in looks(question)])
        lines.append(f"trials are added until it is decided which is soonest; looked at after {moments}")
    else:
        lines += _too_few(asked.trials, pairs_of(question), "trials={!r}" if python else "--trials {}")
    return lines + measured(question.measured)


def _too_few(trials: int, pairs: int, option: str) -> list[str]:
    """The warning that so many trials can decide nothing, whatever comes of them, and how many can: `option` is how
    their number is given."""
    needed = max(FEWEST, statistics.trials_needed(pairs) if pairs else 0)
    if trials >= needed:
        return []
    remedy = f"use {option.format(needed)}"
    remedy += f", or {option.format('auto')} to go on until it is decided" if pairs else ""
    if trials < FEWEST:
        return [f"fewer than {FEWEST} trials are not a result (asked for: {trials}); {remedy}"]
    least = min(1.0, pairs * statistics.least_p(trials, trials))
    several = "" if pairs == 1 else f" after Holm's correction for {pairs} comparisons"
    return [
        f"{trials} trials each cannot show a difference: the least p that they can have is "
        f"{least:.2g}{several}; {remedy}"
    ]


def measured(times: Sequence[ComputeTime]) -> list[str]:
    """The lines about how long a sample takes, where the cluster leaves that open."""
    if not times:
        return []
    each = [f"{time.seconds_per_sample:g} s" + (_in_batches(time) if len(times) > 1 else "") for time in times]
    return [
        f"a sample takes a simulated worker {listed(each)}, measured once, when the study was begun, for all its runs"
    ]


def _in_batches(time: ComputeTime) -> str:
    return f" in batches of {time.batch_size}" + (f" with {time.threads} threads" if time.threads > 1 else "")


def listed(names: Sequence[str]) -> str:
    """The words as a list in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
