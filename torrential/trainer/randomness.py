"""Randomness as a pure function of (seed, purpose, position), so that a step can be redone or resumed exactly.

purpose 0    a new model
purpose 1    training: the epoch, and the place of the batch's first sample in the epoch's order
purpose 2    evaluation: the step
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_all(device: torch.device, seed: int, *position: int) -> None:
    """Seed every generator that user code may draw from."""
    digest = hashlib.blake2b(repr((seed, position)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
