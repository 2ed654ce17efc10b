"""L-BFGS as commands on vectors that are somewhere else: what is computed here are scalars.

    run([("axpy", "direction", -0.3, "y4"), ("dot", "s3", "direction")])  ->  [the dot product]

`two_loop` is the product of the inverse Hessian's approximation and the gradient (Nocedal 1980); `wolfe` looks for a
step along a direction that meets the strong Wolfe conditions (Nocedal and Wright, algorithms 3.5 and 3.6), by cubic
interpolation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

Command = tuple[Any, ...]  # the name of an operation, and its operands; server/vectors.py carries them out
Run = Callable[[Sequence[Command]], list[float]]

GRADIENT, DIRECTION = "gradient", "direction"
DECREASE, CURVATURE = 1e-4, 0.9  # the constants of the strong Wolfe conditions
LEAST_CURVATURE = 1e-10  # of a pair, relative to |y|²: with less it would spoil the approximation
MOST_STEPS = 25  # tried along one direction
EDGE = 0.1  # the share of a bracket next to its ends that a step is kept out of
LONGEST, SHORTEST = 10.0, 0.1  # factors of the last step when the next is longer, or a value was no number


class CurvaturePair(NamedTuple):
    """A change of the parameters and of the gradient, by the names of the vectors that hold them."""

    s: str
    y: str
    rho: float  # 1 / <y, s>


def two_loop(run: Run, pairs: Sequence[CurvaturePair], scale: float) -> float:
    """Leave the direction of descent in DIRECTION, given the pairs, oldest first, and the scale <s, y> / <y, y> of the
    newest; returns its product with the gradient."""
    products = list[float]()
    commands: list[Command] = [("copy", DIRECTION, GRADIENT)]
    for pair in reversed(pairs):
        (found,) = run([*commands, ("dot", pair.s, DIRECTION)])
        products.append(pair.rho * found)
        commands = [("axpy", DIRECTION, -products[-1], pair.y)]
    commands.append(("scale", DIRECTION, scale))
    for pair, product in zip(pairs, reversed(products), strict=True):
        (found,) = run([*commands, ("dot", pair.y, DIRECTION)])
        commands = [("axpy", DIRECTION, product - pair.rho * found, pair.s)]
    (slope,) = run([*commands, ("scale", DIRECTION, -1.0), ("dot", GRADIENT, DIRECTION)])
    return slope


class LinePoint(NamedTuple):
    """A step along the direction, the objective there, and its slope."""

    step: float
    value: float
    slope: float


Search = Generator[float, tuple[float, float], LinePoint | None]


def wolfe(value: float, slope: float, first: float) -> Search:
    """Yield the steps to try, be sent the objective and its slope at each; returns the step to take. That may be one
    that only decreases the objective, if no better was found; None if there is none."""
    start = before = LinePoint(0.0, value, slope)
    step, tries = first, 0
    while True:
        tries += 1
        found = LinePoint(step, *(yield step))
        if not math.isfinite(found.value) or not math.isfinite(found.slope):
            if tries >= MOST_STEPS:
                return before if before.step else None
            step = before.step + SHORTEST * (step - before.step)
            continue
        if not _decreases(found, start) or (before.step and found.value >= before.value):
            return (yield from _zoom(start, before, found, tries))
        if abs(found.slope) <= -CURVATURE * slope:
            return found
        if found.slope >= 0:
            return (yield from _zoom(start, found, before, tries))
        if tries >= MOST_STEPS:
            return found
        expected, before = _minimum(before, found), found
        step = min(expected, LONGEST * step) if expected > step else LONGEST * step


def _zoom(start: LinePoint, low: LinePoint, high: LinePoint, tries: int) -> Search:
    """Between two steps, of which `low` has the least value that is known."""
    stuck = False
    while tries < MOST_STEPS and abs(high.step - low.step) * abs(start.slope) > 1e-15 * max(1e-300, abs(start.value)):
        tries += 1
        left, right = sorted((low.step, high.step))
        step, margin = _minimum(low, high), EDGE * (right - left)
        near = not left + margin <= step <= right - margin
        if near and (stuck or not left < step < right):
            step = min(max(step, left + margin), right - margin)  # twice next to an end: away from it
            near = False
        stuck = near
        found = LinePoint(step, *(yield step))
        if not math.isfinite(found.value) or not _decreases(found, start) or found.value >= low.value:
            high = (
                found if math.isfinite(found.value) and math.isfinite(found.slope) else LinePoint(step, low.value, 0.0)
            )
            continue
        if abs(found.slope) <= -CURVATURE * start.slope:
            return found
        if found.slope * (high.step - low.step) >= 0:
            high = low
        low = found
    return low if low.step and _decreases(low, start) else None


def _decreases(found: LinePoint, start: LinePoint) -> bool:
    return found.value <= start.value + DECREASE * found.step * start.slope


def _minimum(one: LinePoint, other: LinePoint) -> float:
    """The minimum of the cubic through both; their middle if it has none between them."""
    a, b = sorted((one, other))
    if a.step == b.step:
        return a.step
    d = a.slope + b.slope - 3 * (a.value - b.value) / (a.step - b.step)
    square = d * d - a.slope * b.slope
    if square >= 0:
        root = math.sqrt(square)
        across = b.slope - a.slope + 2 * root
        if across:
            return b.step - (b.step - a.step) * ((b.slope + root - d) / across)
    return (a.step + b.step) / 2


def keeps(product: float, square: float) -> bool:
    """Whether a pair with <y, s> and <y, y> is worth keeping."""
    return product > LEAST_CURVATURE * square
