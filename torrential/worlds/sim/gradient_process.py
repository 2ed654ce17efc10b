"""The program of a process that computes gradients for a simulation; see worlds/sim/gradient_pool.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch
from msgspec.msgpack import decode, encode
from torch import Tensor

from torrential.compute.recompute import recompute
from torrential.optim.recipe import adapt_model
from torrential.shipping import unpack
from torrential.task import Task, build_model
from torrential.trainer.backward import Gradients, Portion
from torrential.worlds.failure import describe
from torrential.worlds.sim.slots import Slots, Welcome, copied, formed, tensors_of

FAILED: tuple[Any, ...] = (None, [], [], [])


class Computing:
    def __init__(self, task: Task, welcome: Welcome, memory: int) -> None:
        config = welcome.config
        self._model = adapt_model(config.recipe, build_model(task)).train()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        if len(tensors) != len(welcome.form):
            raise ValueError(f"its model is another one there ({len(tensors)} tensors, not {len(welcome.form)})")
        for tensor, form in zip(tensors, welcome.form, strict=True):
            tensor.data = formed(tensor, form)
        recompute(self._model, config)
        self._gradients = Gradients(task, self._model, torch.device("cpu"), config.seed, config.settings)
        self._slots = Slots(self._model, memory)
        self._parameters = list(self._model.parameters())
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
        try:
            if not copied(tensors_of(self._model), self._slots.states[slot]):
                return FAILED
            losses = self._gradients.add_up(portions, self._arm)
            used = [parameter.grad is not None for parameter in self._parameters]
            for parameter, grad in zip(self._parameters, self._slots.grads[slot], strict=True):
                if parameter.grad is not None:
                    grad.copy_(parameter.grad)
            if not copied(self._slots.buffers[slot], list(self._model.buffers())):
                return FAILED
        except BaseException:  # a user's task may raise anything; it is raised again where it is seen
            return FAILED
        return losses, sorted(set(self._early)), self._reached, used

    def _arm(self) -> None:
        """The last portion follows."""
        self._early, self._reached = self._reached, []


def _indices(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.int64) if raw else torch.empty(0, dtype=torch.int64)


def main(line_fd: int, memory_fd: int, pickle_fd: int, tensor_fd: int) -> None:
    """The program of a helper: until the simulation is gone."""
    with Connection(line_fd) as line, contextlib.suppress(EOFError, OSError):
        welcome = decode(line.recv_bytes(), type=Welcome)
        try:
            welcome.flags.adopt()
            task = unpack(pickle_fd, tensor_fd)
            torch.set_num_threads(welcome.config.settings.threads or 1)
            helper = Computing(task, welcome, memory_fd)
        except BaseException as error:  # a user's task may raise anything
            return line.send_bytes(encode(describe(error).text))
        line.send_bytes(encode(None))
        while True:
            slot, portions = decode(line.recv_bytes())
            line.send_bytes(encode((slot, *helper.compute(slot, portions))))
