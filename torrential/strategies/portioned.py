"""Gradients of a large batch in small portions: what workers and a coordinator say to each other about them.

    coordinator ── Assignment(portion) ──► worker        to whoever is idle; when none waits, a copy of a slow one
    worker ── Computed(portion) ─────────► coordinator   the first result of a portion counts
    coordinator ── Assignment(keep) ─────► worker        it does, or does not: the worker adds it to its sum, or not
    coordinator ── Assignment(ticket) ───► worker        every few portions: push the sum to the servers
    worker ── accumulate(ticket) ────────► servers       which add it once (server/vectors.py)
    worker ── SumPushed(ticket) ─────────► coordinator   now these portions outlive the worker

When a worker dies, what it was computing or held goes to others. If it was pushing, servers are told to refuse that
ticket from now on (fence) and say whether they have it: if some have it and some do not, the same portions are computed
again by another worker, and added where they are missing.

When the coordinator dies, its successor has the servers refuse all tickets of before and tell which sums they have, and
the workers tell what they hold. An `era` names the coordinator that a letter is to or from, a `life` the worker's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from torrential.data.deal import Batch
from torrential.data.portions import Portions
from torrential.server.vectors import Survey, read_survey
from torrential.strategies.context import Context

SLOW = 2.0  # a worker that takes so many times as long as the median is slow: it keeps nothing back
NOBODY = -1  # who holds results of the dead
TICKETS = 1 << 32  # by which the tickets of a coordinator are apart from its successor's


class Assignment(msgspec.Struct, frozen=True, tag=True):
    """To a worker: what to do next, and what became of what it did last."""

    era: int
    life: int
    batch: int  # the number of the batch: every evaluation of the objective is one
    epoch: int  # the shuffle that it is cut from
    total: int  # samples of the batch
    keep: bool = False  # the result of the last portion counts
    drop: bool = False  # the sum does not
    ticket: int = 0  # push the sum of what counts, under this ticket; 0: not now
    replaces: tuple[int, ...] = ()
    portion: int = -1  # compute this one; -1: nothing now
    span: tuple[int, int] = (0, 0)
    again: tuple[tuple[int, int, int], ...] = ()  # (portion, first, last): compute all of these, and push their sum
    step: int = 0  # how far the run has come
    samples: int = 0


class Computed(msgspec.Struct, frozen=True, tag=True):
    """To the coordinator: a portion is computed."""

    era: int
    life: int
    batch: int
    portion: int
    loss: float  # sum over its samples
    seconds: float


class SumPushed(msgspec.Struct, frozen=True, tag=True):
    """To the coordinator: a sum was pushed; `complete`: all servers have it."""

    era: int
    life: int
    ticket: int
    complete: bool


class Report(msgspec.Struct, frozen=True, tag=True):
    """To a worker: say what you have."""

    era: int


class Holding(msgspec.Struct, frozen=True, tag=True):
    """To the coordinator: a worker is idle, and has these results of a batch."""

    era: int
    life: int
    batch: int = -1
    kept: tuple[tuple[int, float], ...] = ()  # portions that count, with their losses, in the worker's sum
    last: tuple[int, float] | None = None  # a portion whose result may count
    tickets: tuple[int, ...] = ()  # under which the sum was pushed, and did not reach all servers


class Over(msgspec.Struct, frozen=True, tag=True):
    """To a worker: there is nothing left to compute."""


LETTERS = (Assignment, Computed, SumPushed, Report, Holding, Over)


class PortionWorker:
    """The worker's side: computes portions as the coordinator says."""

    def __init__(self, ctx: Context) -> None:
        self._ctx, self._life, self._era = ctx, ctx.comm.view.version, 0
        self._vector, self._gradient = ctx.replica.vector(), ctx.replica.gradient()
        self._sum = ctx.comm.buffer("sum", self._gradient.numel(), self._gradient.dtype)
        self._batch = -1  # that the parameters here are of
        self._kept: list[tuple[int, float]] = []
        self._last: tuple[int, float] | None = None
        self._tickets: tuple[int, ...] = ()
        self._over = False

    def run(self) -> None:
        ctx = self._ctx
        for coordinator in ctx.comm.view.coordinators:
            ctx.comm.post(coordinator, self._holding(0))
        while not self._over and not self._is_closed():
            letter = ctx.params.receive(ctx.config.settings.timeout)
            if letter is None:
                continue
            match letter.message:
                case Over():
                    self._over = True
                case Report(era):
                    self._era = era
                    ctx.comm.post(letter.source, self._holding(era))
                case Assignment() as order if order.era >= self._era and order.life == self._life:
                    self._era = order.era
                    self._carry_out(order, letter.source)

    def _is_closed(self) -> bool:
        """Whether the coordinator is gone because there is nothing left to do; otherwise a successor will come."""
        if self._ctx.comm.view.coordinators:
            return False
        answer = self._ctx.params.call("survey", {"least": 0}).wait()
        return any(read_survey(tensor).closed for tensor in answer.tensors)

    def _holding(self, era: int) -> Holding:
        return Holding(era, self._life, self._batch, tuple(self._kept), self._last, self._tickets)

    def _carry_out(self, order: Assignment, coordinator: int) -> None:
        ctx = self._ctx
        if order.drop or order.batch != self._batch:
            self._forget()
        if order.batch != self._batch:
            self._batch = -1
            if order.portion >= 0 or order.again:
                self._batch = order.batch
                ctx.params.get(self._vector).wait()
        elif order.keep and self._last is not None:
            self._sum.add_(self._gradient)
            self._kept.append(self._last)
        if not order.replaces:  # else the last result waits for the next order
            self._last = None
        if order.ticket and not order.again:
            self._push(order, coordinator)
        if order.again:
            assert not self._kept
            for portion, first, last in order.again:
                self._kept.append((portion, self._compute(order, first, last)))
                self._sum.add_(self._gradient)
            self._push(order, coordinator)
        if order.portion >= 0:
            began = ctx.comm.now()
            self._last = order.portion, self._compute(order, *order.span)
            finished = Computed(order.era, self._life, order.batch, *self._last, ctx.comm.now() - began)
            ctx.comm.post(coordinator, finished)
            ctx.progress.took_part(order.step, order.samples, self._last[1] / (order.span[1] - order.span[0]))

    def _compute(self, order: Assignment, first: int, last: int) -> float:
        indices = self._ctx.data.order(order.epoch)[first:last]
        batch = Batch(order.epoch, first, indices, order.total, len(indices) / order.total)
        return self._ctx.replica.backward([batch], finite=False) * len(indices)

    def _push(self, order: Assignment, coordinator: int) -> None:
        options = {
            "pass": order.batch,
            "ticket": order.ticket,
            "replaces": order.replaces,
            "portions": [portion for portion, _ in self._kept],
            "loss": math.fsum(loss for _, loss in self._kept),
        }
        answer = self._ctx.params.call("accumulate", options, self._sum).wait()
        complete = all(bool(flag) for flag in answer.tensors)
        if complete:
            self._forget()
        else:
            self._tickets += (order.ticket,)
        self._ctx.comm.post(coordinator, SumPushed(order.era, self._life, order.ticket, complete))

    def _forget(self) -> None:
        self._sum.zero_()
        self._kept, self._tickets = [], ()


class _Push(msgspec.Struct, frozen=True):
    """A sum on its way from a worker to the servers."""

    ticket: int
    replaces: tuple[int, ...]
    portions: tuple[int, ...]


class PortionedBatches:
    """The coordinator's side: has the workers compute one batch after another."""

    def __init__(self, ctx: Context, portions: Portions, total: int, sum_every: int) -> None:
        """`total`: samples of a batch; `sum_every`: portions that a worker adds up before it pushes."""
        self._ctx, self._portions, self._total, self._sum_every = ctx, portions, total, sum_every
        self._era = ctx.comm.view.version
        self.first_ticket = self._ticket = self._era * TICKETS
        self._lives: dict[int, int] = {}  # of the workers that have said that they are there
        self._pushes: dict[int, _Push] = {}  # by worker
        self._losses: dict[int, float] = {}  # of portions that count
        self._unsettled: dict[int, bool] = {}  # workers whose last result waits for word: keep it or not
        self._seconds: dict[int, float] = {}  # that each worker took for its last portion
        self._again: list[_Push] = []  # sums that some servers have, and whose workers died
        self._partial: list[_Push] = []  # the same, as long as their workers may turn out to be there
        self._gathering = False  # whether workers are asked what they have of a batch that another began
        self._claims: dict[int, tuple[int, float]] = {}  # results that workers have, and nobody has decided about
        self._drops: set[int] = set()  # workers whose sums are of no use
        self._batch, self._epoch, self._place = 0, 0, (0, 0)

    def greet(self) -> None:
        """Ask all workers what they have of a batch that another coordinator may have begun."""
        for worker in self._ctx.comm.view.workers:
            self._ctx.comm.post(worker, Report(self._era))

    def dismiss(self) -> None:
        """Tell all workers that it is over, those too that come late."""
        ctx, told = self._ctx, set[int]()
        ctx.params.call("close").wait()
        while workers := ctx.comm.view.workers:
            for worker in set(workers) - told:
                ctx.comm.post(worker, Over())
            told = set(workers)
            letter = ctx.params.receive(ctx.config.settings.timeout)
            if letter is not None and isinstance(letter.message, Holding):
                ctx.comm.post(letter.source, Over())

    def compute(self, batch: int, epoch: int, place: tuple[int, int], remembered: Sequence[Survey]) -> float:
        """Have the workers compute the batch with this number; returns the sum of its losses. `place`: the run's steps
        and samples so far; `remembered`: what servers know of a coordinator that began this batch, if one did."""
        ctx, portions = self._ctx, self._portions
        began, self._batch, self._epoch, self._place = ctx.comm.now(), batch, epoch, place
        complete, self._partial = self._settled(remembered)
        self._gathering, self._claims, self._drops = bool(remembered), {}, set()
        self._pushes, self._unsettled, self._again = {}, {}, []
        portions.begin(began, complete)
        for push in self._partial:
            portions.hold(NOBODY, push.portions)
        while True:
            self._follow_view()
            if portions.done:
                break
            self._order()
            letter = ctx.params.receive(ctx.config.settings.timeout)
            if letter is None:
                for worker in portions.at_work:
                    ctx.comm.suspect(worker, ctx.config.settings.timeout)
            else:
                self._handle(letter.source, letter.message)
        ctx.progress.worked(portions.end(ctx.comm.now()), ctx.comm.now() - began)
        return math.fsum(self._losses.values())

    def _settled(self, remembered: Sequence[Survey]) -> tuple[list[int], list[_Push]]:
        """What a coordinator before this one had got of the batch: portions that all servers have, and sums that only
        some have. Their losses are known."""
        here = [survey for survey in remembered if survey.number == self._batch]
        tickets: dict[tuple[int, ...], set[int]] = {}  # several for the same portions, if one was to replace another
        self._losses = {}
        for survey in here:
            for ticket, (portions, loss) in survey.applied.items():
                tickets.setdefault(tuple(portions), set()).add(ticket)
                self._losses |= dict.fromkeys(portions, 0.0) | {portions[0]: loss}
        complete, partial = list[int](), list[_Push]()
        for numbers, same in tickets.items():
            if len(here) == len(remembered) and all(same & survey.applied.keys() for survey in here):
                complete += numbers
            else:
                partial.append(_Push(max(same), tuple(sorted(same)), numbers))
        return complete, partial

    # -- workers ----------------------------------------------------------------------------------------------------
    def _follow_view(self) -> None:
        for worker in sorted(self._lives.keys() - set(self._ctx.comm.view.workers)):
            self._lose(worker)

    def _lose(self, worker: int) -> None:
        """A worker died. If it was pushing, its sum may be on some servers, and on others not."""
        push = self._pushes.pop(worker, None)
        if push is not None:
            flags = self._ctx.params.call("fence", {"ticket": push.ticket}).wait().tensors
            if all(bool(flag) for flag in flags):
                self._portions.safe(push.portions)
            elif push.replaces or any(bool(flag) for flag in flags):
                self._portions.hold(NOBODY, push.portions)
                self._again.append(push)
        for number in self._portions.lose(worker):
            self._losses.pop(number, None)
        for table in (self._lives, self._unsettled, self._seconds, self._claims):
            table.pop(worker, None)
        self._drops.discard(worker)

    def _handle(self, worker: int, message: Any) -> None:
        match message:
            case Holding():
                self._take_over(worker, message)
            case Computed(era, life, batch, portion, loss, seconds) if self._is_known(worker, era, life):
                if batch == self._batch:
                    first = self._portions.finished(worker, portion, self._ctx.comm.now())
                    self._unsettled[worker], self._seconds[worker] = first, seconds
                    if first:
                        self._losses[portion] = loss
                else:
                    self._portions.join(worker, self._ctx.comm.now())
            case SumPushed(era, life, ticket, complete) if self._is_known(worker, era, life):
                push = self._pushes.get(worker)
                if push is not None and push.ticket == ticket and complete:
                    del self._pushes[worker]
                    self._portions.safe(push.portions)
                    if push.replaces:
                        self._portions.join(worker, self._ctx.comm.now())

    def _is_known(self, worker: int, era: int, life: int) -> bool:
        return era == self._era and self._lives.get(worker) == life

    def _take_over(self, worker: int, holding: Holding) -> None:
        """A worker says that it is there, and what it has of a batch that another coordinator began."""
        if self._lives.get(worker) == holding.life or worker not in self._ctx.comm.view.workers:
            return
        if worker in self._lives:
            self._lose(worker)  # it died and came back
        self._lives[worker] = holding.life
        self._portions.join(worker, self._ctx.comm.now())
        if holding.batch != self._batch or not self._gathering:
            return
        numbers = [number for number, _ in holding.kept]
        found = next((push for push in self._partial if push.portions == tuple(numbers)), None)
        if found is not None:
            self._partial.remove(found)
        if numbers and (found is not None or all(map(self._portions.waits, numbers))):
            self._portions.hold(worker, numbers)
            self._losses |= dict(holding.kept)
            if found is not None:
                self._push(worker, found.replaces, found.portions)
        elif numbers:
            self._drops.add(worker)
        if holding.last is not None:
            self._claims[worker] = holding.last

    def _gathered(self) -> bool:
        """Whether all workers have said what they have of a batch that another coordinator began. Then the rest is
        decided: results that nobody has kept, and sums whose workers died."""
        if self._gathering and self._lives.keys() >= set(self._ctx.comm.view.workers):
            self._gathering = False
            for worker, (number, loss) in self._claims.items():
                if self._portions.waits(number):
                    self._portions.hold(worker, [number])
                    self._losses[number], self._unsettled[worker] = loss, True
            self._again += self._partial
        return not self._gathering

    # -- orders -----------------------------------------------------------------------------------------------------
    def _order(self) -> None:
        """Give every idle worker something to do, if there is something."""
        if not self._gathered():
            return
        more = self._portions.available or bool(self._again)
        for worker in self._portions.idle if more else self._portions.idle_holders:
            held = [n for n in self._portions.held(worker) if worker not in self._pushes]
            if worker in self._pushes and self._pushes[worker].replaces:
                continue
            if self._again and not held and worker not in self._pushes:
                push = self._again.pop(0)
                self._portions.occupy(worker)
                self._portions.hold(worker, push.portions)
                self._push(worker, (*push.replaces, push.ticket), push.portions, again=True)
                continue
            if held and (len(held) >= self._most(worker) or self._portions.scarce):
                self._push(worker, (), tuple(held), give=True)
            elif (number := self._portions.give(worker, self._ctx.comm.now())) is not None:
                self._post(worker, portion=number, span=self._span(number))

    def _most(self, worker: int) -> int:
        """Portions that a worker may hold back: a slow one none, or the others would wait for it in the end."""
        usual = statistics.median(self._seconds.values()) if self._seconds else 0.0
        return 1 if self._seconds.get(worker, 0.0) > SLOW * usual else self._sum_every

    def _span(self, number: int) -> tuple[int, int]:
        count, total = self._portions.count, self._total
        return number * total // count, (number + 1) * total // count

    def _push(
        self,
        worker: int,
        replaces: tuple[int, ...],
        portions: tuple[int, ...],
        *,
        again: bool = False,
        give: bool = False,
    ) -> None:
        """Have a worker push its sum, or compute one again and push that, and go on with the next portion."""
        self._ticket += 1
        self._pushes[worker] = _Push(self._ticket, replaces, portions)
        about: dict[str, Any] = {"ticket": self._ticket, "replaces": replaces}
        if again:
            about["again"] = tuple((number, *self._span(number)) for number in portions)
        if give and (number := self._portions.give(worker, self._ctx.comm.now())) is not None:
            about |= {"portion": number, "span": self._span(number)}
        self._post(worker, **about)

    def _post(self, worker: int, **about: Any) -> None:
        keep = False if about.get("replaces") else self._unsettled.pop(worker, False)
        step, samples = self._place
        samples += self._portions.counted * self._total // self._portions.count
        about["drop"] = worker in self._drops
        self._drops.discard(worker)
        order = Assignment(
            self._era,
            self._lives[worker],
            self._batch,
            self._epoch,
            self._total,
            keep=keep,
            step=step,
            samples=samples,
            **about,
        )
        self._ctx.comm.post(worker, order)
