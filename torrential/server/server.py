"""The server role: letters in, letters out.

    View        cut, take up, give up ranges; new neighbours in chains
    a request   for a range that this server heads: server/head.py
    Replicate, Replicated, ShardState   between servers: server/chain.py

A letter that was addressed by a newer view than this server has read waits until the server has read that view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torrential.comm.protocol import SERVERS, Letter, Mail
from torrential.errors import RunFailed
from torrential.optimizers import OptimizerSpec
from torrential.params.layout import Layout
from torrential.server.chain import Ask, ChainLink
from torrential.server.consistency import Consistency
from torrential.server.head import Head
from torrential.server.messages import Moved, Refused, Replicate, Replicated, Request, ShardState, View
from torrential.server.optimizer import Store
from torrential.server.shard import Handler, Initial, Shard
from torrential.server.shares import Shares


@dataclass(frozen=True)
class ServerStatistics:
    """The counts of updates on the ranges that a server heads."""

    updates: int
    dropped: int  # gradients that came too late
    staleness: dict[int, int]  # updates between the read and the push: how often


class Server:
    def __init__(
        self,
        comm: Mail,
        layout: Layout,
        spec: OptimizerSpec,
        consistency: Consistency,
        *,
        initial: Initial | None = None,
        handlers: Mapping[str, Handler] | None = None,
        vectors: Mapping[str, float] | None = None,
        shares: Shares | None = None,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """`initial`: for those that are there when the run begins; who comes later is filled by the others.
        `vectors`: what the handlers keep, see strategies.roles.Servers. `shares`: which workers have which keys; all
        of them all by default. `filled(version)` is called when this server holds all that this view says."""
        self.comm, self.store = comm, Store(comm, layout, spec, vectors=vectors)
        self.view = View(-1, (), ())
        self._consistency, self._handlers, self._shares = consistency, dict(handlers or {}), shares or Shares()
        self._filled, self._told, self._initial = filled, -1, initial
        self._links: dict[int, ChainLink] = {}  # by the start of the range
        self._heads: dict[int, Head] = {}
        self._early: list[Letter] = []
        self._heard: dict[int, float] = {}  # when each address was last heard of
        self._kinds: dict[type, Callable[[Letter], None]] = {
            Replicate: self._replicate,
            Replicated: self._replicated,
            ShardState: self._state,
        }
        if comm.view.version >= 0:
            self._adopt(comm.view)

    def run(self) -> None:
        """Serve until the world says stop."""
        while True:
            self.comm.read(self.handle)
            if self.comm.stop_requested():
                return

    def handle(self, letter: Letter) -> None:
        message = letter.message
        self._heard[letter.source] = self.comm.now()
        if isinstance(message, View):
            if message.version > self.view.version:
                self._adopt(message)
        elif message.view > self.view.version:
            self._early.append(letter)
        elif isinstance(message, Request):
            self._request(letter.source, message, letter.tensors)
        else:
            self._kinds.get(type(message), _ignore)(letter)

    def report(self) -> ServerStatistics:
        shards = [self._links[start].shard for start in sorted(self._heads)]
        staleness: dict[int, int] = {}
        for shard in shards:
            for versions, times in shard.staleness.items():
                staleness[versions] = staleness.get(versions, 0) + times
        return ServerStatistics(
            sum(s.version for s in shards), sum(s.dropped for s in shards), dict(sorted(staleness.items()))
        )

    def waits_for(self) -> list[tuple[int, float]]:
        """Addresses of those without whom something cannot go on here, and how many seconds each has been silent."""
        now = self.comm.now()
        waiting: list[Head | ChainLink] = [*self._heads.values(), *self._links.values()]
        found = {address for one in waiting for address in one.waits_for()}
        return [(address, now - self._heard.get(address, now)) for address in sorted(found)]

    # -- requests ----------------------------------------------------------------------------------------------------
    def _request(self, worker: int, request: Request, tensors: Sequence[Tensor]) -> None:
        head = self._heads.get(request.start)
        if head is not None and all(last <= head.shard.stop for _, last in request.spans):
            head.handle(Ask(worker, request, tensors))
            return
        answer: dict[str, Any] = {"seq": request.seq, "start": request.start, "view": request.view}
        if request.view < self.view.version:
            self.comm.post(worker, Moved(**answer))
        else:
            spans = ", ".join(f"{first} to {last}" for first, last in request.spans) or "none"
            reason = f"worker {worker} asked for parameters ({spans}) that are not here"
            self.comm.post(worker, Refused(reason=reason, **answer))

    # -- the other servers -------------------------------------------------------------------------------------------
    def _replicate(self, letter: Letter) -> None:
        link = self._fitting(letter)
        if link is not None:
            link.replicate(letter.message, letter.tensors)

    def _replicated(self, letter: Letter) -> None:
        link = self._links.get(letter.message.start)
        if link is not None and link.after == letter.source:
            link.replicated(letter.message)

    def _state(self, letter: Letter) -> None:
        link = self._fitting(letter)
        if link is not None:
            link.restore(Shard.restored(self.store, self._handlers, letter.message, letter.tensors))
            self._say_filled()

    def _fitting(self, letter: Letter) -> ChainLink | None:
        """The link that a letter of the server before it is for; None if this server has cut that range since. Then
        the pieces lack what the letter brought, and ask for it."""
        message = letter.message
        for link in [self._links[start] for start in self._links if message.start <= start < message.stop]:
            if link.before != letter.source:
                continue  # a head that is none any more
            if (link.start, link.stop) == (message.start, message.stop):
                return link
            link.lapse()
        return None

    # -- views -------------------------------------------------------------------------------------------------------
    def _adopt(self, view: View) -> None:
        me, before, heads = self.comm.address, self._links, self._heads
        self.view, self._links, self._heads = view, {}, {}
        begin, anew = self._initial is not None, []
        for r in view.table:
            if me not in r.chain:
                continue
            at = r.chain.index(me)
            link = self._links[r.start] = self._link(before, r.start, r.stop)
            if at == 0 and not link.holds:
                raise RunFailed(
                    f"parameters {r.start} to {r.stop} are lost: server {me - SERVERS} was to answer for them before "
                    "it had a copy; go on from a checkpoint, or give every range more replicas"
                )
            neighbours = (r.chain[at - 1] if at else None, r.chain[at + 1] if at + 1 < len(r.chain) else None)
            if at == 0:
                kept = before.get(r.start) is link
                head = heads.get(r.start) if kept else None
                if head is None:
                    head = Head(self.comm, link, self._consistency)
                self._heads[r.start] = head
                anew.append(head)
            if begin:
                link.before = neighbours[0]  # both have the same to begin with
            link.place(*neighbours, view.version)
        self._initial = None
        for address in (*view.workers, *view.servers()):
            self._heard.setdefault(address, self.comm.now())
        for head in anew:
            head.adopt(self._shares.holders(head.shard.start, view.workers), begin)
        early, self._early = self._early, []
        for letter in early:
            self.handle(letter)
        self._say_filled()

    def _link(self, before: Mapping[int, ChainLink], start: int, stop: int) -> ChainLink:
        """The link of this server for a range, cut from what it has of it."""
        for link in before.values():
            if link.start <= start and stop <= link.stop:
                return link if (link.start, link.stop) == (start, stop) else link.part(start, stop)
        initial = self._initial
        shard = None if initial is None else Shard.fresh(self.store, start, stop, self._handlers, initial)
        return ChainLink(self.comm, start, stop, shard)

    def _say_filled(self) -> None:
        version = self.view.version
        if self._filled is not None and self._told < version and all(link.current for link in self._links.values()):
            self._told = version
            self._filled(version)


def _ignore(letter: Letter) -> None:
    """Ignore a letter that concerns only workers."""
