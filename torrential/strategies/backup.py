"""Synchronous training with backup workers (Chen et al. 2016): the first N of N + b gradients make a step.

    worker 0   ──── push ─┐
    worker 1   ── push ───┤ N = 2: sum, step, answer
    worker 2   ────────── push ─► too late: dropped, and on to the newest parameters

Servers drop a gradient of any version but the current one. Its samples are dealt out again, to the next worker that
asks, so none is starved however slow the worker that had them. A remedy for slow workers, not for dead ones: each death
uses up one of the b.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from torrential.errors import BadInput
from torrential.server.consistency import Consistency
from torrential.strategies.base import exchange
from torrential.strategies.context import Context
from torrential.strategies.parameter_server import ParameterServerStrategy
from torrential.strategies.roles import Roles, Servers


class Backup(ParameterServerStrategy, frozen=True, kw_only=True):
    """Synchronous training with backup workers: the first N of N + b gradients make a step."""

    name: ClassVar[str] = "backup"
    summary: ClassVar[str] = "synchronous, without waiting for the slowest: the first N of N + b gradients make a step"

    backups: Annotated[int, msgspec.Meta(ge=0)] = 1
    """The number b of workers that a step does not wait for."""

    def needed(self, workers: int) -> int:
        """The number of gradients that make a step, each of a worker, or of a replica of several."""
        replicas = self.replicas(workers)
        if self.backups >= replicas:
            counted = f"workers: {workers}" if self.stages == 1 else f"replicas: {replicas}"
            raise BadInput(
                f"a step needs at least one gradient (backups: {self.backups}, {counted}); use fewer backups"
            )
        return replicas - self.backups

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return self.needed(workers) * batch_size

    def roles(self, workers: int, servers: int) -> Roles:
        first = self.needed(workers) if self.backups else None  # none: all are waited for, as in bsp
        return (
            self.worker_role(workers),
            Servers(servers, Consistency(staleness=0, first=first), joined=first is None, stages=self.stages),
        )

    def worker(self, ctx: Context) -> None:
        vector, gradient = ctx.replica.vector(), ctx.replica.gradient()
        needed, joined = (
            self.needed(ctx.config.workers),
            self.samples_per_update(ctx.config.workers, ctx.config.batch_size),
        )
        clock = ctx.params.begin(vector)
        while (batch := ctx.data.take(clock)) is not None:
            weight = 1 / needed if self.backups else len(batch) / batch.total
            loss = ctx.replica.backward([batch.weighted(weight)])
            answer = exchange(ctx, batch, clock, ctx.progress.rate(joined, batch), gradient, vector)
            ctx.progress.advance(batch, loss, answer)
            clock = max(clock + 1, answer.clock)
        ctx.leave()
