"""A schedule of torch's, yet to be built over the task's optimizer.

Task(..., schedule=scheduler(lambda optimizer: CosineAnnealingLR(optimizer, T_max=10), every="epoch"))

Steps of the schedule are counted in samples that the run has trained on, so that all strategies and any number of
workers have the same rates at the same place of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from torrential.errors import BadInput

Every = int | Literal["epoch", "batch"]


@dataclass(frozen=True)
class Scheduler:
    """A schedule of torch.optim.lr_scheduler: how it is built, and when it takes a step. Made by `scheduler()`."""

    make: Callable[[torch.optim.Optimizer], Any]
    every: Every
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the options of the task's optimizer, once known
    groups: tuple[Mapping[str, Any], ...] = ()  # those of each of its groups, in full
    moves: tuple[str, ...] = ()  # options besides the rate that the schedule moves


def scheduler(make: Callable[[torch.optim.Optimizer], Any], *, every: Every) -> Scheduler:
    """A schedule of torch.optim.lr_scheduler, given as a function of the optimizer. It takes a step at the end of
    every "epoch", or of every "batch" of the task's batch size, or after so many samples of all workers together."""
    if not callable(make):
        raise BadInput(f"a scheduler is given by a function of the optimizer that builds it (got {make!r})")
    whole = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if not whole and every not in ("epoch", "batch"):
        raise BadInput(f'a scheduler steps every "epoch", every "batch" or after a number of samples (got {every!r})')
    return Scheduler(make, every)
