"""Bulk synchronous training through servers: push, aggregate, pull. Every step is one step of plain training.

    worker 0   take | backward | push ─────┐            ┌─► pull | take ...
    worker 1   take | backward | push ───┐ │            │
    server                               └─┴─ sum, step ┘

Servers hold a clock's pushes until every worker's is there, sum them in the order of ranks, take one step and answer.
(Li et al. 2014 with tau = 0; Valiant 1990.) The same numbers as `allreduce`, random ones included: joined batches are
cut alike, and a batch's place in the epoch seeds what is drawn for it. In half precision (float16, bfloat16) the two
round gradients at other moments, and differ by roundings.
"""

from __future__ import annotations

from typing import ClassVar

from torrential.server.consistency import Consistency
from torrential.strategies.base import exchange
from torrential.strategies.context import Context
from torrential.strategies.parameter_server import ParameterServerStrategy
from torrential.strategies.roles import Roles, Servers


class Bsp(ParameterServerStrategy, frozen=True, kw_only=True):
    """Bulk synchronous training through servers: push, aggregate, pull."""

    name: ClassVar[str] = "bsp"
    summary: ClassVar[str] = "synchronous, through servers: push, aggregate, pull"

    def roles(self, workers: int, servers: int) -> Roles:
        return (
            self.worker_role(workers),
            Servers(servers, Consistency(staleness=0), joined=True, stages=self.stages),
        )

    def worker(self, ctx: Context) -> None:
        vector, gradient = ctx.replica.vector(), ctx.replica.gradient()
        joined = self.samples_per_update(ctx.config.workers, ctx.config.batch_size)
        clock = ctx.params.begin(vector)
        while (batch := ctx.data.take(clock)) is not None:
            loss = ctx.replica.backward([batch.weighted(len(batch) / batch.total)])
            answer = exchange(ctx, batch, clock, ctx.progress.rate(joined, batch), gradient, vector)
            ctx.progress.advance(batch, loss, answer)
            clock += 1
        ctx.leave()
