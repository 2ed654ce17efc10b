"""Randomness as a pure function of (seed, purpose, position), so that a step can be redone or resumed exactly.

purpose 0    a new model
purpose 1    training: the epoch, and the place of the batch's first sample in the epoch's order
purpose 2    evaluation: the step
purpose 3    reading training data, random augmentation included: as in training
purpose 4    a stream, from its first sample on: the epoch

Data has numbers of its own, so that it makes no difference which process reads it.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

MODEL, TRAINING, EVALUATION, DATA, STREAM = range(5)
CPU = torch.device("cpu")


def seed_all(device: torch.device, seed: int, *position: int) -> None:
    """Seed every generator that user code may draw from."""
    digest = hashlib.blake2b(repr((seed, position)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little") >> 1
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


class SeparateDraws:
    """A block that draws from generators of its own: each time it goes on where it stopped, and what is drawn outside
    is not disturbed. Generators of GPUs are left alone."""

    def __init__(self) -> None:
        self._own = self._outside = _states()

    def __enter__(self) -> None:
        self._outside = _states()
        _restore(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _states()
        _restore(self._outside)


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
