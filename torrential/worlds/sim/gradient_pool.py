"""Processes that compute gradients for a simulation, while it goes on with other roles.

    simulation   begin(work) ──► a free slot of a helper: parameters, buffers ──► memory that both see
                 virtual time goes on: other roles begin theirs, messages pass
                 finish(work) ◄── losses; gradients and buffers from the slot
    helper       the same task and model: loads a slot, computes, leaves the gradients there

Gradients depend on nothing but what is sent, so a run is the same to the byte with any number of helpers.
They are a help and no more: what no helper has begun when it is needed, what fails there, and what a dead or silent one
had begun is computed here. Each has two slots, so that it need not wait for the simulation between two works.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch
from msgspec.msgpack import decode, encode
from torch import nn

from torrential.config import RunConfig
from torrential.descriptors import explained
from torrential.errors import RunFailed, TorrentialError
from torrential.processes import start_helper
from torrential.shipping import pack
from torrential.task import Task
from torrential.trainer.backward import GradientWork
from torrential.worlds.sim.slots import SLOTS, Flags, Slots, Welcome, copied, form_of, tensors_of


class _Job:
    """A GradientWork, and where it is."""

    def __init__(self, work: GradientWork) -> None:
        self.work = work
        self.helper: _Helper | None = None
        self.losses: list[dict[str, float]] | None = None  # and figures, of each portion; None: not computed
        self.failure: Exception | None = None
        self.wanted = True


class _Helper:
    """One helper process, its memory and its jobs."""

    def __init__(self, task: Task, config: RunConfig, model: nn.Module) -> None:
        welcome = Welcome(config, form_of(model), Flags.here())
        try:
            parcel = pack(task)
        except TorrentialError as error:
            raise RunFailed(f"the task cannot be given to other processes: {error}; leave processes out") from error
        memory = os.memfd_create("torrential-slots")
        ours, theirs = socket.socketpair()
        try:
            with parcel, theirs:
                for option in (
                    socket.SO_SNDTIMEO,
                    socket.SO_RCVTIMEO,
                ):  # one that hangs must not hold up the simulation
                    seconds = max(1, round(config.settings.timeout))
                    ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
                self.slots = Slots(model, memory)
                fds = (theirs.fileno(), memory, *parcel.fds)
                self._process = start_helper("torrential.worlds.sim.gradient_process", fds)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(memory)
        self.line = Connection(ours.detach())
        with contextlib.suppress(OSError):  # its death is seen in what it does not say
            self.line.send_bytes(encode(welcome))
        self.free: list[int] = []  # slots; none before it is there
        self.jobs: dict[int, _Job] = {}  # by slot

    def end(self) -> None:
        self.line.close()
        self._process.kill()
        self._process.wait()


class GradientPool:
    """The helper processes of a simulation, and the jobs that they compute."""

    def __init__(self, count: int, task: Task, config: RunConfig) -> None:
        self._count, self._task, self._config = count, task, config
        self._waiting: deque[_Job] = deque()
        self.done = 0  # works that helpers did
        self._helpers: dict[int, _Helper] = {}  # by the descriptor of its line
        self._poll = select.poll()

    def _start(self, model: nn.Module) -> None:
        while self._count:
            self._count -= 1
            with explained():
                helper = _Helper(self._task, self._config, model)
            self._helpers[helper.line.fileno()] = helper
            self._poll.register(helper.line, select.POLLIN)

    def close(self) -> None:
        while self._helpers:
            self._helpers.popitem()[1].end()

    def begin(self, work: GradientWork) -> _Job:
        self._start(work.gradients.model)
        job = _Job(work)
        self._waiting.append(job)
        self._collect(0.0)
        return job

    def forget(self, job: _Job) -> None:
        """Drop a job: the role that wanted it is dead."""
        job.wanted = False

    def finish(self, job: _Job) -> list[dict[str, float]]:
        """Wait for a job's losses. Meanwhile one more is computed here, if all helpers have enough to do."""
        since = time.monotonic()
        self._collect(0.0)
        while job.losses is None and job.failure is None:
            if job.helper is None:
                self._compute(job)
            elif (other := next((each for each in self._waiting if each.wanted), None)) is not None:
                self._compute(other)
                self._collect(0.0)
            elif (left := self._config.settings.timeout - (time.monotonic() - since)) > 0:
                self._collect(left)
            else:
                self._lose(job.helper)
        if job.failure is not None:
            raise job.failure
        assert job.losses is not None
        return job.losses

    def _compute(self, job: _Job) -> None:
        with contextlib.suppress(ValueError):  # a helper may have begun it in vain
            self._waiting.remove(job)
        try:
            job.losses = job.work()
        except Exception as error:  # a user's task may raise anything; it is raised where the result is wanted
            job.failure = error

    def _collect(self, timeout: float) -> None:
        """Collect what helpers have done within so many seconds, and give them more."""
        for fd, _ in self._poll.poll(1000 * timeout):
            helper = self._helpers[fd]
            try:
                self._take(helper, decode(helper.line.recv_bytes()))
            except (EOFError, OSError):
                self._lose(helper)
        for helper in self._helpers.values():
            while helper.free and self._waiting:
                job = self._waiting.popleft()
                if job.wanted:
                    self._give(helper, job)

    def _give(self, helper: _Helper, job: _Job) -> None:
        slot, gradients = helper.free[-1], job.work.gradients
        if not copied(helper.slots.states[slot], tensors_of(gradients.model)):
            return  # for nobody but this process
        helper.free.pop()
        job.helper, helper.jobs[slot] = helper, job
        portions = [(p.position, p.indices.numpy().tobytes(), p.weight, p.scale) for p in job.work.portions]
        with contextlib.suppress(OSError):  # its death is seen in what it says
            helper.line.send_bytes(encode((slot, portions)))

    def _take(self, helper: _Helper, said: Any) -> None:
        if said is None:  # it is there
            helper.free = list(range(SLOTS))
            return
        if isinstance(said, str):
            raise RunFailed(f"the task cannot be computed in another process: {said}; leave processes out")
        slot, losses, early, last, used = said
        job = helper.jobs.pop(slot)
        helper.free.append(slot)
        if not job.wanted:
            return
        job.helper = None
        gradients, watch = job.work.gradients, job.work.watch
        if losses is None or not copied(list(gradients.model.buffers()), helper.slots.buffers[slot]):
            return  # it failed there, and will fail here in the sight of all
        parameters = list(gradients.model.parameters())
        for parameter, grad, has in zip(parameters, helper.slots.grads[slot], used, strict=True):
            if has:
                parameter.grad = torch.empty_like(parameter).copy_(grad)
        if watch is not None:
            watch.replay([parameters[i] for i in early], [parameters[i] for i in last])
        job.losses = losses
        self.done += 1

    def _lose(self, helper: _Helper) -> None:
        self._poll.unregister(helper.line)
        del self._helpers[helper.line.fileno()]
        helper.end()
        for job in helper.jobs.values():
            job.helper = None
