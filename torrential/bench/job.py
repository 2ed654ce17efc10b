"""A run that trains nothing and leaves nothing: its workers do what a benchmark's strategy has them do."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torrential.config import LocalSettings, RunConfig
from torrential.optimizers import optimizer
from torrential.strategies.base import Strategy
from torrential.task import Task
from torrential.worlds.base import Job


class Vector(nn.Module):
    """A model of so many parameters and next to no arithmetic."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.values[0]


def bench_job(strategy: Strategy, settings: LocalSettings, workers: int, servers: int = 0, numel: int = 1) -> Job:
    data = TensorDataset(torch.zeros(workers, 1), torch.zeros(workers, 1))
    task = Task(
        model=partial(Vector, numel),
        loss=functional.mse_loss,
        train=data,
        validation=data,
        test=data,
        optimizer=optimizer("adagrad" if servers else "sgd", lr=1e-3),
        name="bench",
    )
    config = RunConfig(
        task=task.name,
        source=None,
        strategy=strategy.name,
        options={},
        world="local",
        workers=workers,
        servers=servers,
        epochs=1,
        steps=None,
        target=None,
        samples=workers,
        batch_size=1,
        samples_per_step=workers,
        lr=task.optimizer_spec.lr,
        optimizer=task.optimizer_spec.describe(),
        seed=0,
        device="cpu",
        settings=settings,
    )
    return Job(config, task, strategy, Path(os.devnull))  # its directory cannot be
