"""How messages of compressed gradients become sums, for each kind of compressor.

sparse     what each has chosen is gathered by all, who add it up
low rank   two all-reduces, of the left factors and of the right ones
int8       each member adds up its slice of what all send it, and sends the sum to all: both times in bytes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from torrential.comm.protocol import Comm, slices
from torrential.compression import int8
from torrential.compression.powersgd import LowRank, saves
from torrential.compression.sparse import Selected, message_bytes, pack, room, unpack, wanted
from torrential.compression.topk import TopK
from torrential.compression.wire import rounded, wire_dtype
from torrential.params.layout import Layout, ParameterEntry


def gathered(comm: Comm, message: Tensor, size: int) -> list[Tensor]:
    """The messages of all members, which are of one size at the most, in the order of ranks."""
    if len(comm.members) == 1:
        return [message]
    mine = comm.buffer(f"compressed/{size}", size, torch.uint8)
    if mine.is_meta:
        mine = torch.zeros(size, dtype=torch.uint8)
    mine[: message.numel()] = message
    return list(comm.all_gather(mine).wait())


class SparseExchange:
    """Implements GradientExchange for top-k and what is built on it: every member gathers what all have chosen. Where
    that would be more than the vectors themselves, as when warm-up begins with many members, these are summed."""

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        compressor: Callable[[Sequence[ParameterEntry]], TopK],
        wire: str,
        ratio: Callable[[], float],
        step: Callable[[], int],
    ) -> None:
        """`compressor` makes one of matrices; `ratio`: the share of elements that is sent in the coming step; `step`:
        the number of steps taken."""
        self._comm, self._ratio, self._step = comm, ratio, step
        entries = [entry for entry in layout.entries if self.takes(entry)]
        self.compressor = compressor(entries)
        (dtype,) = layout.sizes
        self._wire = wire_dtype(wire, dtype)
        self._starts = [0, *accumulate(self.compressor.sizes)]

    def takes(self, entry: ParameterEntry) -> bool:
        return len(entry.shape) > 1

    def run(self, gradients: Sequence[Tensor | None], sums: Sequence[Tensor], scale: float) -> None:
        sizes, members = self.compressor.sizes, len(self._comm.members)
        if not sizes:
            return
        counts = [wanted(size, self._ratio()) for size in sizes]
        places = room(sum(counts), self._starts[-1])
        summed = 2 * self._starts[-1] * self._wire.itemsize / members
        for total in sums:
            total.zero_()
        if message_bytes(places, self._wire) < summed or members == 1:
            self._gather(gradients, sums, counts, scale, places)
        else:
            self._sum(gradients, sums, counts, scale)

    def _select(self, gradients: Sequence[Tensor | None], counts: Sequence[int], scale: float) -> Selected:
        chosen = self.compressor.select(gradients, counts, scale, self._step())
        sent = Selected(chosen.places, rounded(chosen.values, self._wire))
        self.compressor.sent(sent)
        return sent

    def _gather(
        self,
        gradients: Sequence[Tensor | None],
        sums: Sequence[Tensor],
        counts: Sequence[int],
        scale: float,
        places: int,
    ) -> None:
        size = message_bytes(places, self._wire)
        if sums[0].is_meta:
            message = torch.zeros(size, dtype=torch.uint8)
        else:
            message = pack(self._select(gradients, counts, scale), places, self._wire)
        messages = gathered(self._comm, message, size)
        for message in messages if not sums[0].is_meta else ():
            self._add(unpack(message, places, self._wire), sums)

    def _sum(
        self, gradients: Sequence[Tensor | None], sums: Sequence[Tensor], counts: Sequence[int], scale: float
    ) -> None:
        region = self._comm.buffer("compressed/whole", self._starts[-1], self._wire)
        if not region.is_meta:
            chosen = self._select(gradients, counts, scale)
            region.zero_()
            region[chosen.places.cpu()] = chosen.values.to("cpu", self._wire)
        self._comm.all_reduce(region).wait()
        for total, part in zip(sums, region.split(list(self.compressor.sizes)), strict=True):
            total.copy_(part)

    def _add(self, selected: Selected, sums: Sequence[Tensor]) -> None:
        """Add what a member has sent to the sums of the tensors that it is of."""
        edges = torch.searchsorted(selected.places, torch.tensor(self._starts)).tolist()
        for total, start, low, high in zip(sums, self._starts, edges, edges[1:], strict=False):
            if low < high:
                places, values = selected.places[low:high] - start, selected.values[low:high]
                total.index_add_(0, places.to(total.device), values.to(total.device, total.dtype))

    def commit(self) -> None:
        self.compressor.commit()


class LowRankExchange:
    """Implements GradientExchange for PowerSGD."""

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        compressor: Callable[[Sequence[ParameterEntry]], LowRank],
        rank: int,
        wire: str,
    ) -> None:
        self._comm, self._rank = comm, rank
        self.compressor = compressor([entry for entry in layout.entries if self.takes(entry)])
        (dtype,) = layout.sizes
        self._wire = wire_dtype(wire, dtype)

    def takes(self, entry: ParameterEntry) -> bool:
        return saves(entry.shape, self._rank)

    def run(self, gradients: Sequence[Tensor | None], sums: Sequence[Tensor], scale: float) -> None:
        compressor, members = self.compressor, len(self._comm.members)
        if not sums:
            return
        if sums[0].is_meta:
            self._summed("left", torch.empty(sum(compressor.left_sizes), device="meta"))
            self._summed("right", torch.empty(sum(compressor.right_sizes), device="meta"))
            return
        left = self._summed("left", compressor.project(gradients, scale))
        right = self._summed("right", compressor.fit(left))
        compressor.approximate(right, sums, members)

    def _summed(self, name: str, vector: Tensor) -> Tensor:
        """A vector, added up over all members."""
        if len(self._comm.members) == 1:
            return vector
        region = self._comm.buffer(f"compressed/{name}", vector.numel(), self._wire)
        region.copy_(vector)
        self._comm.all_reduce(region).wait()
        return region.to(vector.device, vector.dtype)

    def commit(self) -> None:
        self.compressor.commit()


class Int8Exchange:
    """Implements GradientExchange for bytes. What rounding the sum of a slice takes off stays behind with its owner."""

    def __init__(self, comm: Comm, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._comm = comm
        self._sizes = [entry.shape.numel() for entry in layout.entries]
        self.error = torch.zeros(sum(self._sizes), dtype=dtype, device=device)
        self._next = torch.zeros_like(self.error)

    def takes(self, entry: ParameterEntry) -> bool:
        return True

    def run(self, gradients: Sequence[Tensor | None], sums: Sequence[Tensor], scale: float) -> None:
        members = self._comm.members
        cuts, mine = slices(self.error.numel(), len(members)), members.index(self._comm.rank)
        parts, kept = self._next.split(self._sizes), self.error.split(self._sizes)
        for part, error, gradient in zip(parts, kept, gradients, strict=True):
            part.zero_() if gradient is None else torch.add(error, gradient, alpha=scale, out=part)
        total = self._summed_slice(cuts, mine)
        messages = gathered(
            self._comm, self._rounded(total, *cuts[mine]), int8.message_bytes(max(high - low for low, high in cuts))
        )
        if total.is_meta:
            return
        for part, error, gradient in zip(parts, kept, gradients, strict=True):
            if gradient is None:  # backward has not reached it: what stayed behind stays there
                part += error
        total = torch.cat([int8.decode(m, high - low) for m, (low, high) in zip(messages, cuts, strict=True)])
        for result, part in zip(sums, total.split(self._sizes), strict=True):
            result.copy_(part)

    def _summed_slice(self, cuts: Sequence[tuple[int, int]], mine: int) -> Tensor:
        """This member's slice of the sum, from what the others send; of its own it has what they need not round."""
        comm, (low, high) = self._comm, cuts[mine]
        others = [place for place in range(len(cuts)) if place != mine and high > low]
        coming = {
            place: comm.recv(
                torch.empty(int8.message_bytes(high - low), dtype=torch.uint8), comm.members[place], "int8"
            )
            for place in others
        }
        leaving = [
            comm.send(self._rounded(self._next[start:stop], start, stop), comm.members[place], "int8")
            for place, (start, stop) in enumerate(cuts)
            if place != mine and stop > start
        ]
        total = torch.zeros_like(self._next[low:high])
        for place in range(len(cuts)):
            if place == mine:
                total += self._next[low:high]
            elif place in coming:
                message = coming[place].wait()
                if not total.is_meta:
                    total += int8.decode(message, high - low).to(total.device)
        for sent in leaving:
            sent.wait()
        return total

    def _rounded(self, values: Tensor, start: int, stop: int) -> Tensor:
        """A message about values; what it takes off stays behind at these places."""
        if values.is_meta:
            return torch.zeros(int8.message_bytes(stop - start), dtype=torch.uint8)
        message = int8.encode(values)
        torch.sub(values, int8.decode(message, stop - start).to(values.device), out=self._next[start:stop])
        return message

    def commit(self) -> None:
        self.error, self._next = self._next, self.error
