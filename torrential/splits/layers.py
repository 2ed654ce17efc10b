"""Layers of torch's that can be split, and how: a worker's layer keeps its slices, and gets a forward that knows it.

colwise          some outputs of a Linear, a convolution or an Embedding; the next layer takes them in slices
colwise-gather   the same, and the outputs are put together again
rowwise          some inputs of a Linear or a convolution, some words of an Embedding; the outputs are summed
qkv              a Linear whose outputs are queries, keys and values: some heads of each
heads            some heads of nn.MultiheadAttention; in a module of your own, its number of heads
sliced           a layer that treats channels apart: batch norm, group norm, dropout, grouped convolutions
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from torrential.errors import BadInput
from torrential.splits.attention import attention
from torrential.splits.group import SplitGroup
from torrential.splits.slices import Slice, marked

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads")  # how modules call their number of heads

Forward = Callable[..., Any]


class LayerSplitter:
    """Cuts the layers of one worker's model; a tensor that several layers share stays shared."""

    def __init__(self, group: SplitGroup) -> None:
        self.group = group
        self._made: dict[int, tuple[Tensor, Slice, Tensor]] = {}  # by the whole tensor's id, which stays alive

    def split(self, name: str, module: nn.Module, way: str) -> None:
        """Make a layer this worker's part of it."""
        self._name, self._way = name, way
        frozen = [n for n, p in module.named_parameters() if not p.requires_grad]
        if frozen:
            raise BadInput(f"{name} cannot be split: its {frozen[0]} is not trained; leave {name} out of split")
        make = WAYS[way].get(type(module))
        if make is None and way == "heads":
            make = _own_heads
        if make is None:
            known = ", ".join(kind.__name__ for kind in WAYS[way])
            raise BadInput(
                f"{name} is a {type(module).__name__}, which cannot be split {way} (that is for: {known}); leave it "
                "out of split, or name the layers inside it"
            )
        forward = make(self, module)
        if forward is not None:
            module.forward = forward

    def take(self, module: nn.Module, name: str, dim: int, blocks: int = 1) -> None:
        """Keep this worker's slice of a parameter or buffer, if the layer has one of that name."""
        whole = getattr(module, name)
        if whole is None:
            return
        cut = Slice(dim, self.group.place, self.group.ways, blocks)
        _, before, part = self._made.get(id(whole), (whole, cut, None))
        if before != cut:
            raise BadInput(
                f"{self._name} shares its {name} with a layer that is split along another dimension; split them alike "
                "(an Embedding rowwise, the Linear after the last block colwise), or neither"
            )
        if part is None:
            part = cut.of(whole)
            if isinstance(whole, nn.Parameter):
                part = nn.Parameter(part)
            part.__dict__.update(whole.__dict__)
            self._made[id(whole)] = (whole, cut, marked(part, cut))
        setattr(module, name, part)

    def replaced(self) -> set[int]:
        """The ids of the whole tensors of which slices were taken."""
        return set(self._made)

    def divided(self, module: nn.Module, name: str) -> int:
        """Make a size of the layer this worker's part of it; returns the whole."""
        whole = int(getattr(module, name))
        if whole % self.group.ways:
            raise BadInput(
                f"{self._name} has {name}={whole}, which {self.group.ways} workers cannot have in equal parts; use a "
                f"multiple of {self.group.ways}, another number of ways, or leave {self._name} out of split"
            )
        setattr(module, name, whole // self.group.ways)
        return whole

    def refuse(self, module: nn.Module, why: str, remedy: str) -> BadInput:
        return BadInput(f"{self._name} ({type(module).__name__}) cannot be split {self._way}: {why}; {remedy}")


# -- Linear ---------------------------------------------------------------------------------------------------------
def _colwise_linear(splitter: LayerSplitter, module: nn.Linear, blocks: int = 1) -> Forward:
    group, size = splitter.group, module.in_features
    if blocks > 1 and module.out_features % (blocks * group.ways):
        raise splitter.refuse(
            module,
            f"its {module.out_features} outputs are not queries, keys and values in {group.ways} equal parts",
            f"use a multiple of {blocks * group.ways}",
        )
    splitter.divided(module, "out_features")
    splitter.take(module, "weight", 0, blocks)
    splitter.take(module, "bias", 0, blocks)
    return lambda given: F.linear(group.whole(given, -1, size), module.weight, module.bias)


def _rowwise_linear(splitter: LayerSplitter, module: nn.Linear) -> Forward:
    group, size = splitter.group, splitter.divided(module, "in_features")
    splitter.take(module, "weight", 1)

    def forward(given: Tensor) -> Tensor:
        total = group.sum(F.linear(group.own(given, -1, size), module.weight))
        return total if module.bias is None else total + module.bias

    return forward


# -- convolutions ---------------------------------------------------------------------------------------------------
def _channels(given: Tensor, module: _ConvNd) -> int:
    """The dimension of the channels: a sample may come alone."""
    return given.dim() - len(module.kernel_size) - 1


def _colwise_conv(splitter: LayerSplitter, module: Any) -> Forward:
    if module.groups > 1:
        raise splitter.refuse(module, f"it has groups={module.groups}", "split it sliced")
    group, size = splitter.group, module.in_channels
    splitter.divided(module, "out_channels")
    splitter.take(module, "weight", 0)
    splitter.take(module, "bias", 0)
    return lambda given: module._conv_forward(
        group.whole(given, _channels(given, module), size), module.weight, module.bias
    )


def _rowwise_conv(splitter: LayerSplitter, module: Any) -> Forward:
    if module.groups > 1:
        raise splitter.refuse(module, f"it has groups={module.groups}", "split it sliced")
    group, size = splitter.group, splitter.divided(module, "in_channels")
    splitter.take(module, "weight", 1)

    def forward(given: Tensor) -> Tensor:
        part = group.own(given, _channels(given, module), size)
        total = group.sum(module._conv_forward(part, module.weight, None))
        bias: Tensor | None = module.bias
        return total if bias is None else total + bias.view(-1, *[1] * len(module.kernel_size))

    return forward


def _sliced_conv(splitter: LayerSplitter, module: Any) -> Forward:
    """A grouped convolution: each worker has some of the groups."""
    if module.groups == 1:
        raise splitter.refuse(module, "each output depends on all channels (groups=1)", "split it colwise or rowwise")
    group, size = splitter.group, module.in_channels
    for each in ("groups", "in_channels", "out_channels"):
        splitter.divided(module, each)
    splitter.take(module, "weight", 0)
    splitter.take(module, "bias", 0)
    return lambda given: module._conv_forward(
        group.own(given, _channels(given, module), size), module.weight, module.bias
    )


# -- Embedding ------------------------------------------------------------------------------------------------------
def _check_embedding(splitter: LayerSplitter, module: nn.Embedding) -> None:
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        if getattr(module, option):
            raise splitter.refuse(module, f"it has {option}={getattr(module, option)}", f"leave out {option}")


def _colwise_embedding(splitter: LayerSplitter, module: nn.Embedding) -> None:
    _check_embedding(splitter, module)
    splitter.divided(module, "embedding_dim")
    splitter.take(module, "weight", 1)


def _rowwise_embedding(splitter: LayerSplitter, module: nn.Embedding) -> Forward:
    _check_embedding(splitter, module)
    group, whole = splitter.group, module.num_embeddings
    splitter.divided(module, "num_embeddings")
    splitter.take(module, "weight", 0)
    count = module.num_embeddings
    first = group.place * count
    padding = module.padding_idx
    padding = None if padding is None or not first <= padding < first + count else padding - first

    def forward(words: Tensor) -> Tensor:
        if words.numel() and not 0 <= int(words.min()) <= int(words.max()) < whole:
            raise IndexError(f"index out of range: {int(words.min())} to {int(words.max())} of {whole} words")
        others = (words < first) | (words >= first + count)
        found = F.embedding((words - first).masked_fill(others, 0), module.weight, padding)
        return group.sum(found.masked_fill(others.unsqueeze(-1), 0.0))

    return forward


# -- layers that treat channels apart -------------------------------------------------------------------------------
def _sliced_norm(splitter: LayerSplitter, module: _BatchNorm) -> None:
    splitter.divided(module, "num_features")
    for name in ("weight", "bias", "running_mean", "running_var"):
        splitter.take(module, name, 0)


def _sliced_group_norm(splitter: LayerSplitter, module: nn.GroupNorm) -> None:
    splitter.divided(module, "num_groups")
    splitter.divided(module, "num_channels")
    splitter.take(module, "weight", 0)
    splitter.take(module, "bias", 0)


def _sliced_prelu(splitter: LayerSplitter, module: nn.PReLU) -> None:
    splitter.divided(module, "num_parameters")
    splitter.take(module, "weight", 0)


def _sliced_dropout(splitter: LayerSplitter, module: _DropoutNd) -> Forward:
    """Every worker draws for the whole activation, as one process would, and uses its slice."""
    group, drop = splitter.group, type(module).forward

    def forward(given: Tensor) -> Tensor:
        if not module.training or module.p == 0.0:
            return given
        dim = given.dim() - 1 if given.dim() == 3 and isinstance(module, nn.Dropout) else 1
        return given * group.cut(drop(module, _whole_ones(given, dim, group.ways)), dim)

    return forward


def _whole_ones(part: Tensor, dim: int, ways: int) -> Tensor:
    """Ones in the shape of the whole, in the order in memory that it would have: so are random numbers drawn."""
    strides = part.stride()
    order = sorted(range(part.dim()), key=lambda each: -strides[each])
    shape = [part.size(each) * (ways if each == dim else 1) for each in order]
    return torch.ones(shape, dtype=part.dtype).permute([order.index(each) for each in range(part.dim())])


# -- attention ------------------------------------------------------------------------------------------------------
def _heads(splitter: LayerSplitter, module: nn.MultiheadAttention) -> Forward:
    if module.bias_k is not None or module.add_zero_attn:
        raise splitter.refuse(module, "it has add_bias_kv or add_zero_attn", "leave these out")
    splitter.divided(module, "num_heads")
    splitter.take(module, "in_proj_weight", 0, 3)
    splitter.take(module, "in_proj_bias", 0, 3)
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        splitter.take(module, name, 0)
    splitter.take(module.out_proj, "weight", 1)
    return partial(attention, module, splitter.group)


def _own_heads(splitter: LayerSplitter, module: nn.Module) -> None:
    found = [name for name in HEADS if isinstance(getattr(module, name, None), int)]
    if not found:
        raise splitter.refuse(module, f"it has no number of heads ({', '.join(HEADS)})", "name the layers inside it")
    splitter.divided(module, found[0])


def _gathered(
    splitter: LayerSplitter, module: nn.Module, make: Callable[[LayerSplitter, Any], Forward | None]
) -> Forward:
    """The layer split by `make`, with outputs put together again."""
    inner = make(splitter, module) or module.forward
    group = splitter.group

    def forward(given: Tensor) -> Tensor:
        part = inner(given)
        return group.gather(part, _channels(part, module) if isinstance(module, _ConvNd) else -1)

    return forward


_COLWISE: dict[type[nn.Module], Callable[[LayerSplitter, Any], Forward | None]] = {
    nn.Linear: _colwise_linear,
    nn.Embedding: _colwise_embedding,
    **dict.fromkeys(CONVOLUTIONS, _colwise_conv),
}
WAYS: dict[str, dict[type[nn.Module], Callable[[LayerSplitter, Any], Forward | None]]] = {
    "colwise": _COLWISE,
    "colwise-gather": {kind: partial(_gathered, make=make) for kind, make in _COLWISE.items()},
    "rowwise": {
        nn.Linear: _rowwise_linear,
        nn.Embedding: _rowwise_embedding,
        **dict.fromkeys(CONVOLUTIONS, _rowwise_conv),
    },
    "qkv": {nn.Linear: partial(_colwise_linear, blocks=3)},
    "heads": {nn.MultiheadAttention: _heads},
    "sliced": {
        **dict.fromkeys(NORMS, _sliced_norm),
        nn.GroupNorm: _sliced_group_norm,
        nn.PReLU: _sliced_prelu,
        **dict.fromkeys(DROPOUTS, _sliced_dropout),
        **dict.fromkeys(CONVOLUTIONS, _sliced_conv),
    },
}
"""The ways to split a layer, and for each the layers that can be split so."""
