"""What a server refuses: requests that do not fit what it holds, and values that are no numbers.

A request is checked as a whole before anything is changed, so a refused request leaves no trace.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from torrential.server.chain import Ask
from torrential.server.messages import Add, Call, GiveBack, Push, Put, Save, Take
from torrential.server.shard import Shard

STREAMS = 32  # places of a large tensor that are read side by side: a core that reads in one waits for memory
COLUMNS = 1 << 16  # elements of each at a time


def objection(shard: Shard, ask: Ask) -> str | None:
    """The reason to refuse a request, in words that go on from "worker 3"; None: there is none."""
    request = ask.request
    kind = type(request)
    for first, last in request.spans:
        if not shard.start <= first <= last <= shard.stop:
            return f"asked to {_verb(kind)} parameters {first} to {last}, outside of {shard.start} to {shard.stop}"
    if kind in (Push, Add, Put):
        return _wrong_values(shard, ask)
    if kind is Save and len(request.spans) != 1 + len(shard.states):
        return f"asked for {len(request.spans)} vectors, where there are {1 + len(shard.states)}"
    if isinstance(request, GiveBack) and shard.dealer is None:
        return "gave samples back where there are none"
    if kind is Take and (shard.dealer is None or request.count < 1):  # type: ignore[attr-defined]
        return "asked for samples where there are none"
    if isinstance(request, Call) and request.name not in shard.handlers:
        return f"called {request.name!r}, which no handler is registered for"
    return None


def _wrong_values(shard: Shard, ask: Ask) -> str | None:
    _, request, tensors = ask
    kind = type(request)
    if isinstance(request, Push) and (wrong := _wrong_rates(shard, request)) is not None:
        return wrong
    if isinstance(request, Push) and tensors:
        wrong = shard.optimizer.objection(request.spans, request.keys)
        if wrong is not None:
            return wrong
    if kind is not Put and request.keys:  # type: ignore[attr-defined]
        wrong = _wrong_keys(shard, tensors)
        if wrong is not None:
            return wrong
        tensors = tensors[:1]
    elif tensors or kind is not Push:  # a push of nothing completes its clock
        sizes = [last - first for first, last in request.spans]
        if [tensor.shape for tensor in tensors] != [(size,) for size in sizes]:
            found = [tuple(tensor.shape) for tensor in tensors]
            return f"sent shapes {found} to {_verb(kind)}, where {sizes} elements belong"
    for tensor in tensors:
        if tensor.dtype != shard.store.dtype:
            return f"sent {tensor.dtype} to {_verb(kind)}, where {shard.store.dtype} belongs"
        if not finite(tensor):
            return f"sent NaN or infinite values to {_verb(kind)} at clock {request.clock}; nothing was changed"
    return None


def _wrong_rates(shard: Shard, push: Push) -> str | None:
    if not math.isfinite(push.lr * push.scale):
        return "pushed with a learning rate or scale that is not finite"
    if not push.rates:
        return None
    groups = 1 + max((group.number for group in shard.store.spec.groups), default=0)
    if len(push.rates) != groups:
        return f"pushed rates of {len(push.rates)} parameter groups, where there are {groups}"
    values = [value for options in push.rates for value in options.values()]
    numbers = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
    if not all(math.isfinite(number) for number in numbers) or any("lr" not in options for options in push.rates):
        return "pushed options of a parameter group that are not finite, or have no lr"
    return None


def _wrong_keys(shard: Shard, tensors: Sequence[Tensor]) -> str | None:
    if len(tensors) != 2 or tensors[1].dtype != torch.int64 or tensors[0].shape != tensors[1].shape:
        return "sent values and keys that do not fit one another"
    keys = tensors[1]
    if keys.dim() == 1 and not keys.numel():
        return None
    least, most = torch.aminmax(keys)
    if keys.dim() != 1 or not shard.start <= int(least) <= int(most) < shard.stop:
        return f"sent keys outside of {shard.start} to {shard.stop}"
    return None


def _verb(kind: type) -> str:
    return kind.__name__.lower()


def finite(tensor: Tensor) -> bool:
    """Whether all elements are; only where a sum over them is not are they looked at one by one."""
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    if tensor.element_size() < 4:
        total = float(tensor.sum(dtype=torch.float32))
    elif tensor.numel() < STREAMS * COLUMNS:
        total = tensor.dot(tensor).item()
    else:
        half = tensor.numel() // 2
        other = _helper().submit(_sum, tensor[half:])  # on another core, if one has nothing to do
        total = _sum(tensor[:half]) + other.result()
    return math.isfinite(total) or bool(torch.isfinite(tensor).all())


@functools.cache
def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def _sum(tensor: Tensor) -> float:
    tail = tensor.numel() % STREAMS
    rows = tensor[: tensor.numel() - tail].view(STREAMS, -1)
    sums, ones = tensor.new_zeros(STREAMS), tensor.new_ones(COLUMNS)
    for part in rows.split(COLUMNS, dim=1):
        sums.addmv_(part, ones[: part.size(1)])
    return float(sums.sum()) + float(tensor[tensor.numel() - tail :].sum())
