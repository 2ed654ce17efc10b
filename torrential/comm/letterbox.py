"""Messages by tag between members that otherwise share memory: each is a letter (comm/post.py).

Letters are read where somebody waits for one. Those that are for others than this box are kept for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor

from torrential.comm.outbox import Outgoing
from torrential.comm.post import Post


class TensorLetter(msgspec.Struct, frozen=True, tag=True):
    """A letter whose tensors one member has sent another."""

    generation: int
    name: str  # its tag


class LetterBox:
    """Implements comm.points.Channel."""

    def __init__(self, post: Post, read: Callable[[float], None]) -> None:
        """`read` waits for a letter for so many seconds, and hands parcels to `deliver`."""
        self._post, self._read = post, read
        self.generation = 0
        self._arrived: dict[tuple[int, int, str], list[Tensor]] = {}

    def regroup(self, generation: int) -> None:
        self.generation = generation
        for key in [key for key in self._arrived if key[1] < generation]:
            del self._arrived[key]

    def deliver(self, source: int, parcel: TensorLetter, tensors: list[Tensor]) -> None:
        if parcel.generation >= self.generation:
            self._arrived[source, parcel.generation, parcel.name] = tensors

    def send(self, to: int, tag: str, tensors: Sequence[Tensor]) -> Outgoing:
        # a copy, for a tensor in a registered buffer would be read there, after it may have been changed
        return self._post.post(to, TensorLetter(self.generation, tag), [tensor.clone() for tensor in tensors])

    def arrived(self, source: int, tag: str) -> bool:
        return (source, self.generation, tag) in self._arrived

    def take(self, source: int, tag: str) -> list[Tensor]:
        return self._arrived.pop((source, self.generation, tag))

    def pause(self, seconds: float) -> None:
        self._read(seconds)
