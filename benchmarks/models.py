"""What the benchmarks train: three models on random data, and the torrential tasks of them.

torrential train benchmarks/models.py:mlp --workers 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torrential.optimizers import OptimizerSpec, optimizer
from torrential.task import Task

CLASSES = 10
HELD_OUT = 64  # samples; evaluation is not what is measured
OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {"lr": 1e-3, "momentum": 0.9}, "adam": {"lr": 1e-4}}


@dataclass(frozen=True)
class Workload:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one input
    batch_size: int
    samples: int  # a multiple of 16 full batches, so that no batch is cut short

    def data(self, samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(samples)
        inputs = torch.randn(samples, *self.shape, generator=generator)
        return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))

    def task(self, name: str, kind: str) -> Task:
        return Task(
            name=name,
            model=self.build,
            loss=F.cross_entropy,
            train=self.data(self.samples),
            validation=self.data(HELD_OUT),
            test=self.data(HELD_OUT),
            optimizer=spec(kind),
            batch_size=self.batch_size,
            epochs=100_000,
        )


def spec(kind: str) -> OptimizerSpec:
    return optimizer(kind, **OPTIMIZERS[kind])


def build_mlp() -> nn.Module:
    """24 million parameters: much to communicate for little arithmetic."""
    return _perceptron(784, 4096, 4096, 1024, CLASSES)


def build_deep() -> nn.Module:
    """13 million parameters in equal layers, so that there is something to send from the beginning of backward on."""
    return _perceptron(784, *[1024] * 13, CLASSES)


def _perceptron(*sizes: int) -> nn.Module:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*[module for pair in layers for module in pair][:-1])


def build_cnn() -> nn.Module:
    """Three convolutional blocks with batch norm, 30,000 parameters: much arithmetic for little to communicate."""
    blocks = *_block(1, 16), *_block(16, 32), *_block(32, 64)
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 3 * 3, CLASSES))


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return convolution, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.ReLU()


WORKLOADS = {
    "mlp": Workload(build_mlp, (784,), batch_size=32, samples=2048),
    "deep": Workload(build_deep, (784,), batch_size=512, samples=8192),
    "cnn": Workload(build_cnn, (1, 28, 28), batch_size=64, samples=4096),
}


def mlp() -> Task:
    return WORKLOADS["mlp"].task("mlp", "sgd")


def mlp_adam() -> Task:
    return WORKLOADS["mlp"].task("mlp_adam", "adam")


def deep() -> Task:
    return WORKLOADS["deep"].task("deep", "sgd")


def deep_adam() -> Task:
    return WORKLOADS["deep"].task("deep_adam", "adam")


def cnn() -> Task:
    return WORKLOADS["cnn"].task("cnn", "sgd")


def cnn_adam() -> Task:
    return WORKLOADS["cnn"].task("cnn_adam", "adam")
