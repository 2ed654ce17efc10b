"""The simulated world: deaths survived, same bytes, the time of the cluster. What it must equal is in test_contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torrential as tt
from torrential import checkpoint as checkpoints
from torrential.errors import BadInput, Interrupted, RunFailed, Terminated
from torrential.records import RECORDS, Event, Step, read_records
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers
from torrential.tasks.digits import digits

FAST: dict[str, Any] = {"compute": {"seconds_per_sample": 1e-3}, "detection": 0.05}
SERVED = [name for name, kind in STRATEGIES.items() if needs_servers(kind)]


def simulate(out: Path, strategy: str, workers: int = 4, cluster: dict[str, Any] | None = None, **options: Any) -> Any:
    if needs_servers(STRATEGIES[strategy]):
        options = {"servers": 2} | options
    return tt.train(
        "digits-mlp",
        strategy,
        workers=workers,
        world="sim",
        cluster=FAST | (cluster or {}),
        out=out,
        device="cpu",
        progress=False,
        **{"epochs": 2} | options,
    )


def weights(result: Any) -> dict[str, Tensor]:
    found, _ = checkpoints.latest(result.out / "checkpoints")
    assert found is not None
    return dict(found.model)


def difference(a: Any, b: Any) -> float:
    one, other = weights(a), weights(b)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_every_algorithm_gives_the_same_sums(tmp_path: Path) -> None:
    joined = simulate(tmp_path / "joined", "allreduce", 1, batch_size=64, lr=0.1)
    for algorithm in ("ring", "tree"):
        four = simulate(tmp_path / algorithm, "allreduce", 4, batch_size=16, lr=0.1, algorithm=algorithm)
        assert difference(four, joined) < 1e-6, algorithm


@pytest.mark.parametrize("strategy", [name for name, kind in STRATEGIES.items() if "sim" in kind.worlds])
def test_deaths_are_survived_and_repeat_to_the_byte(strategy: str, tmp_path: Path) -> None:
    faults = [{"kind": "crash", "worker": 2, "at": 0.3, "lasts": 0.3}, {"kind": "crash", "worker": 1, "at": 0.5}]
    if strategy in SERVED:
        faults.append({"kind": "crash", "server": 1, "at": 0.35, "lasts": 0.2})
    spread = {"seconds_per_sample": 1e-3, "spread": "lognormal"}
    cluster = {"faults": faults, "compute": spread, "stragglers": [{"worker": 3, "factor": 2.0}]}
    how = {"ways": 2} if strategy == "tensor" else {}  # so that others have the slices of those that die
    runs = [simulate(tmp_path / str(i), strategy, cluster=cluster, epochs=4, **how) for i in range(2)]
    events = [record.event for record in runs[0].history if isinstance(record, Event)]
    assert events.count("worker_lost") == 2 and events.count("worker_joined") == 1
    assert ("server_filled" in events) == (strategy in SERVED)
    assert difference(*runs) == 0
    first, second = ((run.out / RECORDS).read_bytes().replace(str(run.out).encode(), b"") for run in runs)
    assert first == second
    assert runs[0].summary.value > 0.5


def test_time_is_what_the_cluster_says(tmp_path: Path) -> None:
    """Workers that wait for one another are as slow as the slowest of them."""
    cluster = {"network": {"latency": 0.0, "bandwidth": 1e15, "inside_bandwidth": 1e15, "handling": 0.0}}
    even = simulate(tmp_path / "even", "allreduce", cluster=cluster, steps=10, batch_size=16)
    assert even.summary.seconds == pytest.approx(10 * 16 * 1e-3, rel=1e-3)
    slow = cluster | {"stragglers": [{"worker": 1, "factor": 4.0}]}
    uneven = simulate(tmp_path / "uneven", "allreduce", cluster=slow, steps=10, batch_size=16)
    assert uneven.summary.seconds == pytest.approx(4 * even.summary.seconds, rel=1e-3)
    waited = [s.wait for s in uneven.history if isinstance(s, Step) and s.worker == 0]
    assert sum(waited) == pytest.approx(0.75 * uneven.summary.seconds, rel=0.1)


def cut_off(run: Any) -> None:
    """As if it had been interrupted before its last checkpoint."""
    last = sorted((run.out / "checkpoints").iterdir())[-1]
    last.rename(run.out.parent / f"{run.out.name}-{last.name}")
    lines = (run.out / RECORDS).read_bytes().splitlines(keepends=True)
    (run.out / RECORDS).write_bytes(b"".join(line for line in lines if b'"summary"' not in line))


def test_resumed_is_uninterrupted(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole", "allreduce", epochs=3)
    part = simulate(tmp_path / "part", "allreduce", epochs=3)
    cut_off(part)
    resumed = tt.train("digits-mlp", resume=part.out, progress=False)
    assert difference(resumed, whole) == 0


def test_faults_that_are_over_do_not_strike_again_when_a_run_is_resumed(tmp_path: Path) -> None:
    faults = [
        {"kind": "crash", "worker": 1, "at": 0.1, "lasts": 0.2},
        {"kind": "crash", "worker": 2, "at": 0.2},
        {"kind": "slow-link", "hosts": [0], "delay": 1e-3, "at": 0.1, "lasts": 1000.0},
    ]
    part = simulate(tmp_path / "part", "allreduce", epochs=3, cluster={"faults": faults, "detection": 0.05})
    cut_off(part)
    tt.train("digits-mlp", resume=part.out, progress=False)
    events = [(r.event, r.worker) for r in read_records(part.out / RECORDS) if isinstance(r, Event)]
    after = events[events.index(("resumed", None)) + 1 :]
    assert after == [("slow-link", None), ("worker_lost", 2)]  # before the workers first met


@pytest.mark.parametrize(("strategy", "kind"), [("allreduce", Interrupted), ("ssp", Terminated)])
def test_an_interrupt_is_no_failure_of_the_role_that_it_finds_at_work(
    strategy: str, kind: type[BaseException], tmp_path: Path
) -> None:
    calls = 0

    def loss(outputs: Any, targets: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise kind(15)
        return F.cross_entropy(outputs, targets)

    task = replace(digits(), loss=loss)
    with pytest.raises(kind):
        tt.train(task, strategy, workers=4, world="sim", out=tmp_path / "run", device="cpu", progress=False)


@pytest.mark.parametrize("strategy", ["allreduce", "bsp"])
def test_events_have_the_step_at_which_they_happened(strategy: str, tmp_path: Path) -> None:
    """A step takes 0.01 s of computing and about as little as nothing of messages; records are 0.1 s apart."""
    cluster = {"detection": 0.0, "faults": [{"kind": "crash", "worker": 1, "at": 0.078}]}
    result = simulate(tmp_path / "run", strategy, 2, cluster, batch_size=10, steps=12)
    recorded = [r.step for r in result.history if isinstance(r, Step) and r.time < 0.078]
    lost = next(r for r in result.history if isinstance(r, Event) and r.event == "worker_lost")
    assert max(recorded) < lost.step == 7


def test_a_partition_for_ever_ends_with_who_waited(tmp_path: Path) -> None:
    cluster = {"faults": [{"kind": "partition", "hosts": [0, 1], "at": 0.2}]}
    with pytest.raises(RunFailed, match="worker"):
        simulate(tmp_path / "sync", "allreduce", cluster=cluster)
    with pytest.raises(RunFailed, match="server"):
        simulate(tmp_path / "served", "downpour", cluster=cluster)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"world": "simm"}, "did you mean 'sim'"),
        ({"cluster": "laptop"}, "add --world sim"),
        ({"world": "sim", "cluster": "nowhere.toml"}, "cannot read"),
        ({"world": "sim", "cluster": {"host": 3}}, "host"),
        ({"world": "sim", "cluster": {"network": {"latency": -1.0}}}, "latency"),
        ({"world": "sim", "cluster": {"hosts": 2}, "workers": 3}, "too small"),
        ({"world": "sim", "cluster": {"stragglers": [{"worker": 7}]}}, "names worker 7"),
        ({"gradients": "off"}, "--world sim"),
        ({"world": "sim", "algorithm": "native"}, "real processes"),
    ],
)
def test_bad_input(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says):
        tt.train("digits-mlp", out=tmp_path / "run", progress=False, **options)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("strategy", ["allreduce", "ssp"])
def test_a_run_stops_when_its_target_is_reached(strategy: str, tmp_path: Path) -> None:
    """At the next step of every worker, not at the next record of one; what is told of the run is of that moment."""
    result = simulate(tmp_path / "run", strategy, workers=2, target=0.3, epochs=20)
    summary = result.summary
    assert summary.reached and summary.seconds == summary.time_to_target
    events = [record for record in result.history if isinstance(record, Event) and record.event == "target_reached"]
    assert [event.time for event in events] == [pytest.approx(summary.time_to_target, rel=0.1)]
    assert max(record.step for record in result.history if isinstance(record, Step)) <= summary.steps + 4
