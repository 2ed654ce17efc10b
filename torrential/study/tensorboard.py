"""The runs of a study as TensorBoard reads them: one event file for each run."""

from __future__ import annotations

import shutil
from pathlib import Path

from torrential.listeners.figures import need
from torrential.listeners.tensorboard import DIRECTORY, EventFile
from torrential.records import Evaluation, Step
from torrential.study.results import Run, Study


def check_tensorboard() -> None:
    """Refuse to go on where TensorBoard's package is missing."""
    need("tensorboard", "--tensorboard")


def write_events(study: Study) -> Path:
    """Write event files into a directory of their own, which is made anew."""
    place = study.directory / DIRECTORY
    shutil.rmtree(place, ignore_errors=True)
    for kind, entries in (("", study.entries), ("tuning-", study.tuning)):
        for run in (run for entry in entries for run in entry.runs):
            _write(run, place / f"{kind}{run.directory.name}", study.metric)
    return place


def _write(run: Run, place: Path, metric: str) -> None:
    file = EventFile(place, metric, run.manifest.created)
    happened: list[Step | Evaluation] = sorted([*run.steps, *run.evaluations], key=lambda record: record.time)
    file.write(happened)
    file.close()
