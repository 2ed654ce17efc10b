"""Tensor parallelism (AlexNet, Krizhevsky et al. 2012; Megatron-LM, Shoeybi et al. 2019): layers split over workers.

    worker 0    x ──► W₁[:h/2] ──► relu ──► W₂[:, :h/2] ──┐
                                                          ├─ sum ──► y, the same on both
    worker 1    x ──► W₁[h/2:] ──► relu ──► W₂[:, h/2:] ──┘

All workers of a group compute on the same batch, each with its slice of every split layer (splits/); the others are
whole on each. The step is that of plain training, to rounding: dropout is drawn for the whole layer, and the norm by
which gradients are clipped is that of the whole model. With fewer ways than workers there are several groups, which sum
the gradients of each slice.

When a worker dies, those that are left form as many whole groups as they can; a worker whose slice is not needed rests,
and is sent the gradients. A replacement takes its slice from another group. Where the last copy of a slice is lost, the
run ends, and can be resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self

import msgspec
import torch
from torch import Tensor, nn

from torrential.comm.protocol import Handle
from torrential.data.batches import training_batches
from torrential.errors import BadInput, RunFailed
from torrential.optimizers import OptimizerSpec
from torrential.params.base import ELEMENTWISE
from torrential.splits.gradients import GradientVector
from torrential.splits.group import SplitGroup, group_sum
from torrential.splits.plan import cut_model, found_plan, matched, read_plan, split_group_of, write_plan
from torrential.splits.rehearse import rehearse
from torrential.splits.slices import put_together, slice_of
from torrential.step import run_step
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.strategies.roles import Role, Roles
from torrential.task import Task, training_samples


class TensorParallel(Strategy, frozen=True, kw_only=True):
    """Layers of the model split over the workers of a group, which compute on the same batch together."""

    name: ClassVar[str] = "tensor"
    summary: ClassVar[str] = "layers split over workers, which compute on the same batch together"
    uncompressed: ClassVar[str] = "its workers send activations"

    ways: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of workers that a layer is split over; 0: all of them. With fewer there are several groups."""
    split: str = ""
    """How layers are split, as in 0=colwise,2=rowwise; names may be patterns. By default the task's, or what is found:
    pairs of layers in an nn.Sequential, attention by heads, transformers' blocks."""

    def roles(self, workers: int, servers: int) -> Roles:
        return (Role("worker", workers, self.worker, "regroup"),)

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return max(1, workers // (self.ways or workers)) * batch_size

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        if self.ways > 1 and spec.kind not in ELEMENTWISE:
            known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise BadInput(
                f"tensor has slices of tensors, and {spec.kind.__name__} may need whole ones; use one of {known}"
            )
        return spec

    # -- the model's parts ------------------------------------------------------------------------------------------
    def refuse(self, task: Task, model: nn.Module) -> None:
        if len(kinds := {parameter.dtype for parameter in model.parameters()}) > 1:
            raise BadInput(f"tensor needs parameters of one dtype (given: {', '.join(sorted(map(str, kinds)))})")

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        ways = self.ways or workers
        if workers % ways:
            raise BadInput(f"ways={ways} does not divide the workers ({workers}); give a multiple of it")
        if ways == 1:  # any model will do
            return msgspec.structs.replace(self, ways=1, split="")
        said = read_plan(self.split) if self.split else dict(task.split or {})
        plan = matched(said, model) if said else found_plan(model, ways)
        if not plan:
            raise BadInput(
                f"no layers were found that {ways} workers can have in equal parts; name them, as in "
                '--set split="0=colwise,2=rowwise", or give --set ways=1'
            )
        batch = training_batches(task).fetch(torch.arange(min(2, training_samples(task))))
        rehearse(model, plan, ways, lambda part: run_step(task, part, batch, " of the split model"))
        return msgspec.structs.replace(self, ways=ways, split=write_plan(plan))

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        if self.ways == 1:
            return model
        return cut_model(model, read_plan(self.split), SplitGroup(rank % self.ways, self.ways))

    def fellows(self, rank: int, workers: int) -> range:
        first = rank - rank % self.ways
        return range(first, first + self.ways)

    def assembled(self, parts: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for rank in sorted(parts, reverse=True):  # of several groups the first counts
            for name, tensor in parts[rank].items():
                kind, _, inner = name.partition("/")
                if kind in ("parameters", "buffers"):
                    found[inner] = tensor
        return put_together(found)

    def worker(self, ctx: Context) -> None:
        worker = _TensorWorker(self, ctx)
        ctx.rounds(worker.propose, worker.conclude)


class _TensorWorker:
    """One worker of a group: it has a slice of every layer that is split, and all of the others."""

    def __init__(self, strategy: TensorParallel, ctx: Context) -> None:
        model = ctx.replica.model
        if any(parameter.device.type != "cpu" for parameter in model.parameters()):
            raise RunFailed("tensor computes on CPUs only; give --device cpu")
        self._ctx, self._rank, self._ways = ctx, ctx.comm.rank, strategy.ways
        self._place = self._rank % self._ways
        self._parameters = ctx.replica.local(own=True, undo=False)
        self._parameters.clip_norm = None  # which is for the norm of all
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._vector: GradientVector | None = None  # where gradients are summed or sent
        sizes = [p.numel() * (1 if slice_of(p) is None else self._ways) for p in self._trained]
        self._share = sum(p.numel() for p in self._trained) / sum(sizes)  # of what a whole model computes
        self._group = split_group_of(model)
        self._generation = -1
        self._teams: list[list[int]] = []  # whole groups, each the workers by place
        self._resting: list[int] = []  # workers with this one's slice that are in none of them

    def propose(self) -> Vote:
        ctx = self._ctx
        if ctx.comm.generation != self._generation:
            self._meet()
            self._generation = ctx.comm.generation
        for parameter in self._trained:
            parameter.grad = None
        number = next((number for number, team in enumerate(self._teams) if self._rank in team), None)
        share = ctx.data.share(1, part=number or 0, parts=len(self._teams))
        loss = 0.0
        if number is not None:
            loss = ctx.replica.backward_with_others(share.batches, self._share)
        self._sum_gradients(rests=number is None)
        samples = share.samples if number is not None and self._place == 0 else 0
        return Vote(loss, samples, [self._place, *self._squares()])

    def conclude(self, decision: Decision) -> None:
        ctx = self._ctx
        split = {int(place): square for place, square, _ in decision.numbers.tolist()}  # the same for all of a place
        whole = decision.numbers[:, 2]
        if not torch.allclose(whole, whole[0], rtol=0.0, atol=0.0, equal_nan=True):
            raise RunFailed(
                "parameters that are not split have got other gradients on one worker of a group than on another; the "
                "model draws random numbers of its own, or its workers compute differently"
            )
        if ctx.task.clip_norm is not None:
            norm = math.sqrt(math.fsum([*split.values(), float(whole[0])]))
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, ctx.task.clip_norm / (norm + 1e-6))
        self._parameters.step(ctx.progress.rate(ctx.data.joined))

    def _meet(self) -> None:
        """Members have changed: who computes with whom?"""
        comm = self._ctx.comm
        lines = [[rank for rank in comm.members if rank % self._ways == place] for place in range(self._ways)]
        lost = next((place for place, line in enumerate(lines) if not line), None)
        if lost is not None:
            raise RunFailed(f"no worker has slice {lost} of {self._ways} of the model any more; resume the run")
        count = min(map(len, lines))
        self._teams = [[line[number] for line in lines] for number in range(count)]
        self._resting = lines[self._place][count:]
        mine = next((team for team in self._teams if self._rank in team), None)
        if mine is not None and self._group is not None:
            self._group.summed = group_sum(comm, mine)
            whole = [buffer for buffer in self._ctx.replica.model.buffers() if slice_of(buffer) is None]
            self._tell(mine[0], mine[1:], whole)  # which may come from different groups

    def _sum_gradients(self, rests: bool) -> None:
        """Over the groups, of which each has its own samples; workers that rest are told the sum."""
        comm, line = self._ctx.comm, [team[self._place] for team in self._teams]
        if len(line) == 1 and not self._resting:
            return
        self._vector = vector = self._vector or GradientVector(comm, self._trained)
        if not rests:
            vector.collect()
        if not rests and len(line) > 1:
            comm.group(line).all_reduce(vector.data).wait()
        self._tell(line[0], self._resting, [vector.data, *self._ctx.replica.model.buffers()])
        vector.spread()

    def _tell(self, source: int, to: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """One worker's tensors are copied to others: called by all of them, and by whom it does not concern."""
        comm, sent = self._ctx.comm, list[Handle]()
        for tensor in tensors:
            if self._rank == source:
                sent += [comm.send(tensor, rank, "copy") for rank in to]
            elif self._rank in to:
                comm.recv(tensor, source, "copy").wait()
        for handle in sent:
            handle.wait()

    def _squares(self) -> tuple[float, float]:
        """The squares of the norms of the gradients of slices, and of parameters that are whole on every worker."""
        sums, clips = [0.0, 0.0], self._ctx.task.clip_norm is not None
        for parameter in self._trained:
            is_whole = slice_of(parameter) is None
            if parameter.grad is not None and (clips or is_whole):
                sums[is_whole] += float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2
        return sums[0], sums[1]
