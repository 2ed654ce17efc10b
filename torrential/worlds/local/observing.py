"""The observer's program in the local world."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torrential.config import HostsSettings
from torrential.records import Evaluation
from torrential.trainer.observer import Observer
from torrential.worlds.base import Job
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, SupervisorLink
from torrential.worlds.local.nursery import return_freed_memory
from torrential.worlds.observing import Observing, SnapshotTaken, Vectors

TELL_SECONDS = 10.0  # between two signs that an evaluation goes on
NICENESS = 5  # evaluation gives way to training where cores are short


def observe(job: Job, link: SupervisorLink, buffers: Buffers) -> None:
    os.nice(NICENESS)
    torch.set_num_threads(1)
    role = LocalObserving(job, link, buffers)
    while not role.dismissed:
        role.take_one()
        role.work()
    role.close()


class LocalObserving(Observing):
    def __init__(self, job: Job, link: SupervisorLink, buffers: Buffers) -> None:
        observer = Observer(job.task, job.config, job.strategy, torch.device(job.config.device), job.directory)
        super().__init__(observer)
        self._link, self._buffers = link, buffers
        self._inbox = link.box(SnapshotTaken, m.OwnStates, m.Gone, m.Back, m.Noted, m.Stop, m.Dismissed)
        observer.gets_on = self._get_on
        if isinstance(job.config.settings, HostsSettings) and job.checkpoint is not None:
            observer.needed = job.checkpoint.step  # by hosts that come later on
        self._told = time.monotonic()

    def take_one(self) -> object:
        message, tensors = self._inbox.get()
        self.hear(message, tensors)
        return message

    def tell(self, message: Any) -> None:
        self._link.send(message)
        if isinstance(message, m.SnapshotDone):
            return_freed_memory()  # until the next one

    def note(self, evaluation: Evaluation) -> None:
        self._link.send(m.Recorded(evaluation))
        while not isinstance(self.take_one(), m.Noted):
            pass

    def vectors(self, taken: SnapshotTaken, tensors: Sequence[Tensor]) -> Vectors:
        """They have come beside the message, if the worker may be on another host; else they lie in its buffers."""
        if len(tensors) > len(taken.rest):
            sent = tensors[: len(tensors) - len(taken.rest)]
            return {name: tensor for (name, *_), tensor in zip(taken.vectors, sent, strict=True)}
        return {
            name: self._buffers.existing(f"snapshot{taken.slot}/{name}", numel, getattr(torch, dtype), taken.rank)
            for name, numel, dtype in taken.vectors
        }

    def _get_on(self) -> None:
        """A long evaluation is told from one that has come to a stop."""
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._link.send(m.Pong())
