"""PyTorch's DistributedDataParallel, as it is: gradients are averaged by Gloo or NCCL while backward goes on.

    worker 0   forward | backward ──bucket──bucket── | step
    worker 1   forward | backward ──bucket──bucket── | step
                                  └ all-reduced by torch.distributed

The baseline that people know (Li et al. 2020), under the rules of all other strategies: the same samples, records,
evaluation and checkpoints. Each worker has an optimizer of its own, and all take the same steps. The death of a worker
ends the run, as it does there; `--resume` goes on. Beside DDP's own exchange there is one small vote of the members in
every step, on the loss and whether to stop. It runs on real processes only: torch's library cannot be simulated from
outside.
"""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.strategies.roles import Role, Roles

VERDICT_SECONDS = 5.0  # from a library's error to the word on who has died


class Ddp(Strategy, frozen=True, kw_only=True):
    """PyTorch's DistributedDataParallel as it is, to compare with."""

    name: ClassVar[str] = "ddp"
    summary: ClassVar[str] = "PyTorch's DistributedDataParallel as it is, to compare with"
    uncompressed: ClassVar[str] = "torch sends its gradients"
    worlds: ClassVar[tuple[str, ...]] = ("local",)

    bucket_mb: float = 25.0
    """DDP's bucket_cap_mb: megabytes of gradients that are averaged together."""

    def roles(self, workers: int, servers: int) -> Roles:
        return (Role("worker", workers, self.worker, "fail"),)

    def worker(self, ctx: Context) -> None:
        parameters, workers = ctx.replica.local(alike=True), ctx.config.workers
        nbytes = sum(numel * dtype.itemsize for dtype, numel in ctx.replica.layout.sizes.items())
        sent = 2 * (workers - 1) * nbytes // workers  # by a ring, which the libraries use

        def parallel(model: nn.Module) -> nn.Module:
            group = ctx.comm.process_group()
            return DistributedDataParallel(model, bucket_cap_mb=self.bucket_mb, process_group=group)

        def propose() -> Vote:
            share = ctx.data.share()
            # DDP takes the mean over workers; with these weights it is that over the samples of all of them
            batches = [batch.weighted(batch.weight * workers) for batch in share.batches]
            try:
                loss = ctx.replica.backward(batches)
            except RuntimeError:  # of the library, if another worker has died: the world ends the run and says who
                ctx.comm.sleep(VERDICT_SECONDS if workers > 1 else 0.0)
                raise
            ctx.comm.meter.bytes_sent += sent
            return Vote(loss, share.samples)

        if workers > 1:
            ctx.replica.wrap(parallel)

        def conclude(decision: Decision) -> None:
            parameters.step(ctx.progress.rate(ctx.data.joined))

        ctx.rounds(propose, conclude)
