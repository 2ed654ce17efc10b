"""Processes that compute gradients for a simulation, while it goes on with other roles.

    simulation   begin(work) ──► a free slot of a hand: parameters, buffers ──► memory that both see
                 virtual time goes on: other roles begin theirs, messages pass
                 finish(work) ◄── losses; gradients and buffers from the slot
    hand         the same task and model: loads a slot, computes, leaves the gradients there

What a Work comes to depends on nothing but what is sent, so a run is the same to the byte with any number of hands.
They are a help and no more: what no hand has begun when it is needed, what fails there, and what a dead or silent one
had begun is computed here. Each has two slots, so that it need not wait for the simulation between two works.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from msgspec.msgpack import decode, encode
from torch import Tensor, nn

from torrential.config import RunConfig
from torrential.errors import RunFailed, TorrentialError
from torrential.optim.recipe import adapt_model
from torrential.shipping import pack, unpack
from torrential.task import Task
from torrential.trainer.backward import Gradients, Portion, Work

PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: with the simulation, also while torch is being loaded
if os.getppid() != {parent}:
    sys.exit(1)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the simulation decides when it ends
sys.path[:] = {path}
from {module} import serve
serve{fds}
"""
SLOTS = 2
FAILED: tuple[Any, ...] = (None, [], [], [])
ALIGNMENT = 64  # bytes


class Slots:
    """Memory for models and their gradients, seen by two processes."""

    def __init__(self, model: nn.Module, fd: int) -> None:
        grads: list[Tensor] = list(model.parameters())
        like = grads + list(model.buffers())
        places, end = [], 0
        for tensor in like + grads:
            places.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        size = max(end, ALIGNMENT)
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, SLOTS * size)
        memory = torch.frombuffer(mmap.mmap(fd, SLOTS * size), dtype=torch.uint8)

        def view(tensor: Tensor, start: int) -> Tensor:
            raw = memory[start : start + tensor.numel() * tensor.element_size()]
            return raw.view(tensor.dtype).view(tensor.shape) if tensor.numel() else torch.empty_like(tensor)

        self.states, self.buffers, self.grads = [], [], []
        for slot in range(SLOTS):
            views = [view(t, slot * size + start) for t, start in zip(like + grads, places, strict=True)]
            self.states.append(views[: len(like)])
            self.buffers.append(views[len(grads) : len(like)])
            self.grads.append(views[len(like) :])


def _copied(into: list[Tensor], tensors: list[Tensor]) -> bool:
    """Whether they are of one kind, and so could be; a module may have put another buffer in the place of one."""
    if len(into) != len(tensors):
        return False
    for one, other in zip(into, tensors, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
    if into:
        torch._foreach_copy_(into, tensors)
    return True


# -- the form of a model: with it, the last bits are the same elsewhere -----------------------------------------------
class Form(msgspec.Struct):
    shape: list[int]
    dtype: str
    strides: list[int]
    place: int  # its address modulo ALIGNMENT


class Settings(msgspec.Struct):
    """Torch's, of the whole process."""

    dtype: str
    matmul: str
    deterministic: bool
    mkldnn: bool

    @classmethod
    def here(cls) -> Settings:
        return cls(
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            bool(torch.backends.mkldnn.enabled),
        )

    def adopt(self) -> None:
        torch.set_default_dtype(getattr(torch, self.dtype.removeprefix("torch.")))
        torch.set_float32_matmul_precision(self.matmul)
        torch.use_deterministic_algorithms(self.deterministic)
        torch.backends.mkldnn.enabled = self.mkldnn  # type: ignore[assignment]


class Welcome(msgspec.Struct):
    """What a hand is told first."""

    config: RunConfig
    form: list[Form]
    settings: Settings


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _form(model: nn.Module) -> list[Form]:
    tensors = _tensors(model)
    spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t.shape, t.stride()) * t.element_size()) for t in tensors)
    if any(after < end for (_, end), (after, _) in itertools.pairwise(spans)):
        raise RunFailed("processes are for models whose parameters and buffers share no memory; leave processes out")
    return [Form(list(t.shape), str(t.dtype), list(t.stride()), t.data_ptr() % ALIGNMENT) for t in tensors]


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def _formed(tensor: Tensor, form: Form) -> Tensor:
    """Memory like the tensor's, but of this form."""
    if list(tensor.shape) != form.shape or str(tensor.dtype) != form.dtype:
        raise ValueError(
            f"its model is another one there ({tensor.dtype} {list(tensor.shape)}, not {form.dtype} {form.shape})"
        )
    if not tensor.numel():
        return tensor.data
    nbytes = _extent(form.shape, form.strides) * tensor.element_size()
    raw = torch.zeros(nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
    start = (form.place - raw.data_ptr()) % ALIGNMENT
    return raw[start : start + nbytes].view(tensor.dtype).as_strided(form.shape, form.strides)


# -- the simulation's side --------------------------------------------------------------------------------------------
class _Job:
    """A Work, and where it is."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.hand: _Hand | None = None
        self.losses: list[float] | None = None  # None: not computed
        self.failure: Exception | None = None
        self.wanted = True


class _Hand:
    def __init__(self, task: Task, config: RunConfig, model: nn.Module) -> None:
        welcome = Welcome(config, _form(model), Settings.here())
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
                program = PROGRAM.format(parent=os.getpid(), path=sys.path, module=__name__, fds=fds)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program], pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
                )
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


class Hands:
    def __init__(self, count: int, task: Task, config: RunConfig) -> None:
        self._count, self._task, self._config = count, task, config
        self._waiting: deque[_Job] = deque()
        self.done = 0  # works that hands did
        self._hands: dict[int, _Hand] = {}  # by the descriptor of its line
        self._poll = select.poll()

    def _start(self, model: nn.Module) -> None:
        while self._count:
            self._count -= 1
            hand = _Hand(self._task, self._config, model)
            self._hands[hand.line.fileno()] = hand
            self._poll.register(hand.line, select.POLLIN)

    def close(self) -> None:
        while self._hands:
            self._hands.popitem()[1].end()

    def begin(self, work: Work) -> _Job:
        self._start(work.gradients.model)
        job = _Job(work)
        self._waiting.append(job)
        self._collect(0.0)
        return job

    def forget(self, job: _Job) -> None:
        """Whoever wanted it is dead."""
        job.wanted = False

    def finish(self, job: _Job) -> list[float]:
        """Meanwhile one more is computed here, if all hands have enough to do."""
        since = time.monotonic()
        self._collect(0.0)
        while job.losses is None and job.failure is None:
            if job.hand is None:
                self._compute(job)
            elif (other := next((each for each in self._waiting if each.wanted), None)) is not None:
                self._compute(other)
                self._collect(0.0)
            elif (left := self._config.settings.timeout - (time.monotonic() - since)) > 0:
                self._collect(left)
            else:
                self._lose(job.hand)
        if job.failure is not None:
            raise job.failure
        assert job.losses is not None
        return job.losses

    def _compute(self, job: _Job) -> None:
        with contextlib.suppress(ValueError):  # a hand may have begun it in vain
            self._waiting.remove(job)
        try:
            job.losses = job.work()
        except Exception as error:  # a user's task may raise anything; it is raised where the result is wanted
            job.failure = error

    def _collect(self, timeout: float) -> None:
        """What hands have done, within so many seconds; and give them more."""
        for fd, _ in self._poll.poll(1000 * timeout):
            hand = self._hands[fd]
            try:
                self._take(hand, decode(hand.line.recv_bytes()))
            except (EOFError, OSError):
                self._lose(hand)
        for hand in self._hands.values():
            while hand.free and self._waiting:
                job = self._waiting.popleft()
                if job.wanted:
                    self._give(hand, job)

    def _give(self, hand: _Hand, job: _Job) -> None:
        slot, gradients = hand.free[-1], job.work.gradients
        if not _copied(hand.slots.states[slot], [*(p.detach() for p in gradients.parameters), *gradients.buffers()]):
            return  # for nobody but this process
        hand.free.pop()
        job.hand, hand.jobs[slot] = hand, job
        portions = [(p.position, p.indices.numpy().tobytes(), p.weight, p.scale) for p in job.work.portions]
        with contextlib.suppress(OSError):  # its death is seen in what it says
            hand.line.send_bytes(encode((slot, portions)))

    def _take(self, hand: _Hand, said: Any) -> None:
        if said is None:  # it is there
            hand.free = list(range(SLOTS))
            return
        if isinstance(said, str):
            raise RunFailed(f"the task cannot be computed in another process: {said}; leave processes out")
        slot, losses, early, last, used = said
        job = hand.jobs.pop(slot)
        hand.free.append(slot)
        if not job.wanted:
            return
        job.hand = None
        gradients, watch = job.work.gradients, job.work.watch
        if losses is None or not _copied(gradients.buffers(), hand.slots.buffers[slot]):
            return  # it failed there, and will fail here in the sight of all
        parameters = gradients.parameters
        for parameter, grad, has in zip(parameters, hand.slots.grads[slot], used, strict=True):
            if has:
                parameter.grad = torch.empty_like(parameter).copy_(grad)
        if watch is not None:
            watch.replay([parameters[i] for i in early], [parameters[i] for i in last])
        job.losses = losses
        self.done += 1

    def _lose(self, hand: _Hand) -> None:
        self._poll.unregister(hand.line)
        del self._hands[hand.line.fileno()]
        hand.end()
        for job in hand.jobs.values():
            job.hand = None


# -- the other side ---------------------------------------------------------------------------------------------------
class _Computing:
    def __init__(self, task: Task, welcome: Welcome, memory: int) -> None:
        config = welcome.config
        self._model = adapt_model(config.recipe, task.model()).train()
        tensors = _tensors(self._model)
        if len(tensors) != len(welcome.form):
            raise ValueError(f"its model is another one there ({len(tensors)} tensors, not {len(welcome.form)})")
        for tensor, form in zip(tensors, welcome.form, strict=True):
            tensor.data = _formed(tensor, form)
        self._gradients = Gradients(task, self._model, torch.device("cpu"), config.seed)
        self._slots = Slots(self._model, memory)
        self._parameters = self._gradients.parameters
        self._early: list[int] = []
        self._reached: list[int] = []  # since then
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, i=index: self._reached.append(i))

    def compute(self, slot: int, given: Iterable[Any]) -> tuple[Any, ...]:
        """Losses, or None if it failed; the parameters reached before the last portion, and in it; which have a
        gradient."""
        portions = [Portion(tuple(at), _indices(raw), *rest) for at, raw, *rest in given]
        self._early, self._reached = [], []
        self._model.zero_grad(set_to_none=True)
        mine = [*(p.detach() for p in self._parameters), *self._gradients.buffers()]
        try:
            if not _copied(mine, self._slots.states[slot]):
                return FAILED
            losses = self._gradients.add_up(portions, self._arm)
            used = [parameter.grad is not None for parameter in self._parameters]
            for parameter, grad in zip(self._parameters, self._slots.grads[slot], strict=True):
                if parameter.grad is not None:
                    grad.copy_(parameter.grad)
            if not _copied(self._slots.buffers[slot], self._gradients.buffers()):
                return FAILED
        except Exception:  # a user's task may raise anything; it is raised again where it is seen
            return FAILED
        return losses, sorted(set(self._early)), self._reached, used

    def _arm(self) -> None:
        """The last portion follows."""
        self._early, self._reached = self._reached, []


def _indices(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.int64) if raw else torch.empty(0, dtype=torch.int64)


def serve(line_fd: int, memory_fd: int, pickle_fd: int, tensor_fd: int) -> None:
    """The program of a hand: until the simulation is gone."""
    with Connection(line_fd) as line, contextlib.suppress(EOFError, OSError):
        welcome = decode(line.recv_bytes(), type=Welcome)
        try:
            welcome.settings.adopt()
            task = unpack(pickle_fd, tensor_fd)
            torch.set_num_threads(welcome.config.settings.threads or 1)
            hand = _Computing(task, welcome, memory_fd)
        except Exception as error:  # a user's task may raise anything
            return line.send_bytes(encode(f"{type(error).__name__}: {error}"))
        line.send_bytes(encode(None))
        while True:
            slot, portions = decode(line.recv_bytes())
            line.send_bytes(encode((slot, *hand.compute(slot, portions))))
