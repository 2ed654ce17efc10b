"""The benchmark of slow links: its entries, what it makes of runs, and one run of a peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import slowlink
from benchmarks.slowlink_peers import PowerSgd
from tests.test_averaging import SAMPLES, task, train


def line(entry: str, world: str, seconds: float | None, compute: float = 2.0) -> str:
    found = {"task": "fashion", "link": "10mbit", "world": world, "entry": entry, "seed": 1, "test": 0.85}
    return json.dumps(found | {"time_to_target": seconds, "samples": 400, "seconds": 8.0, "compute": compute})


def test_entries_are_evaluated_after_equally_many_samples() -> None:
    found = slowlink.entries("100mbit", 32, simulated=True)
    assert [way.every for way in found.values()] == [32] * 5 + [4, 2, 2, 8]
    assert {name.split()[0] for name in slowlink.entries("10mbit", 32, simulated=False)} >= {"ddp", "ddp,"}


def test_a_table_of_runs(tmp_path: Path) -> None:
    runs = [line("ddp", "local", 40.0), line("ddp", "local", 44.0), line("local 32", "local", 4.0)]
    runs += [line("allreduce", "local", None, 4.0), line("local 32", "sim", 3.5)]
    (tmp_path / slowlink.RUNS).write_text("\n".join(runs) + "\n")
    assert slowlink.seconds_per_sample(slowlink.read_runs(tmp_path / slowlink.RUNS)) == 0.01
    slowlink.report(tmp_path)
    rows = (tmp_path / "table.md").read_text().splitlines()
    assert rows[2] == "| fashion | 10mbit | ddp | 42.0 | 40.0 44.0 | 1.0 | 50 | 0.850 |  |"
    assert rows[3] == "| fashion | 10mbit | local 32 | 4.0 | 4.0 | 10.5 | 50 | 0.850 | 3.5 |"
    assert rows[4] == "| fashion | 10mbit | allreduce | missed | missed |  | 50 | 0.850 |  |"
    assert (tmp_path / "times.png").stat().st_size > 0


def test_a_difference_needs_trials() -> None:
    def runs(*seconds: float) -> dict[str, list[dict[str, float]]]:
        return {"local": [{"time_to_target": each} for each in seconds], "sim": []}

    found = {"local 32": runs(1, 2, 3, 4), "ddp": runs(10, 20, 30, 40), "torchft DiLoCo 64": runs(9, 9)}
    rows = slowlink.verdicts({("fashion", "10mbit"): found})
    assert rows[2:] == ["| fashion | 10mbit | local 32 | ddp | 10.00 | 2.50 to 40.00 | 0.029 |"]


def test_powersgd_trains_under_the_rules_of_all(tmp_path: Path) -> None:
    made = train(PowerSgd(start=2), tmp_path / "run", task(), world="local", epochs=1)
    assert made.summary.samples == SAMPLES


def test_a_prediction_needs_real_runs() -> None:
    with pytest.raises(SystemExit, match="--predict needs what computing takes; run the same without it first"):
        slowlink.seconds_per_sample([])
