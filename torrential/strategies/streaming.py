"""Streaming DiLoCo (Douillard et al. 2025): the model is averaged in fragments, each on its way while workers go on.

    round          0         1         2         3        of period / fragments steps each
    worker 0   steps ──┬ steps ──┬ steps ──┬ steps ──
    worker 1   steps ──┴ steps ──┴ steps ──┴ steps ──
    fragment           0 on its way, 1 on its way, 0 ...  what a fragment has gone since it was sent last

When a fragment's round is over, its outer parameters take a Nesterov step by the mean of what workers had gone when it
was sent, as in `diloco`, and every worker goes on from between these and its own, which have moved on meanwhile:

    x_i  <- (1 - own) * outer + own * x_i

So a link is busy all the time at a fragment's size, instead of now and then at the model's, and no worker waits for a
sum that arrives within a round. Workers differ between rounds: their average is evaluated and saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Self

import msgspec
import torch
from torch import Tensor, nn

from torrential.comm.protocol import Handle
from torrential.strategies.averaging import LocalSteps, by_dtype, copy_into, within_epoch
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context, Decision, Vote
from torrential.task import Task


class StreamingDiLoCo(Strategy, frozen=True, kw_only=True):
    """Streaming DiLoCo: fragments of the model take outer steps in turn, each on its way while workers go on."""

    name: ClassVar[str] = "streaming"
    summary: ClassVar[str] = "Streaming DiLoCo: parts of the model are averaged in turn, while workers go on"

    period: Annotated[int, msgspec.Meta(ge=1)] = 32
    """The number of steps that a worker takes between two outer steps of a fragment."""
    fragments: Annotated[int, msgspec.Meta(ge=1)] = 4
    """The number of parts of the model that are sent in turn: each is on its way for period / fragments steps."""
    own: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """How much of its own a worker keeps of a fragment that comes back, and that it has trained on meanwhile."""
    outer_rate: Annotated[float, msgspec.Meta(gt=0)] = 0.7
    """The learning rate of the outer step."""
    outer_momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    """The Nesterov momentum of the outer step."""

    def __post_init__(self) -> None:
        if self.fragments > self.period:
            raise ValueError(
                f"a round has at least one step (fragments: {self.fragments}, period: {self.period}); use "
                f"fragments={self.period} at most"
            )

    def steps(self) -> int:
        """The local steps of a round, in which one fragment is sent."""
        return self.period // self.fragments

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return workers * batch_size * self.steps()

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        period = within_epoch(self.period, task, workers)
        trained = sum(parameter.requires_grad for parameter in model.parameters())
        return msgspec.structs.replace(self, period=period, fragments=min(self.fragments, period, trained))

    def assembled(self, parts: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        first = next(iter(parts.values()), {})
        found = {}
        for name, tensor in first.items():
            kind, _, inner = name.partition("/")
            if kind in ("parameters", "buffers"):
                every = [part[name] for part in parts.values()]
                found[inner] = torch.stack(every).mean(0) if tensor.is_floating_point() else tensor
        return found

    def worker(self, ctx: Context) -> None:
        worker = _StreamingWorker(self, ctx)
        ctx.rounds(worker.propose, worker.conclude)


class _StreamingWorker:
    """A worker's side."""

    def __init__(self, strategy: StreamingDiLoCo, ctx: Context) -> None:
        self._strategy, self._ctx = strategy, ctx
        parameters = ctx.replica.local(own=True)
        self._steps = LocalSteps(ctx, parameters, strategy.steps)
        self._trained = parameters.values()
        self._fragments = in_fragments({n: t.numel() for n, t in self._trained.items()}, strategy.fragments)
        self._outer = {name: tensor.clone() for name, tensor in self._trained.items()}
        self._velocity = {name: torch.zeros_like(tensor) for name, tensor in self._trained.items()}
        for name, tensors in (("outer", self._outer), ("outer momentum", self._velocity)):
            ctx.state.everybody(name, tensors.copy, partial(copy_into, tensors))

    def propose(self) -> Vote:
        handles = self._send()
        loss, samples, _ = self._steps.take(handles)
        for handle in handles:
            handle.wait()
        return Vote(loss / max(1, samples), samples)

    def _sent(self) -> list[str]:
        """The parameters that are on their way in this round; none in the first, when nothing has been trained."""
        step = self._ctx.progress.step
        return self._fragments[(step - 1) % len(self._fragments)] if step else []

    def _send(self) -> list[Handle]:
        """Begin to sum what all members have gone with a fragment since it was sent last."""
        handles = []
        ways = [self._outer[name] - self._trained[name] for name in self._sent()]
        for vector, tensors in by_dtype(self._ctx.comm, "fragment", ways):
            torch.cat([tensor.flatten().to(vector.device) for tensor in tensors], out=vector)
            handles.append(self._ctx.comm.all_reduce(vector.div_(len(self._ctx.comm.members))))
        return handles

    def conclude(self, decision: Decision) -> None:
        strategy, sent = self._strategy, self._sent()
        outer = {id(self._outer[name]): name for name in sent}
        for vector, tensors in by_dtype(self._ctx.comm, "fragment", [self._outer[name] for name in sent]):
            for tensor, flat in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
                name = outer[id(tensor)]
                way = flat.view_as(tensor).to(tensor.device)
                velocity = self._velocity[name].mul_(strategy.outer_momentum).add_(way)
                tensor.sub_(way + strategy.outer_momentum * velocity, alpha=strategy.outer_rate)
                self._trained[name].lerp_(tensor, 1 - strategy.own)


def in_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """The names in so many runs of about equal size, none of them empty."""
    found: list[list[str]] = [[]]
    left, names = sum(sizes.values()), list(sizes)
    for place, name in enumerate(names):
        mine, missing = found[-1], count - len(found)
        full = sum(sizes[each] for each in mine) + sizes[name] / 2 > left / (missing + 1)
        if mine and missing and (full or len(names) - place == missing):
            left -= sum(sizes[each] for each in mine)
            found.append([])
        found[-1].append(name)
    return found
