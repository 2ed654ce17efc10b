"""Every element in a byte: blocks of elements share a scale, and what rounding takes off stays behind.

    scale = max |v| / 127 ;  q = round(v / scale) ;  v is about q scale           for every 1,024 elements

Rounding is to the nearest, so the same numbers come out everywhere; what it takes off is added to the next gradient
(Seide et al. 2014, "1-bit SGD", the first with error feedback).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024  # elements that share a scale
LEVELS = 127


def message_bytes(numel: int) -> int:
    """The bytes of a message about so many elements: a byte for each, and four for each block."""
    return numel + 4 * -(-numel // BLOCK)


def encode(values: Tensor) -> Tensor:
    """A message about a flat vector, on the host."""
    numel = values.numel()
    blocks = torch.nn.functional.pad(values.float(), (0, -numel % BLOCK)).view(-(-numel // BLOCK), BLOCK)
    scales = blocks.abs().amax(1) / LEVELS
    levels = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), levels.view(-1)[:numel].view(torch.uint8)]).cpu()


def decode(message: Tensor, numel: int) -> Tensor:
    """The vector that a message is about, rounded."""
    blocks = -(-numel // BLOCK)
    scales = message[: 4 * blocks].clone().view(torch.float32)
    levels = message[4 * blocks : 4 * blocks + numel].view(torch.int8).float()
    padded = torch.nn.functional.pad(levels, (0, -numel % BLOCK)).view(blocks, BLOCK)
    return (padded * scales[:, None]).view(-1)[:numel]
