"""Handwritten digits, shipped with the package: 1,797 images of 8x8 pixels, 10 classes, a second to train.

The data is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0 (see DATA-LICENSES.md).

The split is the same for everyone: 1,350 to train, 150 to validate, 297 to test.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torrential.optimizers import optimizer
from torrential.task import Task

_SPLIT_SEED = 0
_TEST, _VALIDATION = 297, 150


def digits() -> Task:
    """A small CNN with batch norm."""
    train, validation, test = _splits()
    return Task(
        name="digits",
        model=_cnn,
        loss=F.cross_entropy,
        train=train,
        validation=validation,
        test=test,
        optimizer=optimizer("sgd", lr=0.05, momentum=0.9),
        batch_size=32,
        epochs=20,
    )


def digits_mlp() -> Task:
    """A perceptron with two hidden layers and no batch norm: its gradients add up exactly over workers."""
    train, validation, test = _splits()
    return Task(
        name="digits-mlp",
        model=_mlp,
        loss=F.cross_entropy,
        train=train,
        validation=validation,
        test=test,
        optimizer=optimizer("sgd", lr=0.05, momentum=0.9),
        batch_size=32,
        epochs=20,
    )


class Standard(nn.Module):
    """Pixels to mean 0 and deviation 1 over the data set."""

    def forward(self, images: Tensor) -> Tensor:
        return (images - 0.305) / 0.376


def _cnn() -> nn.Module:
    return nn.Sequential(
        *_block(1, 16, stride=1),
        *_block(16, 32, stride=2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def _block(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


def _mlp() -> nn.Module:
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(Standard(), nn.Flatten(), *layers)


def _splits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Train, validation and test: images (n, 1, 8, 8) between 0 and 1, labels (n,)."""
    with files("torrential.tasks").joinpath("digits.npz").open("rb") as file, np.load(file) as data:
        images = torch.from_numpy(data["images"]).float().div(16).unsqueeze(1)
        labels = torch.from_numpy(data["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    test, validation, train = order[:_TEST], order[_TEST : _TEST + _VALIDATION], order[_TEST + _VALIDATION :]
    return (
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[validation], labels[validation]),
        TensorDataset(images[test], labels[test]),
    )
