"""Records on their way to listeners, each of which hears them in a thread of its own: a slow listener delays no other.

    world ── record ──► queue ──► thread: listener.begin, record, record, ..., end

A queue is bounded. While WAITING records wait for a listener, step records are left out for it, and others too once
twice as many wait. A listener that raises is left out from then on. Both are said in one line. At the end of the run it
has END_SECONDS for what still waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torrential.listeners.base import RunHandle
from torrential.records import Record, Step
from torrential.usercode import in_words, place_of

WAITING = 10_000  # records
END_SECONDS = 30.0
FAILED_SECONDS = 5.0  # in the place of END_SECONDS if the run failed or was interrupted


class Delivery:
    """The thread and the queue of one listener."""

    def __init__(self, listener: Any, run: RunHandle) -> None:
        self._listener, self._run, self.name = listener, run, type(listener).__name__
        self._queue: SimpleQueue[Record | None] = SimpleQueue()  # None: the run is over
        self._given_up = False
        self._left_out = 0
        self.problem: str | None = None  # why the listener hears nothing any more
        self._thread = Thread(target=self._work, name=f"listener {self.name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        limit = WAITING if isinstance(record, Step) else 2 * WAITING
        if self._queue.qsize() >= limit:
            self._left_out += 1
        elif self.problem is None:
            self._queue.put(record)

    def finish(self) -> None:
        """Nothing more will come."""
        self._queue.put(None)

    def wait(self, deadline: float) -> str | None:
        """Let the listener hear the rest until then; what is to be said of how that went."""
        began = time.monotonic()
        self._thread.join(max(0.0, deadline - began))
        if self._thread.is_alive():
            self._given_up = True
            rest = max(0, self._queue.qsize() - 1)
            late = f"was not done {time.monotonic() - began:.0f} s after the end of the run"
            return f"the listener {self.name} {late}; {rest} records were not given to it"
        if self._left_out and self.problem is None:
            return f"the listener {self.name} could not keep up; {self._left_out} records were not given to it"
        return None

    def _work(self) -> None:
        method = "begin"
        try:
            self._call(method, self._run)
            while not self._given_up and (record := self._queue.get()) is not None:
                method = "record"
                self._listener.record(record)
            method = "end"
            self._call(method)
        except BaseException as error:  # a listener is user code: it may raise anything, and the run goes on
            place = place_of(error)
            fact = f"{method} of the listener {self.name} raised {in_words(error)}{place and f' ({place})'}"
            self.problem = f"{fact}; it hears nothing any more, and the run goes on"

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method that a listener may do without."""
        if (function := getattr(self._listener, method, None)) is not None:
            function(*arguments)


class Deliveries:
    """Everything that is delivered to the listeners of a run."""

    def __init__(self, listeners: Sequence[Any], run: RunHandle, say: Callable[[str], None]) -> None:
        self._say = say
        self._under_way = [Delivery(listener, run) for listener in listeners]

    def record(self, record: Record) -> None:
        for delivery in self._under_way:
            delivery.put(record)
        self.tell_problems()

    def tell_problems(self) -> None:
        """Say which listeners have failed, and leave them out."""
        failed = [delivery for delivery in self._under_way if delivery.problem is not None]
        for delivery in failed:
            self._under_way.remove(delivery)
            self._say(f"warning: {delivery.problem}")

    def close(self, failed: bool) -> None:
        """Let all listeners hear the rest, at the same time. `failed`: the run came to no good end."""
        for delivery in self._under_way:
            delivery.finish()
        deadline = time.monotonic() + (FAILED_SECONDS if failed else END_SECONDS)
        for delivery in self._under_way:
            if (line := delivery.wait(deadline)) is not None:
                self._say(f"warning: {line}")
        self.tell_problems()
