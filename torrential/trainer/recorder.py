"""A worker's step records, a few times a second: where its time went since the one before."""

from __future__ import annotations

import math
from typing import Any

from torrential.comm.protocol import Comm
from torrential.records import Step
from torrential.trainer.snapshot import Outlet

RECORD_SECONDS = 0.2  # between two step records of one worker


class Recorder:
    def __init__(self, comm: Comm, outlet: Outlet) -> None:
        self._comm, self._outlet = comm, outlet
        self._last = -math.inf
        self._before = (0.0, 0.0, 0.0)
        self.newest = 0  # step on record

    def hurry(self) -> None:
        """The next step is recorded, however soon it comes."""
        self._last = -math.inf

    def due(self, now: float) -> bool:
        return now - self._last >= RECORD_SECONDS

    def write(self, now: float, **about: Any) -> None:
        meter = self._comm.meter
        reading = (now, meter.communicate, meter.wait)
        elapsed, communicate, wait = (a - b for a, b in zip(reading, self._before, strict=True))
        self._last, self._before, self.newest = now, reading, about["step"]
        self._outlet.record(
            Step(
                worker=self._comm.rank,
                time=now,
                compute=elapsed - communicate - wait,
                communicate=communicate,
                wait=wait,
                bytes_sent=meter.bytes_sent,
                **about,
            )
        )
