"""Map-reduce beside numpy: least squares on one worker and on several, and rounds over a file that was parsed once.

python -m benchmarks.map_reduce --rows 2000000 --columns 100 --workers 1,2
python -m benchmarks.map_reduce --csv 100

Least squares: contenders take turns on the same rows, of which each computes x.T @ x and x.T @ y by numpy on one
thread a process: numpy in chunks; `multiprocessing` with a pool that has the rows already; and `map_reduce`, of which
the seconds of a round are told (portions out to sums in) and, apart, those of all else in a call, with processes
started and rows handed over. The statistic is the same function everywhere.

--csv MB: a file of that size, cut into parts; a round that parses it with numpy.loadtxt, pandas and pyarrow (where
these are installed), and one of logistic regression over what map_reduce keeps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import torrential as tt
from torrential.records import Work

CHUNKS = 64
Rows = tuple[Any, Any]


def products(rows: Rows) -> dict[str, Any]:
    x, y = rows
    return {"xx": x.T @ x, "xy": x.T @ y}


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: each + other[name] for name, each in one.items()}


def spans(rows: int) -> list[tuple[int, int]]:
    return [(i * rows // CHUNKS, (i + 1) * rows // CHUNKS) for i in range(CHUNKS)]


# -- least squares ----------------------------------------------------------------------------------------------------
def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_chunks(data: Rows) -> float:
    x, y = data

    def work() -> None:
        total = products((x[:0], y[:0]))
        for first, last in spans(len(x)):
            total = added(total, products((x[first:last], y[first:last])))

    return timed(work)


_inherited: Rows


def _part(span: tuple[int, int]) -> dict[str, Any]:
    x, y = _inherited
    return products((x[span[0] : span[1]], y[span[0] : span[1]]))


@contextlib.contextmanager
def pool(data: Rows, workers: int) -> Iterator[Callable[[], float]]:
    """Processes of `multiprocessing` that were forked with the rows in memory."""
    global _inherited
    _inherited = data
    with multiprocessing.get_context("fork").Pool(workers) as processes:
        processes.map(abs, range(workers))

        def work() -> None:
            total = products((data[0][:0], data[1][:0]))
            for part in processes.imap(_part, spans(len(data[0]))):
                total = added(total, part)

        yield lambda: timed(work)


def repeated(total: dict[str, Any], so_far: dict[str, Any]) -> dict[str, Any]:
    return total


def ours(data: Rows, workers: int, rounds: int) -> tuple[list[float], float]:
    """The seconds of each round, and of a whole call beyond them."""
    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        done = tt.map_reduce(
            data,
            lambda rows, _: products(rows),
            finish=repeated,
            start=products((data[0][:1], data[1][:1])),
            rounds=rounds,
            workers=workers,
            out=Path(out) / "run",
            threads=1,
            progress=False,
        )
        whole = time.perf_counter() - began
    seconds = [record.seconds for record in done.history if isinstance(record, Work)]
    return seconds, whole - sum(seconds)


def least_squares(rows: int, columns: int, counts: list[int], rounds: int) -> None:
    x = np.random.default_rng(0).normal(size=(rows, columns))
    data = x, x @ np.arange(float(columns))
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        found.setdefault("numpy in chunks", []).append(in_chunks(data))
        for workers in counts:
            if workers > 1:
                with pool(data, workers) as run:
                    found.setdefault(f"multiprocessing × {workers}", []).append(run())
            seconds, rest = ours(data, workers, 4)
            found.setdefault(f"map_reduce × {workers}", []).append(statistics.median(seconds[1:]))
            found.setdefault(f"  first round × {workers}", []).append(seconds[0])
            found.setdefault(f"  all else × {workers}", []).append(rest)
    base = statistics.median(found["numpy in chunks"])
    print(f"least squares, {rows:,} × {columns} float64, median of {rounds}")
    for name, values in found.items():
        median = statistics.median(values)
        print(f"  {name:<24} {median:7.3f} s   {base / median:5.2f} × numpy   {min(values):.3f} to {max(values):.3f}")


# -- a file that is parsed once ---------------------------------------------------------------------------------------
def write_csv(path: Path, megabytes: int, columns: int = 20) -> list[tuple[int, int]]:
    """A file of numbers; returns where each part begins and ends, at the ends of lines."""
    draw = np.random.default_rng(0)
    edges = [0]
    with path.open("wb") as file:
        while file.tell() < megabytes * 1_000_000:
            np.savetxt(file, draw.normal(size=(2000, columns)), fmt="%.6f", delimiter=",")
            edges.append(file.tell())
    return list(itertools.pairwise(edges))


def lines(path: Path, span: tuple[int, int]) -> Any:
    with path.open("rb") as file:
        file.seek(span[0])
        return io.BytesIO(file.read(span[1] - span[0]))


def by_numpy(path: Path, span: tuple[int, int]) -> Any:
    return np.loadtxt(lines(path, span), delimiter=",")


def by_pandas(path: Path, span: tuple[int, int]) -> Any:
    return importlib.import_module("pandas").read_csv(lines(path, span), header=None).to_numpy()


def by_pyarrow(path: Path, span: tuple[int, int]) -> Any:
    csv = importlib.import_module("pyarrow.csv")
    table = csv.read_csv(lines(path, span), read_options=csv.ReadOptions(autogenerate_column_names=True))
    return np.column_stack([column.to_numpy() for column in table.columns])


PARSERS = {"numpy": by_numpy, "pandas": by_pandas, "pyarrow": by_pyarrow}


def slope(rows: Any, weights: Any) -> Any:
    x, y = rows[:, 1:], rows[:, 0] > 0
    return x.T @ (1 / (1 + np.exp(-x @ weights)) - y)


def parse_and_sum(read: Callable[..., Any], path: Path, parts: list[tuple[int, int]], weights: Any) -> Any:
    return sum(slope(read(path, part), weights) for part in parts)


def parsed_once(megabytes: int, counts: list[int], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "numbers.csv"
        parts = write_csv(path, megabytes)
        print(f"a round of logistic regression over {path.stat().st_size / 1e6:.0f} MB of CSV in {len(parts)} parts")
        weights = np.zeros(19)
        for name, read in PARSERS.items():
            if importlib.util.find_spec(name) is None:
                print(f"  {name} is not installed")
                continue
            values = [timed(partial(parse_and_sum, read, path, parts, weights)) for _ in range(rounds)]
            print(f"  {name} parses in every round  {statistics.median(values):7.3f} s")
        for workers in counts:
            readers = [partial(by_numpy, path, part) for part in parts]
            done = tt.map_reduce(
                readers,
                slope,
                finish=lambda total, now: now - 1e-6 * total,
                start=weights,
                rounds=rounds + 1,
                workers=workers,
                out=Path(directory) / f"run{workers}",
                threads=1,
                progress=False,
            )
            first, *later = [record.seconds for record in done.history if isinstance(record, Work)]
            cached = statistics.median(later)
            print(f"  map_reduce × {workers}: first round {first:.3f} s, later ones {cached:.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--workers", default="1,2", help="numbers of workers, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=int, metavar="MB", help="instead: rounds over a CSV file of this size")
    asked = parser.parse_args()
    counts = [int(count) for count in asked.workers.split(",")]
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # which is read when numpy is loaded
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.map_reduce", *sys.argv[1:]],
            os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
    if asked.csv:
        parsed_once(asked.csv, counts, asked.rounds)
    else:
        least_squares(asked.rows, asked.columns, counts, asked.rounds)


if __name__ == "__main__":
    main()
