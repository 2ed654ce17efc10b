"""What an all-reduce will take, from a few measured times; and so which way is the quickest for a message.

The table of costs (`comm/schedules`) is linear in three unknowns, so these are found by least squares from times of
message algorithms. Carriers that are no schedules (shared memory, torch.distributed) get a line, a + b · bytes.
Errors count relative to the time, since times span five orders of magnitude, and no cost may be negative. Every
algorithm of the table sends two bytes for each that it adds, so times of all-reduces only tell 2 · byte + reduce; a
time of adding alone (a sample named `add`) tells the two apart.

    prediction = table of costs or line  ×  measured / predicted, at the measured sizes around this one

The second factor is there because a host is no network: members share its cores and caches, and each algorithm is off
by a factor of its own, which changes slowly with the size. Between measured sizes this is as good as interpolating the
times themselves, beyond them it is better, and it holds for another number of members too (figures in docs/log.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from torrential import records
from torrential.cache import cache_directory
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.schedules.base import Costs
from torrential.errors import RunFailed
from torrential.files import decode_json, read_regular

FORMAT = 1
ADD = "add"  # the name of samples that add a vector to another and send nothing


class Sample(NamedTuple):
    """The measured time of one all-reduce."""

    name: str
    members: int
    nbytes: int
    seconds: float  # the time of the slowest member


class Choice(NamedTuple):
    name: str
    seconds: float  # predicted
    second: str  # the runner-up, or empty
    second_seconds: float

    @property
    def reason(self) -> str:
        behind = f", next {self.second} {1e3 * self.second_seconds:.3g} ms" if self.second else ", the only one"
        return f"{self.name} {1e3 * self.seconds:.3g} ms{behind}"


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted costs of one kind of transport on one machine."""

    format: int = FORMAT
    machine: str
    transport: str  # the transport of messages
    members: int  # when measured
    when: str  # ISO 8601
    costs: Costs
    lines: dict[str, tuple[float, float]] = {}  # of carriers that are no schedules: seconds, seconds per byte
    measured: dict[str, list[tuple[int, float]]] = {}  # by name: bytes and seconds, in ascending order

    @property
    def names(self) -> list[str]:
        return [*(n for n in ALGORITHMS if n in self.measured or not self.measured), *self.lines]

    def model(self, name: str, members: int, nbytes: int) -> float:
        """The predicted seconds of an algorithm: by the table of costs, or by the line fitted to its measurements."""
        if name in self.lines:
            start, byte = self.lines[name]
            return start + byte * nbytes
        return ALGORITHMS[name].seconds(members, nbytes, self.costs)

    def predict(self, name: str, members: int, nbytes: int) -> float:
        points = [(size, s, self.model(name, self.members, size)) for size, s in self.measured.get(name, [])]
        points = [(size, seconds, model) for size, seconds, model in points if seconds > 0 and model > 0]
        if not points:
            return self.model(name, members, nbytes)
        sizes, seconds, models = (np.log(column) for column in zip(*points, strict=True))
        factor = np.exp(np.interp(np.log(max(1, nbytes)), sizes, seconds - models))
        return float(factor) * self.model(name, members, nbytes)

    def choose(self, nbytes: int, members: int | None = None, among: Iterable[str] | None = None) -> Choice:
        """The quickest algorithm; of equals the first in the table, so that members with the same numbers choose the
        same one."""
        names = [n for n in self.names if among is None or n in set(among)]
        count = self.members if members is None else members
        ranked = sorted((self.predict(name, count, nbytes), index) for index, name in enumerate(names))
        (seconds, first), second = ranked[0], ranked[1] if len(ranked) > 1 else None
        return Choice(names[first], seconds, names[second[1]] if second else "", second[0] if second else 0.0)

    def error(self) -> float:
        """The median relative error of the table and the lines alone, against what was measured."""
        off = [abs(self.model(n, self.members, b) / s - 1) for n, points in self.measured.items() for b, s in points]
        return float(np.median(off)) if off else 0.0


# -- fitting --------------------------------------------------------------------------------------------------------
def fit(samples: Sequence[Sample]) -> Costs:
    """The costs that explain the times of message algorithms, and of adding, best."""
    units = [Costs(1.0, 0.0, 0.0), Costs(0.0, 1.0, 0.0), Costs(0.0, 0.0, 1.0)]
    rows = [[_seconds(sample, unit) for unit in units] for sample in samples]
    return Costs(*_least_squares(rows, [s.seconds for s in samples]))


def _seconds(sample: Sample, costs: Costs) -> float:
    if sample.name == ADD:
        return costs.reduce * sample.nbytes
    return ALGORITHMS[sample.name].seconds(sample.members, sample.nbytes, costs)


def fit_line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds at no bytes, and per byte."""
    start, byte = _least_squares([[1.0, s.nbytes] for s in samples], [s.seconds for s in samples])
    return start, byte


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Of all x >= 0 the one with the least relative error in rows · x = seconds.

    Its positive entries are the unconstrained solution for some subset of the columns; with three there are seven.
    """
    table = np.array(rows, dtype=np.float64) / np.array(seconds, dtype=np.float64)[:, None]
    scale = np.linalg.norm(table, axis=0)
    best, least = np.zeros(table.shape[1]), np.inf
    for count in range(1, table.shape[1] + 1):
        for some in itertools.combinations(np.flatnonzero(scale), count):
            columns = list(some)
            found = np.linalg.lstsq(table[:, columns] / scale[columns], np.ones(len(table)), rcond=None)[0]
            x = np.zeros(table.shape[1])
            x[columns] = found / scale[columns]
            error = float(np.sum((table @ x - 1) ** 2))
            if np.all(x >= 0) and error < least * (1 - 1e-9):  # of equals the one with fewer costs
                best, least = x, error
    return [float(value) for value in best]


def fitted(samples: Sequence[Sample], transport: str, members: int, when: str) -> Fitted:
    by_name: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: s.nbytes):
        if sample.name != ADD:
            by_name.setdefault(sample.name, []).append(sample)
    return Fitted(
        machine=machine(),
        transport=transport,
        members=members,
        when=when,
        costs=fit([s for s in samples if s.name in (ADD, *ALGORITHMS)]),
        lines={name: fit_line(own) for name, own in by_name.items() if name not in ALGORITHMS},
        measured={name: [(s.nbytes, s.seconds) for s in own] for name, own in by_name.items()},
    )


# -- keeping --------------------------------------------------------------------------------------------------------
@cache
def machine() -> str:
    return f"{records.cpu_model()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"


def cache_path(transport: str, members: int) -> Path | None:
    """The file in which this machine's measurements are kept for the next run; None for a user without a home
    directory."""
    if (home := cache_directory()) is None:
        return None
    key = hashlib.sha256(f"{machine()}, {transport}, {members}".encode()).hexdigest()[:16]
    return home / f"allreduce-{transport}-{members}-{key}.json"


def load(path: Path | None) -> Fitted | None:
    """The costs in a file; None if there are none, or none that can be trusted, so that they are measured anew."""
    if path is None:
        return None
    try:
        found = decode_json(read_regular(path), Fitted)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if found.format == FORMAT and found.machine == machine() and _sound(found) else None


def _sound(table: Fitted) -> bool:
    """Whether there is something to predict from, and nothing that no measurement can have given."""
    known = set(table.measured) <= {*ALGORITHMS, *table.lines}
    prices = [*dataclasses.astuple(table.costs), *itertools.chain(*table.lines.values())]
    sizes = [[size for size, _ in points] for points in table.measured.values()]
    rising = all(own and own == sorted(set(own)) and own[0] > 0 and own[-1] < 1 << 63 for own in sizes)
    positive = all(seconds > 0 for points in table.measured.values() for _, seconds in points)
    return table.members > 1 and bool(sizes) and known and rising and positive and all(price >= 0 for price in prices)


def save(path: Path, table: Fitted) -> None:
    """Write the costs to a file, if that is possible; else the next run measures again."""
    with contextlib.suppress(OSError, RunFailed):
        records.replace_file(path, msgspec.json.encode(table))


def remember(table: Fitted) -> None:
    """Keep the costs for later runs on this machine."""
    if (path := cache_path(table.transport, table.members)) is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    save(path, table)
