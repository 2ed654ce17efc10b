"""Attention of which each worker has some heads: nn.MultiheadAttention's forward on slices of its projections."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torrential.splits.group import SplitGroup


def attention(
    module: nn.MultiheadAttention,
    group: SplitGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention's forward; `module.num_heads` are this worker's. As there, `is_causal` only says what kind
    of mask is given."""
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal needs attn_mask, as torch's own attention does")
    alone = query.dim() == 2  # a sample without a batch
    entered = _entered(group, query, key, value)
    if alone:
        entered = [each.unsqueeze(0) for each in entered]
    elif not module.batch_first:
        entered = [each.transpose(0, 1) for each in entered]
    heads = [each.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for each in _projected(module, entered)]
    mask = _mask(module, group, heads[0], key_padding_mask, attn_mask)
    result, weights = _attend(module, group, heads, mask, need_weights)
    flat = result.permute(2, 0, 1, 3).flatten(2)  # the order in memory that torch's own has, and dropout draws by
    out = group.sum(F.linear(flat, module.out_proj.weight))
    if module.out_proj.bias is not None:
        out = out + module.out_proj.bias
    if weights is not None:
        weights = group.sum(weights.sum(1)) / (module.num_heads * group.ways) if average_attn_weights else weights
        weights = weights if average_attn_weights else group.gather(weights, 1)
    if alone:
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out.transpose(0, 1) if module.batch_first else out, weights


def _entered(group: SplitGroup, *given: Tensor) -> list[Tensor]:
    """What comes in, each tensor once: in self-attention the three are one, and their gradients are summed at once."""
    found: dict[int, Tensor] = {}
    for each in given:
        if id(each) not in found:
            found[id(each)] = group.enter(each)
    return [found[id(each)] for each in given]


def _projected(module: nn.MultiheadAttention, given: list[Tensor]) -> list[Tensor]:
    """Queries, keys and values of this worker's heads."""
    joined: Tensor | None = module.in_proj_weight  # unless keys or values have a size of their own
    apart = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    weights = apart if joined is None else list(joined.chunk(3))
    biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))
    return [F.linear(each, weight, bias) for each, weight, bias in zip(given, weights, biases, strict=True)]


def _mask(
    module: nn.MultiheadAttention, group: SplitGroup, query: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Both masks as one, to be added to scores of (samples, heads, queries, keys)."""
    found: Tensor | None = None
    if mask is not None:
        found = _added(mask, query)
        if mask.dim() == 3:  # one for each head, of all workers
            found = group.cut(found.unflatten(0, (query.size(0), module.num_heads * group.ways)), 1)
    if padding is not None:
        more = _added(padding, query)[..., None, None, :]
        found = more if found is None else found + more
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of True where nothing is to be seen, as something to add; one of numbers as it is."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill(mask, -math.inf)


def _attend(
    module: nn.MultiheadAttention, group: SplitGroup, heads: list[Tensor], mask: Tensor | None, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    query, key, value = heads
    drop = module.dropout if module.training else 0.0
    if not need_weights and drop == 0.0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask), None
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if drop > 0.0:  # drawn for all heads, as one process would
        samples, count, rows, columns = weights.shape
        kept = F.dropout(torch.ones(samples, count * group.ways, rows, columns, dtype=weights.dtype), drop)
        weights = weights * group.cut(kept, 1)
    return weights @ value, weights if need_weights else None
