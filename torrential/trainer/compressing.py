"""Which compressor a run has, and what stays behind with a worker as its own state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Comm
from torrential.compression.dgc import DeepGradientCompression, share_sent, warmup_epochs
from torrential.compression.powersgd import LowRank
from torrential.compression.sparse import Selected, wanted
from torrential.compression.topk import TopK
from torrential.compression.wire import rounded, wire_dtype
from torrential.config import Compression
from torrential.params.compressed import CompressedSums, GradientExchange
from torrential.params.exchanges import Int8Exchange, LowRankExchange, SparseExchange
from torrential.params.layout import Layout, ParameterEntry
from torrential.params.sums import DenseSums, GradientSums
from torrential.trainer.state import NamedStates

STATE = "compression"  # the name of what stays behind


class Moment(NamedTuple):
    """How far the run has come."""

    step: Callable[[], int]
    epoch: Callable[[], float]
    epochs: float  # of the whole run

    def ratio(self, compression: Compression) -> Callable[[], float]:
        """The share of elements that is sent in the coming step."""
        if compression.compress != "dgc":
            return lambda: compression.ratio
        warmup = warmup_epochs(compression.sparsity_warmup, self.epochs)
        return lambda: share_sent(self.epoch(), warmup, compression.ratio)


def compressed_sums(
    compression: Compression,
    comm: Comm,
    layout: Layout,
    parameters: Sequence[nn.Parameter],
    state: NamedStates,
    *,
    device: torch.device,
    reduce_device: torch.device,
    momentum: Callable[[str], tuple[float, bool]],
    clip_norm: float | None,
    moment: Moment,
    seed: int,
) -> GradientSums:
    """The sums of gradients of all members. `momentum`: SGD's, of a parameter, and whether it is Nesterov's."""
    if compression.compress == "none":
        return DenseSums(comm, layout, parameters, device, reduce_device, compression.wire)
    dtype = reduce(torch.promote_types, layout.sizes, torch.float32)
    exchange: GradientExchange
    match compression.compress:
        case "int8":
            exchange = rounding = Int8Exchange(comm, layout, dtype, device)
            keep(state, layout.entries, lambda: {"residual": rounding.error})
        case "powersgd":
            exchange = _low_rank(compression, comm, layout, state, dtype, device, seed)
        case _:
            exchange = _sparse(compression, comm, layout, state, dtype, device, momentum, moment)
    clip = clip_norm if compression.clips_locally else None
    return CompressedSums(comm, layout, parameters, exchange, compression.wire, clip)


def _low_rank(
    compression: Compression,
    comm: Comm,
    layout: Layout,
    state: NamedStates,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> LowRankExchange:
    def compressor(entries: Sequence[ParameterEntry]) -> LowRank:
        return LowRank([entry.shape for entry in entries], compression.rank, dtype, device, seed)

    exchange = LowRankExchange(comm, layout, compressor, compression.rank, compression.wire)
    made = exchange.compressor
    keep(state, [entry for entry in layout.entries if exchange.takes(entry)], lambda: {"residual": made.error})
    state.everybody("factors", lambda: {"right": made.right}, lambda saved: made.begin_with(saved["right"]), undo=False)
    return exchange


def _sparse(
    compression: Compression,
    comm: Comm,
    layout: Layout,
    state: NamedStates,
    dtype: torch.dtype,
    device: torch.device,
    momentum: Callable[[str], tuple[float, bool]],
    moment: Moment,
) -> SparseExchange:
    exchange = SparseExchange(
        comm,
        layout,
        lambda entries: _compressor(compression, entries, dtype, device, momentum),
        compression.wire,
        moment.ratio(compression),
        moment.step,
    )
    keep(state, [entry for entry in layout.entries if exchange.takes(entry)], exchange.compressor.save)
    return exchange


def _compressor(
    compression: Compression,
    entries: Sequence[ParameterEntry],
    dtype: torch.dtype,
    device: torch.device,
    momentum: Callable[[str], tuple[float, bool]],
) -> TopK:
    sizes = [entry.shape.numel() for entry in entries]
    momenta = [momentum(entry.name) for entry in entries]
    if not (compression.corrects_momentum and any(m for m, _ in momenta)):
        return TopK(sizes, dtype, device)
    m, nesterov = zip(*momenta, strict=True)
    masking = compression.momentum_masking
    return DeepGradientCompression(sizes, dtype, device, momenta=m, nesterov=nesterov, masking=masking)


class CompressedPushes:
    """Implements server.client.PushCompressor: of matrices the largest elements are pushed, all else as it is."""

    def __init__(
        self,
        compression: Compression,
        layout: Layout,
        momentum: Callable[[str], tuple[float, bool]],
        moment: Moment,
        state: NamedStates,
    ) -> None:
        ((dtype, _),) = layout.sizes.items()
        self.wire, self._entries = wire_dtype(compression.wire, dtype), layout.entries
        self._ratio, self._pushes = moment.ratio(compression), torch.zeros((), dtype=torch.int64)
        self._sparse = compression.compress != "none"
        if self._sparse:
            kept = torch.promote_types(dtype, torch.float32)
            self._matrices = [entry for entry in layout.entries if len(entry.shape) > 1]
            self._compressor = _compressor(compression, self._matrices, kept, torch.device("cpu"), momentum)
            keep(state, self._matrices, self._compressor.save, {"pushes": self._pushes})

    def select(self, gradient: Tensor, used: Sequence[int] | None) -> Selected | None:
        if not self._sparse or gradient.is_meta:
            return None
        self._pushes += 1
        parts = [_part(gradient, entry, used) for entry in self._matrices]
        sizes, ratio = self._compressor.sizes, self._ratio()
        counts = [wanted(size, ratio) for size in sizes]
        chosen = self._compressor.select(parts, counts, 1.0, int(self._pushes))
        sent = Selected(chosen.places, rounded(chosen.values, self.wire))
        self._compressor.sent(sent)
        self._compressor.commit()
        return self._with_the_rest(gradient, used, Selected(sent.places, sent.values.to(gradient.dtype)))

    def _with_the_rest(self, gradient: Tensor, used: Sequence[int] | None, chosen: Selected) -> Selected:
        """What was chosen of matrices, and all of the other parameters, by their places in the whole gradient."""
        starts = torch.tensor([0, *self._compressor.sizes]).cumsum(0)
        edges = iter(itertools.pairwise(torch.searchsorted(chosen.places, starts).tolist()))
        before = iter(starts.tolist())
        places, values = list[Tensor](), list[Tensor]()
        for entry in self._entries:
            if len(entry.shape) > 1:
                low, high = next(edges)
                places.append(chosen.places[low:high] + (entry.start - next(before)))
                values.append(chosen.values[low:high])
            elif (part := _part(gradient, entry, used)) is not None:
                places.append(torch.arange(entry.start, entry.stop))
                values.append(part)
        return Selected(torch.cat(places), torch.cat(values))


def _part(gradient: Tensor, entry: ParameterEntry, used: Sequence[int] | None) -> Tensor | None:
    """The gradient of a parameter; None: backward has not reached it."""
    return gradient[entry.start : entry.stop] if used is None or entry.index in used else None


def keep(
    state: NamedStates,
    entries: Sequence[ParameterEntry],
    vectors: Callable[[], Mapping[str, Tensor]],
    beside: Mapping[str, Tensor] | None = None,
) -> None:
    """Have what stays behind saved for each worker, by "<vector>/<parameter>"; a vector has all entries, one after the
    other. `beside`: tensors that are saved with it. A worker that takes another's place begins with nothing: what that
    one had not sent is gone."""

    def save() -> dict[str, Tensor]:
        sizes = [entry.shape.numel() for entry in entries]
        return {
            f"{kind}/{entry.name}": part.view(entry.shape)
            for kind, vector in vectors().items()
            for entry, part in zip(entries, vector.split(sizes), strict=True)
        } | dict(beside or {})

    def load(saved: Mapping[str, Tensor]) -> None:
        for name, tensor in save().items():
            tensor.copy_(saved[name])

    state.own(STATE, save, load, undo=False, handed=False)
