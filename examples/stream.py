"""Train on a stream: samples that are made, or come, one after the other, and cannot be asked for by number.

Every worker reads the stream by itself and keeps what is its own, so that no sample is used twice; the place in it is
saved, and `--resume` goes on there. Two loaders for each worker read ahead, and each window of 256 samples is shuffled.
The task is to say whether a walk of eight steps ends to the right of where it began.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import torrential as tt


class Walks(IterableDataset[tuple[Tensor, int]]):
    """Random walks without end; what it draws with torch, numpy or random is the same for all who read it."""

    def __iter__(self):
        while True:
            steps = torch.randn(8)
            yield steps, int(steps.sum() > 0)


def first(samples: int) -> list[tuple[Tensor, int]]:
    torch.manual_seed(1)
    return [walk for walk, _ in zip(Walks(), range(samples), strict=False)]


task = tt.Task(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
    loss=F.cross_entropy,
    train=Walks(),
    samples=4000,  # an epoch; without it, say how many steps to train: tt.train(..., steps=500)
    shuffle_buffer=256,
    validation=first(400),  # none can be cut from a stream
    test=first(1000),
    batch_size=25,
    epochs=3,
)

if __name__ == "__main__":
    result = tt.train(task, workers=2, loaders=2)
    print(f"test accuracy {result.summary.value:.1%} after {result.summary.samples} samples of the stream")
