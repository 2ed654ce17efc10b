"""Randomness as a pure function of (seed, purpose, position), so that a step can be redone or resumed exactly."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(device: torch.device, seed: int, *position: int) -> None:
    """Seed every generator that user code may draw from."""
    words = np.random.SeedSequence([seed, *position]).generate_state(2, np.uint64)
    value = int(words[0] >> np.uint64(1))
    random.seed(value)
    np.random.seed(int(words[1] & np.uint64(0xFFFFFFFF)))
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
