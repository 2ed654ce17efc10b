"""The agent of a host: it begins and ends the processes there, and keeps what they share. It needs no torch.

    supervisor ── Begin, End ──► agent ── Spawn, End ──► nursery ──► roles
    supervisor ◄── Born, Ended ─ agent ◄── BufferWanted ── roles

It knows nothing of training: which roles are on its host is for the supervisor to say, what becomes of a death for the
membership. The agent of the supervisor's own host is an object in the supervisor's process.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from torrential.comm import stream
from torrential.comm.protocol import address_of
from torrential.errors import RunFailed
from torrential.worlds.local.orders import (
    Begin,
    Born,
    End,
    Ended,
    FromNursery,
    Spawn,
    Surroundings,
    ToNursery,
    ending,
)
from torrential.worlds.local.registry import Registry, RegistryService

JOB = "job"  # the role of a process that makes the job, and has ended before others begin


class Host(Protocol):
    """A host, as the supervisor deals with it; by its agent, wherever that is."""

    number: int
    name: str

    def begin(self, order: Begin) -> None: ...

    def end(self, order: End) -> None: ...

    def close(self, problem: str) -> None:
        """The run is over; it failed with a `problem`, unless that is ""."""


class HostAgent:
    """Implements Host for the host that it is on."""

    def __init__(
        self,
        nursery: socket.socket,
        around: Surroundings,
        report: Callable[[Born | Ended | None], None],
    ) -> None:
        """`report` is told of the processes, in a thread of the agent's; None: the nursery is gone."""
        self.number, self.name = 0, "host 0"
        self._nursery: stream.Plain[ToNursery | FromNursery] = stream.Plain(nursery, FromNursery)
        self._registry = Registry()
        where = f"unix:@torrential-{secrets.token_hex(8)}"
        self._service = RegistryService(self._registry, where, around.secret)
        self._around = msgspec.structs.replace(around, memory=self._service.address)
        self._report = report
        threading.Thread(target=self._watch_nursery, daemon=True).start()

    def begin(self, order: Begin) -> None:
        address = address_of(order.role, order.rank)
        self._registry.forget(ending(address, order.life - 2))  # the last may still be read
        place = order.seat, order.beside
        self._order(Spawn(order.role, order.rank, order.life, self._around, order.loaders, *place, order.identity))

    def end(self, order: End) -> None:
        self._order(order)

    def make_job(self) -> None:
        """Begin the process that makes the job of what lies in the parcel's place (worlds/hosts/loading.py)."""
        self._order(Spawn(JOB, 0, 0, self._around))

    def _order(self, order: ToNursery) -> None:
        try:
            self._nursery.send(order)
        except stream.Closed as error:
            raise RunFailed("the process that starts workers is gone; run again, or go on with --resume") from error

    def _watch_nursery(self) -> None:
        with contextlib.suppress(stream.Closed, stream.WireError):
            while True:
                message = self._nursery.receive()
                assert isinstance(message, Born | Ended)
                self._report(message)
        self._report(None)

    def close(self, problem: str = "") -> None:
        self._service.close()
        self._registry.close()
