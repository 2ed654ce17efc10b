"""Processes that prepare a worker's batches ahead.

    worker   expect(a, b, c, d) ── positions ──► loaders        what it will most likely take next, soonest first
             take(a) ◄──────── a batch in a memory file ──      each reads, augments and collates by itself

A request is a place in the epoch's order; the loader has the same task, knows the same order, and seeds its generators
by that place, so that a batch is the same in any process that reads it. A wrong guess costs time and nothing else:
batches that are not taken are thrown away, and one that was not expected is requested when it is taken. Each loader has
at most two requests before it, so that at most two batches for each are held.

Loaders are forked by their worker before it has threads, and end with it (processes.py).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import torch

from torrential import processes, shipping
from torrential.data.batches import training_batches
from torrential.data.deal import Order
from torrential.errors import RunFailed, TaskFailed, TorrentialError, WaitedTooLong
from torrential.randomness import CPU, DATA, seed_all
from torrential.task import Task
from torrential.usercode import failed

Place = tuple[int, int, int]  # the epoch, and where in its order the batch begins and ends
MOST_ASKED = 2  # requests that one loader has before it
_REPLY_BYTES = 1 << 16
_LONGEST_TEXT = 6000  # characters of a failure, of which each may be four bytes

ReadBatch = Callable[[Place], Any]


class Reply(msgspec.Struct, array_like=True):
    """The answer to a request; with the descriptors of a parcel, unless it failed."""

    place: Place
    failure: str = ""
    trace: str = ""


@dataclass
class LoaderProcess:
    """A loader, as its worker sees it."""

    name: str
    pid: int
    line: socket.socket
    asked: list[Place] = field(default_factory=list)  # in the order in which it answers


class Loaders:
    """The loaders of one worker."""

    def __init__(self, loaders: Sequence[LoaderProcess], timeout: float) -> None:
        self._loaders, self._timeout = loaders, timeout
        self._expected: list[Place] = []
        self._ready: dict[Place, Any] = {}
        self.depth = MOST_ASKED * len(loaders)

    def expect(self, places: Sequence[Place]) -> None:
        """Have these batches prepared, in this order; other prepared batches are thrown away."""
        self._expected = list(places)
        self._ready = {place: batch for place, batch in self._ready.items() if place in self._expected}
        self._receive(0.0)
        self._ask()

    def take(self, place: Place) -> Any:
        """The batch at a place, which is waited for."""
        if place not in self._expected:
            self._expected.insert(0, place)
        if not any(place in loader.asked for loader in self._loaders) and place not in self._ready:
            self._send(min(self._loaders, key=lambda loader: len(loader.asked)), place)
        until = time.monotonic() + self._timeout
        while place not in self._ready:
            if (left := until - time.monotonic()) <= 0:
                loader = next(loader for loader in self._loaders if place in loader.asked)
                what = f"the batch from {place[1]} to {place[2]} of epoch {place[0]}; a larger timeout gives it longer"
                raise WaitedTooLong(loader.name, self._timeout, what)
            self._receive(left)
            self._ask()
        self._expected.remove(place)
        batch = self._ready.pop(place)
        if isinstance(batch, TaskFailed):
            raise batch
        return batch

    def _ask(self) -> None:
        asked = {place for loader in self._loaders for place in loader.asked}
        for place in self._expected:
            idlest = min(self._loaders, key=lambda loader: len(loader.asked))
            if len(idlest.asked) >= MOST_ASKED:
                return
            if place not in asked and place not in self._ready:
                self._send(idlest, place)

    def _send(self, loader: LoaderProcess, place: Place) -> None:
        try:
            loader.line.send(msgspec.msgpack.encode(place))
        except OSError:
            raise _gone(loader) from None
        loader.asked.append(place)

    def _receive(self, seconds: float) -> None:
        """Take in the replies that come within so many seconds, if any do."""
        lines, poll = {loader.line.fileno(): loader for loader in self._loaders}, select.poll()
        for line in lines:
            poll.register(line, select.POLLIN)
        for line, _ in poll.poll(1000 * seconds):
            self._read(lines[line])

    def _read(self, loader: LoaderProcess) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(loader.line, _REPLY_BYTES, 2)
        except OSError:
            message, fds = b"", []
        if not message:
            raise _gone(loader)
        try:
            reply = msgspec.msgpack.decode(message, type=Reply)
            loader.asked.remove(reply.place)
            if reply.place in self._expected:
                self._ready[reply.place] = _failure(reply) if reply.failure else shipping.unpack(*fds)
        finally:
            for fd in fds:
                os.close(fd)


def _failure(reply: Reply) -> TaskFailed:
    """What the user's code raised in a loader."""
    failure = TaskFailed(reply.failure)
    if reply.trace:
        failure.add_note(reply.trace)
    return failure


def _gone(loader: LoaderProcess) -> RunFailed:
    """The error for the death of a loader."""
    status = os.waitstatus_to_exitcode(os.waitpid(loader.pid, 0)[1])
    how = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
    return RunFailed(f"{loader.name} is gone ({how}); if memory was short use fewer loaders, then go on with --resume")


def end_loaders(loaders: Sequence[LoaderProcess]) -> None:
    """End a worker's loaders when it has no more use for them."""
    for loader in loaders:
        loader.line.close()
        os.kill(loader.pid, signal.SIGKILL)
        os.waitpid(loader.pid, 0)


# -- the loader's side ------------------------------------------------------------------------------------------------
def fork_loaders(worker: int, count: int, prepare: Callable[[], ReadBatch]) -> list[LoaderProcess]:
    """Fork the loaders of a worker; each calls `prepare` for what reads its batches. The caller has no threads."""
    found: list[LoaderProcess] = []
    parent = os.getpid()
    for number in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            for line in (ours, *(other.line for other in found)):
                line.close()
            processes.end_with(parent)
            processes.set_name(f"tt-loader-{worker}-{number}")
            _become_loader(theirs, prepare)
        theirs.close()
        found.append(LoaderProcess(f"loader {number} of worker {worker}", pid, ours))
    return found


def _become_loader(line: socket.socket, prepare: Callable[[], ReadBatch]) -> NoReturn:
    code = 1
    try:
        torch.set_num_threads(1)
        _serve(line, prepare())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(line: socket.socket, read: ReadBatch) -> None:
    """Answer requests until the worker is gone."""
    while message := line.recv(_REPLY_BYTES):
        place = msgspec.msgpack.decode(message, type=Place)
        try:
            parcel = shipping.pack(read(place))
        except BaseException as error:  # a user's data set may raise anything
            known = error if isinstance(error, TorrentialError) else failed("the task's training data raised", error)
            trace = "\n".join(getattr(known, "__notes__", ()))
            line.send(msgspec.msgpack.encode(Reply(place, str(known)[:_LONGEST_TEXT], trace[:_LONGEST_TEXT])))
            continue
        with parcel:
            socket.send_fds(line, [msgspec.msgpack.encode(Reply(place))], list(parcel.fds))


def reader(task: Task, order: Order) -> ReadBatch:
    """What a loader does for one place: the batch, as a worker would read it there."""
    batches = training_batches(task, CPU, order.seed)

    def read(place: Place) -> Any:
        epoch, first, last = place
        seed_all(CPU, order.seed, DATA, epoch, first)
        return batches.fetch(order.between(epoch, first, last), epoch)

    return read
