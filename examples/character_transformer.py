"""A small transformer that learns to write, character by character: groups without decay, a warm-up, perplexity.

The text is made of short sentences that follow a grammar, so that a few seconds suffice. The schedule is a function of
the run's progress from 0 to 1, the same for every strategy and number of workers.
"""

import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torrential as tt

CONTEXT, WIDTH = 32, 48
CHARACTERS = "abcdefghijklmnopqrstuvwxyz ."
NUMBER = {character: number for number, character in enumerate(CHARACTERS)}


def text(sentences: int, seed: int) -> Tensor:
    draw = random.Random(seed)
    who, does, what = ["a worker", "the server", "nobody"], ["waits for", "pulls", "pushes"], ["a gradient", "the rest"]
    made = " ".join(f"{draw.choice(who)} {draw.choice(does)} {draw.choice(what)}." for _ in range(sentences))
    return torch.tensor([NUMBER[character] for character in made])


def windows(numbers: Tensor) -> TensorDataset:
    pieces = numbers.unfold(0, CONTEXT + 1, 8)
    return TensorDataset(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(CHARACTERS), WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, numbers: Tensor) -> Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=numbers.device)
        return self.head(self.layers(self.embed(numbers) + self.place, mask=ahead, is_causal=True))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Perplexity:
    """exp of the mean loss: no mean over batches, so it is an object."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.total, self.count = self.total + loss(logits, targets).item() * len(targets), self.count + len(targets)

    def compute(self) -> float:
        return math.exp(self.total / self.count)


task = tt.Task(
    model=Writer,
    loss=loss,
    metric=Perplexity,
    maximize=False,
    train=windows(text(400, seed=0)),
    test=windows(text(60, seed=1)),
    optimizer=tt.optimizer("adamw", lr=3e-3, weight_decay=0.1, groups=[("*.bias", {"weight_decay": 0.0})]),
    schedule=lambda done: min(1.0, done / 0.1) * (1 - 0.9 * done),
    batch_size=16,
    epochs=3,
)

if __name__ == "__main__":
    print(f"perplexity {tt.train(task, workers=2).summary.value:.2f} (a guess has {len(CHARACTERS)})")
