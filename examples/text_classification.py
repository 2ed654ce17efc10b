"""Classify sentences of any length: dict items, a collate that pads, batches of like length, and a step of one's own.

A sentence is about the sea or about the mountains, by the words in it; a few of its words are drawn from a vocabulary
that both share. What the step returns besides the loss becomes records and curves; the metric is one of them, by name.
"""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torrential as tt
from torrential.records import Step

SEA = ["wave", "sail", "harbour", "tide", "gull", "reef"]
MOUNTAINS = ["peak", "ridge", "glacier", "valley", "pine", "scree"]
SHARED = ["the", "a", "we", "saw", "near", "under", "wind", "and", "light", "stood", "for", "hours"]
NUMBERS = {word: number for number, word in enumerate(SEA + MOUNTAINS + SHARED, start=1)}  # 0 is padding


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    made = []
    for number in range(count):
        topic = [SEA, MOUNTAINS][number % 2]
        words = [draw.choice(topic if draw.random() < 0.2 else SHARED) for _ in range(draw.randint(4, 24))]
        made.append({"text": " ".join([*words, draw.choice(topic)]), "label": number % 2})
    return made


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    words = [torch.tensor([NUMBERS[word] for word in item["text"].split()]) for item in items]
    ids = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return {"input_ids": ids, "mask": ids > 0, "labels": torch.tensor([item["label"] for item in items])}


class Classifier(nn.Module):
    """The mean of the words' vectors, and a layer on top of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(len(NUMBERS) + 1, 32), nn.Linear(32, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        vectors = self.words(ids) * mask.unsqueeze(2)
        return self.head(vectors.sum(1) / mask.sum(1, keepdim=True))


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = model(batch["input_ids"], batch["mask"])
    right = logits.argmax(1) == batch["labels"]
    padding = 1 - batch["mask"].float().mean()
    return {"loss": F.cross_entropy(logits, batch["labels"]), "accuracy": right.float().mean(), "padding": padding}


task = tt.Task(
    model=Classifier,
    step=step,
    metric="accuracy",
    train=sentences(2000, seed=0),
    test=sentences(400, seed=1),
    collate=collate,
    length=lambda item: item["text"].count(" "),  # sentences of like length share a batch, and little is padded
    optimizer=tt.optimizer("adam", lr=0.02),
    batch_size=25,
    epochs=4,
)

if __name__ == "__main__":
    result = tt.train(task, workers=2)
    steps = [record for record in result.history if isinstance(record, Step)]
    print(f"test accuracy {result.summary.value:.1%}; of the last batch {steps[-1].figures['padding']:.0%} was padding")
