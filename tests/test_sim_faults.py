"""Random fault schedules in simulated time: what must hold does; and what breaks it on purpose is found."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from torrential.server.consistency import ALWAYS, Consistency
from torrential.server.shard import Shard
from torrential.strategies import STRATEGIES
from torrential.testing.__main__ import app
from torrential.testing.schedule import draw
from torrential.testing.sweep import Failure, check, outcome, outcomes
from torrential.worlds.sim.comm import SimComm


def test_what_must_hold_holds() -> None:
    """Two hundred schedules; scripts/soak runs as many as wanted."""
    lost = [check(seed) for seed in range(200)]
    assert sum(map(bool, lost)) < 50, lost  # most of them can be survived


def test_what_several_processes_run_can_be_imported_by_them() -> None:
    """Nothing can be that is in a module started with -m: it is called __main__ there, and something else is here."""
    assert pickle.loads(pickle.dumps(outcome)) is outcome
    assert outcome.__module__ == "torrential.testing.sweep"
    assert [bool(found) for found in outcomes(range(20), jobs=1)] == [bool(check(seed)) for seed in range(20)]


def test_a_failure_travels_between_processes() -> None:
    failure = pickle.loads(pickle.dumps(Failure(7, "seed 7: wrong")))
    assert failure.seed == 7 and str(failure) == "seed 7: wrong"


def test_schedules_are_of_all_kinds() -> None:
    schedules = [draw(seed) for seed in range(300)]
    strategies = Counter(schedule.strategy for schedule in schedules)
    assert strategies.keys() == STRATEGIES.keys() and min(strategies.values()) > 30
    faults = Counter(fault["kind"] for schedule in schedules for fault in schedule.cluster["faults"])
    assert faults.keys() == {"crash", "partition", "slow-link"} and min(faults.values()) > 30
    for accident in ("loss", "duplication", "delay"):
        assert 30 < sum(schedule.cluster["accidents"][accident] > 0 for schedule in schedules) < 270


def skip_dedupe(self: Shard, worker: int, seq: int) -> None:
    """Every request is new."""


def wait_for_less(self: Consistency, clock: int) -> int:
    return ALWAYS if self.staleness is None else clock - self.staleness - 1


def stay(self: SimComm) -> None:
    """Members change, and this one goes on waiting for those that were."""


@pytest.mark.parametrize(
    ("where", "name", "bug", "says"),
    [
        (Shard, "answered", skip_dedupe, "as applied and as dropped|not the sum|updates; "),
        (Consistency, "needs", wait_for_less, "staleness|older than"),
        (SimComm, "check", stay, "waited|no end|nobody can go on"),
    ],
)
def test_a_planted_bug_is_found(
    where: type, name: str, bug: Callable[..., Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(Failure, match=says) as found:
        for seed in range(1000):
            check(seed)
    monkeypatch.undo()
    check(found.value.seed)


def test_a_failure_says_what_happened_and_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimComm, "check", stay)
    runner = CliRunner()
    swept = runner.invoke(app, ["--schedules", "40"])
    assert swept.exit_code == 1
    seed = next(line.split(":")[0].removeprefix("seed ") for line in swept.stdout.splitlines() if line[:5] == "seed ")
    again = runner.invoke(app, ["--seed", seed])
    assert again.exit_code == 1 and again.stdout in swept.stdout
    for word in ("allreduce", "workers", "faults: kind=crash", "the last events:", "gets", f"--seed {seed}"):
        assert word in again.stdout
    monkeypatch.undo()
    held = runner.invoke(app, ["--seed", seed])
    assert held.exit_code == 0 and "all held" in held.stdout
