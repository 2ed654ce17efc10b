"""Runs that are still being written: read once, and then only what has been added since.

    read = RunTails()
    read.begin()                                          # a pass over all runs; takes a bounded time
    study = read_study(directory, read=read)

A run without a summary is no problem here: it is going on. A damaged line is left out and counted. A file that was cut
or replaced, as by a run that is resumed, is read from its beginning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torrential import records
from torrential.errors import BadInput
from torrential.files import open_regular
from torrential.records import LONGEST_LINE, Evaluation, Event, Manifest, Record, Step, Summary, Work
from torrential.study.read import read_known_manifest
from torrential.study.results import Run

PASS_BYTES = 64 << 20  # of records, that one pass over all runs reads; files that wait for the next count as behind
REMEMBERED = 64  # bytes before the place that was read to: other bytes there mean another file

Identity = tuple[int, int, int, int]  # of a file: device, inode, size, time of the last change


class RecordTail:
    """The end of one records file. `read` gives what was added to the file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seen: Identity | None = None  # the file as it was when it was read
        self._before = b""
        self.position = 0  # bytes that were read
        self.damaged = 0  # lines that are no records
        self.behind = 0  # bytes that were there and have not been read

    def read(self) -> tuple[bool, list[Record]]:
        """Whether the file is read from its beginning, and the records that are new."""
        found = _identity(self._path)
        if found is None:
            began = self.position > 0
            self._begin()
            return began, []
        if found == self.seen and not self.behind:
            return False, []
        try:
            began, data = self._added(found)
        except OSError as error:
            raise BadInput(f"cannot read {self._path} ({error.strerror}); check its permissions") from error
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= LONGEST_LINE:
            raise BadInput(
                f"{self._path} has a line of more than {LONGEST_LINE:,} bytes, which is no record; delete it"
            )
        self.position += end
        self._before = (self._before + data[:end])[-REMEMBERED:]
        self.behind = max(0, found[2] - self.position) if len(data) == LONGEST_LINE else 0
        self.seen = found
        new, damaged = records.decode_records(data[:end])
        self.damaged += damaged
        return began, new

    def _added(self, found: Identity) -> tuple[bool, bytes]:
        """At most LONGEST_LINE bytes that follow what was read."""
        with open_regular(self._path) as file:
            same = self.seen is not None and found[:2] == self.seen[:2]
            file.seek(self.position - len(self._before))
            if same and file.read(len(self._before)) == self._before:
                return False, file.read(LONGEST_LINE)
            began = self.seen is not None
            self._begin()
            file.seek(0)
            return began, file.read(LONGEST_LINE)

    def _begin(self) -> None:
        self.seen, self.position, self._before = None, 0, b""
        self.damaged = self.behind = 0


class _RunTail:
    """One run's directory. The lists of its Run grow; whenever something has changed, there is a new Run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest_seen: Identity | None = None
        self._manifest: Manifest | str = ""  # or what is wrong with it
        self.tail = RecordTail(directory / records.RECORDS)
        self._run: Run | None = None

    def read(self, further: bool) -> Run:
        """The run as it is now; as far as it has been read before, unless it is to be read `further`."""
        manifest = self.read_manifest()
        began, new = self.tail.read() if further else (False, list[Record]())
        problem = f"{self.tail.damaged:,} damaged lines of its records are left out" if self.tail.damaged else ""
        if self._run is None or began:
            self._run = Run(self._directory, manifest, [], [], [], None)
        if began or new or (self._run.manifest, self._run.problem) != (manifest, problem):
            self._run = replace(_with_records(self._run, new), manifest=manifest, problem=problem)
        return self._run

    @property
    def written(self) -> float:
        seen = self.tail.seen or self._manifest_seen
        return 0.0 if seen is None else seen[3] / 1e9

    def read_manifest(self) -> Manifest:
        found = _identity(self._directory / records.MANIFEST)
        if found != self._manifest_seen or not self._manifest:
            self._manifest_seen = found
            try:
                self._manifest = read_known_manifest(self._directory)
            except BadInput as error:
                self._manifest = str(error)
        if isinstance(self._manifest, str):
            raise BadInput(self._manifest)
        return self._manifest


class RunTails:
    """Reads runs as read_run does, except that one going on is no problem. Called again, it gives the same Run for a
    directory in which nothing has changed."""

    def __init__(self) -> None:
        self._tails: dict[Path, _RunTail] = {}
        self._asked: set[Path] = set()
        self._left = PASS_BYTES
        self.behind = False  # whether there were more records than one pass reads

    def begin(self) -> None:
        """Begin a pass over all runs. Those that the last pass did not ask for are forgotten."""
        self._tails = {directory: tail for directory, tail in self._tails.items() if directory in self._asked}
        self._asked.clear()
        self._left, self.behind = PASS_BYTES, False

    def __call__(self, directory: Path) -> Run:
        found = self._tail(directory)
        before, further = found.tail.position, self._left > 0
        run = found.read(further)
        self._left -= max(0, found.tail.position - before)
        self.behind |= not further or found.tail.behind > 0
        return run

    def manifest(self, directory: Path) -> Manifest:
        """The manifest alone, of a run whose records are not needed."""
        return self._tail(directory).read_manifest()

    def written(self, directory: Path) -> float:
        """When records of a run were last written, in seconds since 1970; before the first one, its manifest."""
        return self._tail(directory).written

    def _tail(self, directory: Path) -> _RunTail:
        self._asked.add(directory)
        return self._tails.setdefault(directory, _RunTail(directory))


def _with_records(run: Run, new: Sequence[Record]) -> Run:
    run.steps.extend(record for record in new if isinstance(record, Step))
    few = [record for record in new if not isinstance(record, Step)]
    run.evaluations.extend(record for record in few if isinstance(record, Evaluation))
    run.events.extend(record for record in few if isinstance(record, Event))
    run.batches.extend(record for record in few if isinstance(record, Work))
    return replace(run, summary=next((r for r in reversed(few) if isinstance(r, Summary)), run.summary))


def _identity(path: Path) -> Identity | None:
    """None where there is no such file."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInput(f"cannot read {path} ({error.strerror}); check its permissions") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
