"""`torrential bench allreduce`: every way to all-reduce on this machine, measured on real worker processes."""

from __future__ import annotations

import re
from statistics import median
from typing import NamedTuple

import msgspec

from torrential.bench.job import bench_job
from torrential.bench.member import Calibrated, MeasureAllReduce, Measured, News, Picked
from torrential.comm import futex
from torrential.comm.costs import Fitted, machine
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.shared import MAX_RANKS
from torrential.config import LocalSettings
from torrential.descriptors import check_descriptors
from torrential.errors import BadInput, RunFailed, UnknownName
from torrential.records import Event, Record
from torrential.worlds.base import Job, RunWatcher
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.supervisor import LocalWorld

SIZES = "1KB,4KB,16KB,64KB,256KB,1MB,4MB,16MB,64MB,100MB"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
TRANSPORTS = ("shared", "unix", "tcp", "tls")
ELSEWHERE = {
    "gloo": "Gloo is called native here; use --algorithms native",
    "nccl": "NCCL sums on GPUs, which are not measured here; leave it out of --algorithms",
    "hierarchical": "hierarchical needs hosts to pretend and is not measured here; leave it out of --algorithms, or "
    "train with --set algorithm=hierarchical --set hosts=2",
}


class Benchmark(NamedTuple):
    """The benchmark that was asked for, with checked arguments."""

    workers: int
    sizes: list[int]  # bytes
    transport: str
    algorithms: list[str]
    rounds: int
    fresh: bool  # calibrate even if the costs are known

    @property
    def cells(self) -> int:
        return len(self.sizes) * len(self.algorithms) * self.rounds

    @property
    def messages(self) -> str:
        """The transport that messages go over, also if `auto` uses shared memory."""
        return "unix" if self.transport == "shared" else self.transport


class Timings(msgspec.Struct, frozen=True):
    """The times of all algorithms at one size."""

    bytes: int
    ms: dict[str, float]  # median over the rounds
    predicted_ms: dict[str, float]
    spread_ms: dict[str, tuple[float, float]]  # least and most of the rounds
    picked: str  # what auto stands for
    best: str
    auto_over_best: float | None
    auto_over_gloo: float | None
    auto_over_picked: float | None  # the same code but for the picking: what differs from 1 is mostly noise


class Result(msgspec.Struct, frozen=True):
    machine: str
    workers: int
    transport: str
    rounds: int
    fitted: Fitted
    rows: list[Timings]


def ask(workers: int, sizes: str, transport: str, algorithms: str | None, rounds: int, fresh: bool) -> Benchmark:
    for name, value, least in (("workers", workers, 2), ("rounds", rounds, 1)):
        if value < least:
            raise BadInput(f"--{name} must be at least {least} (given: {value})")
    if workers > MAX_RANKS:
        raise BadInput(f"--workers can be {MAX_RANKS} at most (given: {workers})")
    if transport not in TRANSPORTS:
        raise UnknownName("transport", transport, TRANSPORTS)
    if transport == "shared" and not futex.supported():
        raise BadInput("--transport shared needs Linux on x86-64; use --transport unix")
    here = [*(["shared"] if transport == "shared" else []), "native", *ALGORITHMS, "auto"]
    names = here if algorithms is None else [name.strip() for name in algorithms.split(",")]
    for name in names:
        if name == "shared" and transport != "shared":
            raise BadInput(f"shared needs --transport shared (given: {transport}); leave it out of --algorithms")
        if name not in here:
            raise BadInput(ELSEWHERE[name]) if name in ELSEWHERE else UnknownName("algorithm", name, here)
    unique = list(dict.fromkeys(names))
    check_descriptors(workers)
    return Benchmark(workers, sorted({_bytes(text) for text in sizes.split(",")}), transport, unique, rounds, fresh)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?B)?", text.strip(), re.IGNORECASE)
    size = int(found[1]) * UNITS[(found[2] or "").upper()] // 4 * 4 if found else 0
    if size < 4:
        raise BadInput(f"a size is a number of bytes, KB, MB or GB, at least 4 bytes (given: {text!r}); try 64KB")
    return size


def measure(asked: Benchmark, launch: Launch | None, watcher: RunWatcher) -> Result:
    """Start the workers, let them measure, and put together what they report."""
    news: list[News] = []

    def note(record: Record) -> None:
        if isinstance(record, Event) and record.event == "worker_lost":
            raise RunFailed(f"worker {record.worker} died; nothing was measured")
        if isinstance(record, Event) and record.event == "bench":
            news.append(decode(record))

    try:
        LocalWorld(launch).run(_job(asked), note, watcher)
    except RunFailed as error:
        raise RunFailed(str(error).replace("; no checkpoint was made yet", "")) from error
    return _result(asked, news)


def decode(record: Event) -> News:
    news: News = msgspec.json.decode(record.detail, type=News)
    return news


def _job(asked: Benchmark) -> Job:
    strategy = MeasureAllReduce(
        sizes=asked.sizes,
        algorithms=asked.algorithms,
        rounds=asked.rounds,
        messages=asked.messages,
        fresh=asked.fresh,
    )
    if asked.transport == "tls":
        settings = LocalSettings(transport="tcp", security="tls")
    else:
        settings = LocalSettings(transport=asked.transport)  # type: ignore[arg-type]
    return bench_job(strategy, settings, asked.workers)


def _result(asked: Benchmark, news: list[News]) -> Result:
    table = next(n.table for n in news if isinstance(n, Calibrated))
    picked = {n.nbytes: n.name for n in news if isinstance(n, Picked)}
    times: dict[int, dict[str, list[float]]] = {size: {n: [] for n in asked.algorithms} for size in asked.sizes}
    for n in news:
        if isinstance(n, Measured):
            times[n.nbytes][n.name].append(1e3 * n.seconds)
    rows = []
    for size, by_name in times.items():
        ms = {name: median(rounds) for name, rounds in by_name.items()}
        best = min(ms, key=lambda name: ms[name])
        named = {name: picked[size] if name == "auto" else name for name in ms}
        rows.append(
            Timings(
                bytes=size,
                ms=ms,
                predicted_ms={name: 1e3 * table.predict(known, asked.workers, size) for name, known in named.items()},
                spread_ms={name: (min(rounds), max(rounds)) for name, rounds in by_name.items()},
                picked=picked[size],
                best=best,
                auto_over_best=_ratio(by_name, best),
                auto_over_gloo=_ratio(by_name, "native"),
                auto_over_picked=_ratio(by_name, picked[size]),
            )
        )
    return Result(machine(), asked.workers, asked.transport, asked.rounds, table, rows)


def _ratio(times: dict[str, list[float]], other: str) -> float | None:
    """The factor by which auto takes longer than another: the median over the rounds, in each of which both met the
    same noise."""
    if "auto" not in times or other not in times:
        return None
    return median(a / b for a, b in zip(times["auto"], times[other], strict=True))
