"""The supervisor's servers, and the view that all roles share: who is there, and who answers for what.

    supervisor ── Roster(view, where everybody is) ──► workers, servers     at the start, at every death and join

Nobody stops for it. The next table follows from the last one (server/ring.py): a dead server's ranges go to their
replicas at once; a server that joins is given its share, and filled by those who have it. When all workers have left,
one of them is asked for the last snapshot: nobody is there any more who could be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from torrential.comm.protocol import SERVERS
from torrential.config import RunConfig
from torrential.errors import RunFailed, WorkerFailed
from torrential.server import ring
from torrential.server.messages import Range, View
from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Crew, Member
from torrential.worlds.local.doubts import Doubts
from torrential.worlds.local.mail import address_of, ending
from torrential.worlds.local.registry import Registry

FAILED_STARTS = 3
LIVES = 100


class Servers:
    def __init__(
        self,
        config: RunConfig,
        crew: Crew,
        registry: Registry,
        workers: Mapping[int, Member],  # those that are there, as the supervisor knows them
        event: Callable[[str, int | None, str], None],
        remedy: str,
    ) -> None:
        self._config, self._crew, self._registry, self._workers, self._event = config, crew, registry, workers, event
        self._remedy = remedy
        self._here: dict[int, Member] = {}
        self._doubts = Doubts(config.settings.timeout, workers, self._here, event)
        self.suspect, self.pong = self._doubts.suspect, self._doubts.pong
        self._finisher: Member | None = None  # who was asked for the last snapshot
        self._starting: dict[int, Member] = {}
        self._failed_starts = 0
        self._lost_at: dict[int, float] = {}
        self._view: View | None = None
        self._began = 0.0
        self._numel = 0  # of the key space
        self._bounds: list[int] | None = None  # where it may be cut; None: anywhere

    @property
    def complete(self) -> bool:
        return len(self._here) == self._config.servers

    def start(self) -> None:
        for number in range(self._config.servers):
            self._spawn(number, 0)

    def begin(self, began: float, step: int) -> None:
        """Everybody is there."""
        self._began = began
        servers = sorted(address_of(s.role, s.rank) for s in self._here.values())
        self._renew(ring.begin(servers, self._numel, self._replicas, self._bounds))
        for worker in self._workers.values():
            self.let_go(worker, step)

    def let_go(self, worker: Member, step: int) -> None:
        members = sorted(self._workers)
        worker.send(m.Go(1, members, [], [], members[0], step, [], self._began, ""))

    def workers_changed(self) -> None:
        if self._view is not None:
            self._renew(self._view.table)

    def look(self) -> None:
        """Whether somebody is hung."""
        busy = [w for w in self._workers.values() if not w.left or w is self._finisher]
        some_wait = any(w.left for w in self._workers.values())
        if self._doubts.look(busy, busy if some_wait else []):
            raise RunFailed(f"all workers wait for servers, though none of them is hung; {self._remedy}")

    # -- the end --------------------------------------------------------------------------------------------------
    def left(self, worker: Member, message: m.Left) -> None:
        worker.left, worker.last = True, message.last
        if worker is self._finisher:
            self._finisher = None
            for other in self._workers.values():
                other.last = False
        else:
            self.workers_changed()  # nobody is to wait for it

    def last_word(self) -> bool:
        """All workers have left: whether the last snapshot is given, too. If not, one of them is asked for it."""
        able = sorted(rank for rank, worker in self._workers.items() if worker.last)
        if able and (self._finisher is None or self._workers.get(self._finisher.rank) is not self._finisher):
            self._finisher = self._workers[able[0]]
            self._finisher.send(m.Finish())
        return not able

    def dismiss(self) -> None:
        for server in self._here.values():
            server.send(m.Dismissed())

    def here(self) -> list[Member]:
        return list(self._here.values())

    def starting(self) -> list[Member]:
        return list(self._starting.values())

    # -- comings and goings ---------------------------------------------------------------------------------------
    def ready(self, server: Member, message: m.Ready) -> None:
        if self._starting.get(server.rank) is not server:
            return
        self._here[server.rank] = self._starting.pop(server.rank)
        self._numel, self._bounds = message.numel, message.bounds
        self._failed_starts = 0
        if self._view is not None:
            self._renew(ring.join(self._view.table, SERVERS + server.rank, self._replicas, self._bounds))
            self._event("server_joined", None, f"{server.name}, {self._since_lost(server)}")

    def filled(self, server: Member, message: m.Filled, _: list[Tensor]) -> None:
        """A newcomer has been given what it shall answer for."""
        address, view = SERVERS + server.rank, self._view
        if view is None or message.version != view.version or all(r.heir != address for r in view.table):
            return
        self._renew(ring.promote(view.table, address, self._replicas))
        self._event("server_filled", None, f"{server.name} answers for its ranges, {self._since_lost(server)}")

    def _since_lost(self, server: Member) -> str:
        return f"{time.monotonic() - self._lost_at[server.rank]:.2f} s after it was lost"

    def gone(self, server: Member, how: str = "") -> None:
        if self._starting.get(server.rank) is server:
            return self._did_not_start(server, how)
        if self._here.get(server.rank) is not server:
            return
        del self._here[server.rank]
        self._lost_at[server.rank] = time.monotonic()
        if self._view is None:
            return self._did_not_start(server, how)
        address = SERVERS + server.rank
        heirs = sorted({r.chain[1] - SERVERS for r in self._view.table if r.chain[0] == address and len(r.chain) > 1})
        try:
            self._renew(ring.leave(self._view.table, address, self._replicas))
        except RunFailed as error:
            raise RunFailed(f"{error}; {self._remedy}") from error
        inherited = "; it headed no range" if not heirs else f"; its ranges go to server {', '.join(map(str, heirs))}"
        self._event("server_lost", None, f"{server.name}{inherited}")
        self._replace(server)

    def _did_not_start(self, server: Member, how: str) -> None:
        self._starting.pop(server.rank, None)
        self._failed_starts += 1
        self._lost_at.setdefault(server.rank, time.monotonic())
        self._event("server_lost", None, f"{server.name}, while starting {how}".rstrip())
        if self._failed_starts < FAILED_STARTS:
            self._spawn(server.rank, server.life + 1)
        elif self._view is None:
            raise WorkerFailed(f"{server.name} ended while starting {how}".rstrip())

    def _replace(self, server: Member) -> None:
        if self._config.local.restart_servers and server.life < LIVES:
            self._spawn(server.rank, server.life + 1)

    def _spawn(self, number: int, life: int) -> None:
        self._starting[number] = self._crew.spawn("server", number, life)
        self._registry.forget(ending(SERVERS + number, life - 2))  # the last one's may still be read

    # -- the view -------------------------------------------------------------------------------------------------
    @property
    def _replicas(self) -> int:
        """As many as were asked for, while there are servers for them."""
        asked = self._config.settings.replicas
        return min(1 if asked is None else asked, len(self._here) - 1)

    def _renew(self, table: tuple[Range, ...]) -> None:
        version = 1 if self._view is None else self._view.version + 1
        present = sorted(rank for rank, worker in self._workers.items() if not worker.left)
        self._view = View(version, tuple(present), table)
        everybody = [*self._workers.values(), *self._here.values()]
        contacts = [(address_of(e.role, e.rank), e.letters, e.life) for e in everybody]
        for member in everybody:
            member.send(m.Roster(self._view, contacts, self._began))
