"""The view that all roles of a served strategy share: who is there, and who answers for what (server/ring.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torrential.comm.protocol import SERVERS
from torrential.config import RunConfig
from torrential.server import ring
from torrential.server.messages import Range, View
from torrential.worlds.sim.group import Group
from torrential.worlds.sim.mail import Hub

GATHERED_SECONDS = 1e-3


class Views:
    def __init__(
        self,
        hub: Hub,
        group: Group,
        config: RunConfig,
        numel: int,
        bounds: Sequence[int] | None,
        event: Callable[[str, int | None, str], None],
    ) -> None:
        self._hub, self._group, self._config, self._bounds, self._event = hub, group, config, bounds, event
        self._here = set(range(config.servers))
        self._due = False  # whether workers have changed since the last view
        group.changed = self.workers_changed
        servers = [SERVERS + number for number in range(config.servers)]
        self.view = View(1, tuple(range(config.workers)), ring.begin(servers, numel, self._replicas, bounds))

    def workers_changed(self, joined: bool) -> None:
        """That some have left is said once for those who leave at about the same time: nobody waits for this word."""
        if joined:
            self._renew(self.view.table)
        elif not self._due:
            self._due = True
            self._hub.kernel.after(GATHERED_SECONDS, self._say)

    def _say(self) -> None:
        if self._due:
            self._renew(self.view.table)

    def lose(self, number: int) -> None:
        self._here.discard(number)
        self._renew(ring.leave(self.view.table, SERVERS + number, self._replicas))
        self._event("server_lost", None, f"server {number}")

    def join(self, number: int) -> None:
        self._here.add(number)
        self._renew(ring.join(self.view.table, SERVERS + number, self._replicas, self._bounds))
        self._event("server_joined", None, f"server {number}")

    def filled(self, number: int, version: int) -> None:
        """A newcomer has been given what it shall answer for."""
        address = SERVERS + number
        if version == self.view.version and any(r.heir == address for r in self.view.table):
            self._renew(ring.promote(self.view.table, address, self._replicas))
            self._event("server_filled", None, f"server {number} answers for its ranges")

    @property
    def _replicas(self) -> int:
        asked = self._config.settings.replicas
        return min(1 if asked is None else asked, len(self._here) - 1)

    def _renew(self, table: tuple[Range, ...]) -> None:
        self._due = False
        workers = tuple(sorted(set(self._group.here) - self._group.left))
        self.view = View(self.view.version + 1, workers, table)
        self._hub.announce(self.view)
