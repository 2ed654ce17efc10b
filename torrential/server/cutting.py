"""Cuts what a request carries into what each range's server gets of it.

    vector  |·······|···············|········|        spans of the key space, with their tensors
    table   |  server 1  |   server 0   |   server 2  |
    parts   |·······|····|··········|···|····|        one part for each range

Tensors are cut into views of them; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torrential.errors import BadInput
from torrential.server.messages import Range, Request, Span, View
from torrential.server.ring import find
from torrential.server.shares import OwnedSpan

Pieces = Tensor | Sequence[tuple[int, Tensor]]  # the whole vector, or flat parts of it with the keys they begin at


class RangeRequest:
    """The part of a request that is for one range."""

    __slots__ = (
        "into", "keys", "message", "moved", "posted", "server", "spans", "start", "stop", "tensors", "version", "view",
    )  # fmt: skip

    def __init__(self, view: int, r: Range) -> None:
        self.view, self.start, self.stop, self.server = view, r.start, r.stop, r.chain[0]
        self.spans: tuple[Span, ...] = ()
        self.tensors: list[Tensor] = []
        self.into: list[Tensor] = []
        self.keys = self.moved = False
        self.version: int | None = None
        self.message: Request | None = None
        self.posted: Sequence[Tensor] = ()  # the tensors as they were sent


class Cutter:
    def __init__(self, view: View, numel: int, owned: Sequence[OwnedSpan] = ()) -> None:
        """`owned`: what a worker's vectors stand for, where they are not of all parameters."""
        self.view, self.numel = view, numel
        self._owned, self._whole = [OwnedSpan(0, 0, numel)] if not owned else list(owned), not owned
        self._pieces = WeakTensorKeyDictionary()  # of tensors that were cut, as long as the caller keeps them

    def everywhere(self) -> list[RangeRequest]:
        """Every range that the worker has parameters of."""
        return self.cut(self._spans(), (), ())

    def _spans(self) -> list[Span]:
        return [(span.key, span.key + span.size) for span in self._owned]

    def _parted(self, vector: Tensor) -> list[Tensor]:
        """A worker's vector, in pieces that go with the spans."""
        if self._whole:
            return [vector]
        pieces = self._pieces_of(vector)
        return [pieces[span.start, span.start + span.size] for span in self._owned]

    def split(self, pieces: Pieces | None, into: Tensor | None = None, reading: bool = False) -> list[RangeRequest]:
        if pieces is None:
            return self.cut(self._spans(), (), () if into is None else self._parted(into))
        if isinstance(pieces, Tensor) and not self._whole:
            given, read = self._parted(pieces), [] if into is None else self._parted(into)
            return self.cut(self._spans(), (), given) if reading else self.cut(self._spans(), given, read)
        if isinstance(pieces, Tensor):
            pieces = [(0, pieces)]
        spans = [(start, start + tensor.numel()) for start, tensor in pieces]
        tensors = [tensor for _, tensor in pieces]
        if reading:
            return self.cut(spans, (), tensors)
        if into is None:
            return self.cut(spans, tensors, ())
        return self.cut(spans, tensors, [into] if len(spans) == 1 else [into[a:b] for a, b in spans])

    def split_keys(self, values: Pieces, keys: Tensor, everywhere: bool = False) -> list[RangeRequest]:
        assert isinstance(values, Tensor)
        if keys.numel() != values.numel():
            raise BadInput(f"{values.numel()} values do not fit {keys.numel()} keys; give one value for each key")
        if keys.numel():
            least, most = (int(key) for key in torch.aminmax(keys))
            if not 0 <= least <= most < self.numel:
                raise BadInput(f"no such keys ({least} to {most}); there are {self.numel}")
        parts = self.cut([(0, self.numel)], (values, keys), (), keys=True)
        return parts if everywhere else [part for part in parts if part.tensors[1].numel()]

    def cut(
        self, spans: Sequence[Span], tensors: Sequence[Tensor], into: Sequence[Tensor], keys: bool = False
    ) -> list[RangeRequest]:
        """Cut a request by the table of ranges. `tensors` and `into` are empty or go with the spans, except that with
        `keys` there are the values and the keys."""
        table, version = self.view.table, self.view.version
        if len(table) == 1 and len(spans) == 1 and not keys and 0 <= spans[0][0] < spans[0][1] <= self.numel:
            size = spans[0][1] - spans[0][0]
            part = RangeRequest(version, table[0])
            part.spans = (spans[0],)
            part.tensors, part.into = [_piece(t, 0, size) for t in tensors], [_piece(t, 0, size) for t in into]
            return [part]
        parts: dict[int, RangeRequest] = {}
        if keys and len(table) > 1:
            tensors = _ascending(*tensors)
        for i, (first, last) in enumerate(spans):
            if not 0 <= first <= last <= self.numel:
                raise BadInput(f"no such parameters ({first} to {last}); there are {self.numel}")
            at, offset = find(table, first), first
            sent = self._pieces_of(tensors[i]) if tensors and not keys else {}
            read = self._pieces_of(into[i]) if into else {}
            while first < last:
                r = table[at]
                stop = min(last, r.stop)
                found = parts.get(r.start)
                part = parts[r.start] = RangeRequest(version, r) if found is None else found
                part.spans += ((first, stop),)
                if keys:
                    part.keys, part.tensors = True, list(tensors)
                    if len(table) > 1:
                        low, high = torch.searchsorted(tensors[1], torch.tensor([first, stop])).tolist()
                        part.tensors = [tensor[low:high] for tensor in tensors]
                elif tensors:
                    part.tensors.append(sent[first - offset, stop - offset])
                if into:
                    part.into.append(read[first - offset, stop - offset])
                first, at = stop, at + 1
        return list(parts.values())

    def _pieces_of(self, tensor: Tensor) -> Mapping[Span, Tensor]:
        found: SliceCache | None = self._pieces.get(tensor)
        if found is None or found.whole.data_ptr() != tensor.data_ptr():
            found = self._pieces[tensor] = SliceCache(tensor)
        return found


def _piece(tensor: Tensor, first: int, last: int) -> Tensor:
    return tensor if last - first == tensor.numel() else tensor[first:last]


class SliceCache(dict[Span, Tensor]):
    """The slices of one tensor by span, kept because workers send and read the same ones again and again."""

    def __init__(self, tensor: Tensor) -> None:
        self.whole = tensor.data  # neither the tensor nor a view of it, which would never be let go of

    def __missing__(self, span: Span) -> Tensor:
        piece = self[span] = self.whole[span[0] : span[1]]
        return piece


def _ascending(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    if keys.numel() > 1 and not bool((keys[1:] >= keys[:-1]).all()):
        keys, order = keys.sort(stable=True)
        values = values[order]
    return values, keys
