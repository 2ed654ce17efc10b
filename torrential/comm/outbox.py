"""Writing to a stream without ever blocking the caller.

A small frame is written by the caller itself, as far as the kernel takes it at once. Large ones, the rest of a small
one, and all frames behind them go to a thread, which is started when it is first needed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from torrential.comm import wire

AT_ONCE = 1 << 20  # bytes of payload


class Outgoing:
    """A message on its way; done when it has been handed to the kernel."""

    _sent = False

    def done(self) -> bool:
        return self._sent

    def mark(self) -> None:
        self._sent = True

    def lose(self) -> None:
        """Note that it will never be sent."""


class Outbox:
    def __init__(
        self, write: Callable[[list[memoryview], bool], list[memoryview]], on_written: Callable[[], None] | None = None
    ) -> None:
        """`write(frame, block)` returns what it could not write; the thread calls `on_written` after each frame."""
        self._write, self._on_written = write, on_written
        self._frames: queue.SimpleQueue[tuple[list[memoryview], Outgoing] | None] = queue.SimpleQueue()
        self._queued = 0  # frames that are in the queue, or being written by the thread
        self._lock = threading.Lock()  # of `_queued`; whoever has seen it at 0 may write while holding it
        self._thread: threading.Thread | None = None
        self.lost = False  # the other side is gone

    def send(self, frame: list[memoryview], nbytes: int, outgoing: Outgoing) -> None:
        with self._lock:
            if not self.lost and not self._queued and nbytes <= AT_ONCE:
                try:
                    frame = self._write(frame, False)
                except wire.Closed:
                    self.lost = True
                else:
                    if not frame:
                        return outgoing.mark()
            if self.lost:
                return outgoing.lose()
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._empty, daemon=True)
                self._thread.start()
            self._frames.put((frame, outgoing))

    def close(self) -> None:
        with self._lock:
            self.lost = True
            self._frames.put(None)

    def _empty(self) -> None:
        while (item := self._frames.get()) is not None:
            frame, outgoing = item
            try:
                if not self.lost:
                    self._write(frame, True)
            except wire.Closed:
                self.lost = True
            with self._lock:
                self._queued -= 1
            outgoing.lose() if self.lost else outgoing.mark()
            if self._on_written is not None:
                self._on_written()
