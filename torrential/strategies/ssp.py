"""Stale synchronous parallel (Ho et al. 2013): no worker runs more than `staleness` clocks ahead of the slowest.

    clock c   pull, which waits until everybody has completed c - s clocks | work | push, stamped c

A read at clock c sees every update stamped c - s - 1 or less, of everybody, and all of its own; perhaps newer ones.
With s = 0 this is `bsp`. It evens out passing slowness; a worker that is slow for good slows everybody, s clocks later.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from torrential.server.consistency import Consistency
from torrential.strategies.base import exchange
from torrential.strategies.context import Context
from torrential.strategies.parameter_server import ParameterServerStrategy
from torrential.strategies.roles import Roles, Servers


class Ssp(ParameterServerStrategy, frozen=True, kw_only=True):
    """Stale synchronous parallel: no worker runs more than `staleness` clocks ahead of the slowest."""

    name: ClassVar[str] = "ssp"
    summary: ClassVar[str] = "bounded staleness: no worker runs more than s clocks ahead of the slowest"

    staleness: Annotated[int, msgspec.Meta(ge=0)] = 3
    """Clocks that the fastest worker may be ahead of the slowest."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        """Without staleness all workers of a clock share one joined batch, as in `bsp`."""
        return batch_size if self.staleness else super().samples_per_update(workers, batch_size)

    def roles(self, workers: int, servers: int) -> Roles:
        return (
            self.worker_role(workers),
            Servers(servers, Consistency(staleness=self.staleness), joined=self.staleness == 0, stages=self.stages),
        )

    def worker(self, ctx: Context) -> None:
        vector, gradient = ctx.replica.vector(), ctx.replica.gradient()
        replicas = self.replicas(ctx.config.workers)
        joined = replicas * ctx.config.batch_size
        clock = ctx.params.begin(vector)
        while (batch := ctx.data.take(clock)) is not None:
            weight = 1 / replicas if self.staleness else len(batch) / batch.total
            loss = ctx.replica.backward([batch.weighted(weight)])
            answer = exchange(ctx, batch, clock, ctx.progress.rate(joined, batch), gradient, vector)
            ctx.progress.advance(batch, loss, answer)
            clock += 1
        ctx.leave()
