"""The contract carries strategies of every kind: four probes (tests/probes.py), each in both worlds."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torrential as tt
from tests import probes, test_faults
from tests.test_equivalence import assert_equal_models, fresh, plain_loop
from tests.test_faults import Run
from torrential.records import Event, Summary
from torrential.tasks import load_task

pytestmark = pytest.mark.timeout(120)

WORLDS: dict[str, dict[str, Any]] = {"local": {}, "sim": {"cluster": {"compute": {"seconds_per_sample": 1e-3}}}}
start = test_faults.start
both_worlds = pytest.mark.parametrize("world", WORLDS)


def train(out: Path, strategy: tt.Strategy, world: str, task: tt.Task | str = "digits-mlp", **options: Any) -> Any:
    given = WORLDS[world] | {"device": "cpu", "progress": False} | options
    return tt.train(task, strategy, world=world, out=out, **given)


@pytest.mark.parametrize("kind", [probes.LocalSGD, probes.TwoStages, probes.Coordinated, probes.Averaging])
def test_a_probe_is_short(kind: type[tt.Strategy]) -> None:
    assert len(inspect.getsource(kind).splitlines()) < 80


# -- local SGD --------------------------------------------------------------------------------------------------------
def adam_task() -> tt.Task:
    return dataclasses.replace(load_task("digits-mlp"), optimizer=tt.optimizer("adamw", lr=1e-3))


@both_worlds
def test_local_sgd_of_one_worker_is_plain_training(world: str, tmp_path: Path) -> None:
    task = adam_task()
    model = fresh(task)
    plain = plain_loop(task, torch.optim.AdamW(model.parameters(), lr=1e-3), model, task.batch_size, steps=24)
    result = train(tmp_path / "run", probes.LocalSGD(period=4), world, task, workers=1, steps=6)
    assert_equal_models(result.model, plain)


@both_worlds
def test_local_sgd_resumes_bit_for_bit(world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, strategy = adam_task(), probes.LocalSGD(period=3)
    options = {"workers": 2, "evaluate_every": 2}
    whole = train(tmp_path / "whole", strategy, world, task, steps=8, **options)
    stopped_after(tmp_path / "cut", strategy, world, task, steps=8, until=4, **options)
    resumed = tt.train(task, strategy, resume=tmp_path / "cut", progress=False)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert newest(whole.out, "workers") == newest(resumed.out, "workers")
    assert any(name.startswith("1/optimizer/") for name in load_file(path_of(whole.out, "workers")))


def path_of(out: Path, part: str) -> Path:
    return max((out / "checkpoints").glob("step-*")) / f"{part}.safetensors"


def newest(out: Path, part: str) -> bytes:
    return path_of(out, part).read_bytes()


def stopped_after(out: Path, strategy: tt.Strategy, world: str, task: tt.Task, until: int, **options: Any) -> None:
    """A run of which nothing is left but what it had saved by then."""
    train(out, strategy, world, task, **options)
    (out / "records.jsonl").write_text("")
    for checkpoint in (out / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > until:
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()


# -- a pipeline -------------------------------------------------------------------------------------------------------
@both_worlds
def test_a_pipeline_of_two_stages_is_plain_training(world: str, tmp_path: Path) -> None:
    task = load_task("digits-mlp")
    model = fresh(task)
    assert isinstance(model, nn.Sequential)
    options = {"lr": task.optimizer.lr, **task.optimizer.options}
    plain = plain_loop(task, task.optimizer.kind(model.parameters(), **options), model, 4 * task.batch_size, steps=12)
    result = train(tmp_path / "run", probes.TwoStages(), world, workers=2, steps=12)
    assert_equal_models(result.model, plain)


# -- a coordinator ----------------------------------------------------------------------------------------------------
@both_worlds
def test_a_coordinator_deals_portions(world: str, tmp_path: Path) -> None:
    task = load_task("digits-mlp")
    model = fresh(task)
    options = {"lr": task.optimizer.lr, **task.optimizer.options}
    plain = plain_loop(task, task.optimizer.kind(model.parameters(), **options), model, 6 * task.batch_size, steps=7)
    result = train(tmp_path / "run", probes.Coordinated(), world, workers=3, steps=7)
    assert_equal_models(result.model, plain)
    assert result.summary.steps == 7


def test_a_coordinator_survives_the_deaths_of_workers(tmp_path: Path) -> None:
    cluster = {
        "compute": {"seconds_per_sample": 1e-3},
        "faults": [{"kind": "crash", "worker": 1, "at": 0.3}, {"kind": "crash", "worker": 2, "at": 0.9, "lasts": 0.4}],
    }
    calm = train(tmp_path / "calm", probes.Coordinated(), "sim", workers=3, steps=12)
    result = train(tmp_path / "run", probes.Coordinated(), "sim", workers=3, steps=12, cluster=cluster)
    events = [r.event for r in result.history if isinstance(r, Event)]
    assert events.count("worker_lost") == 2 and events.count("worker_joined") == 1
    assert result.summary.samples == calm.summary.samples
    assert_equal_models(result.model, calm.model)


# -- servers with a state of the strategy's own -----------------------------------------------------------------------
@both_worlds
def test_what_servers_keep_for_a_strategy_is_saved_and_resumed(world: str, tmp_path: Path) -> None:
    task, strategy, options = load_task("digits-mlp"), probes.Averaging(), {"workers": 1, "servers": 2}
    whole = train(tmp_path / "whole", strategy, world, task, steps=12, evaluate_every=4, **options)
    stopped_after(tmp_path / "cut", strategy, world, task, steps=12, evaluate_every=4, until=8, **options)
    resumed = tt.train(task, strategy, resume=tmp_path / "cut", progress=False)
    assert newest(whole.out, "optimizer") == newest(resumed.out, "optimizer")
    states = load_file(path_of(whole.out, "optimizer"))
    averages = [tensor for name, tensor in states.items() if name.endswith("/average")]
    assert averages and all(tensor.abs().sum() > 0 for tensor in averages)


def test_what_servers_keep_for_a_strategy_survives_a_server(tmp_path: Path) -> None:
    crash = {"compute": {"seconds_per_sample": 1e-3}, "faults": [{"kind": "crash", "server": 0, "at": 0.2}]}
    options = {"workers": 1, "servers": 2, "steps": 20}
    calm = train(tmp_path / "calm", probes.Averaging(), "sim", **options)
    result = train(tmp_path / "run", probes.Averaging(), "sim", cluster=crash, **options)
    assert [r.event for r in result.history if isinstance(r, Event)].count("server_lost") == 1
    assert newest(calm.out, "optimizer") == newest(result.out, "optimizer")


# -- real processes, really killed ------------------------------------------------------------------------------------
def killed(begin: Callable[..., Run], kind: str, role: str, *options: object) -> Run:
    """A run of a probe of which one process is killed in the middle, and which uses every sample once all the same."""
    run = begin("digits-mlp", "--strategy", f"{Path(probes.__file__)}:{kind}", "--epochs", 10, *options)
    run.until_training(step=10)
    run.kill(role)
    assert run.wait(90) == 0, run.said()
    summary = run.records()[-1]
    assert isinstance(summary, Summary) and summary.samples == 10 * 1350
    assert summary.value is not None and summary.value > 0.9
    return run


def test_a_coordinator_survives_a_killed_worker(start: Callable[..., Run]) -> None:
    run = killed(start, "Coordinated", "tt-worker-1", "--workers", "3", "--set", "restart=true")
    assert [event.worker for event in run.events("worker_lost")] == [1]


def test_a_killed_coordinator_goes_on_from_its_state(start: Callable[..., Run]) -> None:
    run = killed(start, "Coordinated", "tt-coord-0", "--workers", "2")
    assert len(run.events("coordinator_lost")) == 1


def test_what_servers_keep_for_a_strategy_survives_a_killed_server(start: Callable[..., Run]) -> None:
    run = killed(start, "Averaging", "tt-server-0", "--workers", "1", "--servers", "2")
    assert len(run.events("server_lost")) == 1
    states = load_file(path_of(run.out, "optimizer"))
    assert all(tensor.abs().sum() > 0 for name, tensor in states.items() if name.endswith("/average"))
