"""A snapshot: the parameters and everything else that a run needs to go on, as they were at one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import msgspec
import torch
from torch import Tensor, nn

from torrential.checkpoint import Checkpoint
from torrential.params.base import dtype_name
from torrential.params.layout import Layout
from torrential.records import Record
from torrential.server.dealer import Dealer


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    epoch: int
    cursor: int
    samples: int
    time: float
    members: list[int]
    counts: dict[str, int]  # by parameter: updates so far
    final: bool
    parts: bool = False  # whether members have states of their own that belong to it
    number: int | None = None  # what the parts are given under, where servers make the checkpoint; else the step
    givers: list[int] = []  # the workers that give a part, where it is not the members
    dealer: Dealer | None = None  # of samples, where servers deal them

    @property
    def parts_under(self) -> int:
        """The number that the parts have which belong to it; later snapshots have larger ones."""
        return self.step if self.number is None else self.number


class Outlet(Protocol):
    """The place where a role leaves records and snapshots; the world takes them from there."""

    def record(self, record: Record) -> None: ...

    def snapshot(self, snapshot: Snapshot, flat: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
        """Copy a snapshot out, to be evaluated and saved beside training."""

    def own_states(self, step: int, states: Mapping[str, Tensor]) -> None:
        """Give this worker's part of a snapshot: the states that are its own."""


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach() for name, b in model.named_buffers() if b is not None}


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the model's parameters and buffers of the same names."""
    mine = {name: p.detach() for name, p in model.named_parameters()} | buffers_of(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            mine[name].copy_(tensor)


def load_flat(model: nn.Module, layout: Layout, flat: Mapping[str, Tensor]) -> None:
    named = dict(model.named_parameters())
    with torch.no_grad():
        for entry in layout.entries:
            named[entry.name].copy_(entry.view(flat[dtype_name(entry.dtype)]))


def to_checkpoint(
    snapshot: Snapshot,
    seed: int,
    model: nn.Module,
    layout: Layout,
    flat: Mapping[str, Tensor],
    extras: Mapping[str, Tensor],
    owners: Mapping[str, Mapping[str, Tensor]],
    value: float | None = None,
) -> Checkpoint:
    """`model` already holds the snapshot's parameters; `owners`: named states by whose they are (trainer/state.py);
    `value`: the metric on validation data."""
    optimizer = dict(extras)
    for name, vector in flat.items():
        dtype, _, key = name.partition("/")
        if key:
            ours = (e for e in layout.entries if dtype_name(e.dtype) == dtype)
            optimizer |= {f"{e.name}/{key}": e.view(vector) for e in ours}
    return Checkpoint(
        step=snapshot.step,
        epoch=snapshot.epoch,
        cursor=snapshot.cursor,
        samples=snapshot.samples,
        seed=seed,
        members=snapshot.members,
        applied=snapshot.counts,
        model=dict(model.state_dict()),
        optimizer=optimizer,
        workers={f"{owner}/{name}": t for owner, named in owners.items() for name, t in named.items()},
        dealer=snapshot.dealer,
        value=value if value is not None and math.isfinite(value) else None,
    )


def from_checkpoint(checkpoint: Checkpoint, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The flat vectors and extras of a checkpoint."""
    flat: dict[str, Tensor] = {}
    extras: dict[str, Tensor] = {}

    def place(name: str, index: int, tensor: Tensor) -> None:
        entry = layout.entries[index]
        vector = flat.setdefault(name, torch.zeros(layout.sizes[entry.dtype], dtype=tensor.dtype))
        entry.view(vector).copy_(tensor)

    by_name = {e.name: e for e in layout.entries}
    for entry in layout.entries:
        place(dtype_name(entry.dtype), entry.index, checkpoint.model[entry.name])
    for name, tensor in checkpoint.optimizer.items():
        parameter, _, key = name.rpartition("/")
        if parameter not in by_name:
            continue  # another worker's part of the model has it
        entry = by_name[parameter]
        if tensor.shape == entry.shape and key != "step":
            place(f"{dtype_name(entry.dtype)}/{key}", entry.index, tensor)
        else:
            extras[name] = tensor
    return flat, extras
