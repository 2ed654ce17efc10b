"""Progressive resizing: small images while training is young, larger ones later.

    Resize.parse("0:0.5,0.6:1")    from the start at half size, from 60 % of training at full size

Cheaper by the square of the scale, for networks that take images of any size. Targets stay as they are.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from torrential.errors import BadInput

_TRY = "try 0:0.5,0.6:1"


@dataclass(frozen=True)
class Resize:
    stages: list[tuple[float, float]]
    """(from which part of training, scale), in order; the first from 0."""

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        if not starts or starts[0] != 0:
            raise BadInput(f"the first stage of resizing must begin at 0 (got {self}); {_TRY}")
        if not all(a < b < 1 for a, b in itertools.pairwise(starts)):
            raise BadInput(f"stages of resizing must begin one after the other, before 1 (got {self}); {_TRY}")
        if not all(0 < scale <= 1 for _, scale in self.stages):
            raise BadInput(f"scales of resizing must be above 0 and at most 1 (got {self}); {_TRY}")

    @classmethod
    def parse(cls, text: str) -> Resize:
        try:
            pairs = [tuple(map(float, stage.split(":"))) for stage in text.split(",")]
            stages = [(start, scale) for start, scale in pairs]
        except ValueError:
            raise BadInput(f"resizing is a list of start:scale (got {text!r}); {_TRY}") from None
        return cls(stages)

    def __str__(self) -> str:
        return ",".join(f"{start:g}:{scale:g}" for start, scale in self.stages)

    def at(self, progress: float) -> float:
        """The scale when this part of training, 0 to 1, is done."""
        starts = [start for start, _ in self.stages]
        return self.stages[max(0, bisect.bisect_right(starts, progress) - 1)][1]

    @staticmethod
    def apply(inputs: Any, scale: float) -> Tensor:
        """Images (N, C, H, W) with sides `scale` times as long, bilinear and antialiased; at 1 the very same tensor."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 4:
            got = f"shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
            raise BadInput(f"only images (N, C, H, W) can be resized (got {got}); leave resizing out")
        if scale == 1:
            return inputs
        full = inputs.shape[2:]
        sides = [round(side * scale) for side in full]
        if not all(sides):
            raise BadInput(
                f"resizing would leave nothing of images of {full[0]} × {full[1]} (scale: {scale:g}); "
                f"use scales of at least {1 / min(full):.2g}"
            )
        if inputs.is_floating_point():
            return F.interpolate(inputs, sides, mode="bilinear", antialias=True)
        return F.interpolate(inputs.float(), sides, mode="bilinear", antialias=True).round().to(inputs.dtype)
