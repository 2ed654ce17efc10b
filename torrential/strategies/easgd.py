"""Elastic averaging SGD (Zhang, Choromanska, LeCun 2015): every worker explores by itself, on a spring to a centre.

    server   the centre c                         it is what is evaluated
    worker   x <- x - rate * g(x)                 `period` times
             e = alpha * (x - c);   c <- c + e;   x <- x - e after the next gradient, in the authors' order

The centre moves by what all workers have, and each of them stays near it, so they may be apart for long. What one side
gains the other loses: the sum of the centre and all workers does not change by an exchange. With `momentum` the local
steps are Nesterov's (EAMSGD): the gradient is taken where the velocity leads to.

Asynchronous as it is; a resumed run begins with all workers at the centre. With `waits=true` all exchange at once, with
the same centre, and a resumed run goes on with every worker where it was. With `in_turn=true` they exchange one after
the other, in the order of their numbers (the paper's round-robin). Then worker w of N stamps its pushes with every
second clock: 2w, 2(w + N), 2(w + 2N), ..., and with a staleness of one clock nobody may read before the worker whose
turn is before its own has pushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, Self

import msgspec
import torch
from torch import Tensor, nn

from torrential.data.deal import Batch
from torrential.errors import BadInput
from torrential.optimizers import OptimizerSpec
from torrential.server.consistency import Consistency
from torrential.strategies.averaging import copy_into, within_epoch
from torrential.strategies.context import Context
from torrential.strategies.parameter_server import ParameterServerStrategy
from torrential.strategies.roles import Roles, Servers
from torrential.task import Task


class Easgd(ParameterServerStrategy, frozen=True, kw_only=True):
    """Elastic averaging SGD: workers take steps of their own, each drawn to a centre that the servers keep."""

    name: ClassVar[str] = "easgd"
    summary: ClassVar[str] = "elastic averaging: workers take steps of their own, drawn to a centre on the servers"
    uncompressed: ClassVar[str] = "its workers send parameters, not gradients"

    period: Annotated[int, msgspec.Meta(ge=1)] = 8
    """The number of minibatches between two exchanges with the centre."""
    beta: Annotated[float, msgspec.Meta(gt=0)] = 0.9
    """How far all workers together draw the centre in an exchange; one of N draws it, and is drawn, by beta / N."""
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """The Nesterov momentum of local steps (EAMSGD). It is the worker's own, and never sent."""
    waits: bool = False
    """Whether all workers exchange at once, and so wait for the slowest."""
    in_turn: bool = False
    """Whether workers exchange one after the other in the order of their numbers, from their second exchange on."""

    def __post_init__(self) -> None:
        if self.waits and self.in_turn:
            raise ValueError("workers exchange all at once or one after the other; give waits=true or in_turn=true")

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return batch_size * self.period * (self.replicas(workers) if self.waits else 1)

    def roles(self, workers: int, servers: int) -> Roles:
        staleness = 0 if self.waits else 1 if self.in_turn else None
        return (self.worker_role(workers), Servers(servers, Consistency(staleness), self.waits, stages=self.stages))

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """Servers add what they are sent; local steps have no state but their momentum."""
        return spec.replaced(torch.optim.SGD, spec.lr, ())

    def alpha(self, workers: int) -> float:
        """How far a worker is drawn to the centre, and the centre to it."""
        return self.beta / self.replicas(workers)

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        made = super().fitted(task, model, workers)
        made = msgspec.structs.replace(made, period=within_epoch(made.period, task, made.replicas(workers)))
        rate, alpha = task.optimizer_spec.lr, made.alpha(workers)
        bound = (4 - 2 * rate) / (4 - rate) if rate < 2 else 0.0
        if alpha > bound:
            raise BadInput(
                f"a worker would be drawn by more than is stable (alpha = beta / workers = {alpha:g}, the bound at a "
                f"rate of {rate:g} is {bound:.3g}); use a smaller beta"
            )
        return made

    def worker(self, ctx: Context) -> None:
        vector, gradient = ctx.replica.vector(), ctx.replica.gradient()
        centre, pull = (ctx.comm.buffer(name, vector.numel(), vector.dtype) for name in ("centre", "elastic"))
        clock, alpha = ctx.params.begin(centre), self.alpha(ctx.config.workers)
        vector.copy_(centre)
        velocity = torch.zeros_like(vector)
        pull.zero_()
        if self.waits:
            mine = {"position": vector, "pull": pull} | ({"velocity": velocity} if self.momentum else {})
            ctx.state.own("elastic", mine.copy, partial(copy_into, mine), undo=False, handed=False)

        def train(minibatches: Sequence[Batch]) -> float:
            return sum(self._step(ctx, each, vector, gradient, velocity) * len(each) for each in minibatches)

        while (batch := ctx.data.take(clock, self.period)) is not None:
            minibatches = batch.split(ctx.config.batch_size) if len(batch) else []
            loss = train(minibatches[:1])
            vector.add_(pull)  # of the last exchange, which the first gradient has not seen
            loss += train(minibatches[1:])
            ctx.params.pull(centre, clock=clock).wait()
            torch.sub(centre, vector, out=pull)  # what the worker gains, and the centre loses
            pull.mul_(alpha if len(batch) else 0.0)  # without samples of its own it takes no part in the exchange
            clock = self._stamp(clock, ctx)
            pushed = pull if len(batch) else None
            answer = ctx.params.push(pushed, clock=clock, lr=1.0, lease=batch.lease).wait()
            ctx.progress.advance(batch, loss / max(1, len(batch)), answer)
            clock += 1
        ctx.leave()

    def _stamp(self, clock: int, ctx: Context) -> int:
        """The clock of the worker's next push."""
        if not self.in_turn:
            return clock
        turn = -(-clock // 2)
        return 2 * (turn + (ctx.comm.rank // self.stages - turn) % self.replicas(ctx.config.workers))

    def _step(self, ctx: Context, minibatch: Batch, vector: Tensor, gradient: Tensor, velocity: Tensor) -> float:
        """One local step; returns the loss."""
        if self.momentum:
            vector.add_(velocity, alpha=self.momentum)  # to where the velocity leads
        loss = ctx.replica.backward([minibatch.weighted(1.0)])
        rate = ctx.progress.rate(ctx.config.batch_size, minibatch)
        vector.sub_(gradient, alpha=rate)
        if self.momentum:
            velocity.mul_(self.momentum).sub_(gradient, alpha=rate)
        return loss
