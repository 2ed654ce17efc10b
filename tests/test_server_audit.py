"""The audit of benchmarks/server_faults.py finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.audit import NUMEL, Entry, Plan, numbers, objections, places, tag


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """One worker was killed with three of five additions acknowledged, and its next life ended well after two."""
    for life, (sent, acknowledged, ended) in enumerate([(5, 3, 0), (2, 2, 1)]):
        entries = numbers(tmp_path / f"worker-0-{life:02}", Entry, "w+")
        entries[[Entry.SENT, Entry.ACKNOWLEDGED, Entry.ENDED]] = sent, acknowledged, ended
        entries.flush()
    return Plan(str(tmp_path), workers=1, servers=1, replicas=0, transport="shared", staleness=None, seed=0)


def keep(plan: Plan, first: list[int], second: list[int]) -> np.ndarray:
    """As if these additions of the two lives had been applied."""
    values = np.zeros(NUMEL)
    for slot, applied in enumerate((first, second)):
        pairs = places(slot).view(-1, 2).numpy()
        values[pairs[:, 0]], values[pairs[:, 1]] = len(applied), sum(tag(slot, number) for number in applied)
    np.save(plan.values, values)
    return values


@pytest.mark.parametrize("applied", [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4, 5]])
def test_what_was_not_acknowledged_may_have_been_applied_or_not(plan: Plan, applied: list[int]) -> None:
    keep(plan, applied, [1, 2])
    assert list(objections(plan)) == []


@pytest.mark.parametrize("applied", [[1, 2], [1, 2, 4], [1, 2, 3, 3], [1, 2, 2], [1, 2, 3, 4, 4]])
def test_what_was_lost_or_applied_twice_is_found(plan: Plan, applied: list[int]) -> None:
    keep(plan, applied, [1, 2])
    (said,) = objections(plan)
    assert said.startswith("worker 0, life 0: 3 of 5 acknowledged")


def test_one_copy_that_is_not_like_the_others_is_found(plan: Plan) -> None:
    values = keep(plan, [1, 2, 3], [1, 2])
    values[places(1)[-2:].numpy()] = 1, tag(1, 1)
    values[NUMEL - 1] = 1
    np.save(plan.values, values)
    said = list(objections(plan))
    assert len(said) == 3 and "2 sums" in said[0] and "1 applied" in said[1] and said[2].endswith("nobody added any")
