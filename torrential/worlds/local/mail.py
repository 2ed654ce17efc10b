"""What every role of this host has: a clock, registered memory, letters. All that a server needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torrential.comm import futex, stream
from torrential.comm.post import Contact, Post
from torrential.comm.protocol import Handle, Letter, Meter, address_of, letter_by_letter
from torrential.comm.tls import Tls
from torrential.config import HostsSettings, LocalSettings
from torrential.server.messages import Message, View
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, SupervisorLink
from torrential.worlds.local.orders import ending

if TYPE_CHECKING:
    from torrential.server.server import Server
    from torrential.worlds.local.orders import Spawn


def open_post(spawn: Spawn) -> Post:
    """The post at which letters for a role arrive, from the moment that others hear of it."""
    around = spawn.around
    beside = around.address.partition("?")[0]  # the supervisor's address, without its challenge
    mine = f"{beside}-{spawn.role}-{spawn.rank}-{spawn.life}"
    where = stream.tcp_address(around.interface, 0) if around.transport == "tcp" else mine
    tls = None if spawn.identity is None else Tls(spawn.identity)
    post = Post(address_of(spawn.role, spawn.rank), spawn.life, where, around.secret, Message, tls)
    post.home = around.memory  # each host has an agent of its own
    return post


def contact_text(post: Post) -> str:
    """How others hear where letters reach a role, and on which host it is."""
    return f"{post.where} {post.home}"


def _is_ping(letter: Letter) -> bool:
    return letter.source < 0 and isinstance(letter.message, m.Ping)


class LocalMail:
    """Implements comm.protocol.Mail."""

    resend: float | None = None
    own_memory = True
    """Whether registered buffers belong to one incarnation. Where workers regroup they belong to the rank: survivors go
    on with what the dead have left there."""

    def __init__(
        self, address: int, link: SupervisorLink, buffers: Buffers, post: Post, settings: LocalSettings
    ) -> None:
        self.address, self._link, self._buffers, self._post = address, link, buffers, post
        self.shares_memory = settings.transport == "shared" and settings.algorithm not in ("native", "nccl")
        self.shares_at_home = self.shares_memory or (isinstance(settings, HostsSettings) and futex.supported())
        self.meter = Meter()
        self.view = View(-1, (), ())
        self._began = time.monotonic()
        self.first: int | None = None  # the version of the first view heard of
        self.lives: dict[int, int] = {}
        self._pinged = False  # asked whether this role gets on
        self._receiving = False
        post.memory = buffers if self.shares_at_home else None
        link.route(self._changed, m.Roster)
        link.route(self._ping, m.Ping)

    def _changed(self, item: tuple[m.Roster, list[Tensor]]) -> None:
        roster, _ = item
        contacts = {}
        for address, text, life in roster.contacts:
            where, _, home = text.partition(" ")
            contacts[address] = Contact(where, life, home)
        self._post.know(contacts)
        for address, _, life in roster.contacts:
            if life > self.lives.setdefault(address, life):
                self._buffers.forget(ending(address, self.lives[address]))
                self.lives[address] = life
        self._began = roster.began + self._link.clock
        self.view = roster.view  # last: whoever reads it knows where these are
        self.first = self.first or roster.view.version
        self._post.announce(roster.view)

    # -- whether it gets on ---------------------------------------------------------------------------------------
    def _ping(self, item: tuple[m.Ping, list[Tensor]]) -> None:
        """Called by the link's thread; the answer comes from where this role works or waits."""
        self._pinged = True
        if self._receiving:
            self._post.announce(item[0])

    def answer_ping(self) -> None:
        if self._pinged:
            self._pinged = False
            self._link.send(m.Pong(self.waits_for()))

    # -- clock and memory ---------------------------------------------------------------------------------------
    def now(self) -> float:
        return time.monotonic() - self._began

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def buffer(
        self, name: str, numel: int, dtype: torch.dtype, *, common: bool = False, rank: int | None = None
    ) -> Tensor:
        assert self.shares_at_home or not common, "there is no common memory here"
        owner = None if common else (self.address if rank is None else rank)
        if self.own_memory and owner == self.address:
            name = f"{name}~{self._post.life}"
        return self._buffers.get(name, numel, dtype, owner)

    # -- letters ------------------------------------------------------------------------------------------------
    def post(self, to: int, message: Any, tensors: Sequence[Tensor] = ()) -> Handle:
        began = time.perf_counter()
        handle = self._post.post(to, message, tensors)
        self.meter.communicate += time.perf_counter() - began
        self.meter.bytes_sent += sum(t.nbytes for t in tensors)
        return handle

    def second_post(self, listen: str, messages: Any) -> Post:
        return self._post.beside(listen, messages)

    def land(self, where: Callable[[Any], Sequence[Tensor] | None]) -> None:
        self._post.landing = where

    def receive(self, timeout: float | None = None) -> Letter | None:
        began = time.perf_counter()
        self._receiving = True
        self.answer_ping()
        letter = self._post.receive(timeout)
        while letter is not None and _is_ping(letter):
            self.answer_ping()
            gone = time.perf_counter() - began
            letter = self._post.receive(None if timeout is None else max(0.0, timeout - gone))
        self._receiving = False
        self.meter.wait += time.perf_counter() - began
        return letter

    read = letter_by_letter

    def waits_for(self) -> list[tuple[int, float]]:
        """Addresses without whom this role cannot go on; a worker complains by itself."""
        return []

    def stop_requested(self) -> bool:
        return self._link.stop or self._link.dismissed

    def close(self) -> None:
        self._post.close()


class ServerMail(LocalMail):
    """A server goes on until it is dismissed."""

    def __init__(
        self, address: int, link: SupervisorLink, buffers: Buffers, post: Post, settings: LocalSettings
    ) -> None:
        super().__init__(address, link, buffers, post, settings)
        link.route(lambda _: post.stop(), m.Dismissed)
        self.server: Server | None = None  # whose mail this is

    def waits_for(self) -> list[tuple[int, float]]:
        return [] if self.server is None else self.server.waits_for()
