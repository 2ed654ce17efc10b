"""Comm for processes of one host."""

from __future__ import annotations

import dataclasses
import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from torrential.comm.carrier import Operation
from torrential.comm.choosing import Chooser
from torrential.comm.hierarchical import HierarchicalCarrier
from torrential.comm.messenger import Messenger, settle
from torrential.comm.native import NativeCarrier
from torrential.comm.post import Post
from torrential.comm.protocol import Handle, Meter, Part, Standing
from torrential.comm.scheduled import ScheduledCarrier
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.shared import MAIL_BYTES, MAX_RANKS, WORDS, SharedCarrier
from torrential.config import LocalSettings
from torrential.errors import PeerLost, Regrouped
from torrential.records import Event
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, Link
from torrential.worlds.local.mail import LocalMail

T = TypeVar("T")
W = TypeVar("W", m.Go, m.AllStopped)


class LocalComm(LocalMail):
    """Implements comm.protocol.Comm."""

    def __init__(
        self, rank: int, workers: int, link: Link, buffers: Buffers, messenger: Messenger | None, post: Post | None,
        settings: LocalSettings, backend: str | None, kept: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, link, buffers, post, settings.transport == "shared" and backend is None)
        self.rank, self._settings, self._messenger = rank, settings, messenger
        self.members: tuple[int, ...] = ()
        self.generation = 0
        self._pinged = False  # asked whether we wait; where there are servers, that is a letter
        if post is None:
            link.route(self._ping, m.Ping)
        self._box = link.box(m.AllStopped, m.Go)
        self._workers = workers
        self._small: SharedCarrier | ScheduledCarrier
        if messenger is None:
            self._small = self._shared("", self.meter)
        elif settings.algorithm == "hierarchical":
            self._small = HierarchicalCarrier(
                rank, self.meter, self.check, settings.timeout, messenger, self._shared, self._host
            )
        else:
            self._small = ScheduledCarrier(rank, self.meter, self.check, settings.timeout, messenger)
        self._small.overdue, self._small.relieved = self._suspect, lambda operation: self._relieved(operation.indirect)
        self._native = None
        if backend is not None:
            self._native = NativeCarrier(rank, self.meter, self.check, settings.timeout, backend)
            self._native.overdue = lambda waited: self._link.send(m.Suspect(-1, waited))
            self._native.relieved = self._relieved
        self.chooser: Chooser | None = None  # where there is something to choose
        if messenger is not None and settings.algorithm == "auto":
            names = [*ALGORITHMS, *([] if self._native is None else ["native"])]
            self.chooser = Chooser(
                self, lambda name, tensor: self._all_reduce(name, tensor).wait(), names, settings.transport, kept
            )

    def _shared(self, name: str, meter: Meter) -> SharedCarrier:
        counters = self._buffers.get(f"counters{name}", MAX_RANKS * 2 * WORDS, torch.int64, None)
        spin = self._workers <= len(os.sched_getaffinity(0))
        timeout = self._settings.timeout
        return SharedCarrier(self.rank, meter, self.check, timeout, counters, self._mail, self._buffers.twin, spin)

    def _host(self, rank: int) -> int:
        return rank * self._settings.hosts // self._workers

    def _mail(self, rank: int) -> Tensor:
        return self._buffers.get("mail", 2 * MAIL_BYTES, torch.uint8, rank).view(2, MAIL_BYTES)

    # -- computing ----------------------------------------------------------------------------------------------
    def compute(self, samples: int, work: Callable[[], T]) -> T:
        return work()

    def reached(self, share: float, then: Callable[[], None]) -> None:
        then()

    # -- collectives --------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._all_reduce(self._pick(tensor.nbytes), tensor)

    def _pick(self, nbytes: int) -> str:
        """Which algorithm sums a vector of this size; the same on all members."""
        if self._settings.algorithm != "auto":
            return self._settings.algorithm
        if self.chooser is None or len(self.members) == 1:
            return "shared" if self._messenger is None else "direct"
        return self.chooser.pick(nbytes)

    def _all_reduce(self, algorithm: str, tensor: Tensor) -> Handle:
        if algorithm == "native":
            assert self._native is not None
            return self._native.all_reduce(tensor)
        if isinstance(self._small, ScheduledCarrier):
            return self._small.all_reduce(tensor, None if algorithm == "hierarchical" else algorithm)
        return self._small.all_reduce(tensor)

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Handle:
        return self._small.reduce_scatter(region, parts)

    def all_gather(self, vector: Tensor) -> Handle:
        return self._small.all_gather(vector)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._small.broadcast(tensor, root)

    def barrier(self) -> Handle:
        return self._small.barrier()

    # -- membership ---------------------------------------------------------------------------------------------
    def check(self) -> None:
        if self._pinged:
            self._pinged = False
            self._link.send(m.Pong())
        if self._link.newest_generation > self.generation:
            raise Regrouped(self._link.newest_generation)

    def _suspect(self, operation: Operation, waited: float) -> None:
        """Somebody is hung: have it ended. The regrouping that follows ends our wait. Where the one we wait for may be
        waiting too, the supervisor finds out who is not."""
        self._link.send(m.Suspect(-1 if operation.indirect else operation.lagging(), waited))

    def _relieved(self, complained: bool = True) -> None:
        if complained:
            self._link.send(m.Suspect(-1, 0.0))

    def _ping(self, _: object) -> None:
        self._pinged = True

    def regroup(self, stand: Callable[[], int]) -> Standing:
        self._link.until(lambda: self._link.newest_generation > self.generation, "a new generation")
        while True:
            generation = self._link.newest_generation
            self._link.send(m.Stopped(generation))
            if not self._await(m.AllStopped, generation):
                continue
            self._link.send(m.Standing(generation, stand()))
            go = self._await(m.Go, generation)
            if go:
                break
        self.generation, self.members = generation, tuple(go.members)
        self._began = go.began
        if self._messenger is not None:
            peers = zip(go.members, go.addresses, go.lives, strict=True)
            try:
                self._messenger.regroup(generation, {r: (a, life) for r, a, life in peers if r != self.rank})
                settle(self._messenger, self.members, self.check, self._settings.timeout)
            except PeerLost:
                self._link.until(lambda: self._link.newest_generation > generation, "word of a lost peer")
                self.check()
        self._small.regroup(generation, self.members)
        if self._native is not None:
            self._small.barrier().wait()  # all are here: the library's own meeting is not left waiting for the dead
            try:
                self._native.regroup(self.members, go.meeting)
            except RuntimeError:
                self._link.until(lambda: self._link.newest_generation > generation, "word of a lost peer")
                self.check()
        if self.chooser is not None:
            self._settle(self.chooser)
        return Standing(generation, self.members, go.source, go.applied, tuple(go.behind))

    def begin(self) -> None:
        """Where there are servers, wait for the word to begin. There is one generation: deaths are news in the view."""
        go, _ = self._box.get()
        self.generation, self.members, self._began = go.generation, tuple(go.members), go.began

    def _settle(self, chooser: Chooser) -> None:
        """Agree on what to pick from. What is sent for it is no part of training and not counted; the time it takes is
        time of the run, and the record says so."""
        before, began = dataclasses.replace(self.meter), self.now()
        try:
            origin = chooser.settle()
        finally:
            vars(self.meter).update(vars(before))
        if origin is not None and self.rank == self.members[0]:
            took = f" in {self.now() - began:.1f} s, which count as time of the run" if origin == "measured" else ""
            detail = f"{origin}{took}; {chooser.describe()}"
            self._link.send(m.Recorded(Event(event="algorithms_chosen", time=self.now(), detail=detail)))

    def _await(self, kind: type[W], generation: int) -> W | None:
        """The supervisor's word on this generation, or None if there is a newer one."""
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
        asked = self._link.box(m.Finish)
        self._link.send(m.Left(self.generation, last is not None))
        while True:
            self._link.until(
                lambda: (
                    self._link.dismissed
                    or self._link.newest_generation > self.generation
                    or (last is not None and not asked.empty())
                ),
                "all to finish",
                1e9,
            )
            if self._link.dismissed:
                return
            self.check()
            asked.get()
            assert last is not None
            last()
            self._link.send(m.Left(self.generation))

    def close(self) -> None:
        super().close()
        if self._native is not None:
            self._native.close()
        if self._messenger is not None:
            self._messenger.close()
