"""Downpour SGD (Dean et al. 2012): replicas that never wait for one another push gradients and fetch parameters.

    replica   fetch | g, g, g: the replica keeps moving, g adds up | push the sum | fetch ...
    server    on every push: w_i -= eta_i * dw_i, with a rate of its own for every parameter (Adagrad)

A gradient is applied to parameters that other replicas have moved since it was computed on them: with R equal replicas
about R - 1 updates. Adagrad's rates, which shrink where gradients are large, make that stable where one fixed rate is
not; so does a warm start, in which one replica runs alone at first. The rate that they begin with is Adagrad's own, for
one that suits the task's optimizer may be a hundred times too large or too small.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch

from torrential.optimizers import OptimizerSpec
from torrential.server.client import PendingRequest
from torrential.server.consistency import Consistency
from torrential.strategies.context import Context
from torrential.strategies.parameter_server import ParameterServerStrategy
from torrential.strategies.roles import Roles, Servers

Count = Annotated[int, msgspec.Meta(ge=1)]
ADAGRAD_RATE = 0.01  # torch's default, too


class Downpour(ParameterServerStrategy, frozen=True, kw_only=True):
    """Downpour SGD: workers push gradients and fetch parameters, and never wait for each other."""

    name: ClassVar[str] = "downpour"
    summary: ClassVar[str] = "asynchronous: workers push gradients and fetch parameters, and never wait for each other"

    push_every: Count = 1
    """The number of minibatches whose gradients make one push."""
    fetch_every: Count = 1
    """The number of minibatches between two fetches of parameters."""
    overlap: bool = False
    """Whether the next minibatch begins before the push is answered and the parameters are here: its parameters are
    older by one push of its own."""
    server: Literal["adagrad", "task"] = "adagrad"
    """The servers' optimizer: Adagrad at a rate of 0.01, or the task's own at the task's rate; --lr gives another rate.
    Momentum and delay add up: the task's own may diverge with two workers and more."""
    warm: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of updates that one worker makes alone before the others begin."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return batch_size * self.push_every

    def roles(self, workers: int, servers: int) -> Roles:
        return (
            self.worker_role(workers),
            Servers(servers, Consistency(staleness=None), stages=self.stages),
        )

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        if self.server == "task":
            return spec
        return spec.replaced(torch.optim.Adagrad, ADAGRAD_RATE, ("weight_decay",) if spec.decays_gradients() else ())

    def worker(self, ctx: Context) -> None:
        vector, gradient = ctx.replica.vector(), ctx.replica.gradient()
        clock, number = ctx.params.begin(vector), 0
        total = ctx.comm.buffer("pushed", gradient.numel(), gradient.dtype) if self.push_every > 1 else None
        used: list[int] | None = None  # entries that are part of the sum; None: all
        fetched: PendingRequest | None = None
        pushed: PendingRequest | None = None
        while (batch := ctx.data.take(clock, self.push_every, after=self.warm)) is not None:
            before = pushed
            if self.warm and not number:
                ctx.params.pull(vector, clock=clock).wait()  # others may have begun long before
            for minibatch in batch.split(ctx.config.batch_size):
                if fetched is not None and not self.overlap:
                    fetched.wait()
                loss = ctx.replica.backward([minibatch], after=pushed)
                if fetched is not None:
                    fetched.wait()
                    fetched = None
                rate = ctx.progress.rate(ctx.config.batch_size, minibatch)
                if total is not None:
                    total.copy_(gradient) if minibatch.first == batch.first else total.add_(gradient)
                reached = ctx.replica.reached()
                used = reached if minibatch.first == batch.first else _either(used, reached)
                number += 1
                if number % self.fetch_every:
                    vector.sub_(gradient, alpha=rate)  # the replica keeps moving
                last, fetch = minibatch.stop == batch.stop, number % self.fetch_every == 0
                if last:
                    summed = gradient if total is None else total
                    about: dict[str, Any] = {"clock": clock, "lr": rate, "used": used, "lease": batch.lease}
                    about["scale"] = ctx.replica.push_scale() if total is None else 1.0
                    if fetch:  # in one round trip
                        pushed = fetched = ctx.params.push_pull(summed, vector, **about)
                    else:
                        pushed = ctx.params.push(summed, **about)
                elif fetch:
                    fetched = ctx.params.pull(vector, clock=clock)
            assert pushed is not None
            known = before if self.overlap else pushed
            ctx.progress.advance(batch, loss, None if known is None else known.wait())
            clock, done = clock + 1, batch
        if self.overlap and pushed is not None:
            ctx.progress.count(done, pushed.wait())
        ctx.leave()


def _either(used: list[int] | None, others: list[int] | None) -> list[int] | None:
    return None if used is None or others is None else sorted({*used, *others})
