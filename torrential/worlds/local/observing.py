"""The observer's program in the local world: take snapshots as they come, evaluate, record, save."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

from torrential.records import Evaluation
from torrential.trainer.observer import Observer
from torrential.trainer.pending import Parts, Pending
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.base import Job
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, Link
from torrential.worlds.local.nursery import return_freed_memory

TELL_SECONDS = 10.0  # between two signs that an evaluation goes on
NICENESS = 5  # evaluation gives way to training where cores are short


def observe(job: Job, link: Link) -> None:
    os.nice(NICENESS)
    torch.set_num_threads(1)
    role = _Observing(job, link)
    while not role.dismissed:
        role.take_one()
        role.work()
    role.close()


class _Observing:
    def __init__(self, job: Job, link: Link) -> None:
        self._link = link
        self._inbox = link.box(m.SnapshotTaken, m.OwnBuffers, m.Gone, m.Back, m.Noted, m.Stop, m.Dismissed)
        self._buffers = Buffers(link, -1)
        self._observer = Observer(job.task, job.config, job.strategy, torch.device(job.config.device), job.directory)
        self._observer.gets_on = self._get_on
        self._pending: Pending[tuple[m.SnapshotTaken, list[Tensor]]] = Pending()
        self._last: Snapshot | None = None
        self._reached = False
        self._told = time.monotonic()
        self.dismissed = False

    def take_one(self) -> object:
        message, tensors = self._inbox.get()
        if isinstance(message, m.SnapshotTaken):
            self._pending.add(message.snapshot, (message, tensors))
        elif isinstance(message, m.OwnBuffers):
            self._pending.part(message.rank, message.step, dict(zip(message.names, tensors, strict=True)))
        elif isinstance(message, m.Back):
            self._pending.back(message.rank)
        elif isinstance(message, m.Gone):
            self._pending.gone(message.rank)
        elif isinstance(message, m.Stop):
            self._reached = True  # as seen by an observer before this one
        elif isinstance(message, m.Dismissed):
            self.dismissed = True
        return message

    def work(self) -> None:
        """Deal with all snapshots that are complete."""
        while (item := self._pending.next(ready_or_not=self.dismissed)) is not None:
            _, (taken, tensors), parts, news = item
            if news and not self._reached:
                self._process(taken, dict(zip(taken.rest, tensors, strict=True)), parts)
            self._link.send(m.SnapshotDone(taken.rank, taken.slot))
            return_freed_memory()  # until the next one

    def _process(self, taken: m.SnapshotTaken, rest: dict[str, Tensor], parts: Parts) -> None:
        flat = {
            name: self._buffers.get(f"snapshot{taken.slot}/{name}", numel, getattr(torch, dtype), taken.rank)
            for name, numel, dtype in taken.vectors
        }
        if not self._observer.complete(taken.snapshot, parts):
            return
        self._observer.load(flat, rest, parts)
        evaluation = self._observer.evaluate(taken.snapshot, "validation")
        self._note(evaluation)
        self._observer.save(taken.snapshot, flat, rest, parts)
        self._last = taken.snapshot
        if self._observer.task.reaches(self._observer.config.target, evaluation.value):
            self._reached = True
            self._link.send(m.Stop())

    def _get_on(self) -> None:
        """A long evaluation is told from one that has come to a stop."""
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._link.send(m.Pong())

    def _note(self, evaluation: Evaluation) -> None:
        """Return when the supervisor has written it: no checkpoint shall exist whose evaluation is not on record."""
        self._link.send(m.Recorded(evaluation))
        while not isinstance(self.take_one(), m.Noted):
            pass

    def close(self) -> None:
        """The last word is the test set's, on the parameters last evaluated, maybe by an observer before this one."""
        last = self._last or self._observer.load_saved()
        if last is not None and self._observer.config.settings.test:
            self._note(self._observer.evaluate(last, "test"))
        self._link.send(m.Left(0))
