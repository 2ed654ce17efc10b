"""Fashion-MNIST: 70,000 photographs of clothes, 28x28 grey pixels, 10 classes (H. Xiao, K. Rasul and R. Vollgraf, 2017;
https://github.com/zalandoresearch/fashion-mnist, MIT licence).

Images stay bytes in the data set (47 MB where floats take 188), are gathered and sent as bytes, and become floats in
the model's first layer. Train is the first 55,000 of the official 60,000 after a fixed shuffle, validation the last
5,000, and test the official 10,000.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from torrential.data.find import Source, find
from torrential.data.idx import read_idx
from torrential.data.images import Pixels, split
from torrential.errors import BadInput
from torrential.optimizers import optimizer
from torrential.task import Task
from torrential.tasks.resnets import resnet8

SOURCE = Source(
    name="fashion-mnist",
    files={
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    addresses=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    install="on Debian: apt-get install dataset-fashion-mnist",
)
_CLASSES = 10


def fashion(data_dir: Path | None = None) -> Task:
    """A CNN of three blocks with batch norm."""
    train, validation, test = _splits(data_dir)
    return Task(
        name="fashion",
        model=_cnn,
        loss=F.cross_entropy,
        train=train,
        validation=validation,
        test=test,
        optimizer=optimizer("sgd", lr=0.02, momentum=0.9, weight_decay=5e-4),
        batch_size=32,
        epochs=10,
    )


def fashion_mlp(data_dir: Path | None = None) -> Task:
    """A perceptron with two hidden layers and no batch norm."""
    train, validation, test = _splits(data_dir)
    return Task(
        name="fashion-mlp",
        model=_mlp,
        loss=F.cross_entropy,
        train=train,
        validation=validation,
        test=test,
        optimizer=optimizer("sgd", lr=0.02, momentum=0.9),
        batch_size=32,
        epochs=10,
    )


def fashion_resnet(data_dir: Path | None = None) -> Task:
    """ResNet-8, on the images as they are: neither mirrored nor shifted."""
    train, validation, test = _splits(data_dir)
    return Task(
        name="fashion-resnet",
        model=lambda: nn.Sequential(_pixels(), resnet8(channels=1)),
        loss=F.cross_entropy,
        train=train,
        validation=validation,
        test=test,
        optimizer=optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=1e-4),
        batch_size=128,
        epochs=30,
    )


def _pixels() -> nn.Module:
    return Pixels(72.94, 90.02)


def _cnn() -> nn.Module:
    blocks = *_block(1, 16), *_block(16, 32), *_block(32, 64)
    return nn.Sequential(_pixels(), *blocks, nn.Flatten(), nn.Linear(64 * 3 * 3, _CLASSES))


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """Halves width and height; pooling comes first, so that the rest has a quarter of the work."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return convolution, nn.MaxPool2d(2), nn.BatchNorm2d(outputs), nn.ReLU()


def _mlp() -> nn.Module:
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, _CLASSES)
    return nn.Sequential(_pixels(), nn.Flatten(), *layers)


def _splits(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Train, validation and test: images (n, 1, 28, 28) as bytes, labels (n,)."""
    paths = find(SOURCE, data_dir)
    images, labels = _load(paths["train-images-idx3-ubyte.gz"], paths["train-labels-idx1-ubyte.gz"])
    test = _load(paths["t10k-images-idx3-ubyte.gz"], paths["t10k-labels-idx1-ubyte.gz"])
    train, validation = split(images, labels, held=len(labels) // 12)  # 5,000 of 60,000
    return TensorDataset(*train), TensorDataset(*validation), TensorDataset(*test)


def _load(image_path: Path, label_path: Path) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.dtype != torch.uint8 or images.shape[1:] != (28, 28) or labels.dtype != torch.uint8 or labels.dim() != 1:
        raise BadInput(f"{image_path} is not Fashion-MNIST (shape: {tuple(images.shape)}); it needs n x 28 x 28 bytes")
    if len(images) != len(labels):
        raise BadInput(
            f"{len(images)} images in {image_path} but {len(labels)} labels in {label_path}; fetch both again"
        )
    if len(labels) and int(labels.max()) >= _CLASSES:
        raise BadInput(f"{label_path} holds a label above {_CLASSES - 1} ({int(labels.max())}); fetch it again")
    return images.unsqueeze(1), labels.long()
