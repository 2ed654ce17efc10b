"""Which of the roles is hung, where there are servers: not always the one that somebody waits for.

    worker ── Suspect(server) ──► supervisor ── Ping ──► server         a request was not answered for `timeout` seconds
    server ── Pong(waits for) ──► supervisor ── Ping ──► those of them that have been silent for as long
    worker ── Pong ─────────────► supervisor                            it waits for somebody itself

A Ping is answered from where a role works: by a server between two letters, by a worker that waits. Whoever does not
answer within a moment is hung: it is named and ended, and the view goes on without it. A worker that has been computing
for longer than `timeout` while others wait for it is taken for hung, as it is by collectives; one that waits for the
observer is not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from torrential.comm.protocol import SERVERS
from torrential.worlds.local import messages as m
from torrential.worlds.local.crew import Member

GRACE_SECONDS = 2.0


class Doubts:
    def __init__(
        self,
        timeout: float,
        workers: Mapping[int, Member],
        servers: Mapping[int, Member],
        event: Callable[[str, int | None, str], None],
    ) -> None:
        """Of the workers and servers that are there, as the supervisor knows them."""
        self._timeout, self._grace = timeout, min(GRACE_SECONDS, timeout)
        self._workers, self._servers, self._event = workers, servers, event
        self._pinged: dict[tuple[str, int, int], tuple[Member, float, str]] = {}  # since when, and why
        self._complained: dict[int, float] = {}  # by worker: when it last did
        self._stuck: float | None = None  # since when all workers complain

    def suspect(self, worker: Member, message: m.Suspect) -> None:
        self._complained[worker.rank] = time.monotonic()
        accused = self._find(message.rank)
        if accused is not None:
            self._ping(accused, f"{worker.name} waited {message.seconds:.0f} s for it")

    def pong(self, member: Member, message: m.Pong, _: list[Tensor]) -> None:
        self._pinged.pop(_key(member), None)
        for address, silent in message.waits:
            accused = self._find(address)
            if accused is not None and accused is not member and silent >= self._timeout:
                self._ping(accused, f"{member.name} waited {silent:.0f} s for it")

    def look(self, busy: list[Member], awaited: list[Member]) -> bool:
        """`busy`: workers that are not finished; `awaited`: those of them that others, who are, wait for. True if all
        wait for servers, and have done so for longer than it takes to find out who is hung."""
        now = time.monotonic()
        for worker in awaited:
            if now - worker.heard > self._timeout:
                self._ping(worker, f"the others are finished, and it has been silent for {now - worker.heard:.0f} s")
        for member, since, why in list(self._pinged.values()):
            gone = self._find(member.rank + (SERVERS if member.role == "server" else 0)) is not member
            if gone or member.delayed:
                del self._pinged[_key(member)]
            elif now - since > self._grace:
                del self._pinged[_key(member)]
                self._stuck = None
                server = member.role == "server"
                said = f"{member.name}: {why}; ended" if server else f"{why}; ended"
                self._event("server_hung" if server else "worker_hung", None if server else member.rank, said)
                member.kill()
        if not busy or any(now - self._complained.get(w.rank, -math.inf) > self._timeout for w in busy):
            self._stuck = None
        elif self._stuck is None:
            self._stuck = now
        return self._stuck is not None and now - self._stuck > self._timeout + self._grace

    def _ping(self, member: Member, why: str) -> None:
        if not member.delayed and _key(member) not in self._pinged:
            self._pinged[_key(member)] = member, time.monotonic(), why
            member.send(m.Ping())

    def _find(self, address: int) -> Member | None:
        return self._servers.get(address - SERVERS) if address >= SERVERS else self._workers.get(address)


def _key(member: Member) -> tuple[str, int, int]:
    return member.role, member.rank, member.life
