"""Regression with a metric of one's own that is no mean of batches: R², the share of the variance that is explained.

A metric is an object with `update(outputs, targets)`, which is given every batch of an evaluation, and `compute()`: the
objects of torchmetrics can be given as they are. Here it is written by hand. The target of the run is a value of it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torrential as tt


class R2:
    """One minus the squared error over the variance of the targets."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs)
        self.targets.append(targets)

    def compute(self) -> Tensor:
        outputs, targets = torch.cat(self.outputs), torch.cat(self.targets)
        return 1 - (outputs - targets).square().sum() / (targets - targets.mean()).square().sum()


def springs(samples: int, seed: int) -> TensorDataset:
    """Stiffness, mass and time of a spring that was let go, and where its weight is then."""
    made = torch.rand(samples, 3, generator=torch.Generator().manual_seed(seed)) + 0.5
    stiffness, mass, time = made.unbind(1)
    return TensorDataset(made, torch.cos((stiffness / mass).sqrt() * 3 * time).unsqueeze(1))


task = tt.Task(
    model=lambda: nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
    loss=F.mse_loss,
    metric=R2(),
    target=0.98,
    train=springs(4000, seed=0),
    test=springs(1000, seed=1),
    optimizer=tt.optimizer("adam", lr=0.005),
    batch_size=50,
    epochs=20,
)

if __name__ == "__main__":
    result = tt.train(task, "bsp", workers=2)
    print(f"{result.summary.metric} {result.summary.value:.3f} after {result.summary.steps} steps")
