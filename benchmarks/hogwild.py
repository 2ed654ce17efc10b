"""Hogwild on sparse logistic regression, in rows per second: one and two processes, beside torch in a plain loop.

python -m benchmarks.hogwild [--rows N] [--epochs E] [--batch B] [--rounds R] [--json FILE]

    torch        nn.EmbeddingBag(sparse=True) and torch.optim.SGD in a plain loop, one process
    embedding    nn.Embedding(sparse=True), summed over a row's features, and torch.optim.SGD in a plain loop
    bag          the first model by `hogwild`, with 1 and 2 workers
    sparse       the second by `hogwild`; `write` and `step` with writing or whole steps in turn: what a lock costs
    dense        the control: as many numbers per row, of 100 features that all rows have
    full         the other control: the gradient of the second model as a dense vector

A row has 100 of 1,000,000 features; what is to be learnt is a random hyperplane. Rows per second are counted from the
first to the last step on record, so that neither starting nor evaluating is part of it. Every round starts each
contender anew, one after the other; figures are medians, and the gain of two workers is the median of the rounds'.
`lost` is what a run of its own counts: the share of updates of single parameters that another worker overwrote.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.records import Event, Step, describe_machine

FEATURES, TOUCHED, DENSE = 1_000_000, 100, 100
RATE = 0.5
NEVER = 10**9  # steps between two snapshots


class Bag(nn.Module):
    """Sparse logistic regression by torch's own layer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(FEATURES, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.weights(features)
        return scores.squeeze(1)


class Summed(nn.Module):
    """The same by a plain look-up, whose gradient is less work to make."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.weights = nn.Embedding(FEATURES, 1, sparse=sparse)
        nn.init.zeros_(self.weights.weight)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.weights(features)
        return scores.sum(1).squeeze(1)


class Dense(nn.Module):
    """Logistic regression on features that every row has."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(DENSE, 1, bias=False)
        nn.init.zeros_(self.weights.weight)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.weights(features)
        return scores.squeeze(1)


def sparse_rows(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    truth = torch.randn(FEATURES, generator=torch.Generator().manual_seed(0))
    features = torch.randint(0, FEATURES, (count, TOUCHED), generator=draw)
    return TensorDataset(features, (truth[features].sum(1) > 0).float())


def dense_rows(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    truth = torch.randn(DENSE, generator=torch.Generator().manual_seed(0))
    features = torch.randn(count, DENSE, generator=draw)
    return TensorDataset(features, (features @ truth > 0).float())


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs > 0) == (targets > 0)).float().mean()


@dataclass(frozen=True)
class Contender:
    model: Any
    workers: int
    turns: Literal["none", "write", "step"] = "none"
    share: float = 1.0  # of the rows: less where it is slow

    @property
    def rows(self) -> Any:
        return dense_rows if self.model is Dense else sparse_rows


def full() -> nn.Module:
    return Summed(sparse=False)


CONTENDERS: dict[str, Contender] = {
    "torch": Contender(Bag, 0),
    "embedding": Contender(Summed, 0),
    "bag 1": Contender(Bag, 1),
    "bag 2": Contender(Bag, 2),
    "sparse 1": Contender(Summed, 1),
    "sparse 2": Contender(Summed, 2),
    "sparse 2 write": Contender(Summed, 2, "write"),
    "sparse 2 step": Contender(Summed, 2, "step"),
    "dense 1": Contender(Dense, 1),
    "dense 2": Contender(Dense, 2),
    "full 1": Contender(full, 1, share=0.1),
    "full 2": Contender(full, 2, share=0.1),
}


@dataclass(frozen=True)
class Outcome:
    rate: float  # rows per second
    loss: float  # mean, over the rows that were trained on
    lost: tuple[int, int] = (0, 0)  # updates of single parameters: overwritten, and all


def plain(contender: Contender, train: TensorDataset, batch: int, epochs: int) -> Outcome:
    """A plain loop in this process."""
    torch.manual_seed(0)
    model = contender.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    features, targets = train.tensors
    began = time.perf_counter()
    for _ in range(epochs):
        for indices in torch.randperm(len(train)).split(batch):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(features[indices]), targets[indices]).backward()
            optimizer.step()
    return Outcome(epochs * len(train) / (time.perf_counter() - began), loss_of(model, train))


def ours(contender: Contender, train: TensorDataset, batch: int, epochs: int, count: bool = False) -> Outcome:
    task = tt.Task(
        model=contender.model,
        loss=F.binary_cross_entropy_with_logits,
        train=train,
        test=contender.rows(64, 1),
        validation=contender.rows(64, 2),
        metric=right,
        optimizer=tt.optimizer("sgd", lr=RATE),
        batch_size=batch,
        epochs=epochs,
        name="sparse-logistic",
    )
    with tempfile.TemporaryDirectory() as out:
        strategy = tt.Hogwild(turns=contender.turns, count_lost=count)
        made = tt.train(
            task,
            strategy,
            workers=contender.workers,
            threads=1,
            device="cpu",
            progress=False,
            evaluate_every=NEVER,
            out=Path(out) / "run",
        )
    steps = [record for record in made.history if isinstance(record, Step) and record.worker == 0]
    rate = (steps[-1].samples - steps[0].samples) / (steps[-1].time - steps[0].time)
    said = [r.detail.split() for r in made.history if isinstance(r, Event) and r.event == "lost"]
    lost = sum(int(words[0]) for words in said), sum(int(words[2]) for words in said)
    return Outcome(rate, loss_of(made.model, train), lost)


def loss_of(model: nn.Module, train: TensorDataset) -> float:
    features, targets = train.tensors
    with torch.no_grad():
        return float(F.binary_cross_entropy_with_logits(model(features), targets))


def measure(name: str, rows: int, batch: int, epochs: int, count: bool = False) -> Outcome:
    contender = CONTENDERS[name]
    train = contender.rows(int(rows * contender.share), 0)
    if not contender.workers:
        return plain(contender, train, batch, epochs)
    return ours(contender, train, batch, epochs, count)


def lines(found: dict[str, list[Outcome]], lost: dict[str, Outcome]) -> Iterator[str]:
    yield "| contender | rows/s | min–max | × one worker | loss | updates lost |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, outcomes in found.items():
        rates = [outcome.rate for outcome in outcomes]
        alone = found.get(f"{name.split(' ')[0]} 1")
        gain = ""
        if alone is not None and CONTENDERS[name].workers > 1:
            gain = f"{median(mine.rate / one.rate for mine, one in zip(outcomes, alone, strict=True)):.2f}"
        gone, made = lost[name].lost if name in lost else (0, 0)
        share = f"{gone:,} of {made:,} ({gone / made:.1e})" if made else ""
        loss = median(outcome.loss for outcome in outcomes)
        yield (
            f"| {name} | {median(rates):,.0f} | {min(rates):,.0f}–{max(rates):,.0f} | {gain} | {loss:.4f} | {share} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--count", action="store_true", help="count lost updates, in runs of their own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.contenders.split(",")
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            found[name].append(measure(name, args.rows, args.batch, args.epochs))
            print(f"round {number}: {name}: {found[name][-1].rate:,.0f} rows/s", flush=True)
    counted = [name for name in names if CONTENDERS[name].workers > 1] if args.count else []
    lost = {name: measure(name, args.rows // 4, args.batch, args.epochs, count=True) for name in counted}
    print("\n".join(lines(found, lost)))
    if args.json is not None:
        raw = {name: [vars(outcome) for outcome in outcomes] for name, outcomes in found.items()}
        raw_lost = {name: vars(outcome) for name, outcome in lost.items()}
        args.json.write_text(
            json.dumps({"machine": describe_machine(), "runs": raw, "lost": raw_lost}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
