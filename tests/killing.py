"""A listener that kills one role of a run at a given moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import torrential as tt


class Killing(tt.Listener):
    """Kills the process of this name (tt-worker-0, tt-coord-0, ...) when a record says that it is time, once."""

    def __init__(self, name: str, is_time: Callable[[Any], bool]) -> None:
        self._name, self._is_time, self.killed = name, is_time, threading.Event()

    def record(self, record: Any) -> None:
        if self.killed.is_set() or not self._is_time(record):
            return
        for process in psutil.Process().children(recursive=True):
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == self._name:
                process.send_signal(signal.SIGKILL)
                self.killed.set()
