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

from torrential.checkpoint import Checkpoint
from torrential.comm.protocol import Comm
from torrential.config import RunConfig
from torrential.data.deal import order
from torrential.errors import NonFiniteLoss
from torrential.optim.recipe import adapt_model, adapt_optimizer
from torrential.optim.schedule import schedule_of
from torrential.params.home import flat_gradient, gradients
from torrential.params.layout import plan
from torrential.server.client import Answer, Client, Pending
from torrential.server.optimizer import state_names
from torrential.strategies.base import Batch, Strategy
from torrential.task import Task, build_model
from torrential.trainer.backward import Gradients, Portion, Work
from torrential.trainer.randomness import seed_all
from torrential.trainer.recorder import Recorder
from torrential.trainer.saving import Saving
from torrential.trainer.slow import Brake
from torrential.trainer.snapshot import Outlet, load_rest, rest_of


class ServedWorker:
    """Implements strategies.base.ServedContext."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        strategy: Strategy,
        comm: Comm,
        outlet: Outlet,
        device: torch.device,
        checkpoint: Checkpoint | None = None,
        late: bool = False,
    ) -> None:
        """`checkpoint`: what the servers begin with, if not with a new model. `late`: the others have begun before."""
        self.task, self.config, self.comm, self.outlet, self.device = task, config, comm, outlet, device
        seed_all(device, config.seed, 0)
        self.model = adapt_model(config.recipe, build_model(task)).to(device).train()
        self.layout = plan(self.model, strategy.bucket_bytes)
        ((dtype, numel),) = self.layout.sizes.items()
        self.vector = comm.buffer("vector", numel, dtype)
        self.gradient = comm.buffer("gradient", numel, dtype)
        self._parameters = gradients(self.model, self.layout)
        self._dry = device.type == "meta"  # nothing is computed there
        self._apart = device.type not in ("cpu", "meta")  # the model's parameters are copies of the vector, not views
        if not self._apart:
            for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                entry.view(self.vector).copy_(parameter.data)
                parameter.data = entry.view(self.vector)
        spec = strategy.optimizer(adapt_optimizer(config.recipe, task.optimizer.with_lr(config.lr), self.model))
        self._states = state_names(self.layout, spec)
        self._gradients = Gradients(task, self.model, device, config.seed)
        self._schedule = schedule_of(config, strategy.joined(config.workers, config.batch_size))
        self._brake = Brake(config, comm)
        self._recorder = Recorder(comm, outlet)
        self.step = 0  # updates applied, as far as this worker knows
        self._samples = 0
        self._epoch = 0
        self._first = not late and comm.rank == 0  # among those who take part
        self._staleness: Counter[int] = Counter()
        self._dropped = 0
        self._loss = math.nan
        self._rate = config.lr  # of this worker's last push
        self.used: list[int] | None = None
        if checkpoint is not None:
            self.step, self._samples, self._epoch = checkpoint.step, checkpoint.samples, checkpoint.epoch
            rest = rest_of(self.model, self.layout)
            load_rest(self.model, {name: checkpoint.model[name] for name in rest if name in checkpoint.model})
        self._told = -1 if late else self._due(self._epoch)

    # -- taking part --------------------------------------------------------------------------------------------
    def begin(self) -> int:
        self.params = Client(
            self.comm,
            self.vector.numel(),
            self.vector.dtype,
            timeout=self.config.settings.timeout,
            resend=self.comm.resend,
            overdue=self.comm.suspect,
        )
        self._saving = Saving(self.comm, self.params, self.outlet, self.model, self.layout, self._states)
        clock = self.params.enter()
        self.params.pull(self.vector, clock=clock).wait()  # ranges that are behind are waited for
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
        self._saving.give_up()  # the last one follows
        self.params.wait()
        self._record()  # the counts are complete now
        self.comm.leave(None if self._dry else self._saving.last)

    # -- a batch ------------------------------------------------------------------------------------------------
    def backward(self, batch: Batch, weight: float, after: Pending | None = None) -> float:
        if not len(batch.indices):
            return math.nan  # nothing to add this time
        began = self.comm.now()
        self._load()
        for parameter in self._parameters:
            parameter.grad = None
        portion = Portion((batch.epoch, batch.first), batch.indices, weight)
        work = self._no_work if self._dry else Work(self._gradients, [portion])
        (loss,) = self.comm.compute(len(batch.indices), work)
        if not math.isfinite(loss):
            remedy = self._schedule.remedy(self._place(batch), self._rate)
            raise NonFiniteLoss(self.step + 1, self.comm.rank, loss, remedy)
        if after is not None:
            after.wait()
        self._collect()
        self._brake.hold(began)
        return loss

    def _no_work(self) -> list[float]:
        return [0.0]

    def _load(self) -> None:
        if self._apart:
            for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                parameter.data.copy_(entry.view(self.vector), non_blocking=True)

    def _collect(self) -> None:
        """Gradients from where autograd left them into the flat vector; clipped here, before they are sent."""
        if self._dry:
            return
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
            self.count(batch, answer)
        self._saving.look()
        if not len(batch.indices):
            return
        self._loss, self._epoch = loss, batch.epoch
        self._samples = self._place(batch) + len(batch.indices)
        if self._recorder.due(self.comm.now()):
            self._record()
        ends = batch.first + batch.total >= self.config.samples
        if not self._dry:
            self._save_when_due(self._due(batch.epoch + ends))

    def count(self, batch: Batch, answer: Answer) -> None:
        self.step = max(self.step, answer.version)
        self._dropped += answer.dropped
        if len(batch.indices) and not answer.dropped:
            self._staleness[answer.staleness] += 1

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

    # -- checkpoints --------------------------------------------------------------------------------------------
    def _due(self, epochs: int) -> int:
        """How many checkpoints belong to so many epochs, or to the steps taken so far; the last comes at the end."""
        every = self.config.settings.evaluate_every
        return min(epochs, self.config.epochs - 1) if every is None else self.step // every

    def _save_when_due(self, due: int) -> None:
        first = self.comm.rank == self.comm.view.workers[0]
        succeeded = first and not self._first and self._told > 0  # whoever was first may have died before it had saved
        wanted = succeeded or (first and due > self._told >= 0)
        if wanted and self._saving.busy:
            return  # as soon as that is done
        if wanted:
            self._saving.begin()
        self._told, self._first = max(self._told, due), first
