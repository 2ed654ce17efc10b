"""When a worker may read. One object; every off-by-one of staleness is decided here.

    a worker's clock c        it works on its (c+1)-th iteration: it has pushed for clocks 0 .. c-1
    completed clocks          of a worker: how many of its clocks have been applied; of all: the smallest of the workers
                              of the view. The dead do not count; nor does a newcomer before its first word.
    stamp                     a push made at clock c is stamped c
    the read that starts c    waits until completed >= c - s

So a worker that reads at clock c sees every update stamped c-s-1 or less, of all workers (Ho et al. 2013), and perhaps
newer ones; and its own updates, since they were sent to the same server before the read. Workers that are executing
(between the read that starts a clock and the push that ends it) are at most s clocks apart. The numbers of completed
clocks can differ by s + 1 for a moment: the fastest has pushed for clock c and not begun c+1, the slowest is executing
c - s.

    s = 0      bulk synchronous (BSP): a clock's pushes are summed in the order of ranks and applied as one
    s >= 1     stale synchronous (SSP), the bounded delay tau = s of Li et al. 2014: a push is applied as it comes
    s = None   eventual (asynchronous): no worker waits

With `first` = N a clock is complete with its first N pushes and later ones are dropped (backup workers, Chen et al.
2016); `completed` is then the number of such clocks, whichever workers took part.
"""

from __future__ import annotations

from dataclasses import dataclass

from torrential.errors import BadInput

ALWAYS = -(1 << 62)


@dataclass(frozen=True)
class Consistency:
    """When a worker may read, by clocks: `staleness` 0 is bulk synchronous, None asynchronous. With `first` = N a
    clock is complete with its first N pushes."""

    staleness: int | None = 0
    first: int | None = None

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise BadInput(f"staleness counts clocks and cannot be negative (got {self.staleness}); use 0 for BSP")
        if self.first is not None and (self.first < 1 or self.staleness != 0):
            raise BadInput(
                f"the first N gradients make a step only where all of one clock do (first: {self.first}, "
                f"staleness: {self.staleness}); use staleness=0 and at least 1"
            )

    @property
    def aggregates(self) -> bool:
        """Whether the pushes of one clock become one update."""
        return self.staleness == 0

    def needs(self, clock: int) -> int:
        """The number of clocks that must be completed before a read at `clock`."""
        return ALWAYS if self.staleness is None else clock - self.staleness
