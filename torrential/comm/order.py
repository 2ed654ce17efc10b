"""One order for all: operations are launched in the order of their places, in whichever order they become ready.

Workers that start the same operations in different orders wait for one another for ever, or add up what does not
belong together. Each becomes ready when it likes; it is launched once all before it have been.

    ready(1)   ready(2)   ready(0) -> launch 0, 1, 2   ready(3) -> launch 3
"""

from __future__ import annotations

from collections.abc import Callable


class InOrder:
    def __init__(self, launch: Callable[[int], None]) -> None:
        self._launch = launch
        self._next = 0
        self._ready: set[int] = set()

    def ready(self, place: int) -> None:
        self._ready.add(place)
        while self._next in self._ready:
            self._ready.remove(self._next)
            self._go()

    def finish(self, count: int) -> None:
        """Launch all of the first `count` that are not launched yet, ready or not."""
        while self._next < count:
            self._go()

    def _go(self) -> None:
        self._launch(self._next)
        self._next += 1
