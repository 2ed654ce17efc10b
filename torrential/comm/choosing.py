"""The members of a group agree on one table of costs, and pick from it alike.

A member that chose another algorithm than the rest would wait for messages that never come. So everything that enters a
decision is agreed on first: times are those of the slowest member, the same for all; and after every regrouping the
lowest member that has a table hands it to everybody, newcomers included, byte for byte.

    regrouped ─► has anybody a table? ── no ──► has the first member one in a file? ── no ──► measure together
                        │ yes                            │ yes                                     │
                        └────────────────────────────────┴────────► broadcast, pick ◄──────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec
import torch
from torch import Tensor

from torrential.comm import costs
from torrential.comm.costs import ADD, Choice, Fitted, Sample
from torrential.comm.protocol import Comm

SIZES = tuple(1 << power for power in (10, 14, 18, 21, 24))  # bytes
BUDGET_SECONDS = 0.8  # for all of them; what was begun is finished, so it may take a little longer
ADDED = 1 << 20  # bytes
ROUNDS = 3
MAX_REPETITIONS = 50
SHOWN = tuple(10**power for power in range(3, 9))  # bytes, in the record of what is picked

AllReduce = Callable[[str, Tensor], object]
"""Sum over the members in place, by the algorithm of that name; returns when done."""
Agree = Callable[[Tensor], Tensor]
"""All-gather: everybody's small vector, the same (members, numel) tensor on all."""


def timed(all_reduce: AllReduce, agree: Agree, name: str, tensor: Tensor, repetitions: int) -> float:
    """Seconds for one call, of the slowest member. All begin together."""
    agree(torch.zeros(1))
    start = time.perf_counter()
    for _ in range(repetitions):
        all_reduce(name, tensor)
    mine = (time.perf_counter() - start) / repetitions
    return float(agree(torch.tensor([mine], dtype=torch.float64)).max())


def calibrate(
    all_reduce: AllReduce,
    agree: Agree,
    names: Sequence[str],
    data: Tensor,  # (numel,) float32 zeros, as large as the largest size that may be measured
    members: int,
    transport: str,
    seconds: float = BUDGET_SECONDS,
    sizes: Sequence[int] = SIZES,
) -> Fitted:
    """Measure each algorithm at a few sizes, from small to large, until they or the time are used up.

    Called by all members alike. The first call at a size is not counted; the next one says how often to repeat.
    """
    began = time.perf_counter()
    samples = [_adding(agree, data, members)]
    for number, size in enumerate(sizes):
        tensor = data[: size // data.element_size()]
        times: dict[str, list[float]] = {}
        for name in names:
            all_reduce(name, tensor)
            times[name] = [timed(all_reduce, agree, name, tensor, 1)]
        once = {name: own[0] for name, own in times.items()}
        spent = float(agree(torch.tensor([time.perf_counter() - began], dtype=torch.float64)).max())
        share = (seconds - spent) / (len(sizes) - number)
        for _ in range(max(0, min(ROUNDS, int(share / sum(once.values()))))):
            for name, first in once.items():
                repetitions = max(1, min(MAX_REPETITIONS, int(share / ROUNDS / len(names) / first)))
                times[name].append(timed(all_reduce, agree, name, tensor, repetitions))
        samples += [Sample(name, members, size, median(own[1:] or own)) for name, own in times.items()]
        rest = seconds - float(agree(torch.tensor([time.perf_counter() - began], dtype=torch.float64)).max())
        if number and number + 1 < len(sizes) and 2 * sum(once.values()) * sizes[number + 1] / size > rest:
            break  # the next size would take too long
    return costs.fitted(samples, transport, members, datetime.now(UTC).isoformat(timespec="seconds"))


def _adding(agree: Agree, data: Tensor, members: int) -> Sample:
    """All members at once, as in an all-reduce."""
    vector = data[: min(data.numel(), ADDED // data.element_size())]
    other = torch.zeros_like(vector)
    seconds = [timed(lambda _, target: torch.add(target, other, out=target), agree, ADD, vector, 1) for _ in range(6)]
    return Sample(ADD, members, vector.nbytes, median(seconds[1:]))


class Chooser:
    """Chooses the algorithm for each size, on a transport where there is a choice."""

    def __init__(
        self, comm: Comm, all_reduce: AllReduce, names: Sequence[str], transport: str, kept: Path | None = None
    ) -> None:
        self._comm, self._all_reduce, self._names, self._transport = comm, all_reduce, names, transport
        self._kept = kept  # the run's own copy: a resumed run picks as before, to the same bits
        self.table: Fitted | None = None
        self._picks: dict[int, str] = {}

    def agree_on_costs(
        self,
        data: Tensor | None = None,
        seconds: float = BUDGET_SECONDS,
        sizes: Sequence[int] = SIZES,
        fresh: bool = False,
    ) -> str | None:
        """Agree with the other members on one table of costs, after a regrouping. Returns where it is from if it is new
        to all members, else None."""
        members = self._comm.members
        self._picks = {}
        if len(members) == 1 or self._spread():
            return None
        if self._comm.rank == members[0] and not fresh:
            self.table = self._load()
        if self._spread():
            origin = "known from an earlier run"
        else:
            origin = "measured"
            data = torch.zeros(max(sizes) // 4) if data is None else data
            self.table = calibrate(
                self._all_reduce, self._agree, self._names, data, len(members), self._transport, seconds, sizes
            )
            self._spread()
        if self._comm.rank == members[0] and self.table is not None:
            self._save(self.table, origin == "measured")
        return origin

    def adopt(self, table: Fitted) -> None:
        """Pick from this table from now on; all members must."""
        self.table, self._picks = table, {}

    def pick(self, nbytes: int) -> str:
        name = self._picks.get(nbytes)
        if name is None:
            name = self._picks[nbytes] = self.choice(nbytes).name
        return name

    def choice(self, nbytes: int) -> Choice:
        assert self.table is not None, "agree_on_costs first"
        return self.table.choose(nbytes, len(self._comm.members), self._names)

    def describe(self) -> str:
        assert self.table is not None, "agree_on_costs first"
        sizes = [size for points in self.table.measured.values() for size, _ in points]
        least, most = min(sizes), max(sizes)
        picks = [f"{n:,} bytes{' (extrapolated)' if n > most else ''}: {self.choice(n).reason}" for n in SHOWN]
        return f"predicted from times at {least:,} to {most:,} bytes; {'; '.join(picks)}"

    def _agree(self, vector: Tensor) -> Tensor:
        gathered: Tensor = self._comm.all_gather(vector).wait()
        return gathered

    def _spread(self) -> bool:
        """Hand the table of the lowest member that has one to all; False if none has."""
        mine = b"" if self.table is None else msgspec.json.encode(self.table)
        sizes = self._agree(torch.tensor([len(mine)]))[:, 0].tolist()
        source = next((index for index, size in enumerate(sizes) if size), None)
        if source is None:
            return False
        page = self._comm.buffer(f"costs/{sizes[source]}", sizes[source], torch.uint8)
        if self._comm.rank == self._comm.members[source]:
            page.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        self._comm.broadcast(page, self._comm.members[source]).wait()
        self.table = msgspec.json.decode(page.numpy().tobytes(), type=Fitted)
        return True

    def _load(self) -> Fitted | None:
        places = [self._kept, costs.cache_path(self._transport, len(self._comm.members))]
        tables = map(costs.load, places)
        return next((t for t in tables if t is not None and set(self._names) <= set(t.measured)), None)

    def _save(self, table: Fitted, new: bool) -> None:
        if new:
            costs.remember(table)
        if self._kept is not None:
            costs.save(self._kept, table)
