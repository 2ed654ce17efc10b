"""Gradients of all members, summed from what a compressor sends of them: all at once, when backward is over.

    backward ──► matrices ──► compressor ──► messages to all members ──► decoded, added up in the order of ranks
            └──► biases, norms (one dimension and less) ──────────────► all-reduce, as they are

The residual, which is what compression leaves out, changes only when the step is taken (`commit`): a round that is
given up leaves no trace. A worker's residual dies with it; its successor begins with none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Comm, Handle
from torrential.compression.dgc import clipping
from torrential.compression.wire import wire_dtype
from torrential.params.base import Finished, flat_gradient
from torrential.params.layout import Bucket, Layout, ParameterEntry
from torrential.params.sums import square_norm


class GradientExchange(Protocol):
    """How a compressor's messages become sums."""

    def takes(self, entry: ParameterEntry) -> bool:
        """Whether a parameter's gradient is compressed; else it is summed as it is."""

    def run(self, gradients: Sequence[Tensor | None], sums: Sequence[Tensor], scale: float) -> None:
        """Leave in `sums` what all members have sent, given this member's flat gradients of the entries that it takes,
        and their factor."""

    def commit(self) -> None:
        """The step is taken."""


class CompressedSums:
    """Implements GradientSums with an exchange of compressed gradients."""

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        exchange: GradientExchange,
        wire: str,
        local_clip: float | None,
    ) -> None:
        """`wire`: the precision in which the rest is sent; `local_clip`: the threshold to which each member clips what
        it adds, where it does."""
        ((dtype, numel),) = layout.sizes.items()
        self._comm, self._parameters, self._exchange, self._local_clip = comm, parameters, exchange, local_clip
        self._last = layout.buckets[-1].index
        self._total = torch.zeros(numel, dtype=dtype, device=parameters[0].device)
        self._sums = [entry.view(self._total) for entry in layout.entries]
        self._taken = [entry.index for entry in layout.entries if exchange.takes(entry)]
        self._whole = [entry.index for entry in layout.entries if not exchange.takes(entry)]
        size = sum(parameters[index].numel() for index in self._whole)
        self._region = comm.buffer("gradients/whole", size, wire_dtype(wire, dtype))

    def reduce(self, bucket: Bucket) -> Handle:
        return _AllAtOnce(self._run) if bucket.index == self._last else Finished()

    def _run(self) -> None:
        gradients = [flat_gradient(parameter) for parameter in self._parameters]
        scale = 1.0
        if self._local_clip is not None:
            norm = square_norm(g for g in gradients if g is not None) ** 0.5
            scale = clipping(norm, self._local_clip, len(self._comm.members))
        whole = self._start_whole(gradients, scale)
        sums = [self._sums[index].view(-1) for index in self._taken]
        self._exchange.run([gradients[index] for index in self._taken], sums, scale)
        whole.wait()
        for index, part in zip(self._whole, self._parts(), strict=True):
            self._sums[index].view(-1).copy_(part)

    def _start_whole(self, gradients: Sequence[Tensor | None], scale: float) -> Handle:
        for index, part in zip(self._whole, self._parts(), strict=True):
            gradient = gradients[index]
            part.zero_() if gradient is None else part.copy_(gradient if scale == 1.0 else gradient * scale)
        alone = len(self._comm.members) == 1 or not self._whole
        return Finished() if alone else self._comm.all_reduce(self._region)

    def _parts(self) -> list[Tensor]:
        return list(self._region.split([self._parameters[index].numel() for index in self._whole]))

    def of(self, entry: ParameterEntry) -> Tensor | None:
        return self._sums[entry.index]

    def square_norm(self) -> float:
        return square_norm(self._sums)

    def commit(self) -> None:
        self._exchange.commit()


class _AllAtOnce:
    """The handle of an exchange, which begins when it is waited for: on every member after all of its backward."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def done(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> None:
        self._run()
