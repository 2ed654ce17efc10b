"""The elements of largest magnitude: how they are found, and how they travel.

    values, n of them ──► a sample says what threshold about k exceed ──► those above it ──► the k largest of them

A message has a fixed number of places, a function of the sizes alone, so that nobody has to say how long it is: a count
(4 bytes), then for each place 16 bits with the number of elements left out since the place before, and the value. A gap
of 65,536 and more takes a place of its own, with the value zero (Lin et al. 2018: values and 16-bit run lengths).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SAMPLED = 200  # elements of a sample that are to exceed the threshold: their number is then known to 7 %
SHARE = 0.01  # of the elements are sampled at the least
EXACT = 1 << 15  # elements of a tensor, up to which no sample is needed
AIM = 1.2  # times as many as are wanted are to exceed the threshold: too many are soon sorted out
ADJUSTMENTS = 10  # of a threshold that too few exceed, before all that is not zero is taken
CHUNK = 1 << 16  # elements compared at a time: what is between stays in the cache
LONGEST = 1 << 16  # elements that one place can pass over, the one that it is of included
STEP = 0x9E3779B1  # samples of different steps begin in different places


Values = Callable[[Any], Tensor]
"""Gives some elements of a vector, by a slice or by places: a vector that need not be there as a whole."""


class Selected(NamedTuple):
    """Elements that are sent: ascending places, each once, and their values."""

    places: Tensor  # (k,) int64
    values: Tensor  # (k,)


def wanted(numel: int, ratio: float) -> int:
    """The number of elements that are sent of a tensor."""
    return min(numel, math.ceil(numel * ratio))


def sampled_threshold(values: Values, numel: int, count: float, step: int = 0) -> float:
    """A magnitude that about `count` of the values exceed, from a sample of them, every so-maniest; `step` says where
    that begins, so that what repeats in a tensor's structure does not show every time."""
    sample = min(numel, max(math.ceil(numel * SHARE), math.ceil(SAMPLED * numel / count)))
    stride = numel // sample
    magnitudes = values(slice(step * STEP % stride, None, stride)).abs()
    above = min(magnitudes.numel(), max(1, round(magnitudes.numel() * count / numel)))
    return float(magnitudes.topk(above, sorted=False).values.min())


def largest(values: Values, numel: int, count: int, step: int = 0) -> Tensor:
    """The places of the `count` elements of largest magnitude, ascending; fewer if others are zero. Of equal ones any.
    `step` moves the sample, and so the time that it takes."""
    if count >= numel or numel <= EXACT:
        return _of_these(values, values(slice(None)).nonzero().view(-1), count)
    threshold = sampled_threshold(values, numel, min(numel, AIM * count), step)
    for _ in range(ADJUSTMENTS):
        found = _above(values, numel, threshold)
        if found.numel() >= count or not threshold:
            break
        threshold *= 0.7
    else:
        found = _above(values, numel, 0.0)
    return _of_these(values, found, count)


def _above(values: Values, numel: int, threshold: float) -> Tensor:
    first = values(slice(0, CHUNK))
    if first.device.type != "cpu":
        return (values(slice(None)).abs() > threshold).nonzero().view(-1)
    found = list[Any]()  # by numpy, whose search for the few that are true is three times as quick
    mask = np.empty(CHUNK, np.bool_)
    for start in range(0, numel, CHUNK):
        part = (first if start == 0 else values(slice(start, start + CHUNK))).abs().numpy()
        exceeds = mask[: len(part)]
        np.greater(part, threshold, out=exceeds)
        found.append(np.flatnonzero(exceeds) + start)
    return torch.from_numpy(np.concatenate(found))


def _of_these(values: Values, places: Tensor, count: int) -> Tensor:
    if places.numel() <= count:
        return places
    kept = values(places).abs().topk(count, sorted=False).indices
    return places[kept].sort().values


# -- messages ---------------------------------------------------------------------------------------------------------
def room(count: int, numel: int) -> int:
    """The places of a message about `count` of `numel` elements: what passes over long gaps is counted in."""
    return count + numel // LONGEST


def message_bytes(places: int, wire: torch.dtype) -> int:
    """The bytes of a message with so many places."""
    return 4 + places * (2 + wire.itemsize)


def pack(selected: Selected, places: int | None, wire: torch.dtype) -> Tensor:
    """A message with so many places, or with as many as it takes (None); its values are rounded to `wire`."""
    at, values = selected.places.cpu(), selected.values.to("cpu", wire)
    gaps = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    passed_over = gaps // LONGEST
    order = torch.arange(at.numel()) + passed_over.cumsum(0)
    used = int(order[-1]) + 1 if at.numel() else 0
    places = used if places is None else places
    lengths, sent = torch.full((places,), LONGEST - 1, dtype=torch.int32), torch.zeros(places, dtype=wire)
    lengths[order], sent[order] = (gaps % LONGEST).int(), values
    head = torch.tensor([used], dtype=torch.int32).view(torch.uint8)
    return torch.cat([head, lengths.to(torch.int16).view(torch.uint8), sent.view(torch.uint8)])


def places_of(message: Tensor, wire: torch.dtype) -> int | None:
    """The places of a message that somebody sent; None if it is none."""
    places, rest = divmod(message.numel() - 4, 2 + wire.itemsize)
    if message.dtype != torch.uint8 or message.dim() != 1 or places < 0 or rest:
        return None
    used = int(message[:4].clone().view(torch.int32))
    return places if 0 <= used <= places else None


def unpack(message: Tensor, places: int, wire: torch.dtype) -> Selected:
    """What was packed; among it may be elements with the value zero, which passed over a gap."""
    used = int(message[:4].clone().view(torch.int32))
    lengths = message[4 : 4 + 2 * used].clone().view(torch.int16).long() & (LONGEST - 1)
    start = 4 + 2 * places
    values = message[start : start + wire.itemsize * used].clone().view(wire)
    return Selected((lengths + 1).cumsum(0) - 1, values)
