"""All-reduce through torch.distributed: Gloo for host memory, NCCL where each worker has its own GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torrential.comm.protocol import Meter
from torrential.errors import WaitedTooLong

POLL_SECONDS = 1e-4


class NativeCarrier:
    """One process group per generation. Small operations and agreement stay with our own carriers."""

    def __init__(self, rank: int, meter: Meter, check: Callable[[], None], timeout: float, backend: str) -> None:
        self.rank, self.meter, self.check, self.timeout, self.backend = rank, meter, check, timeout, backend
        self.members: tuple[int, ...] = ()
        self.overdue: Callable[[float], None] | None = None  # told once, before giving up
        self.relieved: Callable[[], None] | None = None  # told when a wait that was overdue is over

    def regroup(self, generation: int, members: tuple[int, ...], host: str, port: int) -> None:
        self.close()
        self.members = members
        patience = timedelta(seconds=self.timeout)
        shared = dist.TCPStore(host, port, timeout=patience)  # type: ignore[attr-defined]
        store = dist.PrefixStore(f"generation {generation}", shared)  # type: ignore[attr-defined]
        rank = members.index(self.rank)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=len(members), timeout=patience)

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
        self._complained = False

    def done(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout: float | None = None) -> None:
        """A peer's death shows as an error of the library; the supervisor's word on it follows within moments."""
        limit = self.carrier.timeout if timeout is None else timeout
        began = time.perf_counter()
        with self.carrier.meter.waiting():
            try:
                limit = self._complete(began, limit)
            finally:
                if self._complained and self.carrier.relieved is not None:
                    self.carrier.relieved()
            try:
                self.work.wait()
            except RuntimeError:
                while time.perf_counter() - began < limit:
                    self.carrier.check()
                    time.sleep(POLL_SECONDS)
                raise

    def _complete(self, began: float, limit: float) -> float:
        """Wait until it is; the limit in the end, which is twice as long for one who has complained."""
        while not self.work.is_completed():
            self.carrier.check()
            waited = time.perf_counter() - began
            if waited > limit:
                if self._complained or self.carrier.overdue is None:
                    raise WaitedTooLong("some worker", limit, f"{self.carrier.backend} all-reduce")
                self.carrier.overdue(waited)
                self._complained, limit = True, 2 * limit
            time.sleep(POLL_SECONDS)
        return limit
