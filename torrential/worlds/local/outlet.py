"""Where a worker of the local world leaves records and snapshots."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from torrential.comm.protocol import Meter
from torrential.errors import WaitedTooLong
from torrential.records import Record
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, SupervisorLink

SLOTS = 2
PATIENCE_SECONDS = 600.0


class LocalOutlet:
    """Snapshots are copied into one of two registered slots, or sent as bytes where the observer may be on another
    host; when two are still being read, the worker waits."""

    def __init__(
        self,
        rank: int,
        link: SupervisorLink,
        buffers: Buffers,
        meter: Meter,
        check: Callable[[], None],
        apart: bool = False,
    ) -> None:
        self._rank, self._link, self._buffers, self._meter, self._check = rank, link, buffers, meter, check
        self._apart = apart  # whether the observer may be on another host
        self._returned = link.box(m.SnapshotDone)
        self._free: list[int] = []  # the supervisor says which

    def record(self, record: Record) -> None:
        self._link.send(m.Recorded(record))  # type: ignore[arg-type]

    def own_states(self, step: int, states: Mapping[str, Tensor]) -> None:
        self._link.send(m.OwnStates(self._rank, step, list(states)), [_host(t) for t in states.values()])

    def snapshot(self, snapshot: Snapshot, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
        slot = self._slot()
        vectors = [(name, v.numel(), str(v.dtype).removeprefix("torch.")) for name, v in flat.items()]
        beside = [_host(t) for t in rest.values()]
        if self._apart:
            beside = [*(_host(v) for v in flat.values()), *beside]
        else:
            for name, vector in flat.items():
                copy = self._buffers.get(f"snapshot{slot}/{name}", vector.numel(), vector.dtype, self._rank)
                copy.copy_(vector)
        self._link.send(m.SnapshotTaken(self._rank, slot, snapshot, vectors, list(rest)), beside)

    def _slot(self) -> int:
        self._collect()
        if not self._free:
            self._link.send(m.Delayed(True))
            with self._meter.waiting():
                self._wait()
            self._link.send(m.Delayed(False))
        self._free.sort()
        return self._free.pop(0)  # the second slot takes no memory until it is needed

    def _collect(self) -> None:
        while not self._returned.empty():
            self._free.append(self._returned.get()[0].slot)

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._free:
            self._check()
            if time.monotonic() > deadline:
                raise WaitedTooLong("the observer", PATIENCE_SECONDS, "a free snapshot slot")
            with contextlib.suppress(queue.Empty):
                self._free.append(self._returned.get(timeout=0.02)[0].slot)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
