"""Pushes on their way: gradients in half precision, and a few elements with their keys in one message.

    client   keys and values, or a vector ──► message ──► head   keys and values again, or a vector ──► as any push

Between servers they travel as they are there. What an optimizer does with an element whose gradient is zero decides
whether it may be left alone: SGD without momentum does nothing, SGD with momentum moves it, so that gets a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from torrential.compression.sparse import Selected, pack, places_of, unpack
from torrential.optim.corrected import CorrectedSGD
from torrential.optimizers import OptimizerSpec
from torrential.server.chain import Ask
from torrential.server.cutting import RangeRequest
from torrential.server.messages import Push
from torrential.server.optimizer import Store

_WIRES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def encoded(part: RangeRequest, wire: str) -> Sequence[Tensor]:
    """The tensors of a part of a push, in the precision of the wire."""
    if part.keys:
        values, keys = part.tensors
        return [pack(Selected(keys - part.start, values), None, _WIRES[wire])]
    return [tensor.to(_WIRES[wire]) for tensor in part.tensors]


def decoded(ask: Ask, store: Store, start: int) -> Ask | str:
    """A push as if it had not been encoded, or the reason to refuse it; `start`: the first key of the range."""
    worker, request, tensors = ask
    assert isinstance(request, Push)
    wire = _WIRES.get(request.packed)
    if wire is None:
        return f"pushed values of an unknown precision ({request.packed})"
    if not request.keys:
        if any(tensor.dtype != wire for tensor in tensors):
            return f"pushed values that are not of the precision it names ({request.packed})"
        plain = msgspec.structs.replace(request, packed="")
        return Ask(worker, plain, [tensor.to(store.dtype) for tensor in tensors])
    places = places_of(tensors[0], wire) if len(tensors) == 1 and len(request.spans) == 1 else None
    if places is None:
        return "pushed elements in a message that cannot be unpacked"
    found, (first, last) = unpack(tensors[0], places, wire), request.spans[0]
    keys, values = found.places + start, found.values.to(store.dtype)
    if idle_at_zero(store.spec):
        return Ask(worker, msgspec.structs.replace(request, packed=""), [values, keys])
    if keys.numel() and not first <= int(keys[-1]) < last:
        return f"sent keys outside of {first} to {last}"
    vector = torch.zeros(last - first, dtype=store.dtype).index_add_(0, keys - first, values)
    return Ask(worker, msgspec.structs.replace(request, packed="", keys=False), [vector])


def idle_at_zero(spec: OptimizerSpec) -> bool:
    """Whether a step leaves elements alone whose gradient is zero, and all that is kept about them."""
    sets = spec.option_sets()
    if any(options.get("weight_decay") or options.get("lr_decay") for options in sets):
        return False
    if spec.kind is torch.optim.SGD:
        return not any(options.get("momentum") for options in sets)
    return spec.kind in (torch.optim.Adagrad, CorrectedSGD)
