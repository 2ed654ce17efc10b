"""A sum in a fixed order, independent of which worker adds which part: terms are the leaves of one binary tree.

       0..7                    Terms that are neighbours in the tree are added, wherever they happen to be; the
  0..3       4..7              rest waits. So rounding is the same for one worker and for a hundred, and whoever
0..1 2..3  4..5 6..7           has the terms 0 to 3 sends their sum alone.
0 1  2 3   4 5  6 7
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Block(NamedTuple):
    """A place in the tree: 2 ** level neighbouring terms, as far as there are so many."""

    level: int
    place: int  # among the blocks of that level

    def terms(self, count: int) -> range:
        """The terms below it, of `count` in all."""
        return range(self.place << self.level, min((self.place + 1) << self.level, count))


class OrderedSum(Generic[T]):
    """Some of the terms 0 to `count` - 1, added up as far as the order allows."""

    def __init__(self, count: int, combine: Callable[[T, T], T]) -> None:
        assert count > 0, count
        self._count, self._combine = count, combine
        self.blocks: dict[Block, T] = {}

    def add(self, block: Block, value: T) -> None:
        """Add a term (level 0), or terms that others have added up."""
        level, place = block
        while (1 << level) < self._count:
            sibling = Block(level, place ^ 1)
            if sibling in self.blocks:
                other = self.blocks.pop(sibling)
                value = self._combine(value, other) if place < sibling.place else self._combine(other, value)
            elif sibling.terms(self._count):
                break  # which is not here
            level, place = level + 1, place >> 1
        self.blocks[Block(level, place)] = value

    def terms(self) -> list[int]:
        """The terms that are here."""
        return terms_of(self.blocks, self._count)

    @property
    def total(self) -> T:
        """The sum of all terms, once they are here."""
        ((block, value),) = self.blocks.items()
        assert len(block.terms(self._count)) == self._count
        return value


def terms_of(blocks: Iterable[Block], count: int) -> list[int]:
    """The terms below some places of a tree of `count` terms."""
    return sorted(term for block in blocks for term in block.terms(count))
