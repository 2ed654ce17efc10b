"""Logistic regression in rounds of map-reduce, by Newton's method and by gradient descent; labels are 0 or 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torrential as tt


def likelihood(rows: tuple[Tensor, Tensor], weights: Tensor) -> dict[str, Tensor]:
    x, y = rows
    score = x @ weights
    loss = torch.nn.functional.binary_cross_entropy_with_logits(score, y, reduction="sum")
    return {"loss": loss, "gradient": x.T @ (score.sigmoid() - y), "n": torch.tensor(len(y))}


def curvature(rows: tuple[Tensor, Tensor], weights: Tensor) -> dict[str, Tensor]:
    x, _ = rows
    sure = (x @ weights).sigmoid()
    return likelihood(rows, weights) | {"hessian": x.T @ (x * (sure * (1 - sure))[:, None])}


def newton(x: Tensor, y: Tensor, rounds: int = 10, **how: Any) -> tt.Reduction:
    def step(total: dict[str, Tensor], weights: Tensor) -> tt.Estimate:
        done = bool(total["gradient"].abs().max() < 1e-9 * total["n"])
        change = tt.solve_normal(total["hessian"], total["gradient"])
        return tt.Estimate(weights if done else weights - change, float(total["loss"] / total["n"]), done)

    start = torch.zeros(x.shape[1], dtype=torch.float64)
    return tt.map_reduce((x, y), curvature, finish=step, start=start, rounds=rounds, **how)


def gradient_descent(x: Tensor, y: Tensor, rate: float = 1.0, rounds: int = 100, **how: Any) -> tt.Reduction:
    def step(total: dict[str, Tensor], weights: Tensor) -> tt.Estimate:
        return tt.Estimate(weights - rate * total["gradient"] / total["n"], float(total["loss"] / total["n"]))

    start = torch.zeros(x.shape[1], dtype=torch.float64)
    return tt.map_reduce((x, y), likelihood, finish=step, start=start, rounds=rounds, **how)


if __name__ == "__main__":
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, 8, dtype=torch.float64, generator=draw)
    likely = (x @ torch.arange(8, dtype=torch.float64) / 4).sigmoid()
    found = newton(x, (torch.rand(100_000, dtype=torch.float64, generator=draw) < likely).double(), workers=2)
    print(f"{found.rounds} rounds of Newton:", [round(float(w), 2) for w in found.value])
