"""Comm for processes of one host, and of several: roles of one host use its memory, whoever else there is."""

from __future__ import annotations

import dataclasses
import os
import queue
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torrential.comm.carrier import members_of_group
from torrential.comm.channel import PostChannel
from torrential.comm.choosing import SIZES, Chooser
from torrential.comm.hierarchical import HierarchicalCarrier
from torrential.comm.native import NativeCarrier
from torrential.comm.points import PointToPoint
from torrential.comm.post import Post
from torrential.comm.protocol import Agreement, Group, Handle, Meter, Part
from torrential.comm.scheduled import ScheduledCarrier
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.shared import MAIL_BYTES, MAX_RANKS, WORDS, SharedCarrier
from torrential.config import HostsSettings, LocalSettings
from torrential.errors import Regrouped, RunFailed
from torrential.membership.regrouping import leave, meet
from torrential.records import Event
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, SupervisorLink
from torrential.worlds.local.mail import LocalMail
from torrential.worlds.trace import NOTHING, WorkerTrace

T = TypeVar("T")
W = TypeVar("W", m.Go, m.AllStopped)


class LocalComm(LocalMail):
    """Implements comm.protocol.Comm."""

    def __init__(
        self, rank: int, workers: int, link: SupervisorLink, buffers: Buffers, post: Post, settings: LocalSettings,
        backend: str | None, kept: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, link, buffers, post, settings)
        self.rank, self._settings = rank, settings
        self.trace: WorkerTrace | None = None  # where the run is traced
        self._by_messages = settings.transport != "shared"  # collectives; else in shared memory
        self._channel = PostChannel(post)
        self.members: tuple[int, ...] = ()
        self.generation = 0
        self._check_joined: Callable[[], None] = lambda: None
        self._box, self._asked = link.box(m.AllStopped, m.Go), link.box(m.Finish)
        self._workers = workers
        self._small: SharedCarrier | ScheduledCarrier
        if not self._by_messages:
            self._small = self._shared("", self.meter)
        elif settings.algorithm == "hierarchical" or self._may_be_hierarchical(settings):
            self._small = HierarchicalCarrier(
                rank, self.meter, self.check, settings.timeout, self._channel, self._shared, self._host
            )
        else:
            self._small = ScheduledCarrier(rank, self.meter, self.check, settings.timeout, self._channel)
        self._small.complaints = self
        self._groups: dict[tuple[int, ...], SharedCarrier | ScheduledCarrier] = {}  # of this generation
        self._points = PointToPoint(
            self._channel,
            self.meter,
            self.check,
            settings.timeout,
            self,
            self._common_bytes if self.shares_at_home else None,
            post.near if self._by_messages else lambda rank: True,
        )
        self._native = None
        self._group_of_torch: NativeCarrier | None = None
        if backend is not None:
            self._native = NativeCarrier(rank, self.meter, self.check, settings.timeout, backend)
            self._native.complaints = self
        self.chooser: Chooser | None = None  # where there is something to choose
        if self._by_messages and settings.algorithm == "auto":
            names = [*ALGORITHMS, *([] if self._native is None else ["native"])]
            names += ["hierarchical"] * isinstance(self._small, HierarchicalCarrier)
            self.chooser = Chooser(
                self, lambda name, tensor: self._all_reduce(name, tensor).wait(), names, carried_by(settings), kept
            )

    def _shared(self, name: str, meter: Meter) -> SharedCarrier:
        counters = self._buffers.get(f"counters{name}", MAX_RANKS * 2 * WORDS, torch.int64, None)
        spin = self._workers <= len(os.sched_getaffinity(0))
        timeout = self._settings.timeout
        return SharedCarrier(
            self.rank, meter, self.check, timeout, counters, partial(self._mail, name), self._buffers.twin, spin
        )

    def _may_be_hierarchical(self, settings: LocalSettings) -> bool:
        """Whether there are several hosts, and several workers on some of them."""
        several = isinstance(settings, HostsSettings) and 1 < settings.hosts < self._workers
        return several and settings.algorithm == "auto" and self.shares_at_home

    def _host(self, rank: int) -> int | str:
        if isinstance(self._settings, HostsSettings):
            return self._post.home_of(rank)
        return rank * self._settings.hosts // self._workers

    def _mail(self, name: str, rank: int) -> Tensor:
        return self._buffers.get(f"mail{name}", 2 * MAIL_BYTES, torch.uint8, rank).view(2, MAIL_BYTES)

    # -- tracing ------------------------------------------------------------------------------------------------
    @property
    def traced(self) -> bool:
        return self.trace is not None

    def span(self, what: str, began: float, about: Mapping[str, float] = NOTHING) -> None:
        if self.trace is not None:
            self.trace.span(what, began, self.now(), about)
            if about.get("waited", 0.0) > 0:
                self.trace.span("wait", began, began + about["waited"])

    # -- computing ----------------------------------------------------------------------------------------------
    def compute(self, samples: float, work: Callable[[], T], *, waits: bool = False) -> T:
        self._channel.read_meanwhile()
        if self.trace is None:
            return work()
        began = self.now()
        result = work()
        self.trace.span("compute", began, self.now())
        return result

    def within_work(self, wait: Callable[[], T]) -> T:
        return wait()

    def reached(self, share: float, then: Callable[[], None]) -> None:
        then()
        self._channel.read_meanwhile()

    # -- collectives --------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._all_reduce(self._pick(tensor.nbytes), tensor)

    def _pick(self, nbytes: int) -> str:
        """Which algorithm sums a vector of this size; the same on all members."""
        if self._settings.algorithm != "auto":
            return self._settings.algorithm
        if self.chooser is None or len(self.members) == 1:
            return "direct" if self._by_messages else "shared"
        return self.chooser.pick(nbytes)

    def _all_reduce(self, algorithm: str, tensor: Tensor) -> Handle:
        if algorithm == "native":
            assert self._native is not None
            return self._native.all_reduce(tensor)
        if algorithm == "hierarchical" or not isinstance(self._small, ScheduledCarrier):
            return self._small.all_reduce(tensor)
        if isinstance(self._small, HierarchicalCarrier):
            return self._small.all_reduce_flat(tensor, algorithm)
        return self._small.all_reduce(tensor, algorithm)

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Handle:
        return self._small.reduce_scatter(region, parts)

    def all_gather(self, vector: Tensor) -> Handle:
        return self._small.all_gather(vector)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._small.broadcast(tensor, root)

    def barrier(self) -> Handle:
        return self._small.barrier()

    # -- groups, and one member to another ---------------------------------------------------------------------
    def group(self, ranks: Sequence[int]) -> Group:
        members = members_of_group(self.rank, ranks, self.members)
        if members not in self._groups:
            name = ",".join(map(str, members))
            carrier: SharedCarrier | ScheduledCarrier
            if not self._by_messages:
                carrier = self._shared(f"/{name}", self.meter)
            else:
                carrier = ScheduledCarrier(
                    self.rank, self.meter, self.check, self._settings.timeout, self._channel, f"{name}:"
                )
            carrier.complaints, carrier.among = self, f" among workers {', '.join(map(str, members))}"
            carrier.regroup(self.generation, members)
            self._groups[members] = carrier
        return self._groups[members]

    def process_group(self) -> ProcessGroup:
        if self._native is not None:
            raise RunFailed("the strategy uses torch.distributed by itself; leave out algorithm=native")
        if self._settings.security == "tls":
            raise RunFailed("the strategy uses torch.distributed, which sends in clear; leave out security=tls")
        own_gpu = torch.cuda.is_initialized() and self._workers <= torch.cuda.device_count()  # initialized: it has one
        backend = "nccl" if own_gpu else "gloo"
        self._group_of_torch = NativeCarrier(self.rank, self.meter, self.check, self._settings.timeout, backend)
        self._group_of_torch.regroup(tuple(range(self._workers)), self._buffers.file("rendezvous of all workers"))
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def send(self, tensor: Tensor, to: int, tag: str = "") -> Handle:
        return self._points.send(tensor, to, tag)

    def recv(self, into: Tensor, source: int, tag: str = "") -> Handle:
        return self._points.recv(into, source, tag)

    def pass_on(self, tensor: Tensor, to: int, tag: str, room: int) -> Handle:
        return self._points.pass_on(tensor, to, tag, room)

    def take(self, sizes: Sequence[int], kind: torch.dtype, source: int, tag: str, room: int) -> Handle:
        return self._points.take(sizes, kind, source, tag, room)

    def _common_bytes(self, name: str, count: int) -> Tensor:
        return self.buffer(name, count, torch.uint8, common=True)

    def join(self, members: Sequence[int], era: int, check: Callable[[], None]) -> None:
        self.members, self._check_joined = tuple(members), check
        self._channel.regroup(era)
        self._points.regroup(self.rank, self.members, era)

    # -- membership ---------------------------------------------------------------------------------------------
    def check(self) -> None:
        self.answer_ping()
        self._check_joined()
        if self._link.newest_generation > self.generation:
            raise Regrouped(self._link.newest_generation)

    # implements comm.protocol.Complaints: the supervisor finds out who is hung and ends it, and the regrouping that
    # follows ends our wait
    def overdue(self, rank: int, what: str, seconds: float) -> None:
        self._link.send(m.Overdue(rank, what, seconds))

    def relieved(self) -> None:
        self._link.send(m.Relieved())

    def regroup(self, stand: Callable[[], int]) -> Agreement:
        go = meet(self, stand)
        generation = go.generation
        self.generation, self.members = generation, tuple(go.members)
        self._began = go.began + self._link.clock
        self._channel.regroup(generation)
        self._small.regroup(generation, self.members)
        self._groups.clear()
        self._points.regroup(self.rank, self.members, generation)
        if self._native is not None:
            self._small.barrier().wait()  # all are here: the library's own rendezvous is not left waiting for the dead
            try:
                self._native.regroup(self.members, self._buffers.file(f"rendezvous {generation}"))
            except RuntimeError:
                self._link.until(lambda: self._link.newest_generation > generation, "word of a lost peer")
                self.check()
        if self.chooser is not None:
            self._agree_on_costs(self.chooser)
        return Agreement(generation, self.members, go.source, go.applied, tuple(go.behind))

    def begin(self) -> None:
        """Wait for the word to begin, where there are servers. There is one generation: deaths are news in the view."""
        go, _ = self._box.get()
        self.generation, self.members = go.generation, tuple(go.members)
        self._began = go.began + self._link.clock

    def _agree_on_costs(self, chooser: Chooser) -> None:
        """Agree on what to pick from. What is sent for it is no part of training and not counted; the time it takes is
        time of the run, and the record says so."""
        before, began = dataclasses.replace(self.meter), self.now()
        try:
            shared = isinstance(self._small, HierarchicalCarrier)  # which sums what others see
            data = self.buffer("costs/trial", max(SIZES) // 4, torch.float32) if shared else None
            origin = chooser.agree_on_costs(data)
        finally:
            vars(self.meter).update(vars(before))
        if origin is not None and self.rank == self.members[0]:
            took = f" in {self.now() - began:.1f} s, which count as time of the run" if origin == "measured" else ""
            detail = f"{origin}{took}; {chooser.describe()}"
            self._link.send(m.Recorded(Event(event="algorithms_chosen", time=self.now(), detail=detail)))

    # -- implements membership.regrouping.Attendant ------------------------------------------------------------------
    def tell(self, message: m.Stopped | m.Standing | m.Left) -> None:
        self._link.send(message)

    def newer(self) -> int:
        self._link.until(lambda: self._link.newest_generation > self.generation, "a new generation")
        return self._link.newest_generation

    def word(self, kind: type[W], generation: int) -> W | None:
        while True:
            if self._link.newest_generation > generation:
                return None
            try:
                message, _ = self._box.get(timeout=0.002)
            except queue.Empty:
                continue
            if isinstance(message, kind) and message.generation == generation:
                return message

    def suspect(self, address: int, seconds: float) -> None:
        self._link.send(m.Suspect(address, seconds))

    def leave(self, last: Callable[[], None] | None = None) -> None:
        leave(self, last)
        if self.trace is not None:
            self.trace.close()

    def asked_to_finish(self, able: bool) -> bool:
        link = self._link
        self._link.until(
            lambda: link.dismissed or link.newest_generation > self.generation or (able and not self._asked.empty()),
            "all to finish",
            1e9,
        )
        if link.dismissed:
            return False
        self.check()
        self._asked.get()
        return True

    def close(self) -> None:
        super().close()
        for native in (self._native, self._group_of_torch):
            if native is not None:
                native.close()


def carried_by(settings: LocalSettings) -> str:
    """The transport as costs are kept of it."""
    enciphered = settings.transport == "tcp" and settings.security == "tls"
    between = f"-{settings.hosts}-hosts" if isinstance(settings, HostsSettings) else ""
    return ("tls" if enciphered else settings.transport) + between
