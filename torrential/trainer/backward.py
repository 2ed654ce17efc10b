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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torrential.compute.compiled import compile_model
from torrential.compute.precision import autocast
from torrential.config import Settings
from torrential.data.batches import training_batches
from torrential.data.loaders import Loaders
from torrential.data.nest import channels_last, to_device
from torrential.data.resize import Resize
from torrential.randomness import CPU, DATA, TRAINING, seed_all
from torrential.step import pair, run_step
from torrential.task import Task
from torrential.trainer.loss_scale import LossScale
from torrential.trainer.snapshot import buffers_of
from torrential.trainer.watch import BackwardWatch

FORWARD = 1 / 3  # the share of forward in the time of a batch: no gradient is there before


class Portion(NamedTuple):
    position: tuple[int, int]  # the epoch, and the place of its first sample in the epoch's order; it seeds all draws
    indices: Tensor
    weight: float  # the weight of its loss
    scale: float | None = None  # the factor of its images' sides; None: full size


class Gradients:
    def __init__(
        self,
        task: Task,
        model: nn.Module,
        device: torch.device,
        seed: int,
        settings: Settings,
        loaders: Loaders | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        """`loaders`: processes that read batches in the place of this one; `loss_scale`: of fp16."""
        self._settings, self._loss_scale = settings, loss_scale
        self.task, self.model, self._device, self._seed, self._loaders = task, model, device, seed, loaders
        self._kept: dict[tuple[int, int, int], Any] | None = None  # batches by place, where they are kept
        self._batches = training_batches(task, CPU if device.type == "meta" else device, seed)

    def keep_batches(self) -> None:
        """Keep batches that are read one by one, each as long as this worker is asked for it."""
        self._kept = {} if self._batches.draws else None

    def fetch(self, position: tuple[int, int], indices: Tensor) -> Any:
        """The batch at a position, on the device. What is random in it depends on the seed and the position alone."""
        if self._kept is None:
            return self._read(position, indices)
        place = (*position, len(indices))
        if place not in self._kept:
            self._kept = {other: batch for other, batch in self._kept.items() if other[0] == position[0]}
            self._kept[place] = self._read(position, indices)
        return self._kept[place]

    def _read(self, position: tuple[int, int], indices: Tensor) -> Any:
        if self._loaders is not None:
            epoch, first = position
            taken = self._loaders.take((epoch, first, first + len(indices)))
            return self._laid_out(to_device(taken, self._batches.device))
        if self._batches.draws:
            seed_all(self._device, self._seed, DATA, *position)
        return self._laid_out(self._batches.fetch(indices, position[0]))

    def _laid_out(self, batch: Any) -> Any:
        return channels_last(batch) if self._settings.channels_last else batch

    def compile(self, sizes: Sequence[int]) -> None:
        """Have the model's calls compiled, for batches of so many samples, of which the second stands for any other
        number. What is computed on the way is thrown away."""
        compile_model(self.model)
        batches = training_batches(self.task, self._batches.device, self._seed)
        buffers = [buffer.clone() for buffer in buffers_of(self.model).values()]
        for size in sizes:
            seed_all(self._device, self._seed, TRAINING, 0, 0)
            batch = self._laid_out(batches.fetch(torch.arange(size)))
            with autocast(self._settings.precision, self._device):
                run_step(self.task, self.model, batch, " that was compiled").loss.backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        if buffers:
            torch._foreach_copy_(list(buffers_of(self.model).values()), buffers)

    def add_up(self, portions: Sequence[Portion], last: Callable[[], None] | None = None) -> list[dict[str, float]]:
        """Add the portions' gradients up in the parameters' `grad`; returns the portions' losses and figures. `last` is
        called before the last backward."""
        numbers, buffers = list[dict[str, float]](), list[Tensor]()
        for done, portion in enumerate(portions, start=1):
            batch = self.fetch(portion.position, portion.indices)
            if portion.scale is not None:
                inputs, targets = pair(batch)
                batch = Resize.apply(inputs, portion.scale), targets
            seed_all(self._device, self._seed, TRAINING, *portion.position)
            with autocast(self._settings.precision, self._device):
                result = run_step(self.task, self.model, batch)
            if done == 1 < len(portions):
                buffers = [b.clone() for b in buffers_of(self.model).values()]
            if done == len(portions) and last is not None:
                last()
            weight = portion.weight if self._loss_scale is None else portion.weight * self._loss_scale.value
            (result.loss if weight == 1.0 else result.loss * weight).backward()
            numbers.append(result.numbers())
        if buffers:  # statistics are those of the first, as with a worker for each
            torch._foreach_copy_(list(buffers_of(self.model).values()), buffers)
        return numbers


@dataclass(frozen=True)
class GradientWork:
    """Forward and backward over some portions; calling it leaves the gradients in the parameters' `grad`."""

    gradients: Gradients
    portions: Sequence[Portion]
    watch: BackwardWatch | None = None

    def __call__(self) -> list[dict[str, float]]:
        if self.watch is None:
            return self.gradients.add_up(self.portions)
        numbers = self.gradients.add_up(self.portions, self.watch.arm)
        self.watch.end()
        return numbers
