"""All-reduce through torch.distributed: Gloo for host memory, NCCL where each worker has its own GPU.

Members find one another through a file, for torch's own store of that kind listens on all interfaces and asks callers
for no token. Both libraries' connections stay on the loopback interface, unless the environment names another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torrential.comm.protocol import Complaints, Meter
from torrential.errors import WaitedTooLong

POLL_SECONDS = 1e-4
LONG = timedelta(days=1)
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # by default that of the host's name, or the first one
LOOPBACK = "lo"


class NativeCarrier:
    """One process group per generation. Small operations and agreement stay with our own carriers."""

    def __init__(self, rank: int, meter: Meter, check: Callable[[], None], timeout: float, backend: str) -> None:
        self.rank, self.meter, self.check, self.timeout, self.backend = rank, meter, check, timeout, backend
        self.members: tuple[int, ...] = ()
        self.complaints: Complaints | None = None  # what is told of long waits, instead of giving up

    def regroup(self, members: tuple[int, ...], rendezvous: str) -> None:
        """`rendezvous` is the path of an empty file that all members can open, and no other user can."""
        self.close()
        self.members = members
        for name in INTERFACES:
            os.environ.setdefault(name, LOOPBACK)
        patience = timedelta(seconds=self.timeout)
        store = dist.FileStore(rendezvous)  # type: ignore[attr-defined]
        store.set_timeout(patience)
        rank = members.index(self.rank)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=len(members), timeout=patience)
        if self.complaints is not None:  # who is waited for too long is ended; the library need not give up by itself
            dist.distributed_c10d._set_pg_timeout(LONG)

    def all_reduce(self, tensor: Tensor) -> NativeHandle:
        start = time.perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        count = len(self.members)
        self.meter.bytes_sent += 2 * (count - 1) * tensor.nbytes // count
        self.meter.communicate += time.perf_counter() - start
        return NativeHandle(self, work)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class NativeHandle:
    def __init__(self, carrier: NativeCarrier, work: Any) -> None:
        self.carrier, self.work = carrier, work

    def done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout: float | None = None) -> None:
        """A peer's death shows as an error of the library; the supervisor's word on it follows within moments."""
        began, limit = time.perf_counter(), self.carrier.timeout if timeout is None else timeout
        late = False
        with self.carrier.meter.waiting():
            try:
                while not self.work.is_completed():
                    self.carrier.check()
                    waited = time.perf_counter() - began
                    if waited > limit:
                        what = f"{self.carrier.backend} all-reduce"
                        if self.carrier.complaints is None:
                            raise WaitedTooLong("some worker", waited, what)
                        late = True
                        self.carrier.complaints.overdue(-1, f"in a {what}", waited)
                        limit += self.carrier.timeout
                    time.sleep(POLL_SECONDS)
                self._conclude()
            finally:
                if late and self.carrier.complaints is not None:
                    self.carrier.complaints.relieved()

    def _conclude(self) -> None:
        try:
            self.work.wait()
        except RuntimeError:
            failed = time.perf_counter()
            while time.perf_counter() - failed < self.carrier.timeout:
                self.carrier.check()
                time.sleep(POLL_SECONDS)
            raise
