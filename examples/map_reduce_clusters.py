"""K-means and mixtures of Gaussians in rounds of map-reduce; what is read once stays with the workers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import torrential as tt


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
    true = torch.tensor([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]], dtype=torch.float64)
    points = true[torch.arange(30_000) % 3] + torch.randn(30_000, 2, dtype=torch.float64, generator=draw)
    for learn in (k_means, mixture):
        found = learn(points, points[:3], workers=2)
        centres = found.value if learn is k_means else found.value["mean"]
        print(f"{learn.__name__}, {found.rounds} rounds:", centres.round(decimals=1).tolist())
