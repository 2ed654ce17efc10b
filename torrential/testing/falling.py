"""What must hold where every gradient is one: all parameters have moved by the rate for every update that is counted.

- on one vector without locks, and in every checkpoint of it: each minibatch counts once, also after deaths
- of elastic averaging: between two exchanges a worker moves by its own steps and by what it has pushed, and by nothing
  else; with testing/ledger.py, by which the centre has moved by every push once, exchanges conserve the sum of the
  centre and all workers
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torrential.strategies.context import Context
from torrential.strategies.easgd import Easgd

TOLERANCE = 1e-9  # of float64; one update moves everything by far more


def misplaced(model: nn.Module, moved: float) -> float:
    """How far the parameters, which began at zero, are from having moved by so much."""
    return max(float((parameter.detach() + moved).abs().max()) for parameter in model.parameters())


class Balanced(Easgd, frozen=True, kw_only=True):
    """Elastic averaging in which every worker keeps account of what has moved it."""

    def worker(self, ctx: Context) -> None:
        push, backward = ctx.params.push, ctx.replica.backward
        (entry,) = ctx.replica.layout.entries
        mine = entry.view(ctx.replica.vector())
        steps, velocity = 0, 0.0
        begun: Tensor | None = None
        accounted = torch.zeros_like(mine)  # what has moved it since its first exchange: own steps, and pulls

        def step(batches: Any) -> float:
            nonlocal steps, velocity
            steps += 1
            velocity = self.momentum * velocity - ctx.config.lr
            accounted.add_(velocity)
            return backward(batches)

        def exchange(pull: Tensor | None, **how: Any) -> Any:
            nonlocal begun
            if begun is None:
                begun = mine - accounted
            off = float((mine - begun - accounted).abs().max())
            if off > TOLERANCE:
                raise AssertionError(f"after {steps} steps a worker is off by {off} of where its own moves lead")
            if pull is not None:
                accounted.add_(entry.view(pull))
            return push(pull, **how)

        ctx.params.push, ctx.replica.backward = exchange, step  # type: ignore[method-assign, assignment]
        super().worker(ctx)
