"""Faults that a cluster plans and that came too late for some trials: those trials say nothing about them."""

from __future__ import annotations

from collections.abc import Iterator

from torrential.config import read_config
from torrential.optim.schedule import schedule_of
from torrential.progress import counted, number
from torrential.study.results import Entry, Run, Study, unit_of_time
from torrential.worlds.sim.cluster import CRASHES, Fault, make_cluster

MANY = 3  # faults that are named one by one
NAMES = {"crash": "crash of", "partition": "partition of", "slow-link": "slow link of"}


def late_faults(study: Study) -> list[str]:
    """A sentence for each fault that struck some trials only, the others having ended before it."""
    planned: dict[str, list[tuple[Entry, bool]]] = {}  # by the fault in words: each trial, and whether it was struck
    for entry in study.entries:
        for run in entry.finished:
            for words, struck in _faults(run):
                planned.setdefault(words, []).append((entry, struck))
    late = {words: trials for words, trials in planned.items() if not all(struck for _, struck in trials)}
    said = [_sentence(words, trials) for words, trials in list(late.items())[:MANY]]
    more = len(late) - len(said)
    return [*said, *([f"{more} more faults came too late for some trials"] if more else [])]


def _faults(run: Run) -> Iterator[tuple[str, bool]]:
    """What the run's cluster plans, in words, and whether it came before the target, or the end of the run: nothing can
    change the time to the target after that."""
    for fault in make_cluster(run.config.get("cluster") or {}).faults:
        if fault.share is None:
            assert isinstance(fault.at, float)
            end = run.seconds if run.time_to_target is None else run.time_to_target
            when, struck = f"{number(fault.at)} {unit_of_time(run.config['world'])}", fault.at <= end
        else:
            when, struck = f"{100 * fault.share:g} % of the run", fault.share * _planned(run) <= run.samples
        yield f"the {NAMES[fault.kind]} {_where(fault)} at {when}", struck


def _planned(run: Run) -> int:
    """The samples that the run would train on if it had no target."""
    config = read_config(run.config)
    return schedule_of(config, config.samples_per_step).total


def _where(fault: Fault) -> str:
    for role in CRASHES:
        if (number := getattr(fault, role)) is not None:
            return f"{role} {number}"
    return f"host{'' if len(fault.hosts) == 1 else 's'} {', '.join(map(str, fault.hosts))}"


def _sentence(words: str, trials: list[tuple[Entry, bool]]) -> str:
    struck = sum(each for _, each in trials)
    if not struck:
        return f"{words} struck in none of {counted(len(trials), 'trial')}: all had ended before"
    by_entry: dict[str, list[bool]] = {}
    for entry, each in trials:
        by_entry.setdefault(entry.name, []).append(each)
    each_entry = ", ".join(f"{name} {sum(own)} of {len(own)}" for name, own in by_entry.items())
    per_entry = f" ({each_entry})" if len(by_entry) > 1 else ""
    return f"{words} struck in {struck} of {len(trials)} trials{per_entry}; the others had ended before"
