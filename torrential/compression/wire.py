"""The precision in which gradients are sent."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wire_dtype(wire: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a gradient of this dtype is sent: one that is no larger."""
    found = _DTYPES.get(wire, dtype)
    return found if dtype.is_floating_point and found.itemsize < dtype.itemsize else dtype


def rounded(values: Tensor, wire: torch.dtype) -> Tensor:
    """Values as they arrive: in the precision of the wire, and no larger than it knows."""
    if wire == values.dtype:
        return values
    most = torch.finfo(wire).max
    return values.clamp(-most, most).to(wire).to(values.dtype)
