"""The model of a strategy that cuts it: built once, in a file of memory from which each worker takes its own part.

    world    builds the model, traces it if need be, packs both     (shipping.py: tensors in a file of their own)
    worker   maps the file; strategy.part() picks modules; their tensors are copied; the mapping goes

So all workers begin with the values of one model, and no memory of a worker's is ever given to another one's tensors:
pages of the file that are not read are in no process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torrential import shipping
from torrential.config import RunConfig
from torrential.errors import TaskFailed
from torrential.optim.recipe import adapt_model
from torrential.randomness import MODEL, SeparateDraws, seed_all
from torrential.records import Event, Record
from torrential.strategies.base import Strategy
from torrential.task import Task, build_model

IN_FILE_BYTES = 4096  # what is smaller is copied into every process


class WholeModel(NamedTuple):
    """A model as its strategy cuts it."""

    model: nn.Module
    """The model as task and recipe make it."""
    cuttable: nn.Module
    """The same parameters in the form that `Strategy.part` takes."""


def build_whole(task: Task, config: RunConfig, strategy: Strategy, device: torch.device) -> WholeModel:
    """The whole model, as every worker of the run would build it."""
    seed_all(device, config.seed, MODEL)
    model = adapt_model(config.recipe, build_model(task))
    return WholeModel(model, strategy.cuttable(task, model))


@contextlib.contextmanager
def handed_over(
    task: Task, config: RunConfig, strategy: Strategy, write: Callable[[Record], None]
) -> Iterator[tuple[int, int, int] | None]:
    """The place (shipping.unpack_from) of the WholeModel of a run whose strategy gives its workers parts; without one,
    workers build the model by themselves."""
    parcel = None
    if not strategy.has_whole_model():
        with SeparateDraws():
            whole = build_whole(task, config, strategy, torch.device(config.device))
        try:
            parcel = shipping.pack(whole, IN_FILE_BYTES)
        except TaskFailed as error:
            if whole.cuttable is not whole.model:
                raise
            detail = f"every worker builds the whole model before it keeps its part: {error}"
            write(Event(event="warning", time=0.0, detail=detail))
        del whole
    try:
        yield None if parcel is None else (os.getpid(), *parcel.fds)
    finally:
        if parcel is not None:
            parcel.close()


def take_memory(part: nn.Module) -> None:
    """Copy the tensors of a part out of the file that it was mapped from."""
    for tensor in itertools.chain(part.parameters(), part.buffers()):
        tensor.data = tensor.data.clone()
    for module in part.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                vars(module)[name] = value.clone()
