"""What the head of a chain keeps besides its shard: the requests that wait, and what each waits for.

    request ── seen before? ── sound? ──► read     until consistency lets it pass
                  │              │        push     until the clock's others have come, if they are summed
                  ▼              ▼        take     until there are samples, or all have asked
              answer again    Refused     save     until the copy is complete (server/copies.py)

Nothing of this is replicated: when the head is gone, workers send unanswered requests again. Nothing polls: every event
that could let a request pass checks the requests that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from torrential.comm.protocol import Mail
from torrential.server.chain import Ask, ChainLink
from torrential.server.consistency import Consistency
from torrential.server.copies import Copies
from torrential.server.encoding import decoded
from torrential.server.messages import (
    LIFE_BITS,
    Add,
    Call,
    Done,
    GiveBack,
    Mark,
    Marking,
    Pull,
    Push,
    Put,
    Refused,
    Request,
    Save,
    Take,
)
from torrential.server.objections import objection
from torrential.server.shard import Outcome, RequestInfo, ShardOperation
from torrential.server.sums import Clock, operands


class Head:
    """The head of a range: it takes requests of workers, decides when they may be carried out, and answers."""

    def __init__(self, comm: Mail, link: ChainLink, consistency: Consistency) -> None:
        self._comm, self._link, self._consistency = comm, link, consistency
        self.shard = link.shard  # a link gets another one only from a head
        self._aggregates = consistency.aggregates
        self._copies = Copies(comm, link, self._aggregates, self._answer)
        self._workers: frozenset[int] = frozenset()  # the workers of the view
        self._done: dict[int, int] = {}  # completed clocks of the workers that count
        self._least = 0  # the least number of clocks that one of them has completed
        self._last = 0  # how many workers have completed no more than that
        self._ahead: set[int] = set()  # workers that will not push for the clock that is open
        self._open: dict[int, Clock] = {}  # pushes that wait for others of the same clock
        self._summed = 0  # the operation that the buffer of sums was last used for
        self._reads: dict[
            int, dict[tuple[int, int], tuple[Ask, Outcome]]
        ] = {}  # reads that wait, by the clocks that must be completed
        self._takes: dict[int, dict[int, Ask]] = {}  # requests for samples that wait, by clock, or all under 0
        self._empty = 0  # takes were answered with nothing for clocks below this one
        self._kinds: dict[type[Request], Callable[[Ask], None]] = {
            Put: self._update,
            Add: self._update,
            Call: self._update,
            Push: self._push,
            Pull: self._pull,
            Take: self._take,
            GiveBack: self._give_back,
            Mark: lambda ask: self._copies.mark(ask, self._done),
        }
        link.on_replicated, link.progressed = self._on_replicated, self._close

    @property
    def completed(self) -> int:
        """Clocks that all have completed."""
        return self.shard.closed if self._aggregates else self._least

    # -- workers come and go -----------------------------------------------------------------------------------------
    def adopt(self, workers: Sequence[int], begin: bool = False) -> None:
        """The workers of a new view that have this range. `begin`: all of them start now, together; later ones count
        when they speak."""
        shard, before = self.shard, self._workers
        self._workers = frozenset(workers)
        if begin:
            self._link.commit(ShardOperation("meet", workers=tuple(sorted(workers)), number=shard.closed))
        known = before | shard.clocks.keys() | (shard.dealer.holders() if shard.dealer is not None else set())
        self._forget(known - self._workers, self._link.view)  # whoever comes back has seen a later one
        self._done = {worker: max(clock.least(), self._done.get(worker, 0)) for worker, clock in shard.clocks.items()}
        self._count()
        self._ahead = {worker for worker, done in self._done.items() if done > shard.closed}
        self._proceed()

    def _forget(self, gone: Collection[int], life: int) -> None:
        """Workers that are gone, or whose place another has taken; the next life of each is this one or a later."""
        if gone:
            self._link.commit(ShardOperation("forget", workers=tuple(sorted(gone)), number=life))
        for clock in self._open.values():
            clock.forget(gone)
        tables: list[dict[int, Any]] = [*self._takes.values(), self._done]
        for table in tables:
            for worker in gone:
                table.pop(worker, None)
        self._ahead.difference_update(gone)
        self._copies.gone(gone)

    def _proceed(self) -> None:
        """Answer the requests that wait here, as far as that is possible by now."""
        self._close()
        self._release()
        self._deal()
        self._copies.answer_if_complete(self._done)

    def waits_for(self) -> Iterator[int]:
        """Workers without whom something that waits here cannot go on."""
        dealer = self.shard.dealer
        yield from self._copies.awaited()
        if self._aggregates:
            if self._open or self._reads or self._copies.waits:
                opened = self._open.get(self.shard.closed)
                yield from self._done.keys() - self._ahead - set(opened.complete if opened is not None else ())
        elif self._reads:
            yield from (worker for worker, done in self._done.items() if done < max(self._reads))
        for clock, takes in self._takes.items():
            if dealer is not None and dealer.together:
                yield from (w for w, done in self._done.items() if w not in takes and done <= clock)
            elif dealer is not None:
                yield from dealer.holders()
                yield min(self._workers)

    def _meet(self, worker: int) -> None:
        if self._copies.number:
            self._comm.post(worker, Marking(number=self._copies.number))
        self._link.commit(ShardOperation("meet", workers=(worker,), number=self.completed))
        self._done[worker] = self.completed
        self._count()

    def _count(self) -> None:
        self._least = min(self._done.values(), default=self._least)
        self._last = sum(done == self._least for done in self._done.values())

    def _reached(self, worker: int, clock: int) -> None:
        """A worker has completed that many clocks."""
        before = self._done.get(worker)
        if before is None or before >= clock:
            return
        self._done[worker] = clock
        if self._aggregates:
            if clock > self.shard.closed:
                self._ahead.add(worker)
                self._close()
        elif before == self._least:
            self._last -= 1
            if not self._last:
                self._count()
                self._release()

    # -- requests ----------------------------------------------------------------------------------------------------
    def handle(self, ask: Ask) -> None:
        worker, request, _ = ask
        shard = self.shard
        floor = shard.floors.get(worker, 0)
        if request.seq < floor:
            return  # a late copy of something that was answered
        result = shard.answered(worker, request.seq)
        if result is not None:
            self._link.answer_when_replicated(ask, result)
            return
        reason = None
        if isinstance(request, Push) and request.packed and ask.tensors:
            plain = decoded(ask, shard.store, shard.start)
            if isinstance(plain, str):
                reason = plain
            else:
                ask, request = plain, plain.request
        reason = reason or objection(shard, ask)
        if reason is not None:
            self._comm.post(
                worker,
                Refused(seq=request.seq, start=request.start, view=request.view, reason=f"worker {worker} {reason}"),
            )
            return
        kind = type(request)
        if kind is Save:
            dealt = self._empty if shard.dealer is None else max(self._empty, shard.dealer.dealt)
            return self._copies.save(ask, self._workers, self._done, dealt)
        if worker in self._workers:
            life, known = request.seq >> LIFE_BITS, max(shard.lives.get(worker, 0), floor >> LIFE_BITS)
            if life < known:
                return  # it has died, and this came late
            if life > known > 0:
                self._forget({worker}, life)  # it has died and come back
            if worker not in shard.clocks:
                self._meet(worker)
            if request.clock > self._done[worker]:
                self._reached(worker, request.clock)
        elif kind in (Push, Take, GiveBack, Mark):
            return  # a letter of the dead
        self._kinds[kind](ask)

    def _update(self, ask: Ask) -> None:
        request: Any = ask.request
        kind = type(request).__name__.lower()
        options = {"name": request.name, "options": request.options} if kind == "call" else {}
        keys = getattr(request, "keys", False)
        self._apply(ShardOperation(kind, (asked(ask),), request.spans, keys=keys, **options), ask)

    def _apply(self, operation: ShardOperation, ask: Ask) -> None:
        if self._copies.open:
            self._copies.follow(operation, ask.tensors)
        self._link.commit(operation, ask.tensors, (ask,))

    def _on_replicated(self, ask: Ask, outcome: Outcome, tensors: Sequence[Tensor]) -> None:
        """Answer a request whose outcome is on all replicas by now."""
        request = ask.request
        if type(request) is Push and request.pull:
            self._read(ask, request.clock + 1, outcome)
        elif isinstance(request, Pull):
            self._answer(ask, outcome, self._values(ask))
        else:
            self._answer(ask, outcome, tensors)

    def _answer(self, ask: Ask, outcome: Outcome, tensors: Sequence[Tensor] = (), metadata: bytes = b"") -> None:
        request = ask.request
        done = Done(
            seq=request.seq,
            start=request.start,
            view=request.view,
            version=outcome.version,
            clock=self.shard.closed if self._aggregates else self._least,
            dropped=outcome.dropped,
            staleness=outcome.staleness,
            lease=outcome.lease,
            indices=outcome.indices,
            epoch=outcome.epoch,
            total=outcome.total,
            finished=outcome.finished,
            metadata=metadata,
        )
        self._comm.post(ask.worker, done, tensors)

    # -- reads -------------------------------------------------------------------------------------------------------
    def _pull(self, ask: Ask) -> None:
        if self._passes(ask, ask.request.clock, Outcome()):
            over = self.shard.dealer is not None and self.shard.dealer.finished()
            self._link.answer_when_replicated(ask, (Outcome(self.shard.version, finished=over), ()))

    def _read(self, ask: Ask, clock: int, outcome: Outcome) -> None:
        """Answer a push with the parameters, as soon as they may be read."""
        if self._passes(ask, clock, outcome):
            read = Outcome(self.shard.version, outcome.dropped, staleness=outcome.staleness)
            self._answer(ask, read, self._values(ask))

    def _passes(self, ask: Ask, clock: int, outcome: Outcome) -> bool:
        needed = self._consistency.needs(clock)
        if self.completed >= needed or ask.worker not in self._workers:
            return True
        self._reads.setdefault(needed, {})[(ask.worker, ask.request.seq)] = ask, outcome
        return False

    def _values(self, ask: Ask) -> list[Tensor]:
        return [self.shard.store.view(span) for span in ask.request.spans]

    def _release(self) -> None:
        """Reads that may pass by now."""
        if self._reads:
            completed = self.completed
            for needed in sorted(n for n in self._reads if n <= completed):
                for ask, outcome in self._reads.pop(needed).values():
                    if isinstance(ask.request, Push):
                        self._read(ask, ask.request.clock + 1, outcome)
                    else:
                        self._pull(ask)

    # -- pushes ------------------------------------------------------------------------------------------------------
    def _push(self, ask: Ask) -> None:
        request = ask.request
        assert isinstance(request, Push)
        if self._aggregates:
            if request.clock < self.shard.closed:
                self._drop(ask)
            else:
                opened = self._open.get(request.clock)
                if opened is None:
                    opened = self._open[request.clock] = Clock(self.shard.start, self.shard.stop)
                opened.add(ask)
                self._close()
            return
        if request.scale == 0.0:
            ask = ask._replace(tensors=())
        operation = ShardOperation(
            "push",
            (asked(ask),),
            request.spans,
            request.lr,
            request.scale,
            request.used,
            keys=request.keys,
            rates=request.rates,
        )
        self._apply(operation, ask)
        self._reached(ask.worker, self.shard.clocks[ask.worker].least())
        if self._takes:
            self._deal()

    def _drop(self, ask: Ask) -> None:
        self._link.commit(ShardOperation("drop", (asked(ask),)), (), (ask,))
        self._reached(ask.worker, ask.request.clock + 1)
        self._deal()

    def _close(self) -> None:
        """The open clock, if all its pushes are here; and the clock after it."""
        if not self._aggregates:
            return
        shard, before = self.shard, self.shard.closed
        while self._complete() and self._link.stable >= self._summed:  # the sum may still be on its way to replicas
            clock = shard.closed
            opened = self._open.pop(clock, None) or Clock(shard.start, shard.stop)
            asks = opened.chosen(self._consistency.first)
            operation, tensors, summed = operands(shard, clock, asks)
            if summed:
                self._summed = shard.number + 1
            self._link.commit(operation, tensors, asks)
            self._copies.closed()
            for worker in {ask.worker for ask in asks}:
                self._done[worker] = max(self._done.get(worker, 0), clock + 1)
            self._ahead = {worker for worker in self._ahead if self._done.get(worker, 0) > shard.closed}
            for ask in opened.others(asks):
                self._drop(ask)
        if shard.closed > before:
            self._release()
            self._deal()

    def _complete(self) -> bool:
        opened = self._open.get(self.shard.closed)
        arrived = len(opened.complete) if opened is not None else 0
        first = self._consistency.first
        if first is not None:
            abstained = len(opened.abstained) if opened is not None else 0
            willing = len(self._done) - len(self._ahead) - abstained
            return bool(self._done) and arrived - abstained >= min(first, willing)
        if arrived + len(self._ahead) < len(self._done) or not self._done:
            return False
        there = self._ahead.union(opened.complete if opened is not None else ())
        return there.issuperset(self._done)

    # -- samples -----------------------------------------------------------------------------------------------------
    def _take(self, ask: Ask) -> None:
        dealer = self.shard.dealer
        assert dealer is not None  # else it was refused
        if dealer.together and ask.request.clock < dealer.dealt:
            # the other workers of its clock have been dealt to: it gets nothing
            self._link.answer_when_replicated(ask, (Outcome(self.shard.version), ()))
            return
        self._takes.setdefault(ask.request.clock if dealer.together else 0, {})[ask.worker] = ask
        self._deal()

    def _give_back(self, ask: Ask) -> None:
        for takes in self._takes.values():
            takes.pop(ask.worker, None)
        self._link.commit(ShardOperation("give_back", (asked(ask),)), (), (ask,))
        self._deal()

    def _deal(self) -> None:
        dealer = self.shard.dealer
        if dealer is None:
            return
        for clock in sorted(self._takes):
            takes = self._takes[clock]
            if dealer.together:
                missing = (w for w, done in self._done.items() if w not in takes and done <= clock)
                if takes and next(missing, None) is None:
                    asks = [takes[worker] for worker in sorted(takes)]
                    takes.clear()
                    self._hand_out(asks) if dealer.ready() else self._finish(asks)
            elif dealer.finished():
                asks = list(takes.values())
                takes.clear()
                self._finish(asks)
            elif self._consistency.staleness is not None and not dealer.ready():
                asks = list(takes.values())  # others hold the last samples, and must not wait for these: no samples
                takes.clear()  # this time, so that they go on to the next clock
                self._empty = max(self._empty, *(ask.request.clock + 1 for ask in asks))
                self._link.commit(ShardOperation("nothing", tuple(asked(ask) for ask in asks)), (), asks)
            else:
                for worker, ask in list(takes.items()):
                    early = ask.request.after > self.shard.version  # type: ignore[attr-defined]
                    if dealer.ready() and not (early and worker != min(self._workers)):
                        self._hand_out([takes.pop(worker)])  # the first waits for nobody; if it dies, the next is first
            if not takes:
                del self._takes[clock]

    def _hand_out(self, asks: list[Ask]) -> None:
        request = asks[0].request
        assert isinstance(request, Take)
        self._link.commit(ShardOperation("take", tuple(asked(ask) for ask in asks), number=request.count), (), asks)

    def _finish(self, asks: list[Ask]) -> None:
        for ask in asks:
            self._link.answer_when_replicated(ask, (Outcome(self.shard.version, finished=True), ()))


def asked(ask: Ask) -> RequestInfo:
    request = ask.request
    if isinstance(request, Push):
        return RequestInfo(ask.worker, request.seq, request.floor, request.clock, request.version, request.lease)
    if isinstance(request, GiveBack):
        return RequestInfo(ask.worker, request.seq, request.floor, request.clock, lease=request.lease)
    return RequestInfo(ask.worker, request.seq, request.floor, request.clock)
