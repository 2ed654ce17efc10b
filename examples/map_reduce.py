"""Least squares, ridge, naive Bayes and principal components from one pass over the data: sums, and what they tell."""

from __future__ import annotations

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


# -- naive Bayes over counts, as of words; y is the class -------------------------------------------------------------
def naive_bayes(x: Tensor, y: Tensor, classes: int, smoothing: float = 1.0, **how: Any) -> dict[str, Tensor]:
    def counts(rows: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        member = torch.nn.functional.one_hot(rows[1], classes).double()
        return {"of": member.sum(0), "with": member.T @ rows[0].double()}

    def ratios(total: dict[str, Tensor]) -> dict[str, Tensor]:
        smooth = total["with"] + smoothing
        return {"prior": (total["of"] / total["of"].sum()).log(), "word": (smooth / smooth.sum(1, keepdim=True)).log()}

    return tt.map_reduce((x, y), counts, finish=ratios, **how).value


# -- principal components ---------------------------------------------------------------------------------------------
def principal_components(x: Tensor, count: int, **how: Any) -> dict[str, Tensor]:
    def moments(rows: Tensor) -> dict[str, Tensor]:
        return {"n": torch.tensor(len(rows)), "sum": rows.sum(0), "squares": rows.T @ rows}

    def decompose(total: dict[str, Tensor]) -> dict[str, Tensor]:
        mean = total["sum"] / total["n"]
        values, vectors = torch.linalg.eigh(total["squares"] / total["n"] - mean.outer(mean))
        return {"mean": mean, "variance": values.flip(0)[:count], "components": vectors.flip(1).T[:count]}

    return tt.map_reduce(x, moments, finish=decompose, **how).value


if __name__ == "__main__":
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, 8, dtype=torch.float64, generator=draw)
    y = x @ torch.arange(8, dtype=torch.float64) + torch.randn(100_000, dtype=torch.float64, generator=draw)
    found = least_squares(x, y, workers=2)
    print("least squares:", [round(float(w), 2) for w in found])
    print("the same bits on one worker:", torch.equal(found, least_squares(x, y, workers=1)))
