"""Tensors of one size from one member to another through memory that both see: copied once, and read where they lie.

    sender     find a slot that is not read | copy the tensor there, with its type, sizes and number | post it, wake
    receiver   sleep until the number is posted | a tensor in the slot ..... the last of it is gone: the slot is free

Messages are numbered from generation << 32 on, so nothing of an earlier generation is taken for a new one. Each word is
written by one side alone. Where no slot is free the number is posted without a tensor, which then comes as a letter.
"""

from __future__ import annotations

import os
import weakref
from array import array

import torch
from torch import Tensor

from torrential.comm import wire
from torrential.comm.futex import Futex

SPIN_SECONDS = 5e-5
REST_SECONDS = 2e-3
_LINE = 16  # words of two cache lines, which processors fetch together
_ALIGNMENT = 128  # bytes
_TYPES = list(wire.DTYPES.values())
_NUMBERED = {dtype: number for number, dtype in enumerate(_TYPES)}
_MOST_SIZES = _LINE - 2  # beside the type and how many there are


def lane_bytes(slots: int, nbytes: int) -> int:
    """The memory that a lane needs for so many messages of `nbytes` each. What is never used is never touched."""
    return 8 * _data_word(slots) + slots * _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _data_word(slots: int) -> int:
    return _about_word(slots) + slots * _LINE


def _about_word(slots: int) -> int:
    return _LINE + 2 * -(-slots // _LINE) * _LINE


class Lane:
    """One end of a lane; a process has either the sender's or the receiver's."""

    def __init__(self, memory: Tensor, slots: int, nbytes: int) -> None:
        """`memory`: `lane_bytes`, common to both ends, zero at first."""
        self._memory, self._slots, self._nbytes = memory, slots, nbytes
        words = memory[: 8 * _data_word(slots)].view(torch.int64).numpy().data
        self._posted = words[:1]  # the newest number
        self._numbers = words[_LINE : _LINE + slots]  # by slot: of what lies there
        self._freed = words[-(-slots // _LINE) * _LINE + _LINE :][:slots]  # by slot: the newest that is gone
        first = _about_word(slots)
        self._about = [words[at : at + _LINE] for at in range(first, first + slots * _LINE, _LINE)]  # by slot
        self._slot = [
            memory[first : first + nbytes] for first in range(8 * _data_word(slots), memory.numel(), _aligned(nbytes))
        ]
        self._filled = [0] * slots  # by slot: the number that this end has put there
        self._futex, self._number = Futex(), 0

    def regroup(self, generation: int) -> None:
        """Forget messages that are under way: their reader has given them up."""
        self._number, self._filled = generation << 32, [0] * self._slots

    def put(self, tensor: Tensor) -> bool:
        """Send a contiguous tensor. False: there is no room, and it is to be sent as a letter."""
        self._number += 1
        free = (slot for slot, number in enumerate(self._filled) if self._freed[slot] >= number)
        slot = next(free, None) if tensor.ndim <= _MOST_SIZES else None
        if slot is not None:
            self._about[slot][: tensor.ndim + 2] = array("l", [_NUMBERED[tensor.dtype], tensor.ndim, *tensor.shape])
            self._slot[slot].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self._numbers[slot] = self._filled[slot] = self._number
        self._posted[0] = self._number
        self._futex.wake(self._memory.data_ptr())
        return slot is not None

    def expect(self) -> int:
        """The number of the next message to come."""
        self._number += 1
        return self._number

    def posted(self, number: int) -> bool:
        return self._posted[0] >= number

    def take(self, number: int) -> Tensor | None:
        """A message that was posted, where it lies, of the type and sizes that were sent; the slot is the receiver's as
        long as the tensor is referenced. None: the message comes as a letter."""
        numbers = self._numbers.tolist()
        if number not in numbers:
            return None
        slot = numbers.index(number)
        place = self._slot[slot].numpy()  # a view that is gone when the last tensor in it is
        weakref.finalize(place, self._free, slot, number).atexit = False
        kind, count, *sizes = self._about[slot].tolist()
        return torch.from_numpy(place).view(_TYPES[kind]).view(sizes[:count])

    def _free(self, slot: int, number: int) -> None:
        self._freed[slot] = max(number, self._freed[slot])

    def pause(self, number: int, waited: float) -> None:
        """Sleep until something is posted, for a moment at most, if this number is not."""
        seen = self._posted[0]
        if waited < SPIN_SECONDS:
            os.sched_yield()
        elif seen < number:
            self._futex.wait(self._memory.data_ptr(), seen & 0xFFFFFFFF, REST_SECONDS)
