"""Federated averaging (McMahan, Moore, Ramage, Hampson and Agueera y Arcas 2017): clients have data of their own.

    every round   some of the clients are sampled
    client k      x_k <- x after some epochs, or steps, over its own samples
    all           x   <- sum of n_k / n * x_k        n_k: the samples that it has, n: those of all that took part

A few workers carry many clients: client k is of worker k modulo the number of workers, and stays with it, as data do
that may not leave a place. When a worker dies, its clients drop out: the round at hand is taken without them, and so
are those that follow, until a successor is there. Clients have no state but the place in their data: an optimizer
begins anew with every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

import msgspec
import torch
from torch import Tensor, nn

from torrential.data.clients import Clients, clients_of
from torrential.data.deal import Batch
from torrential.errors import BadInput
from torrential.partitions import PartitionRule
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.task import Task, is_stream, training_samples

Count = Annotated[int, msgspec.Meta(ge=0)]


class FedAvg(Strategy, frozen=True, kw_only=True):
    """Federated averaging: clients train on data of their own, and a sample of them is averaged every round."""

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "federated: clients train on their own data, a sample of them is averaged every round"
    uncompressed: ClassVar[str] = "its clients send parameters, not gradients"

    clients: Count = 0
    """The number of clients, where the task has no partition: they have equal parts of the data. 0: one per worker."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """The share of the clients that a round takes."""
    sampled: Count = 0
    """The number of clients that a round takes; 0: as `share` says."""
    local_epochs: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The passes over its data that a client makes in a round."""
    local_steps: Count = 0
    """The minibatches that a client trains on in a round, in the place of whole passes; 0: passes."""
    samples_per_round: Count = 0
    """The samples that a round trains on, on average, an epoch's at most; 0: counted from the clients' data."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return self.samples_per_round or workers * batch_size

    def refuse(self, task: Task, model: nn.Module) -> None:
        if is_stream(task.train):
            raise BadInput("clients have data that can be indexed, and train is a stream; use another strategy")
        given = task.partition
        if isinstance(given, PartitionRule) and (given.alpha is not None or given.labels is not None):
            clients_of(task, 0, given.clients)  # which refuses what has no labels

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        count, samples = self._count_clients(task, workers), training_samples(task)
        remedy = f"use --workers {count}" if task.partition is not None else "leave out clients"
        if count < workers:
            raise BadInput(f"a worker would have no client (clients: {count}, workers: {workers}); {remedy}")
        if count > samples:
            raise BadInput(
                f"a client would have no samples (clients: {count}, samples: {samples}); use clients={samples} at most"
            )
        if self.sampled > count:
            raise BadInput(
                f"a round cannot take more clients than there are (sampled: {self.sampled}, clients: {count}); "
                f"use sampled={count} at most"
            )
        taking = self.sampled or max(1, round(self.share * count))
        passed = self.local_epochs * samples * taking // count
        steps = self.local_steps * taking * min(task.batch_size, max(1, samples // count))
        return msgspec.structs.replace(
            self,
            clients=count,
            sampled=taking,
            samples_per_round=max(1, min(samples, steps if self.local_steps else passed)),
        )

    def _count_clients(self, task: Task, workers: int) -> int:
        given = task.partition
        if given is None:
            return self.clients or workers
        count = given.clients if isinstance(given, PartitionRule) else len(given)
        if self.clients not in (0, count):
            raise BadInput(
                f"the task's partition has other clients than asked for (partition: {count}, clients: {self.clients}); "
                "leave out clients"
            )
        return count

    def worker(self, ctx: Context) -> None:
        worker = _FedAvgWorker(self, ctx)
        ctx.rounds(worker.propose, worker.conclude)


class _FedAvgWorker:
    """A worker's side: trains its clients of a round one after the other, each from the common parameters."""

    def __init__(self, strategy: FedAvg, ctx: Context) -> None:
        self._strategy, self._ctx = strategy, ctx
        self._clients: Clients = clients_of(ctx.task, ctx.config.seed, strategy.clients)
        self._parameters = ctx.replica.local()
        self._seen = torch.zeros(len(self._clients), dtype=torch.int64)  # samples that each client has trained on
        ctx.state.everybody("clients", lambda: {"seen": self._seen}, self._load)
        self._present: list[int] = []  # clients that the round takes, without those of workers that are gone
        self._left_out = 0

    def _load(self, saved: Mapping[str, Tensor]) -> None:
        self._seen.copy_(saved["seen"])

    # -- a round ----------------------------------------------------------------------------------------------------
    def propose(self) -> Vote:
        ctx, workers = self._ctx, self._ctx.config.workers
        chosen = self._clients.sampled(self._strategy.sampled, ctx.progress.step)
        self._present = [client for client in chosen if client % workers in ctx.comm.members]
        self._left_out = len(chosen) - len(self._present)
        total = sum(self._clients.sizes[client] for client in self._present)
        begun = [(tensor, tensor.clone()) for tensor in self._tensors()]
        sums = self._sums()
        loss, samples = 0.0, 0
        for vector, _ in sums:
            vector.zero_()
        for client in self._present:
            if client % workers != ctx.comm.rank:
                continue
            ctx.comm.check()
            for tensor, value in begun:
                tensor.copy_(value)
            batches = self._batches(client)
            loss += self._train(batches)
            samples += sum(len(batch) for batch in batches)
            for vector, tensors in sums:
                flat = torch.cat([tensor.flatten().to(vector.device) for tensor in tensors])
                vector.add_(flat.mul_(self._clients.sizes[client] / total))
        for vector, _ in sums:
            ctx.comm.all_reduce(vector).wait()
        return Vote(loss / max(1, samples), samples)

    def conclude(self, decision: Decision) -> None:
        for vector, tensors in self._sums() if self._present else []:
            for tensor, mean in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(mean.view_as(tensor))
        for client in self._present:
            self._seen[client] += sum(len(batch) for batch in self._batches(client))
        ctx = self._ctx
        if self._left_out and ctx.comm.rank == ctx.comm.members[0]:
            of = len(self._present) + self._left_out
            ctx.progress.note("clients_left_out", f"{self._left_out} of {of} of a round: their worker is gone")

    def _batches(self, client: int) -> list[Batch]:
        strategy, seen = self._strategy, int(self._seen[client])
        size = self._ctx.config.batch_size
        return self._clients.batches(client, seen, size, strategy.local_steps, strategy.local_epochs)

    def _train(self, batches: list[Batch]) -> float:
        """Train on a client's minibatches; returns the sum of its samples' losses."""
        ctx, total = self._ctx, 0.0
        joined = ctx.config.batch_size * len(self._present)
        self._parameters.begin_anew()
        for number, batch in enumerate(batches):
            total += len(batch) * ctx.replica.backward([batch.weighted(ctx.progress.loss_scale(joined))])
            self._parameters.step(ctx.progress.rate(joined, ahead=number * joined))
        return total

    # -- what is averaged -------------------------------------------------------------------------------------------
    def _tensors(self) -> list[Tensor]:
        """The parameters, and the module's floating-point buffers."""
        buffers = [buffer for buffer in self._ctx.replica.model.buffers() if buffer.is_floating_point()]
        return [*self._parameters.values().values(), *buffers]

    def _sums(self) -> list[tuple[Tensor, list[Tensor]]]:
        """For every dtype a vector in registered memory, and the tensors whose weighted sum it is."""
        tensors, found = self._tensors(), []
        for dtype in {tensor.dtype: None for tensor in tensors}:
            own = [tensor for tensor in tensors if tensor.dtype == dtype]
            size = sum(tensor.numel() for tensor in own)
            found.append((self._ctx.comm.buffer(f"clients {dtype} {size}", size, dtype), own))
        return found
