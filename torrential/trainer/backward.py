"""Forward and backward: what a worker computes on its part of the data, as something that can be done elsewhere.

    Gradients      a model and its data
    Portion        of a batch; what is computed on it depends on this, the model's parameters and its buffers alone
    GradientWork   some portions, whose gradients are added up in the parameters; call it to have it done

A world may have a GradientWork done by another process that has the same task, and hand over its gradients
(worlds/sim/gradient_pool.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torrential.data.batches import Batches
from torrential.data.resize import Resize
from torrential.task import Task
from torrential.trainer.randomness import seed_all
from torrential.trainer.snapshot import buffers_of
from torrential.trainer.watch import BackwardWatch
from torrential.usercode import calling

FORWARD = 1 / 3  # the share of forward in the time of a batch: no gradient is there before


class Portion(NamedTuple):
    position: tuple[int, int]  # the epoch, and the place of its first sample in the epoch's order; it seeds all draws
    indices: Tensor
    weight: float  # the weight of its loss
    scale: float | None = None  # the factor of its images' sides; None: full size


class Gradients:
    def __init__(self, task: Task, model: nn.Module, device: torch.device, seed: int) -> None:
        self.task, self.model, self._device, self._seed = task, model, device, seed
        self._batches = Batches(task.train, torch.device("cpu") if device.type == "meta" else device)

    @property
    def samples(self) -> int:
        """The number of samples in the training set."""
        return len(self._batches)

    def fetch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self._batches.fetch(indices)

    def add_up(self, portions: Sequence[Portion], last: Callable[[], None] | None = None) -> list[float]:
        """Add the portions' gradients up in the parameters' `grad`; returns the portions' losses. `last` is called
        before the last backward."""
        losses, buffers = list[float](), list[Tensor]()
        for done, portion in enumerate(portions, start=1):
            seed_all(self._device, self._seed, 1, *portion.position)
            inputs, targets = self._batches.fetch(portion.indices)
            if portion.scale is not None:
                inputs = Resize.apply(inputs, portion.scale)
            with calling("forward pass", self.task.model):
                outputs = self.model(inputs)
            with calling("loss"):
                loss = self.task.loss(outputs, targets)
            if done == 1 < len(portions):
                buffers = [b.clone() for b in buffers_of(self.model).values()]
            if done == len(portions) and last is not None:
                last()
            (loss if portion.weight == 1.0 else loss * portion.weight).backward()
            losses.append(float(loss.detach()))
        if buffers:  # statistics are those of the first, as with a worker for each
            torch._foreach_copy_(list(buffers_of(self.model).values()), buffers)
        return losses


@dataclass(frozen=True)
class GradientWork:
    """Forward and backward over some portions; calling it leaves the gradients in the parameters' `grad`."""

    gradients: Gradients
    portions: Sequence[Portion]
    watch: BackwardWatch | None = None

    def __call__(self) -> list[float]:
        if self.watch is None:
            return self.gradients.add_up(self.portions)
        losses = self.gradients.add_up(self.portions, self.watch.arm)
        self.watch.end()
        return losses
