"""Steps that each worker takes by itself, and an average of all from time to time.

    worker 0   step  step  step  step ─┐            ┌─ step  step ...
    worker 1   step  step  step  step ─┴─ average ──┴─ step  step ...      a round is decided by all, or by nobody

A worker counts by the samples that it has trained on in the round. Floating-point buffers (statistics of batch norm)
are averaged with the parameters. A round ends with the epoch, with fewer steps if need be.

The average may be the new parameters as it is; or the way from the old ones to it is the gradient of an outer step,
with a rate and a momentum of its own (SlowMo, Wang et al. 2020; DiLoCo, Douillard et al. 2023). That way may be sent in
bfloat16; what a worker's rounding leaves out is added to its next one (error feedback, Seide et al. 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from torrential.comm.protocol import Comm, Handle
from torrential.params.local import LocalParameters
from torrential.strategies.context import Context, Decision, Vote
from torrential.task import Task, training_samples

Inner = Literal["keep", "average", "reset"]


def within_epoch(period: int, task: Task, workers: int) -> int:
    """The period, or the whole joined batches of an epoch if these are fewer: a round ends with the epoch."""
    return max(1, min(period, training_samples(task) // (workers * task.batch_size)))


@dataclass(frozen=True)
class OuterStep:
    """The step that all take together at the end of a round; by default to the average."""

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    by_rate: bool = False
    """Whether the momentum is one of gradients, which are the way of a round divided by the learning rate."""

    @property
    def is_plain(self) -> bool:
        return self.rate == 1.0 and self.momentum == 0.0


class LocalSteps:
    """The steps that a worker takes by itself in a round, with an optimizer of its own."""

    def __init__(self, ctx: Context, parameters: LocalParameters, period: Callable[[], int]) -> None:
        """`period`: steps of the next round."""
        self._ctx, self._parameters, self._period = ctx, parameters, period
        self.rate = 0.0
        """The learning rate of the round's first step, the same on all members."""

    def take(self, under_way: Sequence[Handle] = ()) -> tuple[float, int, int]:
        """The sum of this worker's losses, its samples, and those of all. Between steps sums that are `under_way` are
        looked at, so that they get on."""
        ctx = self._ctx
        count = self._count()
        share = ctx.data.share(count)
        joined = ctx.data.joined // count  # samples of one step of everybody
        size = max(1, len(share.batches) // count)  # batches in one step: several, where the recipe has it grow
        total, self.rate = 0.0, ctx.progress.rate(joined)
        for number, first in enumerate(range(0, len(share.batches), size)):
            batches = share.batches[first : first + size]
            samples = sum(len(batch) for batch in batches)
            scale = ctx.progress.loss_scale(joined) / samples
            total += samples * ctx.replica.backward([batch.weighted(scale * len(batch)) for batch in batches])
            self._parameters.step(ctx.progress.rate(joined, ahead=number * size * joined))
            for handle in under_way:
                handle.done()
        return total, share.samples, max(1, share.total)

    def _count(self) -> int:
        """The local steps of the next round: as many as the period has, or as are left in the epoch."""
        ctx = self._ctx
        left = ctx.config.samples - ctx.progress.samples % ctx.config.samples
        each = len(ctx.comm.members) * ctx.config.batch_size
        return max(1, min(self._period(), -(-left // each)))


def by_dtype(comm: Comm, what: str, tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """For every dtype a vector in registered memory, and those of the tensors that are summed there."""
    found = []
    for dtype in {tensor.dtype: None for tensor in tensors}:
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        size = sum(tensor.numel() for tensor in own)
        found.append((comm.buffer(f"{what} {dtype} {size}", size, dtype), own))
    return found


def copy_into(tensors: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Take over what a checkpoint has of these tensors."""
    for name, tensor in tensors.items():
        tensor.copy_(saved[name])


class AveragingWorker:
    """A worker's side: local steps, and what becomes of them when all have theirs."""

    def __init__(
        self, ctx: Context, inner: Inner, outer: OuterStep, period: Callable[[], int], half: bool = False
    ) -> None:
        """`inner`: what becomes of the state of each worker's optimizer; `period`: local steps of the next round;
        `half`: whether ways are sent in bfloat16."""
        self._ctx, self._inner, self._outer = ctx, inner, outer
        self._parameters = ctx.replica.local(alike=inner != "keep")
        self._steps = LocalSteps(ctx, self._parameters, period)
        self._velocity = {} if not outer.momentum else {n: torch.zeros_like(t) for n, t in self._trained().items()}
        if self._velocity:
            ctx.state.everybody("outer momentum", lambda: self._velocity, partial(copy_into, self._velocity))
        self._left_out = {n: torch.zeros_like(t) for n, t in self._trained().items()} if half else {}
        if half:
            ctx.state.own("left out", lambda: self._left_out, partial(copy_into, self._left_out))
        self._begun: dict[str, Tensor] = {}

    @property
    def rate(self) -> float:
        """The learning rate of the round's first step, the same on all members."""
        return self._steps.rate

    def run(self, conclude: Callable[[Decision], None] = lambda decision: None) -> None:
        """Take rounds until the run is finished; `conclude` hears of every one that was decided."""

        def take(decision: Decision) -> None:
            self._conclude()
            conclude(decision)

        self._ctx.rounds(self._propose, take)

    # -- what is averaged -------------------------------------------------------------------------------------------
    def _trained(self) -> Mapping[str, Tensor]:
        return self._parameters.values()

    def _vectors(self) -> list[tuple[Tensor, list[Tensor]]]:
        """For every dtype a vector in registered memory, and the tensors that are averaged there, one by one."""
        tensors = [] if self._left_out else [*self._trained().values()]
        tensors += [buffer for buffer in self._ctx.replica.model.buffers() if buffer.is_floating_point()]
        if self._inner == "average":
            tensors += self._inner_tensors()
        return by_dtype(self._ctx.comm, "average", tensors)

    def _inner_tensors(self) -> list[Tensor]:
        """The state of this worker's optimizer, Adam's counts of steps included, which differ where a worker had no
        samples; zeros where there is none yet."""
        states, trained = self._parameters.optimizer_state(), self._trained()
        kinds = {name.rpartition("/")[2]: t for name, t in sorted(states.items()) if t.is_floating_point()}
        named = [(f"{name}/{kind}", t, like) for kind, like in kinds.items() for name, t in trained.items()]
        return [states.get(name, torch.zeros_like(tensor if like.dim() else like)) for name, tensor, like in named]

    # -- a round ----------------------------------------------------------------------------------------------------
    def _propose(self) -> Vote:
        if not self._outer.is_plain or self._left_out:
            self._begun = {name: tensor.clone() for name, tensor in self._trained().items()}
        loss, samples, total = self._steps.take()
        for vector, tensors in self._vectors():
            torch.cat([tensor.flatten().to(vector.device) for tensor in tensors], out=vector)
            vector.mul_(samples / total)
            self._ctx.comm.all_reduce(vector).wait()
        if self._left_out:
            self._send_ways(samples / total)
        return Vote(loss / max(1, samples), samples)

    def _ways(self) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        """A registered vector of bfloat16, and for every parameter where its way lies there."""
        sizes = [tensor.numel() for tensor in self._left_out.values()]
        vector = self._ctx.comm.buffer("ways", sum(sizes), torch.bfloat16)
        return vector, list(zip(self._left_out, vector.split(sizes), strict=True))

    def _send_ways(self, weight: float) -> None:
        """Sum the ways that all have gone, by their weights."""
        (vector, ways), trained = self._ways(), self._trained()
        for name, sent in ways:
            left_out = self._left_out[name]
            way = (self._begun[name] - trained[name]).add_(left_out)
            sent.copy_(way.flatten() * weight)
            left_out.copy_(way - (sent.to(way.device, way.dtype) / weight).view_as(way) if weight else way)
        self._ctx.comm.all_reduce(vector).wait()

    def _conclude(self) -> None:
        for vector, tensors in self._vectors():
            for tensor, average in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(average.view_as(tensor))
        for name, sent in self._ways()[1] if self._left_out else ():
            tensor = self._trained()[name]
            tensor.copy_(self._begun[name] - sent.to(tensor.device, tensor.dtype).view_as(tensor))
        if self._inner == "reset":
            states = self._parameters.optimizer_state()
            zeros = {name: t if name.endswith("/updates") else torch.zeros_like(t) for name, t in states.items()}
            self._parameters.load_optimizer_state(zeros)
        if not self._outer.is_plain:
            self._take_outer_step()

    def _take_outer_step(self) -> None:
        outer = self._outer
        unit = self.rate if outer.by_rate else 1.0
        if not unit:
            return  # gradients of a round that began without a rate are not known: to the average
        for name, tensor in self._trained().items():
            way = (self._begun[name] - tensor) / unit
            if outer.momentum:
                velocity = self._velocity[name].mul_(outer.momentum).add_(way)
                way = way + outer.momentum * velocity if outer.nesterov else velocity
            tensor.copy_(self._begun[name] - outer.rate * unit * way)
