"""The workers of benchmarks/server_faults.py: each adds numbered tags to a vector on servers, and keeps account of what
was acknowledged in a file that outlives it.

    the vector    | 1 tag | 1 tag | ... unused ... | 1 tag | 1 tag | ...      a pair of numbers for every life of every
                   slot 0   slot 1                  slot 0   slot 1           worker, repeated over the whole key space

Addition n of a life adds 1 to the first number of its pair and tag(n), which is random, to the second, in all copies.
So what was lost, or added twice, on any server, shows in the sums. All numbers are whole and exact in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from torrential.bench.job import Vector, bench_job
from torrential.config import HostsSettings, LocalSettings
from torrential.errors import RunFailed
from torrential.optimizers import optimizer
from torrential.records import MANIFEST, Record
from torrential.run import Silent
from torrential.server.client import Client, PendingRequest
from torrential.server.consistency import Consistency
from torrential.strategies.base import Strategy
from torrential.strategies.context import Context
from torrential.strategies.roles import Role, Roles, Servers
from torrential.task import Task
from torrential.worlds.base import Job
from torrential.worlds.hosts.gathering import Gathering
from torrential.worlds.hosts.rendezvous import rendezvous
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.supervisor import LocalWorld

NUMEL = 1 << 17  # 1 MB
COPIES = 48
HOST_TIMEOUT = 3.0
MOST_WORKERS = 16
LIVES = 64  # of a worker, in one run
DEPTH = 4  # additions under way at a time
PATIENCE_SECONDS = 180.0
LAST_CLOCKS = 50  # that a worker still completes where others wait for it
KINDS = ("add keys", "add", "push keys", "push and pull")


class Plan(msgspec.Struct, frozen=True):
    directory: str
    workers: int
    servers: int
    replicas: int
    transport: str
    staleness: int | None
    seed: int
    hosts: int = 0  # that it is on, if it is on several
    rendezvous: str = ""  # where these meet

    @property
    def control(self) -> Path:
        return Path(self.directory, "control")

    @property
    def values(self) -> Path:
        return Path(self.directory, "values.npy")

    @property
    def events(self) -> Path:
        return Path(self.directory, "events")

    def ledgers(self, rank: int) -> list[Path]:
        """Of all its lives so far."""
        return sorted(Path(self.directory).glob(f"worker-{rank}-*"))


class Word(IntEnum):
    """What the driver tells."""

    KILLED_AT = 0  # the last time it killed
    STOP = 1  # 0, or the clock to stop at


class Entry(IntEnum):
    """What a life of a worker tells."""

    SENT = 0  # additions, this many
    ACKNOWLEDGED = 1
    CLOCK = 2
    KILL = 3  # the last time of a kill after which it began an addition that has been acknowledged
    RECOVERED_AT = 4  # when that was
    ENDED = 5


Memory = np.memmap[Any, np.dtype[np.float64]]


def numbers(path: Path, kind: type[IntEnum], mode: Any = "r+") -> Memory:
    """A file's numbers, in memory that whoever opens it shares."""
    return np.memmap(path, np.float64, mode, shape=(len(kind),))


def tag(slot: int, number: int) -> int:
    return zlib.crc32(f"{slot} {number}".encode())


def places(slot: int) -> Tensor:
    """The keys of a slot, ascending: pairs."""
    first = torch.arange(COPIES) * (NUMEL // COPIES) + 2 * slot
    return torch.stack([first, first + 1], 1).flatten()


class Wide(Vector):
    """In float64."""

    def __init__(self, numel: int) -> None:
        super().__init__(numel)
        self.values = nn.Parameter(torch.zeros(numel, dtype=torch.float64))


class Audit(Strategy, frozen=True, kw_only=True):
    name: ClassVar[str] = "bench-audit"
    summary: ClassVar[str] = "adds numbered tags and keeps account of them"

    plan: Plan

    def roles(self, workers: int, servers: int) -> Roles:
        return Role("worker", workers, self.worker, "view"), Servers(servers, Consistency(self.plan.staleness))

    def worker(self, ctx: Context) -> None:
        _Member(self.plan, ctx.comm).run()
        ctx.comm.leave()


class _Member:
    def __init__(self, plan: Plan, comm: Any) -> None:
        self._plan, self._comm, self._rank = plan, comm, comm.rank
        life = len(plan.ledgers(self._rank))
        assert life < LIVES, "too many kills for one run"
        self._slot = self._rank * LIVES + life
        self._control = numbers(plan.control, Word)
        self._entries = numbers(Path(plan.directory, f"worker-{self._rank}-{life:02}"), Entry, "w+")
        self._chance = Random(f"{plan.seed} {self._slot}")
        self._client = Client(comm, NUMEL, torch.float64, timeout=PATIENCE_SECONDS)
        self._keys = places(self._slot)
        self._whole = [comm.buffer(f"whole-{i}", NUMEL, torch.float64) for i in range(DEPTH)]
        self._into = torch.empty(NUMEL, dtype=torch.float64)
        self._under_way: deque[tuple[float, PendingRequest]] = deque()

    def run(self) -> None:
        self._clock, number = self._client.enter(), 0
        while not self._over():
            number += 1
            values = torch.tensor([1.0, tag(self._slot, number)], dtype=torch.float64).repeat(COPIES)
            self._entries[Entry.SENT] = number
            self._under_way.append((time.time(), self._send(self._chance.choice(KINDS), number, values)))
            if len(self._under_way) == DEPTH:
                self._wait_for_oldest()
        while self._under_way:
            self._wait_for_oldest()
        self._entries[Entry.ENDED] = 1
        if self._rank == min(self._comm.view.workers):
            self._tell_values()

    def _over(self) -> bool:
        stop = self._control[Word.STOP]
        return bool(stop) and (self._plan.staleness is None or self._clock >= stop)

    def _send(self, kind: str, number: int, values: Tensor) -> PendingRequest:
        client, clock = self._client, self._clock
        if kind == "add keys":
            return client.add(values, keys=self._keys)
        whole = self._whole[number % DEPTH]
        whole[self._keys] = values
        if kind == "add":
            return client.add(whole)
        self._clock += 1
        self._entries[Entry.CLOCK] = self._clock
        if kind == "push keys":
            return client.push(values, keys=self._keys, clock=clock, lr=-1.0)
        return client.push_pull(whole, self._into, clock=clock, lr=-1.0)

    def _wait_for_oldest(self) -> None:
        """The oldest of those under way."""
        sent_at, pending = self._under_way.popleft()
        pending.wait()
        entries, killed_at = self._entries, self._control[Word.KILLED_AT]
        entries[Entry.ACKNOWLEDGED] += 1
        if sent_at > killed_at > entries[Entry.KILL]:
            entries[Entry.RECOVERED_AT] = time.time()
            entries[Entry.KILL] = killed_at

    def _tell_values(self) -> None:
        """As soon as nobody adds any more."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while late := [rank for rank in self._comm.view.workers if not self._ended(rank)]:
            if time.monotonic() > deadline:
                raise RunFailed(f"worker {self._rank} waited {PATIENCE_SECONDS:.0f} s for workers {late} to end")
            time.sleep(0.01)
            self._client.get(self._into).wait()  # and hears who is there
        self._client.get(self._into).wait()
        beside = self._plan.values.with_name(f"values-{os.getpid()}.npy")
        np.save(beside, self._into.numpy())
        os.replace(beside, self._plan.values)

    def _ended(self, rank: int) -> bool:
        return bool(numbers(self._plan.ledgers(rank)[-1], Entry)[Entry.ENDED])


def objections(plan: Plan) -> Iterator[str]:
    """What is wrong with the sums, in words."""
    values = torch.from_numpy(np.load(plan.values))
    known = torch.zeros(NUMEL, dtype=torch.bool)
    for rank in range(plan.workers):
        for life, ledger in enumerate(plan.ledgers(rank)):
            slot, entries = rank * LIVES + life, numbers(ledger, Entry)
            known[places(slot)] = True
            found = {(int(n), int(s)) for n, s in values[places(slot)].view(COPIES, 2).tolist()}
            sent, done = int(entries[Entry.SENT]), int(entries[Entry.ACKNOWLEDGED])
            if entries[Entry.ENDED] and (sent != done or len(found) > 1):
                yield f"worker {rank}, life {life}, ended with {done} of {sent} acknowledged and {len(found)} sums"
            for wrong in found - _allowed(slot, sent, done):
                yield f"worker {rank}, life {life}: {done} of {sent} acknowledged, but {wrong[0]} applied, or others"
    if bool(values[~known].any()):
        yield "numbers where nobody added any"


def _allowed(slot: int, sent: int, acknowledged: int) -> set[tuple[int, int]]:
    """All acknowledged additions once, and any of the others once or not at all."""
    assert sent - acknowledged <= DEPTH
    sums = {(acknowledged, sum(tag(slot, number) for number in range(1, acknowledged + 1)))}
    for number in range(acknowledged + 1, sent + 1):
        sums |= {(count + 1, total + tag(slot, number)) for count, total in sums}
    return sums


def task() -> Task:
    """That of all audits."""
    made = bench_job(Strategy(), LocalSettings(), MOST_WORKERS).task
    return dataclasses.replace(made, model=functools.partial(Wide, NUMEL), optimizer=optimizer("sgd", lr=1.0))


def job(plan: Plan) -> Job:
    common: dict[str, Any] = {"threads": 1, "restart": True, "replicas": plan.replicas}
    settings = (
        HostsSettings(hosts=plan.hosts, host_timeout=HOST_TIMEOUT, **common)
        if plan.hosts
        else LocalSettings(transport=plan.transport, **common)  # type: ignore[arg-type]
    )
    made = dataclasses.replace(bench_job(Audit(plan=plan), settings, plan.workers, plan.servers, NUMEL), task=task())
    if not plan.hosts:
        return made
    file = Path(__file__).resolve()  # of which other hosts make the same
    config = msgspec.structs.replace(
        made.config,
        world="hosts",
        source=f"{file}:task",
        strategy=f"{file}:Audit",
        options={"plan": msgspec.structs.asdict(plan)},
        samples=MOST_WORKERS,
        lr=1.0,
        optimizer=made.task.optimizer_spec.describe(),
    )
    Path(plan.directory, MANIFEST).touch()  # by which they see that they see the directory
    return dataclasses.replace(made, config=config, directory=Path(plan.directory))


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    launch = Launch()
    meeting = Gathering(rendezvous(plan.rendezvous, 0, plan.hosts, None)) if plan.hosts else None
    with contextlib.closing(launch), open(plan.events, "ab", buffering=0) as events:

        def write(record: Record) -> None:
            events.write(msgspec.json.encode(record) + b"\n")

        LocalWorld(launch, meeting).run(job(plan), write, Silent())


if __name__ == "__main__":
    from benchmarks import audit as itself  # so that what travels to other processes is not of __main__

    itself.main()
