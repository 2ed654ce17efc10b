"""Tensors by tag between members of one generation; those of real processes are letters (comm/post.py).

    member 1   send(2, "gradient", [tensor]) ──►   member 2   expect(1, "gradient", [into]); arrived?; take

What was expected before it came lies where it was expected, without a copy. Letters of an earlier generation are thrown
away, and what is coming in while generations change lands in memory of its own: nothing of the old can reach the new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from torrential.comm.outbox import Outgoing
from torrential.comm.post import Post

Key = tuple[int, int, str]  # source, generation, tag


class Channel(Protocol):
    """Messages by tag between members of one generation."""

    lands: bool
    """Whether what comes may land where it was expected; else `expect` is of no use."""

    def send(self, to: int, tag: str, tensors: Sequence[Tensor]) -> Outgoing:
        """Start to send tensors to another member. What is for one that is gone is lost without a word."""

    def expect(self, source: int, tag: str, into: Sequence[Tensor]) -> None:
        """Say where a message shall land, if it has not begun to arrive."""

    def arrived(self, source: int, tag: str) -> bool: ...

    def take(self, source: int, tag: str) -> list[Tensor]:
        """A message that has arrived: in the tensors it was expected in, or in others if it was too early."""

    def poll(self) -> None:
        """Read what has come."""

    def pause(self, seconds: float) -> None:
        """Sleep until something has arrived or left, for so many seconds at most."""


class TensorLetter(msgspec.Struct, frozen=True, tag=True):
    """A letter whose tensors one member has sent another."""

    generation: int
    name: str  # its tag


class PostChannel:
    """Implements Channel."""

    lands = True

    def __init__(self, post: Post) -> None:
        self._post = post
        self.generation = 0
        self._arrived: dict[Key, list[Tensor]] = {}
        self._expected: dict[Key, Sequence[Tensor]] = {}  # until it is taken
        post.route(TensorLetter, self._deliver, self._landing)

    def regroup(self, generation: int) -> None:
        self._post.divert()
        self.generation = generation
        self._expected.clear()
        self._arrived = {key: tensors for key, tensors in self._arrived.items() if key[1] >= generation}

    def read_meanwhile(self) -> None:
        """Let a thread read what is expected while its owner computes, until the owner reads again."""
        if self._expected:
            self._post.read_meanwhile()

    def send(self, to: int, tag: str, tensors: Sequence[Tensor]) -> Outgoing:
        return self._post.post(to, TensorLetter(self.generation, tag), tensors, by_reference=False)

    def expect(self, source: int, tag: str, into: Sequence[Tensor]) -> None:
        self._expected[source, self.generation, tag] = into

    def arrived(self, source: int, tag: str) -> bool:
        return (source, self.generation, tag) in self._arrived

    def take(self, source: int, tag: str) -> list[Tensor]:
        key = source, self.generation, tag
        self._expected.pop(key, None)
        return self._arrived.pop(key)

    def poll(self) -> None:
        self._post.poll()

    def pause(self, seconds: float) -> None:
        self._post.pause(seconds)

    # -- called by whoever reads ------------------------------------------------------------------------------------
    def _landing(self, source: int, letter: TensorLetter) -> Sequence[Tensor] | None:
        key = source, letter.generation, letter.name
        return None if key in self._arrived else self._expected.get(key)

    def _deliver(self, source: int, letter: TensorLetter, tensors: list[Tensor]) -> None:
        if letter.generation >= self.generation:
            self._arrived[source, letter.generation, letter.name] = tensors
