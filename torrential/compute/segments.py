"""Which activations are kept for backward, and which are computed again: plans as data (Chen et al. 2016).

A plan lists layers in the order of their calls; what stands in brackets is a segment, of which only the input is kept.
Backward computes a segment again when it comes to it, keeping what the plan in the brackets says.

    kept as usual      0 1 2 3 4 5 6 7 8
    square root        (0 1 2) (3 4 5) 6 7 8         n/L inputs and L layers; the last segment need not come again
    halves of halves   (((0) 1) (2) 3) ((4) 5) ...   about log2(n) inputs, about log2(n)/2 forwards more

The layers of a model lie in rows (compute/recompute.py); a segment lies within one of them, and begins with a layer
that leaves its input alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Union

Plan = tuple[Union[int, "Plan"], ...]
"""Layers by number, and segments."""


class Chain(NamedTuple):
    """The layers of a model, by number in the order of their calls."""

    rows: Sequence[range]
    """The layers that are called one after the other."""
    fragile: frozenset[int] = frozenset()
    """The layers that change their input in place, so that no segment can begin there."""

    @property
    def layers(self) -> int:
        return sum(map(len, self.rows))


class LayerBytes(NamedTuple):
    """What one layer has to do with memory, on a batch."""

    given: int
    """The bytes of its input."""
    kept: int
    """The bytes that it keeps for backward and that no layer before has kept."""


def square_root_plan(chain: Chain) -> Plan:
    """Segments of about √n of n layers."""
    length = math.isqrt(max(0, chain.layers - 1)) + 1
    return _segmented(chain, _cut(chain, length)[:-1])


def halves_plan(chain: Chain) -> Plan:
    """Halves of halves: a segment for the first half of each row, within which and after which it is the same again."""
    plan: list[int | Plan] = []
    for number, row in enumerate(chain.rows):
        halves = _halves(row, chain.fragile)
        last = number == len(chain.rows) - 1
        plan += halves if last or row.start in chain.fragile else [halves]
    return tuple(plan)


def spans_plan(chain: Chain, spans: Sequence[Sequence[int]]) -> Plan:
    """Segments that are given by their first layer and the one after the last."""
    return _segmented(chain, [range(first, stop) for first, stop in spans])


def spans_of(plan: Plan) -> list[tuple[int, int]]:
    """The segments of a plan of which none is inside of another, as `spans_plan` takes them."""
    found = [list(layers_of(step)) for step in plan if not isinstance(step, int)]
    return [(layers[0], layers[-1] + 1) for layers in found]


def fitting_plan(chain: Chain, layers: Sequence[LayerBytes], budget: int) -> Plan | None:
    """The plan with segments of about equal bytes that fits a budget and computes the fewest layers again; None if none
    fits."""
    count = chain.layers
    if peak_bytes(tuple(range(count)), layers) <= budget:
        return tuple(range(count))
    sums = [0]
    for layer in layers:
        sums.append(sums[-1] + layer.kept)
    fitting: list[tuple[int, int, Plan]] = []
    for size in sorted({sums[-1] * part // SIZES for part in range(1, SIZES + 1)}):
        spans = _cut(chain, size, sums)
        step = max(1, len(spans) // SIZES)
        for some in range(step, len(spans) + 1, step):
            plan = _segmented(chain, spans[:some])
            if (peak := peak_bytes(plan, layers)) <= budget:
                fitting.append((recomputed(plan), peak, plan))
                break  # more of them would be computed again for nothing
    return min(fitting)[2] if fitting else None


SIZES = 32  # the sizes of segments that are tried


def layers_of(plan: Plan) -> Iterator[int]:
    """The layers of a plan, in order."""
    for step in plan:
        if isinstance(step, int):
            yield step
        else:
            yield from layers_of(step)


def recomputed(plan: Plan) -> int:
    """The number of layers that backward computes again, each as often as it does."""
    segments = [step for step in plan if not isinstance(step, int)]
    return sum(sum(1 for _ in layers_of(segment)) + recomputed(segment) for segment in segments)


def peak_bytes(plan: Plan, layers: Sequence[LayerBytes]) -> int:
    """The most bytes of activations that are kept at one time, in forward and backward by this plan."""
    held = [layers[step].kept if isinstance(step, int) else layers[next(layers_of(step))].given for step in plan]
    now = most = sum(held)
    for step, size in zip(reversed(plan), reversed(held), strict=True):
        if not isinstance(step, int):
            inside = max(peak_bytes(step, layers), max(layers[place].kept for place in layers_of(step)))
            most = max(most, now + inside)
        now -= size
    return most


def _cut(chain: Chain, size: int, sums: Sequence[int] | None = None) -> list[range]:
    """The rows in spans of this size, each a little longer if need be: of layers, or of what `sums` adds up."""
    total = range(chain.layers + 1) if sums is None else sums
    spans = []
    for row in chain.rows:
        first = row.start
        for stop in range(row.start + 1, row.stop + 1):
            ends = stop == row.stop or (stop not in chain.fragile and total[stop + 1] - total[first] > size)
            if ends:
                spans.append(range(first, stop))
                first = stop
    return spans


def _segmented(chain: Chain, spans: Sequence[range]) -> Plan:
    """The plan in which these spans, as far as they can be, are segments."""
    begins = {span.start: span for span in spans if span.start not in chain.fragile}
    plan: list[int | Plan] = []
    layer = 0
    while layer < chain.layers:
        span = begins.get(layer)
        plan.append(layer if span is None else tuple(span))
        layer = layer + 1 if span is None else span.stop
    return tuple(plan)


def _halves(row: range, fragile: frozenset[int]) -> Plan:
    middle = next((m for m in range((row.start + row.stop + 1) // 2, row.stop) if m not in fragile), None)
    if middle is None or row.start in fragile:
        return tuple(row)
    first, second = range(row.start, middle), range(middle, row.stop)
    return (_halves(first, fragile), *_halves(second, fragile))
