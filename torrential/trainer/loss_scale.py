"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018): gradients too small for it are computed S times as large.

    loss * S ──► backward in fp16 ──► float32, / S ──► finite? ──► step; after `INTERVAL` good ones S doubles
                                                          └ no ──► no member steps; S halves

Gradients are divided as they arrive at their parameters, before they are summed, clipped or sent. S is a power of two,
so that changes no bit. In rounds everybody votes on whether to skip; with servers a worker has an S of its own, and its
push says that the update which it would be part of is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

FIRST, INTERVAL, MOST = 2.0**16, 2000, 2.0**24


class LossScale:
    """The factor S of the loss, as one worker has it."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.value = FIRST
        self.overflowed = False  # whether the last gradient had values that are not finite
        self.skipping = False  # whether the step that is concluded is left out
        self.voted = False  # whether members decide on S, in rounds
        self._met = False  # whether a gradient since the last vote had such values
        self._good = 0  # steps since S was changed
        self._parameters = parameters
        for parameter in parameters:
            parameter.register_hook(self._unscaled)

    def _unscaled(self, gradient: Tensor) -> Tensor:
        return gradient * (1.0 / self.value)

    def look(self) -> None:
        """See whether the gradients that backward has left are finite."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        values = [grad._values() if grad.is_sparse else grad for grad in grads]
        largest = torch._foreach_norm([v for v in values if v.numel()], float("inf"))
        self.overflowed = bool(largest) and not bool(torch.stack(list(largest)).isfinite().all())
        self._met |= self.overflowed
        if not self.voted:
            self.decide(self.overflowed)

    def begin(self) -> None:
        """A round begins."""
        self.voted, self._met = True, False

    def ballot(self) -> list[float]:
        """This member's vote."""
        return [float(self._met)]

    def decide(self, overflowed: bool, steps: int = 1) -> None:
        """Change S after a step, or a round of several, in which a member's gradient overflowed, or none did."""
        self.skipping = overflowed
        self._good = 0 if overflowed else self._good + steps
        if overflowed:
            self.value = max(1.0, self.value / 2)
        elif self._good >= INTERVAL:
            self.value, self._good = min(MOST, self.value * 2), 0

    # -- named state ------------------------------------------------------------------------------------------------
    def save(self) -> dict[str, Tensor]:
        return {"scale": torch.tensor(self.value), "good": torch.tensor(self._good)}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self.value, self._good = float(saved["scale"]), int(saved["good"])
