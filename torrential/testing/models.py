"""The models that schedules train: tiny ones, in float64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

INPUTS, HIDDEN, CLASSES = 5, 8, 3
BLOCKS = 8  # of a model that is cut: as many as the most stages have chunks


def perceptron() -> nn.Module:
    """A model with one hidden layer."""
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()


def blocks(normed: bool) -> nn.Module:
    """A model that can be cut into up to eight parts, each with something to train. `normed`: it has buffers, those of
    batch norm, and dropout."""
    widths = [INPUTS, *[HIDDEN] * (BLOCKS - 1), CLASSES]
    made = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    for block in made[1:-1] if normed else ():
        # over two positions of each sample, so that a microbatch may have one sample
        block.extend([nn.Unflatten(1, (HIDDEN // 2, 2)), nn.BatchNorm1d(HIDDEN // 2), nn.Flatten(), nn.Dropout(0.1)])
    return nn.Sequential(*made).double()


class Falling(nn.Module):
    """A model whose gradients are all one, for any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(100, dtype=torch.float64))  # several servers, or members, have parts of it

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x.sum().expand(len(inputs), CLASSES)
