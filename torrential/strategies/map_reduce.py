"""Learning by map-reduce: rounds of a statistic over all rows, which a coordinator turns into the next estimate.

    coordinator ── MapOrder(portions) ─► worker        to whoever is idle, a few at a time; when none waits, a copy
    worker ── Mapped(portion) ─────────► coordinator   the first result of a portion counts
    coordinator ── MapOrder(keep) ─────► worker        it does, or does not: the worker adds it to its sums, or not
    coordinator ── MapOrder(send) ─────► worker        when no portion waits: what have you got?
    worker ── Sums(blocks) ────────────► coordinator   sums of neighbouring portions, often one of all it had

All sums are made in one order (data/ordered_sum.py), so the result is the same to the last bit with any number of
workers, and after any deaths.

A worker's portions are given to others when it dies. A coordinator's successor learns from the workers which round it
is, the estimate of that round, and the statistics that they have of it, sent or not: only the finished portions of dead
workers are computed anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from torch import Tensor

from torrential.data.deal import Batch
from torrential.data.ordered_sum import Block, OrderedSum, terms_of
from torrential.data.portions import Portions
from torrential.data.query import Query
from torrential.data.statistics import flat, restored, shape_of
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.strategies.portioned import Over, Report
from torrential.strategies.roles import Role, Roles

AT_ONCE = 0.05  # seconds of work that a worker is given without being asked how far it is
WATCHED = 2  # portions that each worker computes first, around which it looks for writes by a checksum
SLOW = 2.0  # a worker that takes so many times as long as the median sends every sum at once


# -- letters ----------------------------------------------------------------------------------------------------------
class MapOrder(msgspec.Struct, frozen=True, tag=True):
    """To a worker: what to do next, and what became of what it did last. An estimate may come with it."""

    era: int  # which coordinator says so
    life: int  # to which worker of that number
    round: int
    estimate: Any = None  # the plan of the round's estimate (data/statistics.py), with the first order of a round
    keep: list[int] = []  # of what it has computed since the last order, the portions whose results count
    send: bool = False  # the sums of what counts
    portions: list[int] = []  # compute these, one after the other
    samples: int = 0  # how far the run has come


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """To the coordinator: a portion is computed."""

    era: int
    life: int
    round: int
    portion: int
    seconds: float


class Sums(msgspec.Struct, frozen=True, tag=True):
    """To the coordinator: the sums of what counts, their tensors one after the other."""

    era: int
    life: int
    round: int
    blocks: list[Block]
    plans: list[Any]


class SumsHeld(msgspec.Struct, frozen=True, tag=True):
    """To the coordinator: a worker is idle, and has these sums of a round; the round's estimate comes with the
    letter."""

    era: int
    life: int
    round: int = -1
    estimate: Any = None
    kept: list[int] = []  # portions in the worker's sums
    results: list[int] = []  # portions whose results may count


# -- the strategy -----------------------------------------------------------------------------------------------------
class MapReduce(Strategy, frozen=True, kw_only=True):
    """Statistics of all rows, computed in portions by idle workers and added in one order."""

    name: ClassVar[str] = "map_reduce"
    uncompressed: ClassVar[str] = "it has no gradients"
    uses_rate: ClassVar[bool] = False
    evaluates: ClassVar[bool] = False
    letters: ClassVar = (MapOrder, Mapped, Sums, Report, SumsHeld, Over)

    portions: Annotated[int, msgspec.Meta(ge=1)] = 64
    """The number of portions that the rows are cut into."""
    copies: Annotated[int, msgspec.Meta(ge=0)] = 1
    """The number of workers that may be given a copy of a portion that somebody is slow with."""

    def roles(self, workers: int, servers: int) -> Roles:
        return (
            Role("worker", workers, self.worker, "view"),
            Role("coordinator", 1, self.coordinator, "restart"),
        )

    def worker(self, ctx: Context) -> None:
        _Mapper(ctx).run()
        ctx.leave()

    def coordinator(self, ctx: Context) -> None:
        _Reducer(ctx, self.copies).run()
        ctx.leave()


def _query(ctx: Context) -> Query:
    assert isinstance(ctx.task.step, Query)
    return ctx.task.step


class _Portions:
    """The statistics of portions, as one role computes them; the rows that it has read are kept here."""

    def __init__(self, ctx: Context) -> None:
        self._ctx, self._query = ctx, _query(ctx)
        self._read: dict[int, Any] = {}
        self._computed = 0
        self._first: tuple[int, str] | None = None  # a portion of this round, and the shape of its statistic

    def begin(self) -> None:
        self._first = None

    def compute(self, number: int, round: int, estimate: Any) -> Any:
        query, (first, last) = self._query, self._query.span(number)
        batch = Batch(round, first, torch.empty(last - first, dtype=torch.uint8), last - first)  # so many rows
        watched = self._computed < WATCHED
        found = self._ctx.replica.compute(batch, lambda: query.compute(self._rows(number), estimate, watched))
        self._computed += 1
        if query.combine is None:  # else it is for that one to say what fits together
            shape = shape_of(found)
            if self._first is None:
                self._first = number, shape
            elif self._first[1] != shape:
                query.refuse_shapes(*self._first, number, shape)
        return found

    def _rows(self, number: int) -> Any:
        if number not in self._read:
            rows = self._query.rows.read(*self._query.span(number))
            if self._query.rows.in_place:
                return rows
            self._read[number] = rows
        return self._read[number]


class _Mapper:
    """The worker's side: computes portions as the coordinator says, and keeps their sums."""

    def __init__(self, ctx: Context) -> None:
        self._ctx, self._life, self._era = ctx, ctx.comm.view.version, 0
        self._query, self._portions = _query(ctx), _Portions(ctx)
        self._round, self._estimate = -1, None
        self._sums: OrderedSum[Any] = self._no_sums()
        self._sent: dict[Block, Any] = {}  # in case that whom they were sent to is gone
        self._results: dict[int, Any] = {}  # by portion, until it is known whether they count

    def _no_sums(self) -> OrderedSum[Any]:
        return OrderedSum(self._query.portions, self._query.combined)

    def run(self) -> None:
        ctx = self._ctx
        for coordinator in ctx.comm.view.coordinators:
            self._post_holding(coordinator)
        while True:
            letter = ctx.comm.receive(ctx.config.settings.timeout)
            if letter is None:
                continue
            match letter.message:
                case Over():
                    return
                case Report(era):
                    self._era = era
                    for block, value in self._sent.items():
                        self._sums.add(block, value)
                    self._sent = {}
                    self._post_holding(letter.source)
                case MapOrder() as order if order.era >= self._era and order.life == self._life:
                    self._era = order.era
                    self._carry_out(order, letter.tensors, letter.source)

    def _post_holding(self, coordinator: int) -> None:
        plan, tensors = flat(self._estimate)
        holding = SumsHeld(self._era, self._life, self._round, plan, self._sums.terms(), list(self._results))
        self._ctx.comm.post(coordinator, holding, tensors)

    def _carry_out(self, order: MapOrder, tensors: Sequence[Tensor], coordinator: int) -> None:
        ctx = self._ctx
        if order.round != self._round:
            self._round, self._estimate = order.round, restored(order.estimate, tensors)
            self._sums, self._sent = self._no_sums(), {}
            self._portions.begin()
        else:
            for number in order.keep:
                self._sums.add(Block(0, number), self._results[number])
        self._results = {}
        if order.send:
            self._send(order, coordinator)
        for number in order.portions:
            began = ctx.comm.now()
            self._results[number] = self._portions.compute(number, self._round, self._estimate)
            ctx.comm.post(coordinator, Mapped(order.era, self._life, self._round, number, ctx.comm.now() - began))
            ctx.progress.took_part(order.round, order.samples, math.nan)

    def _send(self, order: MapOrder, coordinator: int) -> None:
        plans, together = list[Any](), list[Tensor]()
        for value in self._sums.blocks.values():
            plan, tensors = flat(value)
            plans.append((plan, len(tensors)))
            together += tensors
        sums = Sums(order.era, self._life, self._round, list(self._sums.blocks), plans)
        self._ctx.comm.post(coordinator, sums, together)
        self._sent |= self._sums.blocks
        self._sums = self._no_sums()


class _Reducer:
    """The coordinator's side: deals out portions, adds what comes back, and makes the next estimate of it."""

    def __init__(self, ctx: Context, copies: int) -> None:
        self._ctx, self._query = ctx, _query(ctx)
        self._era = ctx.comm.view.version
        self._round, self._estimate, self._over = 0, self._query.first(), False
        ctx.replica.local(alike=True)  # a checkpoint has a model, if only an empty one
        ctx.state.everybody("map_reduce", self._saved, self._load)
        self._portions = Portions(self._query.portions, copies)
        self._alone = _Portions(ctx)
        self._lives: dict[int, int] = {}  # of the workers that have said that they are there
        self._told: set[int] = set()  # workers that know the round's estimate
        self._sending: set[int] = set()
        self._unsettled: dict[int, list[int]] = {}  # results that count, and whose workers do not know it yet
        self._seconds: dict[int, float] = {}  # that each worker took for its last portion
        self._sums: OrderedSum[Any] = OrderedSum(self._query.portions, self._query.combined)
        self._shape: tuple[int, str] | None = None

    # -- what outlives this process ---------------------------------------------------------------------------------
    def _saved(self) -> dict[str, Tensor]:
        plan, tensors = flat(self._estimate)
        about = msgspec.msgpack.encode((self._round, self._over, plan))
        named = {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
        return {"about": torch.frombuffer(bytearray(about), dtype=torch.uint8), **named}

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        self._round, self._over, self._estimate = read_saved(tensors)

    # -- rounds -----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        progress = self._ctx.progress
        holdings = self._gather()
        newest = max((holding.round for holding, _ in holdings.values()), default=-1)
        if newest > self._round:
            holding, tensors = next(found for found in holdings.values() if found[0].round == newest)
            self._round, self._estimate = newest, restored(holding.estimate, tensors)
        progress.go_on(self._round, self._round * len(self._query.rows), over=self._over)
        while not progress.finished():
            found = self._query.finished(self._compute(holdings), self._estimate)
            holdings = {}
            self._round, self._estimate, self._over = self._round + 1, found.value, found.done
            if found.done:
                progress.end_early("")
            progress.conclude(len(self._query.rows), found.objective)
        self._dismiss()

    def _gather(self) -> dict[int, tuple[SumsHeld, list[Tensor]]]:
        """What every worker has of a round that another coordinator may have begun."""
        comm, found = self._ctx.comm, dict[int, tuple[SumsHeld, list[Tensor]]]()
        for worker in comm.view.workers:
            comm.post(worker, Report(self._era))
        while not found.keys() >= set(comm.view.workers):
            letter = self._receive()
            if letter is not None and isinstance(letter.message, SumsHeld):
                found[letter.source] = letter.message, [tensor.clone() for tensor in letter.tensors]
        for worker in comm.view.workers:
            self._join(worker, found[worker][0].life)
        return {worker: found[worker] for worker in comm.view.workers}

    def _receive(self) -> Any:
        """The next letter; None after `timeout` seconds, when workers that are not idle have been reported as
        suspect."""
        comm, timeout = self._ctx.comm, self._ctx.config.settings.timeout
        letter = comm.receive(timeout)
        if letter is None:
            for worker in set(comm.view.workers) - set(self._portions.idle):
                comm.suspect(worker, timeout)
        return letter

    def _dismiss(self) -> None:
        """Tell all workers that the run is over, also those that come late."""
        comm, told = self._ctx.comm, set[int]()
        while workers := comm.view.workers:
            for worker in set(workers) - told:
                comm.post(worker, Over())
            told = set(workers)
            letter = self._receive()
            if letter is not None and isinstance(letter.message, SumsHeld):
                comm.post(letter.source, Over())

    def _compute(self, holdings: Mapping[int, tuple[SumsHeld, list[Tensor]]]) -> Any:
        """The statistic of all rows. `holdings`: what workers have of it already."""
        ctx, portions = self._ctx, self._portions
        began = ctx.comm.now()
        portions.begin(began)
        self._sums = OrderedSum(self._query.portions, self._query.combined)
        self._shape, self._told, self._sending, self._unsettled = None, set(), set(), {}
        self._take_over({w: holding for w, (holding, _) in holdings.items() if holding.round == self._round})
        while True:
            for worker in sorted(self._lives.keys() - set(ctx.comm.view.workers)):
                self._lose(worker)
            if portions.done:
                break
            if not ctx.comm.view.workers:
                self._compute_alone()
                continue
            self._order()
            letter = self._receive()
            if letter is not None:
                self._handle(letter.source, letter.message, letter.tensors)
        ctx.progress.worked(portions.end(ctx.comm.now()), ctx.comm.now() - began)
        return self._sums.total

    def _take_over(self, holdings: Mapping[int, SumsHeld]) -> None:
        for worker, holding in holdings.items():
            self._told.add(worker)
            self._portions.hold(worker, holding.kept)
        for worker, holding in holdings.items():
            self._unsettled[worker] = [number for number in holding.results if self._portions.waits(number)]
            self._portions.hold(worker, self._unsettled[worker])

    def _compute_alone(self) -> None:
        """Compute the portions that wait, where all workers have left after the round was finished and the coordinator
        that knew its result is gone."""
        self._alone.begin()
        for number in [n for n in range(self._portions.count) if self._portions.waits(n)]:
            self._add(Block(0, number), self._alone.compute(number, self._round, self._estimate))

    # -- workers ----------------------------------------------------------------------------------------------------
    def _join(self, worker: int, life: int) -> None:
        self._lives[worker] = life
        self._portions.join(worker, self._ctx.comm.now())

    def _lose(self, worker: int) -> None:
        self._portions.lose(worker)
        for table in (self._lives, self._unsettled, self._seconds):
            table.pop(worker, None)
        self._told.discard(worker)
        self._sending.discard(worker)

    def _handle(self, worker: int, message: Any, tensors: Sequence[Tensor]) -> None:
        match message:
            case SumsHeld(life=life) if worker in self._ctx.comm.view.workers and self._lives.get(worker) != life:
                if worker in self._lives:
                    self._lose(worker)  # it died and came back
                self._join(worker, life)
            case Mapped(era, life, round, portion, seconds) if self._is_known(worker, era, life):
                if round != self._round:
                    return self._portions.finished_late(worker, portion, self._ctx.comm.now())
                self._seconds[worker] = seconds
                if self._portions.finished(worker, portion, self._ctx.comm.now()):
                    self._unsettled.setdefault(worker, []).append(portion)
            case Sums(era, life, round, blocks, plans) if self._is_known(worker, era, life) and round == self._round:
                self._sending.discard(worker)
                left = list(tensors)
                for block, (plan, count) in zip(blocks, plans, strict=True):
                    self._add(block, restored(plan, left[:count]))
                    left = left[count:]

    def _is_known(self, worker: int, era: int, life: int) -> bool:
        return era == self._era and self._lives.get(worker) == life

    def _add(self, block: Block, value: Any) -> None:
        numbers, shape = terms_of([block], self._portions.count), shape_of(value)
        if self._query.combine is None:  # else a sum may be larger than its terms
            if self._shape is None:
                self._shape = numbers[0], shape
            elif self._shape[1] != shape:
                self._query.refuse_shapes(*self._shape, numbers[0], shape)
        self._sums.add(block, value)
        self._portions.hold(-1, numbers)
        self._portions.safe(numbers)

    # -- orders -----------------------------------------------------------------------------------------------------
    def _order(self) -> None:
        """Give every idle worker something to do, if there is something."""
        for worker in self._portions.idle:
            send = worker not in self._sending and bool(self._portions.held(worker)) and self._is_time(worker)
            number = self._portions.give(worker, self._ctx.comm.now())
            if number is not None:
                self._post(worker, send, [number, *self._portions.give_more(worker, self._more(worker))])
            elif send:
                self._post(worker, send, [])

    def _is_time(self, worker: int) -> bool:
        """Whether a worker is to send its sums: when nothing waits; a slow one always, or others would wait for it."""
        return self._portions.all_given or self._is_slow(worker)

    def _is_slow(self, worker: int) -> bool:
        usual = statistics.median(self._seconds.values()) if self._seconds else 0.0
        return self._seconds.get(worker, 0.0) > SLOW * usual

    def _more(self, worker: int) -> int:
        """Portions to give a worker besides the first, so that it need not ask after each one that is soon done."""
        took = self._seconds.get(worker)
        return 0 if took is None or self._is_slow(worker) else int(AT_ONCE / max(took, 1e-6))

    def _post(self, worker: int, send: bool, portions: list[int]) -> None:
        plan, tensors = (None, list[Tensor]()) if worker in self._told else flat(self._estimate)
        self._told.add(worker)
        if send:
            self._sending.add(worker)
        order = MapOrder(
            self._era,
            self._lives[worker],
            self._round,
            plan,
            keep=self._unsettled.pop(worker, []),
            send=send,
            portions=portions,
            samples=self._samples(),
        )
        self._ctx.comm.post(worker, order, tensors)

    def _samples(self) -> int:
        """The rows that results have been seen of, in all rounds."""
        rows = len(self._query.rows)
        return self._round * rows + self._portions.counted * rows // self._portions.count


def read_saved(tensors: Mapping[str, Tensor]) -> tuple[int, bool, Any]:
    """The round, whether it was the last, and the estimate, of what a coordinator has saved."""
    round, over, plan = msgspec.msgpack.decode(tensors["about"].numpy().tobytes())
    named = [tensors[f"tensor {number}"] for number in range(len(tensors) - 1)]
    return round, over, restored(plan, named)
