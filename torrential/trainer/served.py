"""The context of a worker whose parameters are kept by servers: its model, its samples, its hand on the servers.

    begin ──► take ──► backward ──► push, pull (the strategy's) ──► advance ──► take ...

The model's parameters are views of `vector`, which a pull fills; backward leaves the gradient in `gradient`, which a
push hands over. Both are flat and registered. Workers do not meet: one that dies is missed by nobody but the
consistency that its strategy asks for.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from torrential.comm.protocol import Comm
from torrential.config import RunConfig
from torrential.data.batches import Batches
from torrential.data.deal import order
from torrential.errors import NonFiniteLoss
from torrential.optim.recipe import adapt_model
from torrential.optim.schedule import schedule_of
from torrential.params.home import dtype_name, flat_gradient, gradients
from torrential.params.layout import plan
from torrential.server.client import Answer, Client, Pending
from torrential.strategies.base import Batch, Strategy
from torrential.task import Task
from torrential.trainer.randomness import seed_all
from torrential.trainer.recorder import Recorder
from torrential.trainer.slow import Brake
from torrential.trainer.snapshot import Outlet, Snapshot, buffers_of, rest_of


class ServedWorker:
    """Implements strategies.base.ServedContext."""

    def __init__(
        self, task: Task, config: RunConfig, strategy: Strategy, comm: Comm, outlet: Outlet, device: torch.device
    ) -> None:
        self.task, self.config, self.comm, self.outlet, self.device = task, config, comm, outlet, device
        seed_all(device, config.seed, 0)
        self.model = adapt_model(config.recipe, task.model()).to(device).train()
        self.layout = plan(self.model, strategy.bucket_bytes)
        ((dtype, numel),) = self.layout.sizes.items()
        self.vector = comm.buffer("vector", numel, dtype)
        self.gradient = comm.buffer("gradient", numel, dtype)
        self._parameters = gradients(self.model, self.layout)
        self._apart = device.type != "cpu"  # the model's parameters are copies of the vector, not views
        if not self._apart:
            for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                entry.view(self.vector).copy_(parameter.data)
                parameter.data = entry.view(self.vector)
        self._batches = Batches(task.train, device)
        self._schedule = schedule_of(config, strategy.joined(config.workers, config.batch_size))
        self._brake = Brake(config, comm)
        self._recorder = Recorder(comm, outlet)
        self.step = 0  # updates applied, as far as this worker knows
        self._samples = 0
        self._epoch = 0
        self._told = -1
        self._staleness: Counter[int] = Counter()
        self._dropped = 0
        self._loss = math.nan
        self._rate = config.lr  # of this worker's last push
        self.used: list[int] | None = None

    # -- taking part --------------------------------------------------------------------------------------------
    def begin(self) -> int:
        self.params = Client(
            self.comm,
            self.vector.numel(),
            self.vector.dtype,
            timeout=self.config.settings.timeout,
            resend=self.comm.resend,
        )
        clock = self.params.enter()
        self.params.get(self.vector).wait()
        return clock

    def take(self, clock: int, minibatches: int = 1, after: int = 0) -> Batch | None:
        if self.comm.stop_requested():
            return None
        limit = self.config.steps
        if limit is not None and self.step >= limit:
            return None
        answer = self.params.take(minibatches * self.config.batch_size, clock=clock, after=after).wait()
        if answer.finished:
            self._epoch, self._samples = self.config.epochs, self.config.epochs * self.config.samples
            return None
        first, last = answer.indices
        indices = order(self.config.samples, self.config.seed, answer.epoch)[first:last]
        return Batch(answer.lease, answer.epoch, first, indices, answer.total or max(1, last - first))

    def leave(self) -> None:
        self.params.wait()
        self._record()  # the counts are complete now
        if self.comm.rank == self.comm.view.workers[0]:
            self._give_snapshot(final=True)
        self.comm.leave()

    # -- a batch ------------------------------------------------------------------------------------------------
    def backward(self, batch: Batch, weight: float, after: Pending | None = None) -> float:
        if not len(batch.indices):
            return math.nan  # nothing to add this time
        began = self.comm.now()
        self._load()
        for parameter in self._parameters:
            parameter.grad = None
        loss = self.comm.compute(len(batch.indices), lambda: self._work(batch, weight))
        if not math.isfinite(loss):
            remedy = self._schedule.remedy(self._place(batch), self._rate)
            raise NonFiniteLoss(self.step + 1, self.comm.rank, loss, remedy)
        if after is not None:
            after.wait()
        self._collect()
        self._brake.hold(began)
        return loss

    def _work(self, batch: Batch, weight: float) -> float:
        seed_all(self.device, self.config.seed, 1, batch.epoch, batch.first)
        inputs, targets = self._batches.fetch(batch.indices)
        outcome = self.task.loss(self.model(inputs), targets)
        (outcome if weight == 1.0 else outcome * weight).backward()
        return float(outcome.detach())

    def _load(self) -> None:
        if self._apart:
            for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                parameter.data.copy_(entry.view(self.vector), non_blocking=True)

    def _collect(self) -> None:
        """Gradients from where autograd left them into the flat vector; clipped here, before they are sent."""
        self.used = []
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            grad = flat_gradient(parameter)
            target = self.gradient[entry.start : entry.stop]
            if grad is None:
                target.zero_()
            else:
                self.used.append(entry.index)
                target.copy_(grad)
        if len(self.used) == len(self.layout.entries):
            self.used = None
        if self.task.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64))
            self.gradient *= min(1.0, self.task.clip_norm / (norm + 1e-6))

    def rate(self, batch: Batch, joined: int) -> float:
        self._rate = self._schedule.rate(self._place(batch), joined)
        return self._rate

    def _place(self, batch: Batch) -> int:
        """In the run: samples dealt out before this batch's."""
        return batch.epoch * self.config.samples + batch.first

    def exchange(self, batch: Batch, clock: int, rate: float) -> Answer:
        gradient = self.gradient if len(batch.indices) else None
        pushed = self.params.push_pull(gradient, self.vector, clock=clock, lr=rate, used=self.used, lease=batch.lease)
        return pushed.wait()

    def advance(self, batch: Batch, loss: float, answer: Answer | None) -> None:
        if answer is not None:
            self.step = max(self.step, answer.version)
            self._dropped += answer.dropped
            if len(batch.indices) and not answer.dropped:
                self._staleness[answer.staleness] += 1
        if not len(batch.indices):
            return
        self._loss, self._epoch = loss, batch.epoch
        self._samples = self._place(batch) + len(batch.indices)
        if self._recorder.due(self.comm.now()):
            self._record()
        if self.comm.rank == self.comm.view.workers[0]:
            self._evaluate_when_due(batch)

    def _record(self) -> None:
        self._recorder.write(
            self.comm.now(),
            step=self.step,
            epoch=self._epoch,
            samples=self._samples,
            loss=self._loss,
            staleness=dict(self._staleness),
            dropped=self._dropped,
        )

    # -- snapshots ----------------------------------------------------------------------------------------------
    def _evaluate_when_due(self, batch: Batch) -> None:
        every = self.config.settings.evaluate_every
        place = batch.epoch if every is None else self.step // every
        if self._told < 0:
            self._told = place
        elif place > self._told:
            self._told = place
            self._give_snapshot(final=False)

    def _give_snapshot(self, final: bool) -> None:
        """Of the servers' parameters as they are; `vector` is left alone, a pull into it may be under way."""
        parameters = torch.empty_like(self.vector)
        self.params.get(parameters).wait()
        own = buffers_of(self.model)
        if own:
            self.outlet.own_buffers(self.step, own)
        snapshot = Snapshot(
            step=self.step,
            epoch=self._epoch,
            cursor=0,
            samples=self._samples,
            time=self.comm.now(),
            members=[self.comm.rank],
            counts=[self.step] * len(self.layout.entries),
            final=final,
        )
        rest = {f"rest/{n}": t for n, t in rest_of(self.model, self.layout).items()}
        self.outlet.snapshot(snapshot, {dtype_name(parameters.dtype): parameters}, rest)
