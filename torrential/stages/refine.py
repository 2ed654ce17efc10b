"""Cuts moved by a layer or two, as long as a rehearsal of the whole step gets quicker.

A planner counts the slowest stage or cut. A step of a synchronous pipeline also fills it and empties it, and a stage
that may have few microbatches in flight waits for what crosses its cuts: a rehearsal knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from torrential.stages.profile import LayerProfile
from torrential.stages.rehearse import StageCosts, rehearse_schedule

MOVES = (-2, -1, 1, 2)  # layers
QUICKER = 1 - 1e-9  # beyond rounding


def rehearsed_seconds(
    layers: Sequence[LayerProfile], firsts: Sequence[int], bandwidth: float, schedule: str, microbatches: int
) -> float:
    """The seconds of a step of stages that begin at these layers; a microbatch costs its share of a minibatch."""
    spans = [layers[a:b] for a, b in itertools.pairwise([*firsts, len(layers)])]
    costs = StageCosts(
        forward=[sum(layer.forward_seconds for layer in span) / microbatches for span in spans],
        backward=[sum(layer.backward_seconds for layer in span) / microbatches for span in spans],
        communication=[span[-1].activation_bytes / bandwidth / microbatches for span in spans[:-1]],
    )
    return rehearse_schedule(schedule, costs, microbatches).seconds


def refined_cuts(
    firsts: Sequence[int],
    layers: int,
    seconds: Callable[[tuple[int, ...]], float],
    fits: Callable[[tuple[int, ...]], bool],
) -> tuple[int, ...]:
    """The layers at which stages begin, after as many moves of single cuts as make a step quicker. `seconds`: of a
    step; `fits`: whether all stages have the memory that they need."""
    best, took = tuple(firsts), seconds(tuple(firsts))
    while True:
        tried = [(seconds(cuts), cuts) for cuts in _moved(best, layers) if fits(cuts)]
        if not tried or min(tried)[0] >= took * QUICKER:
            return best
        took, best = min(tried)


def _moved(firsts: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    for place, move in itertools.product(range(1, len(firsts)), MOVES):
        cuts = (*firsts[:place], firsts[place] + move, *firsts[place + 1 :])
        if all(a < b for a, b in itertools.pairwise([*cuts, layers])):
            yield cuts
