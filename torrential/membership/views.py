"""Views: the members that are there, and the server that answers for each range, as all members know them.

    membership ── Roster(view, where everybody is) ──► workers, servers, coordinators    at every death, join and leave

No member stops for it. The next table follows from the last one (server/ring.py): a dead server's ranges go to their
replicas at once; a server that joins is given its share, and filled by the servers that have it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torrential.comm.protocol import SERVERS
from torrential.errors import RunFailed
from torrential.membership import messages as m
from torrential.membership.roll import Member, Roll, Rules
from torrential.server import ring
from torrential.server.messages import Range, View

GATHERED_SECONDS = 1e-3  # those who leave at about the same time are in one view


class Views:
    def __init__(self, roll: Roll, rules: Rules) -> None:
        self._roll, self._rules = roll, rules
        self.view: View | None = None
        self.due: float | None = None  # when the next one is to be published at the latest
        self.began = 0.0
        self._held = False  # nothing is to be published yet
        self._numel = 0  # the size of the key space
        self._bounds: list[int] | None = None  # where it may be cut; None: anywhere
        self._shares: list[int] = []  # where it must be cut
        self._lost_at: dict[int, float] = {}  # by number of a server

    def begin(self, began: float) -> None:
        """The first one: everybody is there."""
        self.began = began
        servers = sorted(server.address for server in self._roll.servers.values())
        cuts = self._bounds, self._shares
        self._publish(ring.begin(servers, self._numel, self._replicas, *cuts) if servers else ())

    def renew(self) -> None:
        """Workers or coordinators have come or gone."""
        if self.view is not None:
            self._publish(self.view.table)

    @contextlib.contextmanager
    def at_once(self, wanted: Callable[[], bool]) -> Iterator[None]:
        """A block in which several come or go: at its end there is one view, if it is still wanted."""
        before, self._held = self.view, True
        try:
            yield
        finally:
            self._held = False
        if self.view is not before and self.view is not None and wanted():
            self._publish(self.view.table)

    def gather(self) -> None:
        """Note that a worker has left: the next view may be delayed a little, so that it serves for all workers that
        leave now."""
        if self.due is None:
            self.due = self._roll.now + GATHERED_SECONDS

    # -- servers --------------------------------------------------------------------------------------------------
    def arrived(self, server: Member, message: m.Ready) -> None:
        self._numel, self._bounds, self._shares = message.numel, message.bounds, message.shares
        if self.view is not None:
            self._publish(ring.join(self.view.table, server.address, self._replicas, self._bounds))
            self._roll.note("server_joined", None, f"{server.name}, {self._since_lost(server)}")

    def filled(self, server: Member, message: m.Filled) -> None:
        """A newcomer has been given what it shall answer for."""
        view = self.view
        if view is None or message.version != view.version or all(r.heir != server.address for r in view.table):
            return
        self._publish(ring.promote(view.table, server.address, self._replicas))
        self._roll.note("server_filled", None, f"{server.name} answers for its ranges, {self._since_lost(server)}")

    def lost(self, server: Member) -> None:
        """A server is dead; its replicas go on."""
        assert self.view is not None
        self._lost_at[server.number] = self._roll.now
        table, address = self.view.table, server.address
        heirs = sorted({r.chain[1] - SERVERS for r in table if r.chain[0] == address and len(r.chain) > 1})
        try:
            self._publish(ring.leave(table, address, self._replicas))
        except RunFailed as error:
            raise RunFailed(f"{error}; {self._rules.going_on()}") from error
        inherited = "; it headed no range" if not heirs else f"; its ranges go to server {', '.join(map(str, heirs))}"
        self._roll.note("server_lost", None, f"{server.name}{inherited}")

    def missing(self, server: Member) -> None:
        """A server has not come up; it may be that it was lost before."""
        self._lost_at.setdefault(server.number, self._roll.now)

    def _since_lost(self, server: Member) -> str:
        return f"{self._roll.now - self._lost_at[server.number]:.2f} s after it was lost"

    # -- all of it ------------------------------------------------------------------------------------------------
    @property
    def _replicas(self) -> int:
        """The number of replicas that was asked for, as far as there are servers for them."""
        asked = self._rules.replicas
        return min(1 if asked is None else asked, len(self._roll.servers) - 1)

    def _publish(self, table: tuple[Range, ...]) -> None:
        self.due = None
        version = 1 if self.view is None else self.view.version + (not self._held)
        workers = sorted(rank for rank, worker in self._roll.workers.items() if not worker.left)
        coordinators = sorted(one.address for one in self._roll.coordinators.values() if not one.left)
        self.view = View(version, tuple(workers), table, tuple(coordinators))
        if self._held:
            return
        everybody = self._roll.everybody()
        roster = m.Roster(self.view, [(e.address, e.contact, e.life) for e in everybody], self.began)
        for member in everybody:
            self._roll.send(member, roster)
