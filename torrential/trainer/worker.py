"""The context of a worker's program: its model, its data, and where it stands in the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor

from torrential.checkpoint import Checkpoint
from torrential.comm.protocol import Comm, Handle, Standing
from torrential.config import RunConfig
from torrential.data.deal import Deal, Share
from torrential.data.resize import Resize
from torrential.errors import NonFiniteLoss, Regrouped
from torrential.optim.recipe import adapt_model, adapt_optimizer
from torrential.optim.schedule import schedule_of
from torrential.params.home import Finished, Home, Update, choose, gradients
from torrential.params.layout import Bucket, plan
from torrential.params.replicated import ReplicatedParameters
from torrential.params.shared import SharedParameters
from torrential.strategies.base import Context, Decision, Strategy
from torrential.task import Task, build_model
from torrential.trainer.backward import Gradients, Portion, Work
from torrential.trainer.randomness import seed_all
from torrential.trainer.recorder import Recorder
from torrential.trainer.slow import Brake
from torrential.trainer.snapshot import Outlet, Snapshot, buffers_of, from_checkpoint, load_rest, rest_of
from torrential.trainer.watch import BackwardWatch

_LOSS, _SAMPLES, _NORM, _STOP, _FIRST = 0, 1, 2, 3, 4  # places in a vote; from _FIRST on: used entries


class Worker:
    """Implements strategies.base.Context."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        strategy: Strategy,
        comm: Comm,
        outlet: Outlet,
        device: torch.device,
        meeting: torch.device,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.task, self.config, self.comm, self.outlet, self.device = task, config, comm, outlet, device
        seed_all(device, config.seed, 0)
        self._recipe, self._dry = config.recipe, device.type == "meta"  # nothing is computed there
        self.model = adapt_model(self._recipe, build_model(task)).to(device).train()
        self.layout = plan(self.model, strategy.bucket_bytes)
        self._parameters = gradients(self.model, self.layout)
        self._watch = BackwardWatch(self._parameters, self.layout)
        sizes = [sum(e.shape.numel() for e in bucket.entries) for bucket in self.layout.buckets]
        self._done_by = [done / sum(sizes) for done in itertools.accumulate(sizes)]  # share of backward, by bucket
        self._brake = Brake(config, comm)
        self._recorder = Recorder(comm, outlet)
        spec = adapt_optimizer(self._recipe, task.optimizer.with_lr(config.lr), self.model)
        self.home: Home
        if choose(comm, spec, device):
            self.home = SharedParameters(comm, self.model, self.layout, spec)
        else:
            self.home = ReplicatedParameters(comm, self.model, self.layout, spec, device, meeting)
        self._gradients = Gradients(task, self.model, device, config.seed)
        self._deal = Deal(self._gradients.samples, config.seed)
        self._schedule = schedule_of(config, strategy.joined(config.workers, config.batch_size))
        self._resize = None if self._recipe.resize is None else Resize.parse(self._recipe.resize)
        self._joined = 0  # what all members together take in one step, before it grows
        self.ballot: Handle | None = None
        self._buffers_before: list[Tensor] = []  # as they were when the step in flight began
        self.step = 0
        self.samples = 0
        self._applied = -1  # steps taken; -1 before anything was agreed
        self._stopped = False
        self._told = 0  # the last step whose snapshot this worker has given
        self._time = 0.0
        self._checkpoint = checkpoint
        if checkpoint is not None:
            self._resume(checkpoint)
        self._loss = math.nan

    # -- membership ---------------------------------------------------------------------------------------------
    def join(self, conclude: Callable[[Context], None]) -> None:
        while True:
            try:
                standing = self.comm.regroup(lambda: self._stand(conclude))
                return self._adopt(standing)
            except Regrouped:
                continue

    def _stand(self, conclude: Callable[[Context], None]) -> int:
        """Called when every member has stopped: conclude the step if its ballot is complete, else forget it."""
        if self.ballot is not None and self.ballot.done():
            conclude(self)
        elif self._buffers_before:  # the forward of a step that will be redone leaves no trace
            torch._foreach_copy_(list(buffers_of(self.model).values()), self._buffers_before)
        self.ballot, self._buffers_before = None, []
        return self._applied

    def _adopt(self, standing: Standing) -> None:
        if self._checkpoint is not None and (self.home.private or self.comm.rank == standing.source):
            self.home.load(*from_checkpoint(self._checkpoint, self.layout))
        self.home.regroup(standing)
        if standing.behind:
            self._catch_up(standing)
        self.home.rebuild()
        self._checkpoint = None
        self._applied = self.step
        if standing.generation > 1:
            self._told = min(self._told, self.step - 1)  # whoever was to give the snapshot may be gone
        self._recorder.hurry()  # the first step of a generation is always recorded

    def _catch_up(self, standing: Standing) -> None:
        """The member that is furthest hands its state to those behind."""
        state: dict[str, Tensor] = {}
        if self.comm.rank == standing.source:
            place = [self.step, self._deal.epoch, self._deal.cursor, self.samples]
            state = {"place": torch.tensor(place), "counts": torch.tensor(self.home.counts)}
            if not self._dry:
                state |= {f"rest/{n}": t.cpu().contiguous() for n, t in rest_of(self.model, self.layout).items()}
            if self.home.private and not self._dry:
                state |= {f"flat/{n}": t for n, t in self.home.flat().items()}
                state |= {f"extra/{n}": t for n, t in self.home.extras().items()}
        blob = torch.frombuffer(bytearray(pack(state)), dtype=torch.uint8)
        sizes = self.comm.all_gather(torch.tensor([blob.numel()])).wait()
        size = int(sizes[standing.members.index(standing.source), 0])
        shelf = self.comm.buffer(f"catch-up/{size}", size, torch.uint8)
        if self._dry:
            shelf = torch.empty(size, dtype=torch.uint8)
        if self.comm.rank == standing.source:
            shelf.copy_(blob)
        self.comm.broadcast(shelf, standing.source).wait()
        if self.comm.rank in standing.behind:
            state = unpack(shelf.numpy().tobytes())
            self.step, epoch, cursor, self.samples = state.pop("place").tolist()
            self._deal = Deal(self._gradients.samples, self.config.seed, epoch, cursor)
            self.home.counts[:] = state.pop("counts").tolist()

            def named(kind: str) -> dict[str, Tensor]:
                return {n.removeprefix(kind): t for n, t in state.items() if n.startswith(kind)}

            if self._dry:
                return
            if self._applied < 0:  # a newcomer; others have statistics of their own
                load_rest(self.model, named("rest/"))
            if self.home.private:
                self.home.load(named("flat/"), named("extra/"))

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.step, self.samples, self._applied = checkpoint.step, checkpoint.samples, checkpoint.step
        self._deal = Deal(self._gradients.samples, self.config.seed, checkpoint.epoch, checkpoint.cursor)
        self.home.counts[:] = [checkpoint.applied[e.name] for e in self.layout.entries]
        self._told = -1 if self.finished() else checkpoint.step
        load_rest(
            self.model, {n: checkpoint.model[n] for n in rest_of(self.model, self.layout) if n in checkpoint.model}
        )
        mine = f"{self.comm.rank}/"
        own = {n.removeprefix(mine): t for n, t in checkpoint.workers.items() if n.startswith(mine)}
        load_rest(self.model, own)

    def leave(self) -> None:
        self.comm.leave()

    # -- a step -------------------------------------------------------------------------------------------------
    def finished(self) -> bool:
        limit = self.config.steps
        return self._stopped or self._deal.epoch >= self.config.epochs or (limit is not None and self.step >= limit)

    def share(self, accumulate: int = 1) -> Share:
        members = self.comm.members
        self._joined = len(members) * self.config.batch_size * accumulate
        accumulate *= self._schedule.growth(self.samples, self._joined)
        return self._deal.share(members.index(self.comm.rank), len(members), self.config.batch_size, accumulate)

    def backward(self, share: Share, ready: Callable[[Bucket], None]) -> float:
        began = self.comm.now()
        for parameter in self._parameters:
            parameter.grad = None
        parts = max(1, len(share.micro_batches))

        def announce(bucket: Bucket) -> None:
            done = (parts - 1 + (1 + 2 * self._done_by[bucket.index]) / 3) / parts  # forward is a third
            self.comm.reached(done, lambda: ready(bucket))

        self._watch.begin(announce)
        if len(self.comm.members) > 1:
            self._buffers_before = [b.clone() for b in buffers_of(self.model).values()]
        work = self._no_work if self._dry else Work(self._gradients, self._portions(share), self._watch)
        losses = self.comm.compute(len(share.indices), work)
        self._brake.hold(began)
        total = 0.0
        for loss, part in zip(losses, share.micro_batches.values(), strict=not self._dry):
            total += loss * len(part)
        return total

    def _portions(self, share: Share) -> list[Portion]:
        scale = None if self._resize is None else self._resize.at(self.samples / self._schedule.total)
        return [
            Portion((self._deal.epoch, first), indices, len(indices) / share.total, scale)
            for first, indices in share.micro_batches.items()
        ]

    def _no_work(self) -> list[float]:
        self._watch.end()
        return []

    def vote(self, share: Share, loss: float) -> None:
        clip = self.task.clip_norm
        head = [loss, len(share.indices), self.home.square_norm() if clip else 0.0, self.comm.stop_requested()]
        mine = torch.tensor([*head, *self._watch.seen], dtype=torch.float64)
        self.ballot = Finished(mine[None]) if len(self.comm.members) == 1 else self.comm.all_gather(mine)

    def decide(self) -> Decision:
        assert self.ballot is not None
        votes = self.ballot.wait()  # (members, _FIRST + entries)
        if not math.isfinite(float(votes[:, _LOSS].sum())):
            self._refuse(votes[:, _LOSS].tolist())
        loss, samples, square, stop, *used = votes.sum(0).tolist()
        scale = self._schedule.loss_scale(self._joined)
        if self.task.clip_norm is not None:
            scale = min(scale, self.task.clip_norm / (math.sqrt(square) + 1e-6))
        rate = self._schedule.rate(self.samples, self._joined)
        return Decision(Update(rate, scale, tuple(u > 0 for u in used)), loss / samples, int(samples), stop > 0)

    def _refuse(self, losses: list[float]) -> None:
        for rank, loss in zip(self.comm.members, losses, strict=True):
            if not math.isfinite(loss):
                rate = self._schedule.rate(self.samples, self._joined)
                raise NonFiniteLoss(self.step + 1, rank, loss, self._schedule.remedy(self.samples, rate))

    def advance(self, decision: Decision) -> None:
        self.ballot, self._buffers_before = None, []
        self.step += 1
        self._applied = self.step
        self.samples += decision.samples
        self._deal.advance(decision.samples)
        self._stopped = decision.stop
        self._loss = decision.loss
        self._time = self.comm.now()
        if self._recorder.due(self._time) or self.finished():
            place = {"step": self.step, "epoch": self._deal.epoch, "samples": self.samples}
            self._recorder.write(self._time, **place, loss=self._loss)

    def settle(self) -> None:
        self.comm.check()
        self.home.settle()
        if self._told < self.step and self._due() and not self._dry:
            self._told = self.step
            own = buffers_of(self.model)
            if own:
                self.outlet.own_buffers(self.step, own)
            if self.comm.rank == self.comm.members[0]:
                self._give_snapshot()

    def _due(self) -> bool:
        every = self.config.settings.evaluate_every
        if self.finished():
            return True
        return self._deal.cursor == 0 if every is None else self.step % every == 0

    def _give_snapshot(self) -> None:
        snapshot = Snapshot(
            step=self.step,
            epoch=self._deal.epoch,
            cursor=self._deal.cursor,
            samples=self.samples,
            time=self._time,
            members=list(self.comm.members),
            counts=self.home.counts,
            final=self.finished(),
        )
        extras = {f"extra/{n}": t for n, t in self.home.extras().items()}
        rest = {f"rest/{n}": t for n, t in rest_of(self.model, self.layout).items()}
        self.outlet.snapshot(snapshot, self.home.flat(), extras | rest)
