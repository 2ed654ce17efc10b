"""A split model tried before a run: all workers' parts in one process, and compared with the model that is not split.

Each part runs in a greenlet until it wants a sum; when all have come there, they go on. What a split would silently get
wrong, such as a softmax over the channels of one worker alone, is found here, and so is a shape that does not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import greenlet
import torch
from torch import Tensor, nn

from torrential.data.nest import mapped
from torrential.errors import BadInput
from torrential.randomness import SeparateDraws
from torrential.splits.group import SplitGroup
from torrential.splits.plan import cut_model

TOLERANCE = 1e-3  # of the largest output: a wrong split is off by more, rounding by much less


def rehearse(model: nn.Module, plan: Mapping[str, str], ways: int, run: Callable[[nn.Module], Any]) -> None:
    """Raise BadInput if `run`, a forward, does not give the same with every part of the split model as with the whole
    one. Nothing of `model` is changed."""
    whole = copy.deepcopy(model).train()
    draws = [SeparateDraws() for _ in range(ways + 1)]
    with draws[-1], torch.no_grad():
        expected = tensors_in(run(whole))
    del whole
    parts = []
    for place in range(ways):
        group = SplitGroup(place, ways)
        parts.append((group, cut_model(copy.deepcopy(model).train(), plan, group)))
    runs = [_Part(group, draw, part, run) for (group, part), draw in zip(parts, draws, strict=False)]
    try:
        with torch.no_grad():
            results = _in_turns(runs)
    except Exception as error:
        if type(error) is BadInput:
            raise
        raise BadInput(
            f"the split model does not run: {error}; a layer that gets slices where it needs the whole comes after one "
            "that is split rowwise or colwise-gather"
        ) from error
    for result in results:
        found = tensors_in(result)
        shapes = [[tuple(each.shape) for each in some] for some in (expected, found)]
        if shapes[0] != shapes[1]:
            raise BadInput(
                f"the split model gives outputs of {shapes[1]}, the whole one of {shapes[0]}: the last split ends in "
                "slices; split its last layer rowwise or colwise-gather"
            )
        _compare(expected, found)


def _compare(expected: list[Tensor], found: list[Tensor]) -> None:
    for a, b in zip(expected, found, strict=True):
        if not a.is_floating_point() or not a.numel():
            continue
        off, size = float((a - b).abs().max()), float(a.abs().max())
        if off > TOLERANCE * max(size, 1e-30):
            raise BadInput(
                f"the split model gives other outputs than the whole one (off by {off:.3g}, of {size:.3g}): "
                "something between split layers mixes channels or draws random numbers; split fewer layers"
            )


class _Part:
    """One worker's part of the model at work."""

    def __init__(
        self, group: SplitGroup, draws: SeparateDraws, part: nn.Module, run: Callable[[nn.Module], Any]
    ) -> None:
        group.summed = self._ask
        self.asked: Tensor | None = None  # what it wants summed
        self.result: Any = None
        self._draws, self._parent = draws, greenlet.getcurrent()
        self._greenlet = greenlet.greenlet(lambda: run(part))

    def _ask(self, tensor: Tensor) -> Tensor:
        self.asked = tensor
        answer: Tensor = self._parent.switch()
        return answer

    def go_on(self, answer: Tensor | None = None) -> None:
        self.asked = None
        with self._draws:
            self.result = self._greenlet.switch(*([] if answer is None else [answer.clone()]))


def _in_turns(parts: list[_Part]) -> list[Any]:
    for part in parts:
        part.go_on()
    while any(part.asked is not None for part in parts):
        asked = [part.asked for part in parts if part.asked is not None]
        if len(asked) < len(parts) or len({each.shape for each in asked}) > 1:
            raise BadInput("the workers' parts of the split model do not come to the same sums; split fewer layers")
        total = torch.stack(asked).sum(0)
        for part in parts:
            part.go_on(total)
    return [part.result for part in parts]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest."""
    found: list[Tensor] = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, value)
    return found
