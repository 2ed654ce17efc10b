"""Strategies on parameter servers, as real processes: what they equal, what they count, and who may die."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import torrential as tt
from tests import test_faults
from tests.test_equivalence import assert_equal_models
from tests.test_faults import Run
from torrential.errors import BadInput
from torrential.optimizers import OptimizerSpec
from torrential.records import Event, Step, Summary
from torrential.server.consistency import Consistency
from torrential.server.shard import Shard
from torrential.strategies import STRATEGIES
from torrential.strategies.context import Context
from torrential.strategies.downpour import Downpour
from torrential.strategies.roles import Role, Roles, Servers
from torrential.tasks import load_task

pytestmark = pytest.mark.timeout(120)
start = test_faults.start


def weights(out: Path, strategy: str, **options: object) -> tuple[dict[str, Tensor], Summary]:
    options = {"workers": 2, "epochs": 2, "lr": 0.02} | options
    result = tt.train("digits-mlp", strategy, out=out, progress=False, **options)  # type: ignore[arg-type]
    return {n: p.detach() for n, p in result.model.named_parameters()}, result.summary


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


# -- golden equivalences --------------------------------------------------------------------------------------------
def test_bsp_is_allreduce_and_ssp_without_staleness_is_bsp(tmp_path: Path) -> None:
    plain, _ = weights(tmp_path / "allreduce", "allreduce")
    bsp, summary = weights(tmp_path / "bsp", "bsp", servers=2)
    assert largest_difference(plain, bsp) < 1e-6
    assert summary.samples == 2700 and summary.staleness_max == 0
    ssp, _ = weights(tmp_path / "ssp", "ssp", servers=1, staleness=0)
    assert all(torch.equal(bsp[name], ssp[name]) for name in bsp)


def test_downpour_with_one_replica_is_plain_training(tmp_path: Path) -> None:
    """T3.1, through shared memory and through sockets."""
    plain, _ = weights(tmp_path / "allreduce", "allreduce", workers=1, steps=20)
    for transport in ("shared", "tcp"):
        options = {"server": "task", "transport": transport}
        alone, summary = weights(tmp_path / transport, "downpour", workers=1, steps=20, **options)
        assert all(torch.equal(plain[name], alone[name]) for name in plain)
        assert summary.staleness_max == 0 and summary.steps == 20


# -- counts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("push_every", "fetch_every"), [(4, 6)])
def test_downpour_sends_what_its_periods_say(tmp_path: Path, push_every: int, fetch_every: int) -> None:
    """T3.2, for what the worker sends: pushes. The steps of a worker are minibatches; 43 in an epoch."""
    out = tmp_path / "run"
    options = {"push_every": push_every, "fetch_every": fetch_every}
    trained, summary = weights(out, "downpour", workers=1, epochs=1, transport="tcp", **options)
    numel = sum(-(-p.numel() // 16) * 16 for p in trained.values())
    pushes = -(-1350 // (push_every * 32))
    assert summary.steps == pushes
    assert summary.bytes_sent == pushes * 4 * numel


class Turns(nn.Module):
    """Two heads, of which every other batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.turn = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.turn += self.training
        return self.heads[self.turn % 2](inputs)  # type: ignore[no-any-return]


def test_downpour_pushes_what_any_of_its_minibatches_used(tmp_path: Path) -> None:
    """In the simulated world, which costs less."""
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    spec = tt.optimizer("sgd", lr=0.1)
    sets = {"train": data, "test": data, "validation": data}
    task = tt.Task(model=Turns, loss=functional.cross_entropy, optimizer=spec, epochs=1, batch_size=8, **sets)
    cluster = {"compute": {"seconds_per_sample": 1e-3}}
    options = {"push_every": 2, "world": "sim", "cluster": cluster, "device": "cpu"}
    result = tt.train(task, "downpour", out=tmp_path / "run", progress=False, **options)  # type: ignore[arg-type]
    assert result.summary.steps == 4
    assert all(bool(p.detach().abs().sum() > 0) for p in result.model.parameters())


def test_with_overlap_every_push_is_counted_the_last_ones_too(tmp_path: Path) -> None:
    cluster = {"compute": {"seconds_per_sample": 1e-3}}
    options = {"overlap": True, "epochs": 1, "world": "sim", "cluster": cluster, "device": "cpu"}
    result = tt.train("digits-mlp", "downpour", workers=2, out=tmp_path / "run", progress=False, **options)  # type: ignore[arg-type]
    last = {r.worker: r for r in result.history if isinstance(r, Step)}
    assert sum(sum(r.staleness.values()) for r in last.values()) == result.summary.steps == 43


def test_downpour_does_not_depend_on_a_rate_that_is_not_meant_for_it(tmp_path: Path) -> None:
    """With eight workers SGD with momentum is at chance at the task's rate; by default that rate does not matter."""
    task = load_task("digits-mlp")
    specs = [tt.optimizer("sgd", lr=0.05, momentum=0.9), tt.optimizer("adam", lr=1e-4)]
    cluster = {"compute": {"seconds_per_sample": 1e-3}}
    options: dict[str, Any] = {"workers": 8, "epochs": 12, "world": "sim", "cluster": cluster, "device": "cpu"}

    def run(name: str, spec: OptimizerSpec, **more: Any) -> tt.TrainResult:
        given = options | more | {"out": tmp_path / name, "progress": False}
        return tt.train(dataclasses.replace(task, optimizer=spec), "downpour", **given)

    first, second = (run(spec.kind.__name__, spec) for spec in specs)
    assert_equal_models(first.model, second.model, 0.0)
    assert first.summary.staleness_mean == pytest.approx(7, rel=0.1)
    assert first.summary.value is not None and first.summary.value > 0.85
    wrecked = run("task", specs[0], server="task")
    assert wrecked.summary.value is not None and wrecked.summary.value < 0.5


def test_asynchrony_is_stale_and_backup_drops(tmp_path: Path) -> None:
    _, summary = weights(tmp_path / "downpour", "downpour", workers=3, servers=1)
    assert summary.staleness_mean > 0
    result = tt.train("digits-mlp", "backup", workers=3, epochs=3, out=tmp_path / "backup", progress=False, slow="2:20")
    dropped = {r.worker: r.dropped for r in result.history if isinstance(r, Step)}
    assert dropped[0] == dropped[1] == 0 or sum(dropped.values()) > 0
    assert result.summary.samples == 3 * 1350  # dropped or not, every sample was used


# -- deaths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bsp", "downpour"])  # one that waits and one that does not; all of them in test_sim
def test_a_worker_dies_and_then_a_server(start: Callable[..., Run], name: str) -> None:
    """Nobody waits for the worker, its samples are used by others, and the server is succeeded by its replica."""
    run = start("digits-mlp", "--strategy", name, "--workers", 3, "--servers", 2, "--epochs", 15)
    run.until_training(10)
    run.kill("tt-worker-1")
    run.until_training(30)
    run.kill("tt-server-0")
    assert run.wait() == 0, run.said()
    summary = next(r for r in run.records() if isinstance(r, Summary))
    assert summary.samples == 15 * 1350 and summary.value is not None and summary.value >= 0.9
    assert [e.worker for e in run.events("worker_lost")] == [1] and len(run.events("server_lost")) == 1


# -- bad input ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        ("ssp", {"staleness": -1}, "staleness"),
        ("downpour", {"push_every": 0}, "push_every"),
        ("downpour", {"fetch_every": 0}, "fetch_every"),
        ("backup", {"backups": 2}, "a step needs at least one gradient"),
        ("bsp", {"servers": 10**9}, "more servers than parameters"),
        ("bsp", {"servers": 0}, "needs a server"),
        ("allreduce", {"servers": 2}, "needs no servers"),
    ],
)
def test_bad_options(tmp_path: Path, strategy: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        weights(tmp_path / "run", strategy, **options)


# -- handlers -------------------------------------------------------------------------------------------------------
class Asking(Downpour, frozen=True, kw_only=True):
    """Asks the servers how many parameters each of them heads, and trains."""

    name: ClassVar[str] = "asking"

    def roles(self, workers: int, servers: int) -> Roles:
        def count(shard: Shard, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
            return [torch.tensor([shard.stop - shard.start + options["more"]])]

        return (
            Role("worker", workers, self.worker, "view"),
            Servers(servers, Consistency(None), handlers={"count": count}),
        )

    def worker(self, ctx: Context) -> None:
        found = [int(tensor) for tensor in ctx.params.call("count", {"more": 1}).wait().tensors]
        assert len(found) == 2 and sum(found) == ctx.replica.vector().numel() + 2
        told.append(found)
        super().worker(ctx)


told: list[list[int]] = []


def test_a_strategy_brings_handlers_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told.clear()
    monkeypatch.setitem(STRATEGIES, "asking", Asking)
    tt.train("digits-mlp", Asking(), workers=2, servers=2, steps=2, world="sim", out=tmp_path / "run", progress=False)
    assert len(told) == 2 and told[0] == told[1]


def test_a_worker_that_takes_anothers_place_has_its_statistics_of_batch_norm(tmp_path: Path) -> None:
    """The first worker's go into the model that is evaluated, and a newcomer's own would be those of one batch."""
    fault = {"kind": "crash", "worker": 0, "at": "99.6 %", "lasts": 1e-3}
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "faults": [fault]}
    given = {"workers": 2, "servers": 2, "world": "sim", "epochs": 6, "progress": False, "device": "cpu"}
    result = tt.train("digits", "downpour", cluster=cluster, out=tmp_path / "run", **given)
    assert [r.worker for r in result.history if isinstance(r, Event) and r.event == "worker_joined"] == [0]
    assert result.summary.value is not None and result.summary.value > 0.9  # 0.44 without them
