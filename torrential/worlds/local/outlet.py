"""Where a worker of the local world leaves records and snapshots."""

from __future__ import annotations

import queue
from collections.abc import Mapping

from torch import Tensor

from torrential.comm.protocol import Meter
from torrential.errors import WaitedTooLong
from torrential.records import Record
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, Link

SLOTS = 2
PATIENCE_SECONDS = 600.0


class LocalOutlet:
    """Snapshots are copied into one of two registered slots; when both are still being read, the worker waits."""

    def __init__(self, rank: int, life: int, link: Link, buffers: Buffers, meter: Meter) -> None:
        self._rank, self._life, self._link, self._buffers, self._meter = rank, life, link, buffers, meter
        self._returned = link.box(m.SnapshotDone)
        self._free = list(range(SLOTS))

    def record(self, record: Record) -> None:
        self._link.send(m.Recorded(record))  # type: ignore[arg-type]

    def own_buffers(self, step: int, buffers: Mapping[str, Tensor]) -> None:
        self._link.send(m.OwnBuffers(self._rank, step, list(buffers)), [_host(t) for t in buffers.values()])

    def snapshot(self, snapshot: Snapshot, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
        slot = self._slot()
        vectors = []
        for name, vector in flat.items():
            copy = self._buffers.get(f"snapshot{slot}.{self._life}/{name}", vector.numel(), vector.dtype, self._rank)
            copy.copy_(vector)
            vectors.append((name, vector.numel(), str(vector.dtype).removeprefix("torch.")))
        self._link.send(
            m.SnapshotTaken(self._rank, self._life, slot, snapshot, vectors, list(rest)),
            [_host(t) for t in rest.values()],
        )

    def _slot(self) -> int:
        while not self._returned.empty():
            self._free.append(self._returned.get()[0].slot)
        if not self._free:
            with self._meter.waiting():
                try:
                    self._free.append(self._returned.get(timeout=PATIENCE_SECONDS)[0].slot)
                except queue.Empty as error:
                    raise WaitedTooLong("the observer", PATIENCE_SECONDS, "a free snapshot slot") from error
        self._free.sort()
        return self._free.pop(0)  # the second slot takes no memory until it is needed


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
