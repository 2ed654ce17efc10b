"""Milliseconds for one all-reduce: torrential's carriers against Gloo, in the same processes, one after the other.

python -m benchmarks.allreduce --workers 2,4 --sizes 100MB,10MB,1MB,4KB --rounds 5

    shared       through shared memory; the data lies in registered buffers, as gradients do
    unix, tcp    each slice straight to its owner, over sockets
    gloo         torch.distributed

One thread per process, with the malloc settings of torrential's workers (for Gloo too). A round times each carrier
once, over as many repetitions as make sense for the size; the slowest member counts. Every carrier's sum is checked
once at every size.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.sync import describe, machine
from torrential.comm.direct import DirectCarrier
from torrential.comm.messenger import Messenger, settle
from torrential.comm.protocol import Meter
from torrential.comm.shared import MAIL_BYTES, WORDS, SharedCarrier
from torrential.worlds.local.nursery import keep_freed_memory

CARRIERS = "shared", "unix", "tcp", "gloo"
UNITS = {"KB": 10**3, "MB": 10**6}
TIMEOUT_SECONDS = 60.0
GENERATION = 1

AllReduce = Callable[[Tensor], object]
Times = dict[int, dict[str, list[float]]]  # bytes -> carrier -> seconds, by round


@dataclass(frozen=True)
class Plan:
    workers: int
    sizes: list[int]  # bytes
    rounds: int
    store: str  # a file where Gloo's members meet
    token: bytes
    counters: int  # descriptors of memory files, from here on
    mail: list[int]  # by rank
    data: list[int]


def _nothing() -> None:
    """Nobody joins or leaves here."""


def _map(fd: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=dtype)


def _shared(plan: Plan, rank: int, data: list[Tensor]) -> AllReduce:
    mail = [_map(fd, torch.uint8).view(2, MAIL_BYTES) for fd in plan.mail]

    def find(tensor: Tensor) -> Callable[[int], Tensor]:
        start = (tensor.data_ptr() - data[rank].data_ptr()) // tensor.element_size()
        return lambda other: data[other][start : start + tensor.numel()]

    carrier = SharedCarrier(
        rank,
        Meter(),
        _nothing,
        TIMEOUT_SECONDS,
        _map(plan.counters, torch.int64),
        mail.__getitem__,
        find,
        spin=plan.workers <= len(os.sched_getaffinity(0)),
    )
    carrier.regroup(GENERATION, tuple(range(plan.workers)))
    return lambda tensor: carrier.all_reduce(tensor).wait()


def _direct(plan: Plan, rank: int, address: str) -> AllReduce:
    messenger = Messenger(rank, 0, address, plan.token)
    addresses: list[str] = [""] * plan.workers
    dist.all_gather_object(addresses, messenger.address)
    messenger.regroup(GENERATION, {r: (a, 0) for r, a in enumerate(addresses) if r != rank})
    settle(messenger, range(plan.workers), _nothing, TIMEOUT_SECONDS)
    carrier = DirectCarrier(rank, Meter(), _nothing, TIMEOUT_SECONDS, messenger)
    carrier.regroup(GENERATION, tuple(range(plan.workers)))
    return lambda tensor: carrier.all_reduce(tensor).wait()


def _member(plan: Plan, rank: int, report: Connection | None) -> None:
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{plan.store}", rank=rank, world_size=plan.workers)
    registered = [_map(fd, torch.float32) for fd in plan.data]
    carriers: dict[str, AllReduce] = {
        "shared": _shared(plan, rank, registered),
        "unix": _direct(plan, rank, f"unix:@allreduce-{plan.token.hex()[:16]}-{rank}"),
        "tcp": _direct(plan, rank, "tcp:127.0.0.1:0"),
        "gloo": dist.all_reduce,
    }
    private = torch.empty(max(plan.sizes) // 4)
    memory = dict.fromkeys(CARRIERS, private) | {"shared": registered[rank]}
    times: Times = {}
    for size in plan.sizes:
        for name, carrier in carriers.items():
            _check(carrier, memory[name][: size // 4], rank, plan.workers)
        times[size] = {name: [] for name in carriers}
        for _ in range(plan.rounds):
            for name, carrier in carriers.items():
                times[size][name].append(_time(carrier, memory[name][: size // 4]))
    if report is not None:
        report.send(times)
    dist.barrier()
    dist.destroy_process_group()


def _check(carrier: AllReduce, tensor: Tensor, rank: int, workers: int) -> None:
    pattern = torch.arange(tensor.numel()) % 1000  # small whole numbers: their sums are exact
    tensor.copy_(pattern + rank)
    carrier(tensor)
    assert torch.equal(tensor, (pattern * workers + sum(range(workers))).float()), "wrong sum"


def _time(carrier: AllReduce, tensor: Tensor) -> float:
    """Seconds for one all-reduce, of the slowest member."""
    repetitions = max(3, min(200, 10**8 // tensor.nbytes))
    tensor.zero_()  # so that repeated sums stay finite
    dist.barrier()
    carrier(tensor)
    start = time.perf_counter()
    for _ in range(repetitions):
        carrier(tensor)
    mine = torch.tensor([(time.perf_counter() - start) / repetitions], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def measure(workers: int, sizes: list[int], rounds: int) -> Times:
    def memory(size: int) -> int:
        fd = os.memfd_create("allreduce")
        os.ftruncate(fd, size)
        return fd

    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        plan = Plan(
            workers=workers,
            sizes=sizes,
            rounds=rounds,
            store=f"{directory}/store",
            token=secrets.token_bytes(32),
            counters=memory(workers * 2 * WORDS * 8),
            mail=[memory(2 * MAIL_BYTES) for _ in range(workers)],
            data=[memory(max(sizes)) for _ in range(workers)],
        )
        fork = multiprocessing.get_context("fork")  # the members inherit the memory files
        here, there = fork.Pipe(duplex=False)
        members = [fork.Process(target=_member, args=(plan, r, None if r else there)) for r in range(workers)]
        for member in members:
            member.start()
        there.close()
        try:
            times: Times = here.recv()
            for member in members:
                member.join()
            return times
        except EOFError:
            raise SystemExit("a member failed; see above") from None
        finally:
            for member in members:
                member.terminate()
            for fd in (plan.counters, *plan.mail, *plan.data):
                os.close(fd)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)(KB|MB)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"a size is a number of KB or MB, as in 4KB (given: {text})")
    return int(found[1]) * UNITS[found[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--sizes", default="100MB,10MB,1MB,4KB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    console, host = Console(), machine()
    console.print(describe(host), highlight=False, soft_wrap=True)
    shown = Table(title="all-reduce, median ms (in brackets: times faster than gloo)")
    for column in ("workers", "size", *CARRIERS):
        shown.add_column(column, justify="right")
    rows = []
    sizes = {text: _bytes(text) for text in given.sizes.split(",")}
    for workers in map(int, given.workers.split(",")):
        times = measure(workers, list(sizes.values()), given.rounds)
        for text, size in sizes.items():
            medians = {name: median(seconds) * 1e3 for name, seconds in times[size].items()}
            ratios = {name: medians["gloo"] / ms for name, ms in medians.items()}
            cells = (f"{ms:.3f}" + (f" ({ratios[n]:.1f}×)" if n != "gloo" else "") for n, ms in medians.items())
            shown.add_row(str(workers), text, *cells)
            rows.append(
                {"workers": workers, "bytes": size, "ms": medians, "times_gloo": ratios, "seconds": times[size]}
            )
    console.print(shown)
    if given.json:
        given.json.write_text(json.dumps({"machine": host, "rounds": given.rounds, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
