"""How often runs were evaluated: a run that is evaluated more often crosses the target sooner by luck.

What counts is the interval that was kept, not the one that was asked for: a snapshot of servers needs a mark of every
worker, and with many workers training may be further on than that when it is whole.
"""

from __future__ import annotations

import itertools
import math
from statistics import median

from torrential.study.results import Entry, Run, Study

FINER = 0.9  # of the declared interval: workers that run beside one another do not meet it to the sample
UNEVEN = 1.5  # times as often as another entry, or as rarely as was asked for
LUCK = "an entry that is evaluated more often reaches a target sooner by luck"


def unevenly_evaluated(study: Study) -> list[str]:
    """Entries that were evaluated more often than others; in a study, also more often or more rarely than asked for."""
    if study.own_loop:
        return []  # one script for all entries: they have one rule
    found = {entry.name: each for entry in study.entries if (each := observed(entry))}
    least, most = (pick(found, key=found.__getitem__, default="") for pick in (min, max))
    uneven = bool(found) and found[most] > UNEVEN * found[least]
    if not study.asked:
        if not uneven:
            return []
        return [f"{least} was evaluated every {found[least]:,.0f} samples and {most} every {found[most]:,.0f}: {LUCK}"]
    often, declared = _too_often(study), _declared(study)
    if not uneven and (not found or found[most] <= UNEVEN * declared):
        return often
    other = f" and {least} every {found[least]:,.0f}" if uneven else ""
    why = LUCK if uneven else "no time to a target is more exact"
    asked = interval(study) + ("" if study.interval else f" ({declared:,} samples)")
    rarely = f"{most} was evaluated every {found[most]:,.0f} samples{other}, not {asked}"
    remedy = "ask for an interval that all can keep, with --set evaluate_every"
    return [*often, f"{rarely} as was asked for: {why}; {remedy}"]


def _too_often(study: Study) -> list[str]:
    runs = [(entry, run) for entry in study.entries for run in entry.finished if run.validation]
    names = {entry.name for entry, run in runs if _looks(run) > _allowed(study, run)}
    return [f"{name} was evaluated more often than declared ({interval(study)})" for name in sorted(names)]


def _declared(study: Study) -> int:
    """Samples between two evaluations; without an interval, those of an epoch. 0: nothing was run."""
    epochs = (int(run.config["samples"]) for entry in study.entries for run in entry.finished)
    return study.interval or next(epochs, 0)


def _looks(run: Run) -> int:
    return len({evaluation.step for evaluation in run.validation})


def _allowed(study: Study, run: Run) -> float:
    """The last evaluation comes when the run ends, whenever that is."""
    return run.validation[-1].samples / (FINER * (study.interval or run.config["samples"])) + 1


def observed(entry: Entry) -> float:
    """Samples between two evaluations until the target, in the median; 0 if there are none. The last one of a run that
    missed comes when the run ends, and does not count if there are others."""
    gaps = []
    for run in entry.finished:
        end = math.inf if run.time_to_target is None else run.time_to_target
        samples = [0, *sorted({evaluation.samples for evaluation in run.validation if evaluation.time <= end})]
        own = [after - before for before, after in itertools.pairwise(samples)]
        gaps += own[:-1] if len(own) > 1 and end == math.inf else own
    return median(gaps) if gaps else 0.0


def interval(study: Study) -> str:
    if study.own_loop:
        return "when the script reports"
    if study.interval is not None:
        return f"every {study.interval:,} samples"
    every = {run.config.get("settings", {}).get("evaluate_every") for entry in study.entries for run in entry.runs}
    return "once per epoch" if study.asked or every <= {None} else "at intervals of the runs' own"
