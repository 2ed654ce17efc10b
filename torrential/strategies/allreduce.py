"""Synchronous data parallelism: every step is one step of plain training on the joined batch.

Each worker computes gradients on its share of a joined batch; gradients are summed over the workers; everybody takes
the same step. (The synchronous baseline of Chen et al. 2016 and Goyal et al. 2017; DDP in PyTorch.)

    worker 0   forward | backward ──bucket 0──bucket 1── | vote | step
    worker 1   forward | backward ──bucket 0──bucket 1── | vote | step
                                  └ summed while backward goes on

1. Propose: the share's gradients, weighted by true sizes (an uneven last batch counts for what it is), are summed
   bucket by bucket as backward completes them. Nothing is consumed, no member's parameters change.
2. Vote: a small all-gather carries loss, norm and which parameters were used. When it is complete, the step is
   decided for everybody; clipping applies to the sum.
3. Conclude: everyone takes the step.

If a member dies or joins, all waits end with Regrouped; the members meet, a step that was decided is concluded by
everybody, one that was not is proposed anew by whoever is there, on the data still owed.

Batch-norm statistics stay with each worker; the lowest-ranked member's go into the evaluated model.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from torrential.comm.protocol import Handle
from torrential.params.layout import Bucket
from torrential.params.synchronized import Synchronized
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote


class AllReduce(Strategy, frozen=True, kw_only=True):
    """Synchronous data parallelism: gradients are summed over all workers at every step."""

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "synchronous: gradients are summed over all workers at every step"
    uncompressed: ClassVar[str] = ""

    accumulate: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Micro-batches per worker and step. One worker with accumulate=k takes the steps of k workers: the same pieces of
    every batch (a short last one too), the same random numbers, batch-norm statistics of the first piece."""
    overlap: bool = True
    """Whether buckets are summed while backward goes on, or all of them after it."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.accumulate

    def worker(self, ctx: Context) -> None:
        parameters = ctx.replica.synchronized()
        ctx.rounds(lambda: self.propose(ctx, parameters), lambda decision: self.conclude(ctx, parameters, decision))

    def propose(self, ctx: Context, parameters: Synchronized) -> Vote:
        share = ctx.data.share(self.accumulate)
        sums: list[Handle] = []
        late: list[Bucket] = []
        loss = ctx.replica.backward(
            share.batches, lambda b: sums.append(parameters.reduce(b)) if self.overlap else late.append(b)
        )
        sums += [parameters.reduce(bucket) for bucket in late]
        for summed in sums:
            summed.wait()
        return Vote(loss, share.samples, parameters.numbers())

    def conclude(self, ctx: Context, parameters: Synchronized, decision: Decision) -> None:
        joined = ctx.data.joined
        parameters.step(ctx.progress.rate(joined), decision.numbers, ctx.progress.loss_scale(joined))
