"""Who takes part, and how the survivors come together again.

For collectives a change of members is a new generation, agreed on in two rounds, as by the supervisor of real
processes: all stop; each says how many steps it has taken; those behind take the state of whoever is furthest.
For strategies with servers it is a new view (worlds/sim/views.py), which interrupts nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torrential.comm.protocol import Standing
from torrential.errors import RunFailed
from torrential.worlds.sim.mail import Hub

if TYPE_CHECKING:
    from torrential.worlds.sim.comm import SimComm


class Group:
    """Of the workers."""

    def __init__(self, hub: Hub, served: bool) -> None:
        self._hub, self._served = hub, served
        self.here: dict[int, SimComm] = {}
        self.left: set[int] = set()
        self.generation = 0
        self.regrouped: Callable[[tuple[int, ...]], None] = lambda members: None
        self.changed: Callable[[bool], None] = lambda joined: None  # for servers: workers have come or gone
        self._stopped: dict[int, int] = {}
        self._standing: dict[int, int] = {}
        self._met = 0  # the last generation that was agreed on
        self._steps = -1  # that the furthest had taken then
        self._able: set[int] = set()  # to do the last thing
        self._asked: int | None = None
        self.dismissed = False

    def join(self, *comms: SimComm) -> None:
        for comm in comms:
            self.here[comm.rank] = comm
        self._change(joined=True)

    def lose(self, rank: int) -> None:
        del self.here[rank]
        self.left.discard(rank)
        if not self.here:
            raise RunFailed("all workers are gone; there is nobody to go on")
        self._change(joined=False)
        self._dismiss_if_all_left()

    def _change(self, joined: bool) -> None:
        if self._served:
            return self.changed(joined)
        self.generation += 1
        self._stopped, self._standing = {}, {}
        self.left.clear()
        self._wake()

    def _wake(self) -> None:
        for comm in self.here.values():
            comm.messenger.tell()

    # -- a meeting ------------------------------------------------------------------------------------------------
    def meet(self, comm: SimComm, stand: Callable[[], int]) -> Standing:
        comm.until(lambda: self.generation > comm.generation)
        while True:
            generation = self.generation
            self._round_trip(comm)
            if self._all_have(comm, generation, self._stopped, 0):
                applied = stand()
                self._round_trip(comm)
                if self._all_have(comm, generation, self._standing, applied):
                    return self._agree()

    def _all_have(self, comm: SimComm, generation: int, said: dict[int, int], word: int) -> bool:
        """Say something, and wait until all have said it; False if members have changed by then."""
        if self.generation == generation:
            said[comm.rank] = word
            self._wake()
            comm.until(lambda: self.generation > generation or said.keys() >= self.here.keys())
        return self.generation == generation

    def _round_trip(self, comm: SimComm) -> None:
        comm.sleep(2 * self._hub.cluster.network.latency)

    def _agree(self) -> Standing:
        members = tuple(sorted(self.here))
        furthest = max(self._standing.values())
        if furthest < 0 <= self._steps:
            raise RunFailed("every worker that had the parameters is gone; nothing is left to go on with")
        source = min(r for r in members if self._standing[r] == furthest)
        behind = tuple(r for r in members if self._standing[r] < furthest or (furthest < 0 and r != source))
        if self._met < self.generation:
            self._met = self.generation
            self._steps = furthest
            self.regrouped(members)
        return Standing(self.generation, members, source, furthest, behind)

    # -- the end --------------------------------------------------------------------------------------------------
    def leave(self, comm: SimComm, last: Callable[[], None] | None = None) -> None:
        self.left.add(comm.rank)
        if last is not None:
            self._able.add(comm.rank)
        if self._served:
            self.changed(False)
        self._dismiss_if_all_left()
        generation = self.generation
        comm.until(lambda: self.dismissed or self.generation > generation or self._asked == comm.rank)
        if self._asked == comm.rank and last is not None:
            last()
            self._able.clear()
            self._dismiss_if_all_left()
            comm.until(lambda: self.dismissed)
        if not self.dismissed:
            comm.check()

    def _dismiss_if_all_left(self) -> None:
        """But first one of them does the last thing that is to be done."""
        if self.left >= set(self.here):
            self._asked = min(self._able & self.left, default=None)
            self.dismissed = self._asked is None
            self._wake()
