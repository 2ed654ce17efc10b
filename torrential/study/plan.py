"""Which runs a study consists of, in which order: a pure function of the question.

Trial by trial, and within a trial the entries in an order drawn by the seed, so that a drift of the machine
hits all entries alike. Every run has a seed of its own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from torrential.study import statistics
from torrential.study.ask import Question, Spec, grid, slug, with_values

RUNS = "runs"  # where those are that are reported


@dataclass(frozen=True)
class Trial:
    """One run that a study plans."""

    entry: str  # its name
    spec: Spec  # with what is tried, or was chosen
    number: int  # from 1
    seed: int
    directory: Path
    values: dict[str, str]  # what is tried in tuning; empty in a trial that is reported

    @property
    def title(self) -> str:
        tried = " ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{self.entry}, " + (f"tuning {tried}" if tried else f"trial {self.number}")


def pairs_of(question: Question) -> int:
    """The number of comparisons between the entries."""
    return math.comb(len(question.entries), 2)


def looks(question: Question) -> list[int]:
    """The numbers of trials after which it is looked whether there is an answer; one, unless trials are added."""
    asked = question.asked
    return statistics.looks(pairs_of(question), asked.trials) if asked.auto else [asked.trials]


def seed_of(base: int, *key: object) -> int:
    """Below 2^31, which every random generator takes."""
    text = "/".join(map(str, (base, *key)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1


def tuning_directory(root: Path, spec: Spec, values: Mapping[str, str], number: int) -> Path:
    text = "-".join(f"{name}={value}" for name, value in values.items())
    tried = text if text == slug(text, ()) else slug(text, (slug(text, ()),))  # no two of them may have one directory
    return root / "tuning" / f"{spec.slug}-{tried}-{number}"


def trial_directory(root: Path, spec: Spec, number: int) -> Path:
    return root / RUNS / f"{spec.slug}-{number}"


def tuning_trials(question: Question, root: Path) -> list[Trial]:
    asked, planned = question.asked, []
    for number in range(1, asked.tune_trials + 1):
        those = [(spec, values) for spec in question.entries for values in grid(asked.tune)]
        Random(f"{asked.seed}/tuning/{number}").shuffle(those)
        for spec, values in those:
            seed = seed_of(asked.seed, "tuning", spec.name, sorted(values.items()), number)
            place = tuning_directory(root, spec, values, number)
            planned.append(Trial(spec.name, with_values(spec, values), number, seed, place, values))
    return planned


def reported_trials(question: Question, root: Path, chosen: Mapping[str, dict[str, str]]) -> list[Trial]:
    """`chosen`: by an entry's name, what tuning has chosen."""
    asked, planned = question.asked, []
    for number in range(1, asked.trials + 1):
        specs = list(question.entries)
        Random(f"{asked.seed}/trial/{number}").shuffle(specs)
        for spec in specs:
            seed = seed_of(asked.seed, "trial", spec.name, number)
            final = with_values(spec, chosen.get(spec.name, {}))
            planned.append(Trial(spec.name, final, number, seed, trial_directory(root, spec, number), {}))
    return planned
