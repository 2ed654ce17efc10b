"""Watches backward, and says when a bucket's gradients are complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from torrential.comm.order import InOrder
from torrential.params.layout import Bucket, Layout


def _tell(watch: weakref.ref[BackwardWatch], index: int, _: Tensor) -> None:
    """The hook of a parameter. The garbage collector does not see hooks, so that one which held the watch, and by that
    the parameter, would keep a simulated worker's model until the process ends."""
    if (there := watch()) is not None:
        there._arrived(index)


class BackwardWatch:
    """Announces buckets in one order, in whichever order backward completes them, so that all workers agree on it."""

    def __init__(self, parameters: list[nn.Parameter], layout: Layout, hooks: bool = True) -> None:
        """`hooks`: backward is heard of by itself, not told by `replay`."""
        self._buckets = layout.buckets
        self._home = [b.index for b in layout.buckets for _ in b.entries]  # by entry: its bucket
        self._order: InOrder | None = None
        self._missing: list[int] = []
        self.seen = [False] * len(parameters)  # by entry: whether backward reached it in this step
        self._armed = False
        self._places = {parameter: index for index, parameter in enumerate(parameters)}
        for index, parameter in enumerate(parameters) if hooks else ():
            parameter.register_post_accumulate_grad_hook(partial(_tell, weakref.ref(self), index))

    def begin(self, ready: Callable[[Bucket], None]) -> None:
        self._order = InOrder(lambda place: ready(self._buckets[place]))
        self._missing = [len(b.entries) for b in self._buckets]
        self.seen = [False] * len(self.seen)
        self._armed = False

    def arm(self) -> None:
        """The coming backward is the step's last: announce buckets as they are completed."""
        self._armed = True
        self._pending = [True] * len(self.seen)

    def _arrived(self, index: int) -> None:
        self.seen[index] = True
        if self._armed and self._pending[index]:
            self._pending[index] = False
            bucket = self._home[index]
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                assert self._order is not None
                self._order.ready(bucket)

    def replay(self, early: Sequence[nn.Parameter], last: Sequence[nn.Parameter]) -> None:
        """A backward that was elsewhere: what it reached before its last part, and in that, in order."""
        for parameter in early:
            self._arrived(self._places[parameter])
        self.arm()
        for parameter in last:
            self._arrived(self._places[parameter])
        self.end()

    def end(self) -> None:
        """Backward is over; what it did not reach will not come."""
        assert self._order is not None
        self._order.finish(len(self._buckets))
