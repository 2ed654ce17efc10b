"""A model's trainable parameters as a few flat vectors, one per dtype, cut into buckets.

Entries stand in reverse order of definition, which is the order in which backward completes their gradients, so a
bucket is one contiguous region and the first buckets are ready first. Tied weights appear once; frozen ones never.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torrential.comm.protocol import ALIGNMENT, slices


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter of the model, and its place in the flat vector."""

    index: int
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int  # in the flat vector of its dtype
    marks: Mapping[str, Any] = field(default_factory=dict, compare=False)  # attributes that the model has given it
    kind: type[nn.Parameter] = nn.Parameter

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Entries whose gradients are reduced together."""

    index: int
    dtype: torch.dtype
    entries: tuple[ParameterEntry, ...]

    @property
    def start(self) -> int:
        return self.entries[0].start

    @property
    def stop(self) -> int:
        return self.entries[-1].stop


@dataclass(frozen=True)
class Piece:
    """The part of one entry that one member owns; bounds in the flat vector."""

    entry: ParameterEntry
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    entries: tuple[ParameterEntry, ...]
    buckets: tuple[Bucket, ...]
    sizes: dict[torch.dtype, int]  # length of each flat vector

    def pieces(self, member: int, members: int) -> Iterator[Piece]:
        """The pieces that a member owns: its slice of every bucket, cut at the entries' bounds."""
        for bucket in self.buckets:
            low, high = slices(bucket.stop - bucket.start, members)[member]
            for entry in bucket.entries:
                start, stop = max(entry.start, bucket.start + low), min(entry.stop, bucket.start + high)
                if start < stop:
                    yield Piece(entry, start, stop)


def plan(model: nn.Module, bucket_bytes: int, names: Mapping[str, str] | None = None) -> Layout:
    """The layout of a model's trained parameters. `names`: what to call them, by the model's own names."""
    named = [(n if names is None else names[n], p) for n, p in model.named_parameters() if p.requires_grad]
    sizes: dict[torch.dtype, int] = {}
    entries: list[ParameterEntry] = []
    groups: list[list[ParameterEntry]] = []
    filled = 0
    for name, parameter in reversed(named):
        dtype = parameter.dtype
        start = sizes.get(dtype, 0)
        entry = ParameterEntry(
            len(entries), name, parameter.shape, dtype, start, dict(vars(parameter)), type(parameter)
        )
        sizes[dtype] = -(-entry.stop // ALIGNMENT) * ALIGNMENT
        entries.append(entry)
        if not groups or filled >= bucket_bytes or groups[-1][0].dtype != dtype:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += parameter.nbytes
    buckets = tuple(Bucket(i, g[0].dtype, tuple(g)) for i, g in enumerate(groups))
    return Layout(tuple(entries), buckets, sizes)
