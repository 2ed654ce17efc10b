"""Carry a study out: run by run, each at most once to its end, also after interruptions.

The directories of the runs are all that is remembered. A run that ended, well or by diverging, is never repeated; one
that was cut off is removed and started anew. So a study goes on when it is called again, however it was stopped.

Where trials are added until it is decided which entry is soonest, that is looked at after planned numbers of them
(plan.looks) and nowhere else. What a look says is a function of the runs, so a study that goes on comes to the same.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torrential import records
from torrential.locks import lock_directory
from torrential.records import Summary
from torrential.study.ask import Question
from torrential.study.plan import Trial, looks, reported_trials, tuning_trials
from torrential.study.read import read_study
from torrential.study.results import DIVERGED, Study
from torrential.study.verdict import is_decided


class Runner(Protocol):
    def __call__(self, trial: Trial) -> None:
        """Carry out one run in the directory of the trial, which is not there yet."""


class StudyListener(Protocol):
    """A listener that hears how a study goes on."""

    def planned(self, runs: int, done: int) -> None: ...

    def goes_on(self, runs: int, trials: int, more: int) -> None:
        """Hear that it is undecided after so many trials of each entry, so that more are made: as many of each, and
        runs in all."""

    def begins(self, trial: Trial) -> None: ...

    def ended(self, trial: Trial) -> None: ...


def conduct(question: Question, directory: Path, run: Runner, watch: StudyListener) -> Study:
    tuning = tuning_trials(question, directory)
    reported = reported_trials(question, directory, {})  # with the same directories, whatever tuning will choose
    first = [*tuning, *(trial for trial in reported if trial.number <= looks(question)[0])]
    watch.planned(len(first), sum(is_finished(trial.directory) for trial in first))
    _carry_out(tuning, run, watch)
    if tuning:
        chosen = {entry.name: entry.tuned for entry in read_study(directory).entries}
        reported = reported_trials(question, directory, chosen)
    for before, trials in itertools.pairwise([0, *looks(question)]):
        if before:
            watch.goes_on(len(tuning) + trials * len(question.entries), before, trials)
        _carry_out([trial for trial in reported if trial.number <= trials], run, watch)
        study = read_study(directory)
        if study.trials == trials and is_decided(study):  # of a study that goes on there may be later trials
            return study
    raise AssertionError("the last look decides a study")


def _carry_out(trials: Sequence[Trial], run: Runner, watch: StudyListener) -> None:
    for trial in trials:
        if is_finished(trial.directory):
            continue
        if trial.directory.exists():
            fd = lock_directory(trial.directory, "run")  # somebody may have resumed it
            try:
                shutil.rmtree(trial.directory)
            finally:
                os.close(fd)
        watch.begins(trial)
        run(trial)
        watch.ended(trial)


def is_finished(directory: Path) -> bool:
    path = directory / records.RECORDS
    if not path.exists():
        return False
    found = records.read_records(path)
    return any(isinstance(record, Summary) or getattr(record, "event", "") == DIVERGED for record in found)
