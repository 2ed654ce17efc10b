"""Normal equations, as least squares and Newton's method leave them, solved with a word on what is wrong with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torrential.errors import BadInput

_NAMED = 6  # columns that a message names
_SHARE = 0.1  # of the largest element: the columns that matter to a direction


def solve_normal(a: Any, b: Any, ridge: float = 0.0) -> Any:
    """The x of (a + ridge · 1) x = b, where a is symmetric and positive; an array if a is one, else a tensor. BadInput
    if a is singular in float64: it names the columns that depend on one another."""
    left = torch.as_tensor(a, dtype=torch.float64)
    right = torch.as_tensor(b, dtype=torch.float64)
    if left.ndim != 2 or left.shape[0] != left.shape[1] or right.ndim not in (1, 2) or len(right) != len(left):
        shapes = f"a: {list(left.shape)}, b: {list(right.shape)}"
        raise BadInput(f"normal equations have a square matrix and as many right sides as it has rows ({shapes})")
    if not (left.isfinite().all() and right.isfinite().all()):
        raise BadInput("the normal equations have numbers in them that are not finite; look for such in the data")
    left = left + ridge * torch.eye(len(left), dtype=torch.float64)
    scale = left.diagonal().clamp_min(torch.finfo(torch.float64).tiny).rsqrt()  # units of columns do not matter
    values, vectors = torch.linalg.eigh(scale[:, None] * left * scale)
    least = float(values[-1]) * len(left) * torch.finfo(torch.float64).eps
    if not float(values[0]) > least:
        raise BadInput(
            f"the normal equations are singular: {_blamed(left, vectors[:, values <= least])}; leave some of them out, "
            "or add a ridge: solve_normal(a, b, ridge=1e-3)"
        )
    scaled = scale[:, None] * right if right.ndim > 1 else scale * right
    turned = vectors.T @ scaled
    found = vectors @ (turned / (values[:, None] if right.ndim > 1 else values))
    found = scale[:, None] * found if right.ndim > 1 else scale * found
    return found.numpy() if isinstance(a, np.ndarray) else found


def _blamed(left: Tensor, directions: Tensor) -> str:
    """The columns without which the rest would do, in words."""
    empty = [i for i in range(len(left)) if not float(left[i, i])]
    if empty:
        return f"{_listed(empty)} {'is' if len(empty) == 1 else 'are'} zero in all rows"
    if directions.shape[1] > 1:
        return f"its {len(left)} columns have only {len(left) - directions.shape[1]} independent ones among them"
    weights = directions[:, 0].abs()
    found = [i for i in range(len(left)) if float(weights[i]) > _SHARE * float(weights.max())]
    return f"{_listed(found)} depend on one another"


def _listed(columns: list[int]) -> str:
    names = ", ".join(map(str, columns[:_NAMED]))
    more = f" and {len(columns) - _NAMED} more" if len(columns) > _NAMED else ""
    return f"{'column' if len(columns) == 1 else 'columns'} {names}{more}"
