"""Bulk synchronous training through servers: push, aggregate, pull. Every step is one step of plain training.

    worker 0   take | backward | push ─────┐            ┌─► pull | take ...
    worker 1   take | backward | push ───┐ │            │
    server                               └─┴─ sum, step ┘

Servers hold a clock's pushes until every worker's is there, sum them in the order of ranks, take one step and answer.
(Li et al. 2014 with tau = 0; Valiant 1990.) The same numbers as `allreduce`, random ones included: joined batches are
cut alike, and a batch's place in the epoch seeds what is drawn for it.
"""

from __future__ import annotations

from typing import ClassVar

from torrential.server.consistency import Consistency
from torrential.strategies.base import ServedContext, Strategy


class Bsp(Strategy, frozen=True, kw_only=True):
    name: ClassVar[str] = "bsp"
    summary: ClassVar[str] = "synchronous, through servers: push, aggregate, pull"
    served: ClassVar[bool] = True
    together: ClassVar[bool] = True

    def consistency(self, workers: int) -> Consistency:
        return Consistency(staleness=0)

    def worker(self, ctx: ServedContext) -> None:  # type: ignore[override]
        clock = ctx.begin()
        while (batch := ctx.take(clock)) is not None:
            loss = ctx.backward(batch, weight=len(batch.indices) / batch.total)
            rate = ctx.rate(batch, joined=ctx.config.workers * ctx.config.batch_size)
            ctx.advance(batch, loss, ctx.exchange(batch, clock, rate))
            clock += 1
        ctx.leave()
