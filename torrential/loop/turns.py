"""The script and the strategy's program take turns in one thread, each as plain blocking code.

    script    ask(wish) ──────►        the program goes on until the wish is granted, and then wants another
    program   awaited() ◄──────        the script goes on until it has a wish
              grant(answer)            from the next `awaited` on the script has its answer

The script is the main greenlet, and the program another (as roles are in worlds/sim/kernel.py). What the program raises
is raised in the script, where it asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greenlet import getcurrent, greenlet


@dataclass(frozen=True)
class NextBatch:
    """The script wants its next batch, of this epoch if it says so."""

    epoch: int


@dataclass(frozen=True)
class BeginPass:
    """The script begins to iterate over its loader, for batches of this epoch."""

    epoch: int
    unused: bool  # whether the pass before has trained on nothing, and its batches are given again
    broken: bool  # whether the pass before has trained, and was left before its epoch was over


@dataclass(frozen=True)
class TakeStep:
    """The script has called step() of one of its optimizers."""

    optimizer: int


@dataclass(frozen=True)
class Place:
    """The script wants to know the epoch that it is in."""


@dataclass(frozen=True)
class AtEnd:
    """The script has come to its end."""

    epoch: int  # earlier ones are over for it, though samples may be left


Wish = BeginPass | NextBatch | TakeStep | Place | AtEnd


class Turns:
    def __init__(self, program: Callable[[], None]) -> None:
        self._script = getcurrent()
        self._program = greenlet(program)
        self._failure: BaseException | None = None
        self._answer: Any = None
        self.wish: Wish | None = None  # what the script waits for

    # -- the script's side ----------------------------------------------------------------------------------------
    def ask(self, wish: Wish) -> Any:
        """Let the program go on until it has granted the wish; what the program raises is raised here, and at every
        later call."""
        if self._failure is not None:
            raise self._failure
        if self._program.dead:
            return None
        self.wish, self._answer = wish, None
        try:
            self._program.switch()
        except BaseException as error:
            self._failure = error
            raise
        return self._answer

    # -- the program's side ---------------------------------------------------------------------------------------
    def awaited(self) -> Wish:
        """The script's wish; if it has none, it goes on until it has."""
        while self.wish is None:
            self._script.switch()
        return self.wish

    def grant(self, answer: Any = None) -> None:
        self._answer, self.wish = answer, None
