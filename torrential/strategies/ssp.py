"""Stale synchronous parallel (Ho et al. 2013): nobody runs more than `staleness` clocks ahead of the slowest.

    clock c   pull, which waits until everybody has completed c - s clocks | work | push, stamped c

A read at clock c sees every update stamped c - s - 1 or less, of everybody, and all of its own; perhaps newer ones.
With s = 0 this is `bsp`. It evens out passing slowness; a worker that is slow for good slows everybody, s clocks later.
server/consistency.py has the conventions.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from torrential.server.consistency import Consistency
from torrential.strategies.base import ServedContext, Strategy


class Ssp(Strategy, frozen=True, kw_only=True):
    name: ClassVar[str] = "ssp"
    summary: ClassVar[str] = "bounded staleness: nobody runs more than s clocks ahead of the slowest"
    served: ClassVar[bool] = True

    staleness: Annotated[int, msgspec.Meta(ge=0)] = 3
    """Clocks that the fastest worker may be ahead of the slowest."""

    @property
    def together(self) -> bool:  # type: ignore[override]
        """Without staleness all workers of a clock share one joined batch, as in `bsp`."""
        return self.staleness == 0

    def joined(self, workers: int, batch_size: int) -> int:
        return workers * batch_size if self.together else batch_size

    def consistency(self, workers: int) -> Consistency:
        return Consistency(staleness=self.staleness)

    def worker(self, ctx: ServedContext) -> None:  # type: ignore[override]
        clock = ctx.begin()
        while (batch := ctx.take(clock)) is not None:
            joined = ctx.config.workers * ctx.config.batch_size
            share = len(batch.indices) / batch.total if self.together else 1 / ctx.config.workers
            loss = ctx.backward(batch, weight=share)
            rate = ctx.rate(batch, joined)
            ctx.advance(batch, loss, ctx.exchange(batch, clock, rate))
            clock += 1
        ctx.leave()
