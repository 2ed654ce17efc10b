"""What each worker does in `torrential bench allreduce`: meet, calibrate, check every sum, measure in turns.

It is a strategy, so that worlds/local starts it, watches it and cleans up after it as after any run. The vector lies in
a registered buffer, as gradients do in training. `auto` and `shared` go through the run's own comm; the message
algorithms and Gloo meet beside it, so that each can be measured whatever the run's transport is. Gloo is called
directly, without the polling by which our native carrier notices deaths.

    size 1   check a, b, c | a b c | b a c | c a b | ...      each a block of calls, begun together
    size 2   ...

What is measured goes to the supervisor as events.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from random import Random
from typing import ClassVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from torrential.comm.channel import PostChannel, TensorLetter
from torrential.comm.choosing import Chooser, timed
from torrential.comm.costs import Fitted
from torrential.comm.native import NativeCarrier
from torrential.comm.post import Contact, Post
from torrential.comm.protocol import Meter
from torrential.comm.scheduled import ScheduledCarrier
from torrential.comm.schedules import ALGORITHMS
from torrential.errors import RunFailed
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.worlds.local.comm import LocalComm

CALIBRATED = tuple(1 << power for power in range(10, 27, 2))  # bytes; more than a run takes the time for
SMALLEST_BUFFER = 1 << 22  # bytes, so that there is something to calibrate with
CALIBRATION_SECONDS = 6.0
BLOCK_SECONDS = 0.015
MAX_REPETITIONS = 500
TIMED_SINGLY = 3  # calls, to find out how often to repeat
SINGLE_CALLS = 1 + TIMED_SINGLY  # of each algorithm at each size, before the rounds: the first is checked
TIMEOUT_SECONDS = 60.0
ADDRESS_BYTES = 128  # as much as the longest takes
PERIOD = 1009  # of the numbers that are summed: small and whole, so that sums are exact


class Calibrated(msgspec.Struct, frozen=True, tag=True):
    table: Fitted


class Measured(msgspec.Struct, frozen=True, tag=True):
    nbytes: int
    name: str
    seconds: float


class Picked(msgspec.Struct, frozen=True, tag=True):
    nbytes: int
    name: str  # that `auto` stands for at this size


News = Calibrated | Measured | Picked


class MeasureAllReduce(Strategy, frozen=True, kw_only=True):
    name: ClassVar[str] = "bench-allreduce"
    summary: ClassVar[str] = "times every way to all-reduce"

    sizes: list[int]  # bytes
    algorithms: list[str]
    rounds: int
    messages: str  # unix, tcp or tls
    fresh: bool

    def worker(self, ctx: Context) -> None:
        comm = ctx.comm
        assert isinstance(comm, LocalComm)
        comm.regroup(lambda: 0)
        _Member(self, comm, ctx.progress.note).run()
        comm.leave()


def contenders(shares_memory: bool) -> list[str]:
    """All that is calibrated."""
    return [*ALGORITHMS, "native", *(["shared"] if shares_memory else [])]


def repetitions(once: float) -> int:
    """The number of calls that make one measurement of an algorithm that takes so many seconds for one."""
    return max(1, min(MAX_REPETITIONS, int(BLOCK_SECONDS / once)))


class _Member:
    def __init__(self, asked: MeasureAllReduce, comm: LocalComm, note: Callable[[str, str], None]) -> None:
        self._asked, self._comm, self._note = asked, comm, note
        self._first = self._comm.rank == self._comm.members[0]
        self._data = self._comm.buffer("bench", max(*asked.sizes, SMALLEST_BUFFER) // 4, torch.float32)

    def run(self) -> None:
        post = self._meet()
        try:
            table = self._table()
            if self._comm.chooser is not None:
                self._comm.chooser.adopt(table)
            self._tell(Calibrated(table))
            for size in self._asked.sizes:
                self._measure(self._data[: size // 4])
        finally:
            post.close()
            self._native.close()

    # -- contenders ---------------------------------------------------------------------------------------------
    def _meet(self) -> Post:
        """Connect what the run has not connected: a carrier of messages, and Gloo."""
        comm, members = self._comm, self._comm.members
        tcp = self._asked.messages != "unix"
        where = "tcp:127.0.0.1:0" if tcp else f"unix:@torrential-bench-{secrets.token_hex(8)}"
        post = comm.second_post(where, TensorLetter)
        mine = torch.frombuffer(bytearray(post.where.encode().ljust(ADDRESS_BYTES)), dtype=torch.uint8)
        addresses = [row.numpy().tobytes().decode().strip() for row in self._agree(mine)]
        post.know({r: Contact(where, 0) for r, where in zip(members, addresses, strict=True)})
        channel = PostChannel(post)
        channel.regroup(comm.generation)
        self._scheduled = ScheduledCarrier(comm.rank, Meter(), comm.check, TIMEOUT_SECONDS, channel)
        self._scheduled.regroup(comm.generation, members)
        file = os.memfd_create("torrential rendezvous") if self._first else -1
        pid, descriptor = self._agree(torch.tensor([os.getpid(), file]))[0].tolist()
        self._native = NativeCarrier(comm.rank, Meter(), comm.check, TIMEOUT_SECONDS, "gloo")
        self._native.regroup(members, f"/proc/{pid}/fd/{descriptor}")
        return post

    def _all_reduce(self, name: str, tensor: Tensor) -> None:
        if name in ALGORITHMS:
            self._scheduled.all_reduce(tensor, name).wait()
        elif name == "native":
            dist.all_reduce(tensor)
        else:  # shared, and whatever auto picks
            self._comm.all_reduce(tensor).wait()

    def _agree(self, vector: Tensor) -> Tensor:
        gathered: Tensor = self._comm.all_gather(vector).wait()
        return gathered

    def _table(self) -> Fitted:
        """The one that is known already, if it knows all contenders; else measured."""
        names = contenders(self._comm.shares_memory)
        chooser = Chooser(self._comm, self._all_reduce, names, self._asked.messages)
        sizes = [size for size in CALIBRATED if size <= self._data.nbytes]
        chooser.agree_on_costs(self._data, CALIBRATION_SECONDS, sizes, self._asked.fresh)
        assert chooser.table is not None
        return chooser.table

    # -- measuring ----------------------------------------------------------------------------------------------
    def _measure(self, tensor: Tensor) -> None:
        chooser = self._comm.chooser
        self._tell(Picked(tensor.nbytes, "shared" if chooser is None else chooser.pick(tensor.nbytes)))
        once: dict[str, float] = {}
        for name in self._asked.algorithms:
            self._check(name, tensor)
            tensor.zero_()  # so that repeated sums stay finite
            once[name] = min(timed(self._all_reduce, self._agree, name, tensor, 1) for _ in range(TIMED_SINGLY))
        for number in range(self._asked.rounds):
            for name in Random(number).sample(list(once), len(once)):  # so that nobody always comes after the same one
                self._all_reduce(name, tensor)  # what the one before has left in caches is not this one's matter
                seconds = timed(self._all_reduce, self._agree, name, tensor, repetitions(once[name]))
                self._tell(Measured(tensor.nbytes, name, seconds))

    def _check(self, name: str, tensor: Tensor) -> None:
        members = self._comm.members
        numbers = torch.arange(PERIOD, dtype=torch.float32)
        sums = numbers * len(members) + sum(members)
        whole = tensor.numel() // PERIOD * PERIOD
        body, tail = tensor[:whole].view(-1, PERIOD), tensor[whole:]
        body[:] = numbers + self._comm.rank
        tail[:] = numbers[: len(tail)] + self._comm.rank
        self._all_reduce(name, tensor)
        if not (bool((body == sums).all()) and torch.equal(tail, sums[: len(tail)])):
            raise RunFailed(f"{name} gives a wrong sum (worker {self._comm.rank}, {tensor.nbytes:,} bytes)")

    def _tell(self, news: News) -> None:
        if self._first:
            self._note("bench", msgspec.json.encode(news).decode())
