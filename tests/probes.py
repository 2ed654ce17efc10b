"""Four strategies written against the public contract alone, each of a kind that no shipped one is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor, nn

from torrential.data.deal import Batch
from torrential.server.consistency import Consistency
from torrential.server.messages import View
from torrential.server.shard import Shard
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.strategies.roles import Role, Roles, Servers


# -- local SGD --------------------------------------------------------------------------------------------------------
class LocalSGD(Strategy, frozen=True, kw_only=True):
    """Every worker steps by itself; all average their parameters every `period` steps. Inner state stays inner."""

    name: ClassVar[str] = "probe-local"
    summary: ClassVar[str] = "periodic averaging"

    period: int = 4

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.period

    def worker(self, ctx: Context) -> None:
        parameters, vector = ctx.replica.local(), ctx.replica.vector()
        total = ctx.comm.buffer("total", vector.numel(), vector.dtype)

        def propose() -> Vote:
            share, loss = ctx.data.share(self.period), 0.0
            for batch in share.batches:
                loss += ctx.replica.backward([batch.weighted(1.0)]) * len(batch)
                parameters.step(ctx.progress.rate(len(batch)))
            total.copy_(vector)
            ctx.comm.all_reduce(total).wait()
            return Vote(loss / max(1, share.samples), share.samples)

        def conclude(decision: Decision) -> None:
            vector.copy_(total / len(ctx.comm.members))

        ctx.rounds(propose, conclude)


# -- a pipeline of two stages -----------------------------------------------------------------------------------------
class TwoStages(Strategy, frozen=True, kw_only=True):
    """GPipe on an nn.Sequential: all microbatches forward, then all backward, then a step of each stage."""

    name: ClassVar[str] = "probe-pipeline"
    summary: ClassVar[str] = "two stages, four microbatches"

    microbatches: int = 4
    cut: int = 3

    def roles(self, workers: int, servers: int) -> Roles:
        return (Role("worker", 2, self.worker, "fail"),)

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return batch_size * self.microbatches

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        assert isinstance(model, nn.Sequential)
        return model[: self.cut] if rank == 0 else model[self.cut :]

    def assembled(self, parts: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        named = (item for own in parts.values() for item in own.items() if item[0].startswith("parameters/"))
        return {name.removeprefix("parameters/"): tensor for name, tensor in named}

    def worker(self, ctx: Context) -> None:
        parameters = ctx.replica.local(own=True)
        run = self.first if ctx.comm.rank == 0 else self.last

        def propose() -> Vote:
            share = ctx.data.share(self.microbatches, part=0, parts=1)
            ctx.replica.model.zero_grad()
            return run(ctx, share.batches)

        ctx.rounds(propose, lambda decision: parameters.step(ctx.progress.rate(ctx.data.joined)))

    def first(self, ctx: Context, batches: Sequence[Batch]) -> Vote:
        replica, outputs = ctx.replica, list[Tensor]()
        for batch in batches:
            inputs = replica.fetch(batch)[0]
            outputs.append(replica.compute(batch, lambda inputs=inputs: replica.model(inputs), share=1 / 6))
            ctx.comm.send(outputs[-1], to=1)
        for batch, output in zip(batches, outputs, strict=True):
            slope = ctx.comm.recv(torch.empty_like(output), source=1).wait()
            replica.compute(batch, lambda output=output, slope=slope: output.backward(slope), share=1 / 3)
        return Vote(0.0, 0)

    def last(self, ctx: Context, batches: Sequence[Batch]) -> Vote:
        replica, inputs, losses = ctx.replica, list[Tensor](), list[Tensor]()
        width = next(replica.model.parameters()).shape[1]
        for batch in batches:
            inputs.append(ctx.comm.recv(torch.empty(len(batch), width), source=0).wait().requires_grad_())
            losses.append(
                replica.compute(
                    batch,
                    lambda x=inputs[-1], b=batch: ctx.task.loss(replica.model(x), replica.fetch(b)[1]),
                    share=1 / 6,
                )
            )
        for batch, given, loss in zip(batches, inputs, losses, strict=True):
            replica.compute(batch, lambda loss=loss, batch=batch: (loss * batch.weight).backward(), share=1 / 3)
            ctx.comm.send(given.grad, to=0)
        samples = sum(len(batch) for batch in batches)
        total = sum(float(loss.detach()) * len(batch) for loss, batch in zip(losses, batches, strict=True))
        return Vote(total / samples, samples)


# -- a coordinator that deals portions --------------------------------------------------------------------------------
class Portion(msgspec.Struct, frozen=True, tag=True):
    """Compute the gradient on these samples; with the parameters."""

    step: int
    number: int
    epoch: int
    first: int
    last: int
    total: int


class Computed(msgspec.Struct, frozen=True, tag=True):
    """The gradient of a portion."""

    step: int
    number: int
    loss: float


class Over(msgspec.Struct, frozen=True, tag=True):
    """There is nothing left to compute."""


class Coordinated(Strategy, frozen=True, kw_only=True):
    """A coordinator cuts each batch into portions for idle workers; a dead worker's portion goes to another."""

    name: ClassVar[str] = "probe-coordinator"
    summary: ClassVar[str] = "portions dealt by a coordinator"
    letters: ClassVar = (Portion, Computed, Over)

    portions: int = 6

    def roles(self, workers: int, servers: int) -> Roles:
        return (
            Role("worker", workers, self.worker, "view"),
            Role("coordinator", 1, self.coordinator, "restart"),
        )

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return batch_size * self.portions

    def coordinator(self, ctx: Context) -> None:
        parameters, vector = ctx.replica.local(alike=True), ctx.replica.vector()
        while not ctx.progress.finished():
            share = ctx.data.share(self.portions, part=0, parts=1)
            total = torch.zeros_like(vector)
            loss = self.collect(ctx, share.batches, vector, total)
            parameters.step(ctx.progress.rate(ctx.data.joined), total)
            ctx.progress.conclude(share.samples, loss / share.samples)
        for worker in ctx.comm.view.workers:
            ctx.comm.post(worker, Over())
        ctx.leave()

    def collect(self, ctx: Context, batches: Sequence[Batch], vector: Tensor, total: Tensor) -> float:
        step, losses = ctx.progress.step, 0.0
        waiting, busy, done = list(range(len(batches))), dict[int, int](), set[int]()
        while len(done) < len(batches):
            busy = {worker: number for worker, number in busy.items() if worker in ctx.comm.view.workers}
            waiting = [n for n in range(len(batches)) if n not in done and n not in busy.values()]
            for worker in ctx.comm.view.workers:
                if worker not in busy and waiting:
                    number = busy[worker] = waiting.pop(0)
                    batch = batches[number]
                    where = (batch.epoch, batch.first, batch.stop, batch.total)
                    ctx.comm.post(worker, Portion(step, number, *where), [vector])
            letter = ctx.comm.receive(60.0)
            assert letter is not None, "nobody has said anything for a minute"
            if isinstance(letter.message, Computed) and letter.message.step == step:
                busy.pop(letter.source, None)
                if letter.message.number not in done:
                    done.add(letter.message.number)
                    total += letter.tensors[0]
                    losses += letter.message.loss * len(batches[letter.message.number])
        return losses

    def worker(self, ctx: Context) -> None:
        vector, gradient = ctx.replica.vector(), ctx.replica.gradient()
        while not isinstance((letter := ctx.comm.receive(60.0)).message, Over):
            if isinstance(letter.message, View):
                continue
            portion = letter.message
            vector.copy_(letter.tensors[0])
            indices = ctx.data.order(portion.epoch)[portion.first : portion.last]
            batch = Batch(portion.epoch, portion.first, indices, portion.total, len(indices) / portion.total)
            loss = ctx.replica.backward([batch])
            ctx.comm.post(letter.source, Computed(portion.step, portion.number, loss), [gradient])
        ctx.leave()


# -- servers that keep a running average ------------------------------------------------------------------------------
def average(shard: Shard, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    shard.states["average"].lerp_(shard.parameters, 1 - options["decay"])
    return []


class Averaging(Strategy, frozen=True, kw_only=True):
    """Asynchronous pushes; the servers also keep a running average of the parameters."""

    name: ClassVar[str] = "probe-average"
    summary: ClassVar[str] = "a running average on the servers"

    decay: float = 0.9

    def roles(self, workers: int, servers: int) -> Roles:
        return (
            Role("worker", workers, self.worker, "view"),
            Servers(servers, Consistency(None), handlers={"average": average}, vectors={"average": 0.0}),
        )

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return batch_size

    def worker(self, ctx: Context) -> None:
        vector, gradient = ctx.replica.vector(), ctx.replica.gradient()
        clock = ctx.params.begin(vector)
        while (batch := ctx.data.take(clock)) is not None:
            loss = ctx.replica.backward([batch])
            rate = ctx.progress.rate(ctx.config.batch_size, batch)
            pushed = ctx.params.push_pull(gradient, vector, clock=clock, lr=rate, lease=batch.lease).wait()
            ctx.params.call("average", {"decay": self.decay}).wait()
            ctx.progress.advance(batch, loss, pushed)
            clock += 1
        ctx.leave()
