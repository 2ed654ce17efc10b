"""Residual networks for small images: 28x28, 32x32 or alike.

`resnet20`  K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition" (2016), section 4.2: three
            stages of three basic blocks, 16, 32 and 64 channels, 0.27 million parameters. Where a stage halves the
            image, the shortcut takes every second pixel and fills new channels with zeros (their option A).
`resnet8`   the same with one block in each stage, 0.08 million parameters.
`resnet9`   the fast one of D. Page, "How to Train Your ResNet" (2018): wide and shallow, 6.6 million parameters.

A basic block has `last_norm`, the batch norm just before the sum; a block whose last_norm has weight zero is the
identity at first (P. Goyal et al. 2017, section 5.1). The blocks of `resnet9` have none: a relu follows their last
norm, and would pass no gradient back to a weight of zero. Convolutions start as He et al. (2015) say, the last layer
from N(0, 0.01²).
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional as F


def resnet20(channels: int = 3, classes: int = 10) -> nn.Module:
    return _basic(3, channels, classes)


def resnet8(channels: int = 3, classes: int = 10) -> nn.Module:
    return _basic(1, channels, classes)


def _basic(blocks_per_stage: int, channels: int, classes: int) -> nn.Module:
    widths = [16, *(width for width in (16, 32, 64) for _ in range(blocks_per_stage))]
    blocks = [BasicBlock(inputs, outputs) for inputs, outputs in itertools.pairwise(widths)]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    return _initialised(nn.Sequential(*_convolution(channels, 16), *blocks, *head))


def resnet9(channels: int = 3, classes: int = 10) -> nn.Module:
    return _initialised(
        nn.Sequential(
            *_convolution(channels, 64),
            *_convolution(64, 128, pool=True),
            WideBlock(128),
            *_convolution(128, 256, pool=True),
            *_convolution(256, 512, pool=True),
            WideBlock(512),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(512, classes, bias=False),
            Scale(0.125),
        )
    )


class BasicBlock(nn.Module):
    """relu(x + two convolutions of x); with more outputs than inputs it also halves the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grown = outputs - inputs
        self.stride = 2 if self.grown else 1
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.norm2

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.grown:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grown))
        return F.relu(x + y)


class WideBlock(nn.Module):
    """x + two convolutions of x, each with its norm and relu."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_convolution(channels, channels), *_convolution(channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return x + y


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _convolution(inputs: int, outputs: int, pool: bool = False) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    layers = convolution, nn.BatchNorm2d(outputs), nn.ReLU()
    return (*layers, nn.MaxPool2d(2)) if pool else layers


def _initialised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
