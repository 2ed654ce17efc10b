"""A slice of a tensor that several workers have in equal parts, its name, and the whole put together again.

The name of a slice says all that is needed to put the whole together: "0.weight[dim 0, slice 1 of 2]". Queries, keys
and values lie in one tensor, and each worker has some heads of all three: "[dim 0 in 3 blocks, slice 1 of 2]".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_NAME = re.compile(r"(.+)\[dim (\d+)(?: in (\d+) blocks)?, slice (\d+) of (\d+)\]")
_MARK = "torrential_slice"  # the attribute of a tensor that is a slice


@dataclass(frozen=True)
class Slice:
    """One of several equal parts of a tensor along a dimension."""

    dim: int
    place: int  # 0 to ways - 1
    ways: int
    blocks: int = 1  # the dimension consists of so many blocks, of each of which the slice has its part

    def of(self, whole: Tensor) -> Tensor:
        """A copy of this slice of a tensor."""
        blocks = [block.chunk(self.ways, self.dim)[self.place] for block in whole.chunk(self.blocks, self.dim)]
        return torch.cat([block.detach() for block in blocks], self.dim)

    def name(self, whole: str) -> str:
        """The name of this slice of the tensor that is called `whole`."""
        blocks = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        return f"{whole}[dim {self.dim}{blocks}, slice {self.place} of {self.ways}]"


def marked(tensor: Tensor, cut: Slice) -> Tensor:
    """The tensor, from now on known to be a slice."""
    setattr(tensor, _MARK, cut)
    return tensor


def slice_of(tensor: Tensor) -> Slice | None:
    """The slice of a larger tensor that this one is; None: it is whole."""
    return getattr(tensor, _MARK, None)


def name_of(tensor: Tensor, name: str) -> str:
    """The name of a model's parameter or buffer; of a slice, one that says so."""
    cut = slice_of(tensor)
    return name if cut is None else cut.name(name)


def read_name(name: str) -> tuple[str, Slice | None]:
    """The name of the whole tensor, and the slice of it that a name is of."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name, None
    whole, dim, blocks, place, ways = found.groups()
    return whole, Slice(int(dim), int(place), int(ways), int(blocks or 1))


def put_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by name, of slices and whole ones; those of which a slice is missing are left out."""
    found: dict[str, Tensor] = {}
    slices: dict[tuple[str, Slice], dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        whole, cut = read_name(name)
        if cut is None:
            found[name] = tensor
        else:
            slices.setdefault((whole, replace(cut, place=0)), {})[cut.place] = tensor
    for (whole, cut), parts in slices.items():
        if len(parts) == cut.ways:
            blocks = [parts[place].chunk(cut.blocks, cut.dim) for place in range(cut.ways)]
            found[whole] = torch.cat([each[block] for block in range(cut.blocks) for each in blocks], cut.dim)
    return found
