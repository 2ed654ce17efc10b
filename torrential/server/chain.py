"""One range on one server, and its place in the chain of servers that hold it (van Renesse, Schneider 2004).

    head ── Replicate(7) ──► replica ── Replicate(7) ──► tail       each applies it, then passes it on
    head ◄── Replicated(7) ─ replica ◄── Replicated(7) ─ tail       the head answers the worker now

Letters of one server to another arrive in order, so the operations that a replica has applied are a prefix of those of
the server before it. When that server changes, or an operation is missing, the replica says so (Replicated with
`empty`), gets a whole ShardState and the operations after it, and passes the ShardState on. An operation is
acknowledged to a worker only when all servers of the chain have it, so any of them can go on with its own state when
those before it are gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from torrential.comm.protocol import Mail
from torrential.server.messages import Replicate, Replicated, Request
from torrential.server.shard import Outcome, Result, Shard, ShardOperation

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ShardOperation).decode


class Ask(NamedTuple):
    """A request and its tensors, with the worker that made it."""

    worker: int
    request: Request
    tensors: Sequence[Tensor]


class ChainLink:
    """One range on one server, and its neighbours in the chain of servers that hold it."""

    def __init__(self, comm: Mail, start: int, stop: int, shard: Shard | None) -> None:
        self.start, self.stop = start, stop
        self.before: int | None = None  # addresses of its neighbours in the chain
        self.after: int | None = None
        self.current = shard is not None  # whether it can go on from what the one before it sends
        self.view = 0
        self.stable = 0 if shard is None else shard.number  # operations that are on all servers after this one
        # called at the head: when the outcome of a request is on all replicas, and when more operations are
        self.on_replicated: Callable[[Ask, Outcome, Sequence[Tensor]], None] = _nobody
        self.progressed: Callable[[], None] = _nothing
        self._comm, self._shard = comm, shard
        self._waiting: deque[tuple[int, Ask, Outcome, Sequence[Tensor]]] = deque()

    @property
    def shard(self) -> Shard:
        assert self._shard is not None
        return self._shard

    @property
    def holds(self) -> bool:
        return self._shard is not None

    def part(self, start: int, stop: int) -> ChainLink:
        link = ChainLink(self._comm, start, stop, None if self._shard is None else self._shard.part(start, stop))
        link.before, link.after, link.current, link.stable = self.before, self.after, self.current, self.stable
        return link

    def place(self, before: int | None, after: int | None, view: int) -> None:
        """Take the place in the chain that a new view gives this server."""
        if before is not None and before != self.before:
            self.current = False
        self.before, self.after, self.view = before, after, view
        if before is None:
            self.current = True
        else:
            self._waiting.clear()  # the workers ask the new head
            if not self.current:
                self._ask()
        if after is None and self._shard is not None:
            self._advance(self._shard.number)
        elif before is not None and self.current:
            self._acknowledge()

    def waits_for(self) -> Iterator[int]:
        """Neighbours without whom it cannot go on."""
        if self.before is not None and not self.current:
            yield self.before
        if self.after is not None and self._shard is not None and self.stable < self._shard.number:
            yield self.after

    # -- at the head -------------------------------------------------------------------------------------------------
    def commit(self, operation: ShardOperation, tensors: Sequence[Tensor] = (), asks: Sequence[Ask] = ()) -> None:
        """Apply an operation here and on all replicas; then answer `asks`, one for each request it carries out."""
        shard = self.shard
        results = shard.apply(operation, tensors)
        if self.after is None:
            self.stable = shard.number
        else:
            self._pass_on(_encode(operation), tensors)
        for ask, result in zip(asks, results, strict=True):
            self.answer_when_replicated(ask, result)

    def answer_when_replicated(self, ask: Ask, result: Result) -> None:
        """Answer a request as soon as all that was applied so far is on all replicas."""
        number = self.shard.number
        if self.stable >= number:
            self.on_replicated(ask, *result)
        else:
            self._waiting.append((number, ask, *result))

    # -- behind it ---------------------------------------------------------------------------------------------------
    def replicate(self, message: Replicate, tensors: Sequence[Tensor]) -> None:
        if not self.current:
            return  # a ShardState is on its way, and what comes after it
        if message.number > self.shard.number + 1:
            self.lapse()
        elif message.number == self.shard.number + 1:
            self.shard.apply(_decode(message.operation), tensors)
            if self.after is None:
                self._advance(message.number)
            else:
                self._pass_on(message.operation, tensors)

    def lapse(self) -> None:
        """An operation is missing, or was for another range than this."""
        if self.current:
            self.current = False
            self._ask()

    def restore(self, shard: Shard) -> None:
        self._shard, self.current, self.stable = shard, True, 0
        if self.after is None:
            self._advance(shard.number)
        else:
            self._fill()

    # -- neighbours --------------------------------------------------------------------------------------------------
    def replicated(self, message: Replicated) -> None:
        """Take what the next server of the chain says about its operations."""
        if message.empty:
            if self.current:  # else as soon as this one is restored
                self._fill()
        elif self._shard is not None and message.number <= self._shard.number:
            self._advance(message.number)

    def _fill(self) -> None:
        """Send the next server of the chain a ShardState."""
        assert self.after is not None
        self._comm.post(self.after, *self.shard.state(self.view))

    def _ask(self) -> None:
        assert self.before is not None
        self._comm.post(self.before, Replicated(start=self.start, number=0, view=self.view, empty=True))

    def _pass_on(self, operation: bytes, tensors: Sequence[Tensor]) -> None:
        assert self.after is not None
        message = Replicate(
            start=self.start, stop=self.stop, number=self.shard.number, operation=operation, view=self.view
        )
        self._comm.post(self.after, message, tensors)

    def _advance(self, number: int) -> None:
        self.stable = max(self.stable, number)
        if self.before is not None:
            self._acknowledge()
            return
        while self._waiting and self._waiting[0][0] <= self.stable:
            _, ask, outcome, tensors = self._waiting.popleft()
            self.on_replicated(ask, outcome, tensors)
        self.progressed()

    def _acknowledge(self) -> None:
        assert self.before is not None
        self._comm.post(self.before, Replicated(start=self.start, number=self.stable, view=self.view))


def _nobody(ask: Ask, outcome: Outcome, tensors: Sequence[Tensor]) -> None:
    raise AssertionError("only the head is asked")


def _nothing() -> None:
    pass
