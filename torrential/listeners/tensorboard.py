"""A run as TensorBoard shows it, while it goes on: event files in the run's directory, written by its own package.

TensorBoard's steps are samples here, which mean the same in all strategies; its time is that of the records.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from torrential.listeners.base import Listener, RunHandle
from torrential.listeners.figures import figures_of, need
from torrential.records import Evaluation, Record, Step, read_manifest

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

DIRECTORY = "tensorboard"
FLUSH_SECONDS = 2


class TensorBoard(Listener):
    """A listener that writes event files for TensorBoard: `tensorboard --logdir runs` shows all runs there."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """`directory`: where event files go; by default `tensorboard` in the run's directory. What was there is made
        anew from the records."""
        need("tensorboard", "TensorBoard")
        self._directory = None if directory is None else Path(directory)

    def begin(self, run: RunHandle) -> None:
        place = self._directory or run.directory / DIRECTORY
        self._events = EventFile(place, run.metric, read_manifest(run.directory).created)
        self._events.write(run.history)

    def record(self, record: Record) -> None:
        self._events.write([record])

    def end(self) -> None:
        self._events.close()


class EventFile:
    """The event file of one run, in a directory that is made anew."""

    def __init__(self, directory: Path, metric: str, created: str) -> None:
        """`created`: when the run began, in ISO 8601."""
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(directory, ignore_errors=True)
        self._writer: SummaryWriter = SummaryWriter(str(directory), flush_secs=FLUSH_SECONDS)
        self._metric, self._began = metric, _seconds_of(created)

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, Step | Evaluation):
                for name, value in figures_of(record, self._metric).items():
                    self._writer.add_scalar(name, value, record.samples, self._began + record.time)

    def close(self) -> None:
        self._writer.close()


def _seconds_of(date: str) -> float:
    """Since 1970; 0 for a text that is no date: what TensorBoard shows is mostly the time since the first event."""
    try:
        return datetime.fromisoformat(date).timestamp()
    except (ValueError, OverflowError):
        return 0.0
