"""The parameter server's speed: 100 MB of float32 in another process of this machine.

python -m benchmarks.server --rounds 9

    plain           the operation itself on one tensor, nobody else involved: add_, copy_, fused Adagrad, index_add_
    socket          the bytes alone over a plain tcp socket, acknowledged
    ours shared     torrential's server, the worker's gradient read where it lies; also ours tcp
    rpc             torch.distributed.rpc (TensorPipe)
    ray             an actor of Ray, if that is installed

    push            add a gradient          adagrad   a gradient through fused Adagrad
    pull            into a tensor           sparse    add to 1 % of the keys
    small           1 KB there through fused Adagrad (others: added) and 1 KB back, in one round trip

All are up all the time; one is at work at a time and the others are stopped, because torch RPC polls with a whole core
in each of its processes even when there is nothing to do. Ray, which does not survive that, comes afterwards with ours
beside it. In every round each does each operation, in an order of its own, once to warm up and then --times times (the
short ones more often); its time is the median of that. The table shows medians over the rounds, ratios are medians of
the ratios within a round. Arithmetic has --threads threads everywhere.

At the end: throughput of 4 workers at once on 1 and 2 servers, and what memory all that takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.memory import by_role, pss, tree
from benchmarks.stores import Setup, start
from benchmarks.sync import describe, machine

OPERATIONS = ("push", "pull", "adagrad", "sparse", "small")
MORE = {"small": 300, "sparse": 10}  # as many of these for one of the large operations

Times = dict[str, dict[str, list[float]]]  # operation -> contender -> seconds by round


class Contender:
    """One kind of store, up and waiting to be asked."""

    def __init__(self, setup: Setup, listener: Listener) -> None:
        self.name = setup.name
        self.process = start(setup)
        self._lines: list[Connection] = []
        for _ in range(setup.workers):
            line = listener.accept()
            name, _pid = line.recv()
            assert name == self.name, f"{name} called, {self.name} was expected"
            self._lines.append(line)

    def do(self, operation: str, times: int) -> list[list[float]] | None:
        """All its workers at once; seconds of each call, by worker."""
        self.rest(signal.SIGCONT)
        for line in self._lines:
            line.send((operation, times))
        answers = [line.recv() for line in self._lines]
        return None if answers[0] is None else answers

    def rest(self, number: signal.Signals = signal.SIGSTOP) -> None:
        for pid in tree(self.process.pid):
            os.kill(pid, number)

    def memory(self) -> int:
        return sum(pss(pid) for pid in tree(self.process.pid))

    def close(self) -> None:
        self.rest(signal.SIGCONT)
        for line in self._lines:
            line.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(contenders: list[Contender], rounds: int, times: int, console: Console, rest: bool) -> Times:
    found: Times = {operation: {} for operation in OPERATIONS}
    for contender in contenders if rest else []:
        contender.rest()
    for number in range(rounds):
        for operation in OPERATIONS:
            for contender in Random(f"{number} {operation}").sample(contenders, len(contenders)):
                contender.do(operation, 1)
                answer = contender.do(operation, times * MORE.get(operation, 1))
                if answer is not None:
                    found[operation].setdefault(contender.name, []).append(median(answer[0]))
                if rest:
                    contender.rest()
        console.print(f"round {number + 1} of {rounds}", highlight=False)
    return found


def ratio(times: dict[str, list[float]], ours: str, other: str) -> float | None:
    if ours not in times or other not in times:
        return None
    return median(b / a for a, b in zip(times[ours], times[other], strict=True))


def table(found: Times, names: list[str]) -> Table:
    shown = Table(title="milliseconds, and how many times as long as ours")
    shown.add_column("operation")
    for name in names:
        shown.add_column(name, justify="right")
    for operation, times in found.items():
        cells = []
        for name in names:
            digits = 3 if operation == "small" else 1
            cell = f"{1e3 * median(times[name]):.{digits}f}" if name in times else ""
            over = ratio(times, "ours shared", name)
            cells.append(cell + (f" ({over:.2f}×)" if over and name != "ours shared" else ""))
        shown.add_row(operation, *cells)
    return shown


def verdicts(found: Times) -> list[tuple[str, float | None, float]]:
    """What was promised: the words, what was measured, and at least how much it should be."""
    shared, tcp = "ours shared", "ours tcp"
    return [
        ("push: torch RPC takes so many times as long", ratio(found["push"], shared, "rpc"), 3.0),
        ("pull: torch RPC takes so many times as long", ratio(found["pull"], shared, "rpc"), 2.0),
        ("push: a plain add_ takes this part of the time", ratio(found["push"], shared, "plain"), 1 / 1.5),
        ("pull: a plain copy takes this part of the time", ratio(found["pull"], shared, "plain"), 1 / 1.5),
        ("adagrad: the plain step takes this part of the time", ratio(found["adagrad"], shared, "plain"), 1 / 1.5),
        ("small: 150 µs in ours", 150e-6 / median(found["small"][shared]), 1.0),
        ("tcp push: a plain socket takes this part of the time", ratio(found["push"], tcp, "socket"), 0.8),
        ("tcp pull: a plain socket takes this part of the time", ratio(found["pull"], tcp, "socket"), 0.8),
        (
            "sparse push of 1 %: a tenth of the dense one in it",
            median(0.1 * a / b for a, b in zip(found["push"][shared], found["sparse"][shared], strict=True)),
            1.0,
        ),
    ]


def throughput(base: dict[str, Any], listener: Listener, times: int, console: Console) -> list[dict[str, Any]]:
    rows = []
    for servers in (1, 2):
        contender = Contender(Setup(kind="ours", **base, workers=4, servers=servers), listener)
        try:
            for operation in ("push", "pull", "adagrad"):
                contender.do(operation, 1)
                began = time.perf_counter()
                answers = contender.do(operation, times)
                assert answers is not None
                rate = 4 * base["numel"] * 4 * times / (time.perf_counter() - began)
                rows.append({"servers": servers, "operation": operation, "bytes_per_second": rate})
                console.print(f"4 workers, {servers} servers, {operation}: {rate / 1e9:.2f} GB/s", highlight=False)
            memory = by_role(contender.process.pid)
            rows.append({"servers": servers, "memory": memory})
            for role, (own, shared) in sorted(memory.items()):
                line = f"    {role}: {own / 1e6:,.0f} MB of its own, {shared / 1e6:,.0f} shared"
                console.print(line, highlight=False)
        finally:
            contender.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times", type=int, default=5, help="of each operation in a round")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of each process, for arithmetic")
    parser.add_argument("--without", default="", help="contenders to leave out, as in rpc,ray")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    given = parser.parse_args()
    console, host = Console(width=150), machine()
    console.print(describe(host), highlight=False, soft_wrap=True)
    address, key = f"\0benchmark-{secrets.token_hex(8)}", secrets.token_bytes(16)
    base = {"numel": given.megabytes * 250_000, "driver": address, "key": key.hex(), "threads": given.threads}
    kinds = [kind for kind in ("plain", "socket", "ours", "ours tcp", "rpc") if kind not in given.without.split(",")]
    with Listener(address, "AF_UNIX", authkey=key) as listener:

        def contest(kinds: list[str]) -> tuple[Times, dict[str, int]]:
            with ExitStack() as stack:
                contenders = []
                for kind in kinds:
                    name, _, transport = kind.partition(" ")
                    contenders.append(Contender(Setup(kind=name, transport=transport or "shared", **base), listener))
                    stack.callback(contenders[-1].close)
                found = measure(contenders, given.rounds, given.times, console, "ray" not in kinds)
                console.print(table(found, [c.name for c in contenders]))
                return found, {c.name: c.memory() for c in contenders}

        found, memory = contest(kinds)
        for words, measured, least in verdicts(found):
            if measured is not None:
                verdict = "met" if measured >= least else "NOT met"
                console.print(f"{words}: {measured:.2f} (at least {least:.2f}: {verdict})", highlight=False)
        rays: Times = {}
        if importlib.util.find_spec("ray") and "ray" not in given.without.split(","):
            rays, beside = contest(["ours", "ray"])
            memory["ray"] = beside["ray"]
        for name, size in memory.items():
            console.print(f"memory of {name}: {size / 1e6:,.0f} MB", highlight=False)
        rows = throughput(base, listener, given.times, console)
    if given.json:
        numbers = {"machine": host, "times": found, "times_beside_ray": rays, "memory": memory, "four_workers": rows}
        given.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
