"""Steps of the task's own, and metrics that are collected over batches: what they give, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torrential as tt
from torrential.errors import BadInput
from torrential.records import Step, encode
from torrential.records import _decoder as decoder
from torrential.step import Score, run_step
from torrential.tryout import try_once

CPU = torch.device("cpu")
DATA = [{"x": torch.tensor([float(i), 1.0]), "y": i % 2} for i in range(12)]


class Recall:
    """As torchmetrics has them: it collects, and is no mean of batches."""

    def __init__(self, positive: int = 1) -> None:
        self.positive = positive
        self.reset()

    def reset(self) -> None:
        self.found = self.there = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        right = (preds.argmax(1) == self.positive) & (target == self.positive)
        self.found, self.there = self.found + int(right.sum()), self.there + int((target == self.positive).sum())

    def compute(self) -> Tensor:
        return torch.tensor(self.found / max(1, self.there))


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    outputs = model(batch["x"])
    right = (outputs.argmax(1) == batch["y"]).float().mean()
    return {"loss": F.cross_entropy(outputs, batch["y"]), "right": right, "size": len(outputs),
            "outputs": outputs, "targets": batch["y"]}  # fmt: skip


def backward_itself(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    loss.backward()
    return loss


def task(**changes: Any) -> tt.Task:
    given: dict[str, Any] = dict(
        model=lambda: nn.Linear(2, 2), step=step, train=DATA, test=DATA, validation=DATA, epochs=1, batch_size=5
    )
    return tt.Task(**given | changes)


def joined(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {"x": torch.stack([item["x"] for item in items]), "y": torch.tensor([item["y"] for item in items])}


def scored(of: tt.Task, sizes: list[int]) -> tuple[Score, nn.Module]:
    torch.manual_seed(0)
    score, model, first = Score(of, CPU), of.model(), 0
    for size in sizes:
        score.add(run_step(of, model, joined(DATA[first : first + size])), size)
        first += size
    return score, model


def test_figures_are_means_over_samples_not_over_batches() -> None:
    whole, model = scored(task(), [12])
    parts, _ = scored(task(), [5, 5, 2])
    assert parts.figures()["loss"] == pytest.approx(whole.figures()["loss"], abs=1e-6)
    assert parts.figures()["right"] == pytest.approx(whole.figures()["right"], abs=1e-6)
    assert parts.figures()["size"] == pytest.approx((5 * 5 + 5 * 5 + 2 * 2) / 12)
    outputs = model(joined(DATA)["x"])
    assert whole.value() == pytest.approx(float(F.cross_entropy(outputs, joined(DATA)["y"]).detach()), abs=1e-6)


@pytest.mark.parametrize("metric", [Recall(), Recall], ids=["object", "class"])
def test_a_metric_that_is_no_mean_of_batches(metric: Any) -> None:
    of = task(metric=metric)
    assert of.metric_name == "Recall" and of.maximize
    (parts, model), (whole, _) = scored(of, [1, 4, 7]), scored(of, [12])
    batch = joined(DATA)
    guessed = model(batch["x"]).argmax(1)
    expected = int(((guessed == 1) & (batch["y"] == 1)).sum()) / 6
    assert parts.value() == whole.value() == pytest.approx(expected)
    assert not isinstance(metric, Recall) or metric.there == 0, "the task's own object is not changed"


def test_what_the_metric_is_by_default() -> None:
    assert (task().metric, task().maximize) == ("loss", False)
    assert (task(metric="right").metric, task(metric="right").maximize) == ("right", True)
    assert scored(task(metric=tt.accuracy), [5, 7])[0].value() == pytest.approx(
        scored(task(metric="right"), [12])[0].value()
    )
    short = tt.Task(model=lambda: nn.Linear(2, 2), loss=F.cross_entropy, train=[(torch.ones(2), 1)] * 4, test=[1])
    assert short.metric is tt.accuracy and short.maximize


def test_a_metric_may_need_no_targets() -> None:
    class Mean:
        def __init__(self) -> None:
            self.values: list[Tensor] = []

        def update(self, value: Tensor) -> None:
            self.values.append(value)

        def compute(self) -> Tensor:
            return torch.cat(self.values).mean()

    of = task(metric=Mean(), step=lambda m, b: {"loss": m(b["x"]).mean(), "outputs": b["y"].float()})
    assert scored(of, [5, 7])[0].value() == 0.5


def test_a_metric_is_one_number() -> None:
    class Several(Recall):
        def compute(self) -> Any:
            return {"precision": 0.5, "recall": 0.25}

    with pytest.raises(BadInput, match=r"several numbers \(precision, recall\), and a run is judged by one"):
        scored(task(metric=Several()), [5])[0].value()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": lambda m, b: {"right": 1.0}}, "a dict with 'loss' (its keys: right)"),
        (
            {"step": lambda m, b: m(b["x"])},
            "one number, the mean over the batch (it is a tensor of shape (2, 2)); end with .mean()",
        ),
        ({"step": lambda m, b: 3.0}, "(it is of type float); return the tensor itself"),
        ({"step": lambda m, b: None}, "(it is of type NoneType)"),
        ({"step": lambda m, b: m(b["x"]).mean().detach()}, "depends on no parameter"),
        ({"step": backward_itself}, "step has called backward(); let it return the loss alone: Torrential runs"),
        ({"step": lambda m, b: {"loss": m(b["x"]).mean(), "logits": b["x"]}}, "the figure 'logits' of the task's step"),
        (
            {"step": lambda m, b: b["z"]},
            "the task's step on a batch of dict(x: Tensor, y: Tensor) raised KeyError: 'z'",
        ),
        ({"metric": "f1"}, "gives no figure 'f1' (it gives: loss, right, size)"),
        ({"metric": Recall(), "step": lambda m, b: m(b["x"]).mean()}, "add 'outputs' and 'targets' to what it returns"),
        ({"step": None, "loss": F.cross_entropy}, "pairs (the training data gives a dict)"),
        ({"step": None, "loss": F.cross_entropy, "train": [(1, 2, 3)]}, "(the training data gives a list of 3)"),
        ({"step": None, "loss": F.cross_entropy, "train": [1.0]}, "give the task a step(model, batch)"),
    ],
)
def test_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        try_once(task(**changes))
    assert says in str(caught.value)


def test_figures_that_are_no_numbers_come_back_from_records() -> None:
    made = Step(worker=0, step=1, epoch=0, samples=8, loss=1.0, time=0.0, compute=0.0, communicate=0.0, wait=0.0,
                bytes_sent=0, figures={"a": math.nan, "b": math.inf, "c": 0.5})  # fmt: skip
    back = decoder.decode(encode(made))
    assert isinstance(back, Step)
    assert math.isnan(back.figures["a"]) and back.figures["b"] == math.inf and back.figures["c"] == 0.5
