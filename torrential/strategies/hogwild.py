"""Hogwild! (Niu, Recht, Re and Wright 2011): all workers change one parameter vector in shared memory, without locks.

    every worker     read x;  g = gradient at what was read;  x_v <- x_v - rate * g_v  for every v that g touches

No worker waits for another. Where gradients are sparse, two workers seldom write to the same place at the same time,
and what is lost then is little; where they are dense they do so all the time. What a gradient has not seen are the
updates that others have written since its parameters were read: that many are its delay, which is on record.

After `period` minibatches each, workers meet, so that a checkpoint is of one moment and a death leaves no half-written
step. Minibatches are dealt in turn: worker i of N takes the i-th, the (N+i)-th and so on.

For comparison workers can take turns, as with a lock: in writing alone (the paper's round robin), or in whole steps,
which then are those of one worker, one after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from torch import nn

from torrential.data.deal import Batch
from torrential.errors import BadInput
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.task import Task


class Hogwild(Strategy, frozen=True, kw_only=True):
    """Hogwild!: all workers change one parameter vector in shared memory, without locks."""

    name: ClassVar[str] = "hogwild"
    summary: ClassVar[str] = "Hogwild!: all workers change one vector in shared memory, without locks"
    uncompressed: ClassVar[str] = "its workers share one memory, so that nothing is sent"
    one_memory: ClassVar[bool] = True

    period: Annotated[int, msgspec.Meta(ge=1)] = 64
    """The number of minibatches that a worker trains on between two meetings of all."""
    turns: Literal["none", "write", "step"] = "none"
    """What workers take turns in, for comparison: in nothing; in writing, as with a lock around it; or in whole steps,
    which makes them those of one worker."""
    count_lost: bool = False
    """Whether updates of single parameters are counted, and how many of them were lost because another worker wrote to
    the same place at the same time. It takes about as long as the updates themselves."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return batch_size

    def refuse(self, task: Task, model: nn.Module) -> None:
        sparse = [n for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
        if sparse and task.clip_norm is not None:
            raise BadInput(
                f"sparse gradients cannot be clipped (layer: {sparse[0] or type(model).__name__}, clip_norm: "
                f"{task.clip_norm:g}); leave out clip_norm"
            )

    def worker(self, ctx: Context) -> None:
        worker = _HogwildWorker(self, ctx)
        ctx.rounds(worker.propose, worker.conclude)


class _HogwildWorker:
    """One worker: writes to the common vector without locks until the round is over."""

    def __init__(self, strategy: Hogwild, ctx: Context) -> None:
        self._strategy, self._ctx = strategy, ctx
        self._parameters = ctx.replica.unlocked(count_lost=strategy.count_lost)
        self._token = torch.zeros(1)
        self._delays: list[int] = []
        self._counted = 0  # updates of single parameters that this worker has made in the round

    def propose(self) -> Vote:
        ctx = self._ctx
        batches = self._minibatches()
        members = ctx.comm.members
        place, loss, samples = members.index(ctx.comm.rank), 0.0, 0
        self._delays, self._counted = [], 0
        self._parameters.begin()
        for first in range(0, len(batches), len(members)):
            if (number := first + place) < len(batches):
                loss += self._step(batches, number) * len(batches[number])
                samples += len(batches[number])
            ctx.comm.check()
        return Vote(loss / max(1, samples), samples, [float(self._counted)], updates=len(batches))

    def conclude(self, decision: Decision) -> None:
        ctx = self._ctx
        self._parameters.conclude()
        for delay in self._delays:
            ctx.progress.delayed(delay)
        if self._strategy.count_lost and ctx.comm.rank == ctx.comm.members[0]:
            made = int(decision.numbers.sum())
            lost = made - self._parameters.counted()
            ctx.progress.note("lost", f"{lost} of {made} updates of single parameters")

    def _minibatches(self) -> list[Batch]:
        """The next minibatches of all members together, each of which makes an update."""
        ctx = self._ctx
        config, progress = ctx.config, ctx.progress
        left = config.samples - progress.samples % config.samples
        most = [self._strategy.period * len(ctx.comm.members), -(-left // config.batch_size)]
        if config.steps is not None:
            most.append(config.steps - progress.step)
        if (every := config.settings.evaluate_every) is not None:
            most.append(every - progress.step % every)
        count = max(1, min(most))
        share = ctx.data.share(count, part=0, parts=1)
        size = config.batch_size * -(-len(share.batches) // count)  # larger, where the recipe has batches grow
        return replace(share.batches[0], indices=share.indices).split(size)

    def _step(self, batches: list[Batch], number: int) -> float:
        """Train on one of the round's minibatches; returns the loss."""
        ctx, parameters, turns = self._ctx, self._parameters, self._strategy.turns
        batch = batches[number]
        if turns == "step":
            self._await_turn(number)
        seen = parameters.written()
        loss = ctx.replica.backward([batch.weighted(ctx.progress.loss_scale(len(batch)))])
        if turns == "write":
            self._await_turn(number)
        self._delays.append(parameters.written() - seen)
        parameters.step(ctx.progress.rate(len(batch), batch))
        if self._strategy.count_lost:
            self._counted += parameters.count()
        if turns != "none" and number + 1 < len(batches):
            self._pass_turn()
        return loss

    def _await_turn(self, number: int) -> None:
        members = self._ctx.comm.members
        if number and len(members) > 1:
            before = members[members.index(self._ctx.comm.rank) - 1]
            self._ctx.comm.recv(self._token, before, "turn").wait()

    def _pass_turn(self) -> None:
        members = self._ctx.comm.members
        if len(members) > 1:
            after = members[(members.index(self._ctx.comm.rank) + 1) % len(members)]
            self._ctx.comm.send(self._token, after, "turn").wait()
