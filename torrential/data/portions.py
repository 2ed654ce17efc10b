"""A batch as many small portions: which worker gets which, which are copies, and which result counts.

    waiting ──give──► out ──finished──► held ──safe──► safe
       ▲               │                 │
       └───── lost ────┴──────lost───────┘        its worker died

A portion is much smaller than a worker's share of the batch, so that the quick do more of them than the slow. When none
is waiting, idle workers get copies of those that are still out; the first result counts, and the others are thrown
away. A result counts from `finished` on, and is held by its worker until `safe` says that it outlives that worker. A
portion goes to the worker that had it last time, since that worker has the data, unless another one runs out of work
first.

This is bookkeeping alone: it sends nothing, and knows the time only as it is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Tally:
    """The counts of one batch's portions."""

    portions: int = 0
    copies: int = 0  # portions given to a second worker, or a third
    wasted: int = 0  # results thrown away, because another worker's was there first, or its worker died
    idle: dict[int, float] = field(default_factory=dict)  # seconds that each worker had nothing to do


class Portions:
    """The portions of one batch after another, and the workers that compute them."""

    def __init__(self, count: int, copies: int = 1) -> None:
        """`copies`: how many workers more than one may be at work on the same portion."""
        assert count > 0, count
        self.count, self._copies = count, copies
        self._homes: dict[int, int] = {}  # who had a portion last
        self._workers: dict[int, float | None] = {}  # since when each has been idle; None: it is at work
        self._given: dict[int, set[int]] = {}  # what each has been given and not finished
        self.begin(0.0)

    def begin(self, now: float, done: Collection[int] = ()) -> None:
        """Begin a batch; `done` are portions whose results are safe already."""
        self._waiting = {number for number in range(self.count) if number not in done}
        self._queues: dict[int, list[int]] | None = None  # what waits, by who had it last; None: to be made anew
        self._out: dict[int, list[int]] = {}  # portions under way, and who computes them, the first one first
        self._copyable: dict[int, None] = {}  # those of them that one more worker may be given, in the same order
        self._held: dict[int, int] = {}  # results that count, and who has them
        self._safe = set(done)
        self.tally = Tally(self.count)
        for worker, idle in self._workers.items():
            self._workers[worker] = now if idle is not None else None

    # -- workers ------------------------------------------------------------------------------------------------------
    def join(self, worker: int, now: float) -> None:
        """Note that a worker is there, and has nothing to do."""
        if worker not in self._workers:
            self._queues = None
        self._workers[worker], self._given[worker] = now, set()

    def lose(self, worker: int) -> list[int]:
        """Note a worker's death: the portion that it was computing waits again, unless another worker computes it too,
        and so do the portions that it held. Returns those that it held."""
        self._workers.pop(worker, None)
        self._given.pop(worker, None)
        self._queues = None
        for number, others in list(self._out.items()):
            if worker in others:
                others.remove(worker)
                if not others:
                    del self._out[number]
                    self._waiting.add(number)
        self._copyable = {number: None for number, others in self._out.items() if len(others) <= self._copies}
        held = [number for number, holder in self._held.items() if holder == worker]
        for number in held:
            del self._held[number]
            self._waiting.add(number)
        self.tally.wasted += len(held)
        return held

    def occupy(self, worker: int) -> None:
        """Note that a worker is busy with something else."""
        self._workers[worker] = None

    @property
    def at_work(self) -> list[int]:
        return [worker for worker, since in self._workers.items() if since is None]

    @property
    def all_given(self) -> bool:
        """Whether no portion waits for a worker."""
        return not self._waiting

    @property
    def available(self) -> bool:
        """Whether there is a portion, or a copy of one, to give."""
        return bool(self._waiting or self._copyable)

    @property
    def scarce(self) -> bool:
        """Whether fewer portions wait than there are workers: all workers may then wait for a result that one holds
        back."""
        return len(self._waiting) < len(self._workers)

    @property
    def idle(self) -> list[int]:
        """Workers that have nothing to do, the one first that has waited longest."""
        return sorted(
            (w for w, since in self._workers.items() if since is not None), key=lambda w: self._workers[w] or 0
        )

    @property
    def idle_holders(self) -> list[int]:
        """Those of them that have results in their hands."""
        holders = set(self._held.values())
        return [worker for worker in self.idle if worker in holders] if holders else []

    # -- portions -----------------------------------------------------------------------------------------------------
    def give(self, worker: int, now: float) -> int | None:
        """The next portion for an idle worker, or None. It is at work from now on."""
        number = self._next(worker)
        if number is None:
            number = self._copy(worker)
            if number is None:
                return None
            self.tally.copies += 1
        self._hand(worker, number)
        since = self._workers[worker]
        assert since is not None, f"worker {worker} is at work"
        self.tally.idle[worker] = self.tally.idle.get(worker, 0.0) + now - since
        self._workers[worker] = None
        return number

    def _hand(self, worker: int, number: int) -> None:
        others = self._out.setdefault(number, [])
        others.append(worker)
        self._given[worker].add(number)
        if len(others) > self._copies:
            self._copyable.pop(number, None)
        else:
            self._copyable[number] = None

    def give_more(self, worker: int, most: int) -> list[int]:
        """So many portions more for a worker that was given one, at most a quarter of those that wait for it."""
        own = (self._queues or {}).get(worker, [])
        more = [self._take(worker, 0) for _ in range(min(most, len(own) // 4))]
        for number in more:
            self._hand(worker, number)
        return more

    def _next(self, worker: int) -> int | None:
        """Take a portion that waits: one that this worker had last, or one that no present worker had, or the last of
        the worker that has most left."""
        if not self._waiting:
            return None
        queues = self._queues = self._by_home() if self._queues is None else self._queues
        if worker in queues:
            return self._take(worker, 0)
        if homeless := [home for home in queues if home not in self._workers]:
            return self._take(min(homeless, key=lambda home: queues[home][0]), 0)
        return self._take(max(queues, key=lambda home: (len(queues[home]), -queues[home][0])), -1)

    def _take(self, home: int, place: int) -> int:
        """Take one out of a queue."""
        assert self._queues is not None
        number = self._queues[home].pop(place)
        if not self._queues[home]:
            del self._queues[home]
        self._waiting.remove(number)
        return number

    def _by_home(self) -> dict[int, list[int]]:
        """The portions that wait, by the worker that had them last; portions that no worker had yet go to
        neighbours."""
        workers, queues = sorted(self._workers), dict[int, list[int]]()
        for number in sorted(self._waiting):
            home = self._homes.get(number, workers[number * len(workers) // self.count])
            queues.setdefault(home, []).append(number)
        return queues

    def _copy(self, worker: int) -> int | None:
        """The portion that has been out for longest, unless enough are at work on it, or this one is."""
        return next((number for number in self._copyable if worker not in self._out[number]), None)

    def finished(self, worker: int, number: int, now: float) -> bool:
        """Note that a worker has computed a portion, and is idle if it has no other; returns whether its result
        counts."""
        self.finished_late(worker, number, now)
        first = worker in self._out.get(number, ())
        if first:
            del self._out[number]
            self._copyable.pop(number, None)
            self._held[number] = worker
            self._homes[number] = worker
        else:
            self.tally.wasted += 1
        return first

    def finished_late(self, worker: int, number: int, now: float) -> None:
        """Note that a worker has computed a portion of an earlier batch, and is idle if it has no other."""
        self._given[worker].discard(number)
        if not self._given[worker]:
            self._workers[worker] = now

    def held(self, worker: int) -> list[int]:
        """The results that count and that only this worker has."""
        return [number for number, holder in self._held.items() if holder == worker]

    def hold(self, worker: int, numbers: Iterable[int]) -> None:
        """Note that this worker holds these results, which count; it replaces any other holder."""
        for number in numbers:
            if number in self._waiting:
                self._waiting.remove(number)
                self._queues = None
            self._held[number] = worker

    def waits(self, number: int) -> bool:
        return number in self._waiting

    def safe(self, numbers: Sequence[int]) -> None:
        """Note that these results outlive their workers."""
        for number in numbers:
            self._held.pop(number, None)
            self._safe.add(number)

    @property
    def counted(self) -> int:
        """The number of portions that there are results of."""
        return len(self._held) + len(self._safe)

    @property
    def done(self) -> bool:
        return len(self._safe) == self.count

    def end(self, now: float) -> Tally:
        """End a complete batch; returns the counts of its portions."""
        for worker, since in self._workers.items():
            if since is not None:
                self.tally.idle[worker] = self.tally.idle.get(worker, 0.0) + now - since
                self._workers[worker] = now
        return self.tally
