"""Parameters that all members of a group hold alike: gradients are summed over the members, and one step taken.

params/shared.py keeps one copy in shared memory, params/replicated.py one with each member; a strategy cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from torrential.comm.protocol import Handle
from torrential.params.base import CommonParameters, StepGuard, Update
from torrential.params.layout import Bucket


class Synchronized:
    """Parameters that all members hold alike, as a strategy uses them: sum gradients, vote, step."""

    def __init__(
        self,
        parameters: CommonParameters,
        reached: Callable[[], Sequence[bool]],
        clip_norm: float | None,
        guard: StepGuard | None = None,
    ) -> None:
        """`guard`: knows of steps that all members leave out."""
        self._parameters, self._reached, self.clip_norm, self._guard = parameters, reached, clip_norm, guard
        self.factor = 1.0  # of the sum: what all members' gradients are still to be multiplied by

    def reduce(self, bucket: Bucket) -> Handle:
        """Start summing a bucket whose gradients are complete on this member."""
        return self._parameters.reduce(bucket)

    def numbers(self) -> list[float]:
        """The numbers of this member's vote, once all sums are here: its part of the squared norm of the summed
        gradient, and which parameters its backward has reached."""
        norm = 0.0 if self.clip_norm is None else self._parameters.square_norm()
        return [norm, *map(float, self._reached())]

    def step(self, rate: float, numbers: Tensor, scale: float = 1.0) -> None:
        """Take the step that was decided by everybody's `numbers`, with the gradient times `scale`; clipping applies to
        the sum."""
        square, *reached = numbers.sum(0).tolist()
        if self._guard is not None and self._guard.skipping:
            return self._parameters.apply(Update(rate, 1.0, (False,) * len(reached)))
        scale *= self.factor
        if self.clip_norm is not None:
            scale = min(scale, self.clip_norm / (math.sqrt(square) + 1e-6))
        self._parameters.apply(Update(rate, scale, tuple(members > 0 for members in reached)))
