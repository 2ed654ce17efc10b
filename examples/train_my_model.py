"""Train a model of your own on two worker processes, with data, loss and optimizer of your own.

The task is to tell two interleaved spirals apart. While it trains you see loss and validation accuracy; at the end the
accuracy on test data, near 100 %, and what the trained model, by then an ordinary PyTorch module, says of one point.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import torrential as tt


def spirals(samples: int, seed: int) -> TensorDataset:
    """Points (samples, 2) with a little noise, and which of the two arms each is on."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.arange(samples) % 2
    radii = torch.rand(samples, generator=generator).sqrt()
    angles = 3 * math.pi * radii + math.pi * arms
    points = torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1)
    return TensorDataset(points + 0.02 * torch.randn(samples, 2, generator=generator), arms)


task = tt.Task(
    model=lambda: nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)),
    loss=F.cross_entropy,
    train=spirals(4000, seed=0),
    test=spirals(1000, seed=1),
    optimizer=tt.optimizer("adamw", lr=0.01),
    batch_size=50,  # of each worker: a step is on 100 samples
    epochs=10,
)

if __name__ == "__main__":  # so that `torrential train examples/train_my_model.py` works, too
    result = tt.train(task, workers=2)
    print(f"test accuracy {result.summary.value:.1%} after {result.summary.steps} steps; records in {result.out}")
    point = torch.tensor([[0.0, 0.5]])
    print(f"the point (0, 0.5) is on arm {result.model(point).argmax().item()}")
