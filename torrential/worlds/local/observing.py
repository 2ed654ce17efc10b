"""The observer's program in the local world: take snapshots as they come, evaluate, record, save."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from torrential.records import Evaluation
from torrential.trainer.observer import Observer
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.base import Job
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, Link
from torrential.worlds.local.nursery import return_freed_memory

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
        self._snapshots: list[tuple[m.SnapshotTaken, list[Tensor]]] = []
        self._parts: dict[int, dict[int, dict[str, Tensor]]] = {}  # step -> rank -> that worker's buffers
        self._gone: set[int] = set()
        self._last: Snapshot | None = None
        self._reached = False
        self.dismissed = False

    def take_one(self) -> object:
        message, tensors = self._inbox.get()
        if isinstance(message, m.SnapshotTaken):
            self._snapshots.append((message, tensors))
        elif isinstance(message, m.OwnBuffers):
            self._parts.setdefault(message.step, {})[message.rank] = dict(zip(message.names, tensors, strict=True))
        elif isinstance(message, m.Back):
            self._gone.discard(message.rank)
        elif isinstance(message, m.Gone):
            self._gone.add(message.rank)
        elif isinstance(message, m.Stop):
            self._reached = True  # as seen by an observer before this one
        elif isinstance(message, m.Dismissed):
            self.dismissed = True
        return message

    def work(self) -> None:
        """Deal with all snapshots that are complete."""
        while self._snapshots and self._complete(self._snapshots[0][0].snapshot):
            taken, tensors = self._snapshots.pop(0)
            snapshot = taken.snapshot
            if not self._reached and (self._last is None or snapshot.step > self._last.step):
                self._process(taken, dict(zip(taken.rest, tensors, strict=True)))
            for step in [s for s in self._parts if s <= snapshot.step]:
                del self._parts[step]
            self._link.send(m.SnapshotDone(taken.rank, taken.slot))
            return_freed_memory()  # until the next one

    def _complete(self, snapshot: Snapshot) -> bool:
        """Whether every worker's part has come, or will never come."""
        here = set(self._parts.get(snapshot.step, {})) | self._gone
        return self.dismissed or not self._observer.has_buffers or here >= set(snapshot.members)

    def _process(self, taken: m.SnapshotTaken, rest: dict[str, Tensor]) -> None:
        flat = {
            name: self._buffers.get(f"snapshot{taken.slot}/{name}", numel, getattr(torch, dtype), taken.rank)
            for name, numel, dtype in taken.vectors
        }
        self._observer.load(flat, rest)
        evaluation = self._observer.evaluate(taken.snapshot, "validation")
        self._note(evaluation)
        self._observer.save(taken.snapshot, flat, rest, self._parts.get(taken.snapshot.step, {}))
        self._last = taken.snapshot
        if self._observer.task.reaches(self._observer.config.target, evaluation.value):
            self._reached = True
            self._link.send(m.Stop())

    def _note(self, evaluation: Evaluation) -> None:
        """Return when the supervisor has written it: no checkpoint shall exist whose evaluation is not on record."""
        self._link.send(m.Recorded(evaluation))
        while not isinstance(self.take_one(), m.Noted):
            pass

    def close(self) -> None:
        """The last word is the test set's, on the parameters last evaluated, maybe by an observer before this one."""
        last = self._last or self._observer.load_saved()
        if last is not None:
            self._note(self._observer.evaluate(last, "test"))
        self._link.send(m.Left(0))
