"""Reads a stream by position, as if it could be indexed.

    stream      0 1 2 3 4 5 6 7 8 9 ...        every process reads all of it, in its own order
    this one        2 3     6 7                and keeps what is asked for

Processes need no agreement on who reads what, and no sample is used twice when workers come or go. The cost: each
process reads the whole stream up to its place, and goes back to the beginning when an earlier sample is asked for (a
dead worker's). Each epoch begins it anew; `set_epoch` is called before, where it has that. What is random in it is
drawn from generators of its own, which are seeded at its beginning, so that all processes read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torrential.errors import BadInput
from torrential.randomness import CPU, STREAM, SeparateDraws, seed_all
from torrential.usercode import calling

_END = object()


class StreamReader:
    """The samples of a stream of `samples`, by position. `window`: so many neighbours are held together, since they may
    be asked for in any order (a shuffle buffer)."""

    def __init__(
        self,
        dataset: Any,
        samples: int,
        window: int,
        seed: int,
        name: str,
        whose: str = "the task",
        said: str = "say samples={}",
    ) -> None:
        """`name` and `whose` are for messages ("the task's training data"), as is `said`: how a number of samples is
        given."""
        self._dataset, self._samples, self._window, self._seed, self._name = dataset, samples, window, seed, name
        self._whose, self._said = whose, said
        self._epoch = -1
        self._place = 0  # samples read so far
        self._held: list[Any] = []  # the window that ends there
        self._items: Iterator[Any] = iter(())
        self._draws = SeparateDraws()

    def read(self, positions: Sequence[int], epoch: int) -> list[Any]:
        """The samples at these positions of an epoch; quick where they lie behind those that were read last."""
        with self._draws, calling(self._name, whose=self._whose):
            return [self._item(position, epoch) for position in positions]

    def _item(self, position: int, epoch: int) -> Any:
        window = position // self._window * self._window
        if epoch != self._epoch or window < self._place - len(self._held):
            self._begin(epoch)
        while self._place <= position:
            self._read_window(keep=window <= self._place)
        return self._held[position - window]

    def _begin(self, epoch: int) -> None:
        self._epoch, self._place, self._held = epoch, 0, []
        seed_all(CPU, self._seed, STREAM, epoch)
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        self._items = iter(self._dataset)
        if self._items is self._dataset:
            kind = type(self._dataset).__name__
            raise BadInput(f"{kind} cannot be read again (its __iter__ returns itself); let __iter__ begin anew")

    def _read_window(self, keep: bool) -> None:
        held: list[Any] = []
        for _ in range(min(self._window, self._samples - self._place)):
            item = next(self._items, _END)
            if item is _END:
                found = self._place + len(held)
                raise BadInput(
                    f"the stream of {self._whose}'s {self._name} ended after {found} samples of epoch {self._epoch} "
                    f"(samples: {self._samples}); {self._said.format(found)}, or let it go on"
                )
            held.append(item if keep else None)
        self._place += len(held)
        self._held = held
