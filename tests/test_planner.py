"""The planner's cuts in simulated time, beside every other cut (experiments/planner.py has more of them)."""

from __future__ import annotations

import pytest

from experiments.planner import SLOWER, draw, try_all

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planned_cut_is_hardly_slower_than_the_best(seed: int) -> None:
    outcome = try_all(draw(seed, layers=5))
    assert len(outcome.seconds) == [4, 6][seed]  # two stages, and three
    assert outcome.slower <= SLOWER < max(outcome.seconds.values()) / min(outcome.seconds.values())
