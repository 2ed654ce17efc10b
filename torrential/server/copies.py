"""Copies of a head's range for checkpoints, made while training goes on.

    first worker ── Save(n) ───────────► all heads        answered with the copy, once it is complete
    head of key 0 ── Marking(n, cut) ──► all workers
    every worker ── Mark(n, cut) ──────► all heads        between two of its requests, whatever it waits for

Of every push either all copies of a checkpoint have all of it, or none has any; and no worker waits:

- Where pushes are applied as they come, a head copies its range at the first Mark, and what comes from workers that
  have not marked is applied to the range and to the copy. The copy is complete when all have marked.
- Where a clock's pushes become one update, the copy is the range with all clocks before `cut` and none after. No
  samples have been dealt for `cut` when it is chosen; so a push of that clock follows its worker's Mark, and no head
  can have closed it before it has heard of the checkpoint.

The dealer's copy says which samples the copied updates were made of; all others are dealt again (server/dealer.py). A
worker that dies while it sends a push may leave it on some ranges only, with or without a checkpoint.

Marks count on letters of one role to another coming in order, as they do on sockets. Copies are not replicated. A head
that inherits a range meanwhile says that the copy is lost, and the first worker begins another checkpoint, under the
next number; so it does if the cuts of two ranges differ. One is under way at a time. When all workers have left, a
copy is the range as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
from torch import Tensor

from torrential.comm.protocol import Mail
from torrential.server.chain import Ask, ChainLink
from torrential.server.dealer import Dealer, Lease
from torrential.server.messages import Mark, Marking, Save
from torrential.server.optimizer import Scalars
from torrential.server.shard import Outcome, RequestInfo, Shard, ShardOperation


class Saved(msgspec.Struct, array_like=True):
    """The metadata of a range's copy: everything but its vectors."""

    start: int
    stop: int
    version: int
    cut: int  # where pushes are summed; -1: when nobody was there to push
    scalars: Scalars
    dealer: Dealer | None


def join_copies(metadata: Iterable[bytes], numel: int) -> Saved | None:
    """The metadata of all ranges' copies as one; None if a copy is lost."""
    found = [msgspec.msgpack.decode(each, type=Saved) for each in metadata if each]
    stops = [0, *(saved.stop for saved in found)]
    if [saved.start for saved in found] != stops[:-1] or stops[-1] != numel or len({s.cut for s in found}) > 1:
        return None
    scalars: Scalars = {}
    for saved in found:
        scalars |= saved.scalars
    return Saved(0, numel, found[0].version, found[0].cut, scalars, found[0].dealer)


class _Copy:
    def __init__(self, number: int, cut: int, awaited: Collection[int]) -> None:
        self.number, self.cut = number, cut
        self.awaited = set(awaited)  # workers that have not marked
        self.marked: set[int] = set()
        self.undone: list[Lease] = []  # samples of updates that are not in the copy
        self.shard: Shard | None = None
        self.metadata = b""  # an encoded Saved, once the copy is complete


class Copies:
    """The copies of a head's range for checkpoints."""

    def __init__(
        self,
        comm: Mail,
        link: ChainLink,
        aggregates: bool,
        answer: Callable[[Ask, Outcome, Sequence[Tensor], bytes], None],
    ) -> None:
        self._comm, self._link, self._aggregates, self._answer = comm, link, aggregates, answer
        self._announced, self._cut = 0, -1
        self._copy: _Copy | None = None
        self._saves: list[Ask] = []
        self.open = False  # whether what is applied to the range may have to be applied to a copy, too

    @property
    def number(self) -> int:
        """The number of the newest checkpoint that this head has heard of."""
        return max(self._announced, self._link.shard.marked)

    def awaited(self) -> set[int]:
        """Workers that a copy waits for."""
        return set(self._copy.awaited) if self.open and self._copy is not None else set()

    @property
    def waits(self) -> bool:
        return bool(self._saves)

    # -- requests ---------------------------------------------------------------------------------------------------
    def save(self, ask: Ask, workers: Collection[int], counted: Collection[int], dealt: int) -> None:
        """`workers` of the view; those that are counted have spoken. No worker has samples for clock `dealt` yet."""
        request, shard = ask.request, self._link.shard
        assert isinstance(request, Save)
        if request.at_once:
            self._begin(request.number, -1, ())
        elif shard.start == 0 and request.number > shard.marked and counted:
            if request.number > self._announced:
                self._announced, self._cut = request.number, max(dealt, shard.closed)
            for worker in workers:
                self._comm.post(worker, Marking(number=request.number, cut=self._cut))
        same = ask.worker, request.seq  # perhaps addressed by a newer view: the answer has to name that
        self._saves = [other for other in self._saves if (other.worker, other.request.seq) != same] + [ask]
        self.answer_if_complete(counted)

    def mark(self, ask: Ask, counted: Collection[int]) -> None:
        request = ask.request
        assert isinstance(request, Mark)
        if request.number > self._link.shard.marked and (request.cut >= 0 or not self._aggregates):
            self._begin(request.number, request.cut, counted, (ask,))
        else:
            self._link.answer_when_replicated(ask, (Outcome(self._link.shard.version), ()))
        if self._copy is not None and self._copy.number == request.number:
            self._copy.marked.add(ask.worker)
            self._copy.awaited.discard(ask.worker)
        self.answer_if_complete(counted)

    # -- what happens to the range ------------------------------------------------------------------------------------
    def follow(self, operation: ShardOperation, tensors: Sequence[Tensor]) -> None:
        """One worker's update is about to be applied to the range."""
        copy, dealer = self._copy, self._link.shard.dealer
        assert copy is not None and copy.shard is not None
        (asked,) = operation.asked
        if asked.worker not in copy.marked:
            copy.shard.apply(operation, tensors)
        elif dealer is not None and asked.lease in dealer.leases:
            copy.undone.append(dealer.leases[asked.lease])

    def closed(self) -> None:
        """A clock has been closed."""
        copy = self._copy
        if copy is not None and copy.shard is None and copy.cut == self._link.shard.closed:
            self._make(copy)
            self._complete(copy)
            self._answer_all()

    def gone(self, workers: Collection[int]) -> None:
        """Stop waiting for the marks of workers that are gone. One that has left may still ask for the last copy."""
        if self._copy is not None:
            self._copy.awaited.difference_update(workers)

    def answer_if_complete(self, counted: Collection[int]) -> None:
        """Answer the requests for a copy if it is complete, or can be made at once because no worker is there."""
        newest = max((ask.request.number for ask in self._saves), default=0)  # type: ignore[attr-defined]
        waits = self._copy is not None and self._copy.number == newest and self._copy.shard is None
        if not counted and (newest > self._link.shard.marked or waits):
            self._begin(newest, -1, ())
        if self.open and self._copy is not None and not self._copy.awaited:
            self._complete(self._copy)
        self._answer_all()

    # -- copies -------------------------------------------------------------------------------------------------------
    def _begin(self, number: int, cut: int, counted: Collection[int], asks: Sequence[Ask] = ()) -> None:
        shard = self._link.shard
        copy = self._copy = _Copy(number, cut, counted)
        self.open = not self._aggregates
        if not self._aggregates:
            self._make(copy)
        elif cut in (-1, shard.closed):
            self._make(copy)
            self._complete(copy)
        elif cut < shard.closed:
            self._copy = None  # too late
        asked = tuple(RequestInfo(a.worker, a.request.seq, a.request.floor, a.request.clock) for a in asks)
        self._link.commit(ShardOperation("mark", asked, number=number), (), asks)

    def _make(self, copy: _Copy) -> None:
        shard = self._link.shard
        copy.shard = shard.copied(shard.store.twin)

    def _complete(self, copy: _Copy) -> None:
        self.open = False
        shard, dealer = copy.shard, self._link.shard.dealer
        assert shard is not None
        saved = None if dealer is None else dealer.saved(copy.undone)
        cut = copy.cut if self._aggregates else 0
        whole = Saved(shard.start, shard.stop, shard.version, cut, shard.optimizer.scalars(), saved)
        copy.metadata = msgspec.msgpack.encode(whole)

    def _answer_all(self) -> None:
        waiting, self._saves = self._saves, []
        for ask in waiting:
            self._answer_one(ask)

    def _answer_one(self, ask: Ask) -> None:
        number, marked, copy = ask.request.number, self._link.shard.marked, self._copy  # type: ignore[attr-defined]
        if copy is not None and copy.number == number and copy.metadata:
            assert copy.shard is not None
            store = copy.shard.store
            vectors = [store.parameters, *store.states.values()]
            tensors = [v[first:last] for v, (first, last) in zip(vectors, ask.request.spans, strict=True)]
            self._answer(ask, Outcome(copy.shard.version), tensors, copy.metadata)
        elif number < marked or (number == marked and (copy is None or copy.number != number)):
            self._answer(ask, Outcome(), (), b"")
        else:
            self._saves.append(ask)
