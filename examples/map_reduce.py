"""Eight learners that see their data only through sums: each is a statistic of rows, and what is made of the total.

    python examples/map_reduce.py

Every one runs on any number of workers, with the same result to the last bit; rounds keep what they have read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import torrential as tt


# -- least squares, and with a ridge ----------------------------------------------------------------------------------
def products(rows: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    x, y = rows
    return {"xx": x.T @ x, "xy": x.T @ y}


def least_squares(x: Tensor, y: Tensor, ridge: float = 0.0, **how: Any) -> Tensor:
    def solve(total: dict[str, Tensor]) -> Tensor:
        return tt.solve_normal(total["xx"], total["xy"], ridge)

    return tt.map_reduce((x, y), products, finish=solve, **how).value


# -- logistic regression, by Newton's method and by gradient descent; y is 0 or 1 -------------------------------------
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


# -- naive Bayes over counts, as of words; y is the class -------------------------------------------------------------
def naive_bayes(x: Tensor, y: Tensor, classes: int, smoothing: float = 1.0, **how: Any) -> dict[str, Tensor]:
    def counts(rows: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        member = torch.nn.functional.one_hot(rows[1], classes).double()
        return {"of": member.sum(0), "with": member.T @ rows[0].double()}

    def ratios(total: dict[str, Tensor]) -> dict[str, Tensor]:
        smooth = total["with"] + smoothing
        return {"prior": (total["of"] / total["of"].sum()).log(), "word": (smooth / smooth.sum(1, keepdim=True)).log()}

    return tt.map_reduce((x, y), counts, finish=ratios, **how).value


# -- k-means ----------------------------------------------------------------------------------------------------------
def k_means(x: Tensor, centres: Tensor, rounds: int = 50, **how: Any) -> tt.Reduction:
    def nearest(rows: Tensor, centres: Tensor) -> dict[str, Tensor]:
        squares = torch.cdist(rows, centres).square()
        least, which = squares.min(1)
        member = torch.nn.functional.one_hot(which, len(centres)).double()
        return {"sum": member.T @ rows, "n": member.sum(0), "loss": least.sum()}

    def move(total: dict[str, Tensor], centres: Tensor) -> tt.Estimate:
        n = total["n"][:, None]
        moved = torch.where(n > 0, total["sum"] / n.clamp_min(1), centres)  # one that nobody is near stays
        return tt.Estimate(moved, float(total["loss"]), done=bool((moved == centres).all()))

    return tt.map_reduce(x, nearest, finish=move, start=centres, rounds=rounds, **how)


# -- principal components ---------------------------------------------------------------------------------------------
def principal_components(x: Tensor, count: int, **how: Any) -> dict[str, Tensor]:
    def moments(rows: Tensor) -> dict[str, Tensor]:
        return {"n": torch.tensor(len(rows)), "sum": rows.sum(0), "squares": rows.T @ rows}

    def decompose(total: dict[str, Tensor]) -> dict[str, Tensor]:
        mean = total["sum"] / total["n"]
        values, vectors = torch.linalg.eigh(total["squares"] / total["n"] - mean.outer(mean))
        return {"mean": mean, "variance": values.flip(0)[:count], "components": vectors.flip(1).T[:count]}

    return tt.map_reduce(x, moments, finish=decompose, **how).value


# -- mixtures of Gaussians, by expectation and maximisation -----------------------------------------------------------
def mixture(x: Tensor, means: Tensor, rounds: int = 100, tolerance: float = 1e-8, **how: Any) -> tt.Reduction:
    size = x.shape[1]
    start = {
        "share": torch.full((len(means),), 1 / len(means), dtype=torch.float64),
        "mean": means,
        "covariance": x.T.cov().expand(len(means), size, size).clone(),
        "before": -math.inf,
    }

    def expect(rows: Tensor, now: dict[str, Any]) -> dict[str, Tensor]:
        gaussians = torch.distributions.MultivariateNormal(now["mean"], now["covariance"])
        joint = gaussians.log_prob(rows[:, None]) + now["share"].log()
        whole = joint.logsumexp(1)
        part = (joint - whole[:, None]).exp()
        squares = torch.einsum("nk,ni,nj->kij", part, rows, rows)
        return {"n": part.sum(0), "sum": part.T @ rows, "squares": squares, "likelihood": whole.sum()}

    def maximise(total: dict[str, Tensor], now: dict[str, Any]) -> tt.Estimate:
        n, all_rows = total["n"], total["n"].sum()
        mean = total["sum"] / n[:, None]
        spread = total["squares"] / n[:, None, None] - torch.einsum("ki,kj->kij", mean, mean)
        covariance = spread + 1e-9 * torch.eye(size, dtype=torch.float64)
        value = float(total["likelihood"] / all_rows)
        estimate = {"share": n / all_rows, "mean": mean, "covariance": covariance, "before": value}
        return tt.Estimate(estimate, -value, done=value - now["before"] < tolerance)

    return tt.map_reduce(x, expect, finish=maximise, start=start, rounds=rounds, **how)


if __name__ == "__main__":
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, 8, dtype=torch.float64, generator=draw)
    true = torch.arange(8, dtype=torch.float64)
    y = x @ true + torch.randn(100_000, dtype=torch.float64, generator=draw)
    print("least squares:", [round(float(w), 2) for w in least_squares(x, y, workers=2)])
    drawn = torch.rand(100_000, dtype=torch.float64, generator=draw)
    found = newton(x, (drawn < (x @ true / 4).sigmoid()).double(), workers=2)
    print(f"logistic regression, {found.rounds} rounds of Newton:", [round(float(w), 2) for w in found.value])
