"""What a listener is, and what it is told of its run.

class Prints(tt.Listener):
    def record(self, record):
        print(record)

tt.train(task, listeners=[Prints()])
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torrential.config import RunConfig
from torrential.errors import BadInput
from torrential.records import Record


class RunHandle:
    """The run that a listener listens to: where and what it is, and a way to stop it."""

    def __init__(
        self, directory: Path, config: RunConfig, metric: str, maximize: bool, history: Sequence[Record]
    ) -> None:
        self.directory, self.config, self.metric, self.maximize = directory, config, metric, maximize
        self.history = history
        """The records that a resumed run has from before; no listener is told them again."""
        self._lock = threading.Lock()
        self._reason: str | None = None

    def stop(self, reason: str = "a listener wants it") -> None:
        """End the run at the next step that all workers agree on; it is evaluated, saved and summed up as ever. May be
        called from any thread; the first reason is put on record."""
        with self._lock:
            self._reason = str(reason) if self._reason is None else self._reason

    def stop_reason(self) -> str | None:
        """The reason for which the run is to stop; None if no listener has asked for that."""
        return self._reason


class Listener:
    """The base of listeners, each of whose methods does nothing. They are called one after the other in a thread of the
    listener's own, in the process that called `tt.train`."""

    def begin(self, run: RunHandle) -> None:
        """The run begins, or goes on where it was resumed."""

    def record(self, record: Record) -> None:
        """Something is on record: a Step, Evaluation or Event of torrential.records, and at the end a Summary."""

    def end(self) -> None:
        """The run is over. One that failed or was interrupted has given no Summary."""


def check_listeners(given: Any) -> list[Any]:
    """The listeners that were given, if they are some. An object with a method `record` is enough."""
    if not isinstance(given, list | tuple):
        raise BadInput(f"listeners is a list of objects (given: {given!r}); write listeners=[...]")
    for one in given:
        if isinstance(one, type):
            raise BadInput(f"a listener is an object, not a class (given: {one.__name__}); write {one.__name__}()")
        if not callable(getattr(one, "record", None)):
            raise BadInput(
                f"a listener has a method record(record) (given: {one!r}); derive its class from tt.Listener"
            )
    return list(given)
