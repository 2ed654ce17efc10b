"""Laws that the simulated world must obey, with the shipped strategies and no arithmetic (gradients=off)."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torrential as tt
from torrential.records import Step

FREE = {"latency": 0.0, "bandwidth": 1e15, "inside_latency": 0.0, "inside_bandwidth": 1e15, "handling": 0.0}


def simulate(
    out: Path, strategy: str, workers: int, steps: int, compute: dict[str, Any], network: dict[str, float], **more: Any
) -> tt.TrainResult:
    cluster = {"compute": {"seconds_per_sample": 1.0} | compute, "network": FREE | network}
    cluster |= more.pop("cluster", {})
    fixed: dict[str, Any] = {"world": "sim", "device": "cpu", "progress": False, "gradients": "off", "epochs": 10**6}
    return tt.train(
        "digits-mlp", strategy, workers=workers, steps=steps, batch_size=1, cluster=cluster, out=out, **fixed, **more
    )


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def first_of(needed: int, workers: int, steps: int) -> float:
    """Seconds per step if the first `needed` of `workers` make a step; whoever is late ends what it is at, in vain."""
    random = np.random.default_rng(0)
    finish = [(random.exponential(), worker, 0) for worker in range(workers)]
    heapq.heapify(finish)
    now, waiting = 0.0, list[int]()
    for step in range(steps):
        waiting = []
        while len(waiting) < needed:
            now, worker, began_at = heapq.heappop(finish)
            if began_at == step:
                waiting.append(worker)
            else:
                heapq.heappush(finish, (now + random.exponential(), worker, step))
        for worker in waiting:
            heapq.heappush(finish, (now + random.exponential(), worker, step + 1))
    return now / steps


@pytest.mark.parametrize("backups", [0, 2])
def test_t11_1_a_step_with_backups_takes_the_time_of_the_order_statistic(backups: int, tmp_path: Path) -> None:
    """Of exponential times; y (H_(N + b) - H_b) if those who are late began anew at once. They finish first what they
    are at, so a step takes longer than that, and what an independent model of it says."""
    workers, steps = 6, 600
    result = simulate(tmp_path / "run", "backup", workers, steps, {"spread": "exponential"}, {}, backups=backups)
    measured = result.summary.seconds / result.summary.steps
    law = harmonic(workers) - harmonic(backups)
    assert measured == pytest.approx(first_of(workers - backups, workers, 20_000), rel=0.04)
    if backups == 0:
        assert measured == pytest.approx(law, rel=0.04)
    else:
        assert law < measured < harmonic(workers)


@pytest.mark.parametrize("replicas", [2, 100])
def test_staleness_of_equal_replicas_is_one_update_of_each_other(replicas: int, tmp_path: Path) -> None:
    network = {"latency": 1e-3}
    spread = {"spread": "lognormal", "shape": 0.1}
    result = simulate(tmp_path / "run", "downpour", replicas, 8 * replicas + 200, spread, network, servers=1)
    assert result.summary.staleness_mean == pytest.approx(replicas - 1, rel=0.1)


def test_idle_share_falls_with_staleness(tmp_path: Path) -> None:
    """Ten times as slow in one of twenty steps, drawn for each worker: from half of the time to next to nothing."""
    cluster = {"stragglers": [{"factor": 10.0, "every": 20}]}
    idle = []
    for staleness in (0, 3, 40):
        out = tmp_path / str(staleness)
        result = simulate(out, "ssp", 8, 640, {}, {}, servers=1, staleness=staleness, cluster=cluster)
        steps = [record for record in result.history if isinstance(record, Step)]
        idle.append(sum(s.wait for s in steps) / sum(s.wait + s.compute + s.communicate for s in steps))
    assert idle == sorted(idle, reverse=True)
    assert idle[0] > 0.45 and idle[-1] < 0.05


@pytest.mark.parametrize("period", [1, 5])
def test_t12_6_communicating_every_tau_steps(period: int, tmp_path: Path) -> None:
    """With compute y and communication a y an iteration takes y (1 + a / tau). Here a = 1: the latency of asking for
    samples, and of push and fetch, there and back, is 0.25 each time."""
    options = {"push_every": period, "fetch_every": period}
    result = simulate(
        tmp_path / "run",
        "downpour",
        1,
        100,
        {},
        {"latency": 0.25},
        servers=1,
        **options,
        cluster={"servers_apart": True},
    )
    per_iteration = result.summary.seconds / (result.summary.steps * period)
    assert per_iteration == pytest.approx(1 + 1 / period, rel=0.02)
