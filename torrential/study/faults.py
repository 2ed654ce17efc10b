"""Faults that a cluster plans and that came too late for some trials: those trials say nothing about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torrential.progress import counted, number
from torrential.study.results import Entry, Run, Study, unit_of_time

MANY = 3  # faults that are named one by one
NAMES = {"crash": "crash of", "partition": "partition of", "slow-link": "slow link of"}


def late_faults(study: Study) -> list[str]:
    """A sentence for each fault that struck some trials only, the others having ended before it."""
    planned: dict[str, list[tuple[Entry, bool]]] = {}  # by the fault in words: each trial, and whether it was struck
    for entry in study.entries:
        for run in entry.finished:
            for words, at in _faults(run):
                planned.setdefault(words, []).append((entry, at <= _end(run)))
    late = {words: trials for words, trials in planned.items() if not all(struck for _, struck in trials)}
    said = [_sentence(words, trials) for words, trials in list(late.items())[:MANY]]
    more = len(late) - len(said)
    return [*said, *([f"{more} more faults came too late for some trials"] if more else [])]


def _end(run: Run) -> float:
    """The moment after which nothing can change the time to the target."""
    return run.seconds if run.time_to_target is None else run.time_to_target


def _faults(run: Run) -> Iterator[tuple[str, float]]:
    """What the run's cluster plans at a given second, in words."""
    for fault in (run.config.get("cluster") or {}).get("faults", []):
        if isinstance(at := fault.get("at"), int | float):
            unit = unit_of_time(run.config.get("world", ""))
            yield f"the {NAMES.get(fault['kind'], fault['kind'])} {_where(fault)} at {number(at)} {unit}", at


def _where(fault: dict[str, Any]) -> str:
    for role in ("worker", "server", "host"):
        if fault.get(role) is not None:
            return f"{role} {fault[role]}"
    hosts = fault.get("hosts", [])
    return f"host{'' if len(hosts) == 1 else 's'} {', '.join(map(str, hosts))}"


def _sentence(words: str, trials: list[tuple[Entry, bool]]) -> str:
    struck = sum(each for _, each in trials)
    if not struck:
        return f"{words} struck in none of {counted(len(trials), 'trial')}: all had ended before"
    by_entry: dict[str, list[bool]] = {}
    for entry, each in trials:
        by_entry.setdefault(entry.name, []).append(each)
    each_entry = ", ".join(f"{name} {sum(own)} of {len(own)}" for name, own in by_entry.items())
    apart = f" ({each_entry})" if len(by_entry) > 1 else ""
    return f"{words} struck in {struck} of {len(trials)} trials{apart}; the others had ended before"
