"""What every strategy promises, in every world: table-driven, so that a new strategy or world is held to it at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import torrential as tt
from tests.test_equivalence import TOLERANCE, assert_equal_models, fresh, half_loop, half_task, plain_loop
from torrential.comm.protocol import SERVERS
from torrential.errors import BadInput
from torrential.records import Evaluation, Step
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers
from torrential.tasks import load_task

pytestmark = pytest.mark.timeout(120)

WORLDS: dict[str, dict[str, Any]] = {"local": {}, "sim": {"cluster": {"compute": {"seconds_per_sample": 1e-3}}}}
EPOCHS, SAMPLES = 2, 1350
PLAIN: dict[str, dict[str, Any]] = {  # options with which one worker does what a plain loop does
    "allreduce": {},
    "bsp": {},
    "ssp": {},
    "backup": {"backups": 0},
    "downpour": {"server": "task"},
    "local": {"period": 1},
    "adacomm": {"period": 1},
    "diloco": {"period": 1, "outer_rate": 1.0, "outer_momentum": 0.0},
    "streaming": {"period": 1, "fragments": 1, "own": 1.0},
    "hogwild": {},
    "pipeline": {"microbatches": 1},
    "tensor": {},
    "pipedream": {},
    "ddp": {},
}  # sandblaster chooses its steps by itself
JOINED: dict[str, dict[str, Any]] = {  # ... and with which many are one with a large batch
    "allreduce": {},
    "bsp": {},
    "ssp": {"staleness": 0},
    "backup": {"backups": 0},
    "local": {"period": 1},
    "adacomm": {"period": 1},
    "diloco": {"period": 1, "outer_rate": 1.0, "outer_momentum": 0.0},
    "pipeline": {"stages": 1, "microbatches": 4},
    "tensor": {"ways": 1},
    "pipedream": {"stages": 1},
    "ddp": {},
}


def pairs(strategies: Iterable[str]) -> list[tuple[str, str]]:
    """Each of the strategies in each world that it runs in."""
    return [(name, world) for name in strategies for world in STRATEGIES[name].worlds if world in WORLDS]


def train(
    out: Path, world: str, strategy: str, workers: int, task: tt.Task | str = "digits-mlp", **options: Any
) -> tt.TrainResult:
    served = {"servers": 2} if needs_servers(STRATEGIES[strategy]) else {}
    given = WORLDS[world] | served | {"device": "cpu", "progress": False} | options
    return tt.train(task, strategy, workers=workers, world=world, out=out, **given)


@pytest.fixture(scope="module")
def task() -> tt.Task:
    return load_task("digits-mlp")


def plain(task: tt.Task, batch: int, steps: int) -> nn.Module:
    model = fresh(task)
    return plain_loop(task, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, batch, steps=steps)


def test_the_table_is_complete() -> None:
    """Of elastic averaging the centre is evaluated, which takes no steps of its own; clients begin every round anew."""
    assert PLAIN.keys() == {name for name, kind in STRATEGIES.items() if kind.uses_rate} - {"easgd", "fedavg"}


@pytest.fixture(scope="module", params=pairs(STRATEGIES), ids="-".join)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tt.TrainResult:
    strategy, world = request.param
    return train(tmp_path_factory.mktemp("run") / "run", world, strategy, workers=2, epochs=EPOCHS)


def test_every_sample_is_used_once_per_epoch(result: tt.TrainResult) -> None:
    assert result.summary.samples == EPOCHS * SAMPLES


def test_validation_decides_and_test_data_is_read_once(result: tt.TrainResult) -> None:
    evaluations = [r for r in result.history if isinstance(r, Evaluation)]
    due = EPOCHS if STRATEGIES[result.summary.strategy].uses_rate else result.summary.steps  # steps of many epochs
    kind, real = STRATEGIES[result.summary.strategy], result.summary.world == "local"
    least = 1 if needs_servers(kind) and real else due  # copies of servers may be under way when the run ends
    assert [e.split for e in evaluations] == ["validation"] * (len(evaluations) - 1) + ["test"]
    assert least < len(evaluations) <= due + 1
    assert [e.step for e in evaluations] == sorted(e.step for e in evaluations)
    assert evaluations[-1].step == result.summary.steps
    assert evaluations[-1].value == result.summary.value


def test_the_checkpoint_is_what_was_evaluated(result: tt.TrainResult, task: tt.Task) -> None:
    newest = max((result.out / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{result.summary.steps:08d}"
    model = task.model()
    model.load_state_dict(load_file(newest / "model.safetensors"))
    inputs, targets = (torch.stack(column) for column in zip(*task.test, strict=True))
    right = (model.eval()(inputs).argmax(1) == targets).float().mean()
    assert float(right) == pytest.approx(result.summary.value, abs=1e-6)


def test_workers_say_where_their_time_went(result: tt.TrainResult) -> None:
    steps = [r for r in result.history if isinstance(r, Step)]
    assert {s.worker for s in steps if s.worker < SERVERS} == {0, 1}
    for worker in (0, 1):
        mine = [s for s in steps if s.worker == worker]
        assert [s.time for s in mine] == sorted(s.time for s in mine)
        assert min(min(s.compute, s.communicate, s.wait) for s in mine) > -1e-9  # differences, which are rounded
        assert 0 < sum(s.compute + s.communicate + s.wait for s in mine) <= 1.001 * mine[-1].time
        assert sum(s.compute for s in mine) > 0


@pytest.mark.parametrize(("strategy", "world"), pairs(PLAIN))
def test_one_worker_is_a_plain_loop(strategy: str, world: str, task: tt.Task, tmp_path: Path) -> None:
    alone = train(tmp_path / "run", world, strategy, 1, steps=20, lr=0.05, **PLAIN[strategy])
    assert alone.summary.steps == 20
    assert_equal_models(alone.model, plain(task, task.batch_size, 20), TOLERANCE)


@pytest.mark.parametrize(("strategy", "world"), pairs(PLAIN))
def test_one_worker_is_a_plain_loop_in_half_precision(strategy: str, world: str, tmp_path: Path) -> None:
    task = half_task(torch.bfloat16)
    alone = train(tmp_path / "run", world, strategy, 1, task, steps=20, **PLAIN[strategy])
    assert_equal_models(alone.model, half_loop(task, task.batch_size), 0.0)


@pytest.mark.parametrize(("strategy", "world"), pairs(JOINED))
def test_workers_that_wait_for_one_another_are_one_large_batch(
    strategy: str, world: str, task: tt.Task, tmp_path: Path
) -> None:
    together = train(tmp_path / "run", world, strategy, 3, steps=20, batch_size=16, lr=0.05, **JOINED[strategy])
    assert together.summary.samples == 20 * 48
    assert_equal_models(together.model, plain(task, 48, 20), TOLERANCE)


@pytest.mark.parametrize("strategy", ["allreduce", "bsp", "ssp", "backup"])
def test_the_short_batch_that_ends_an_epoch_is_a_step_of_its_own(strategy: str, task: tt.Task, tmp_path: Path) -> None:
    together = train(tmp_path / "run", "sim", strategy, 3, epochs=2, batch_size=17, lr=0.05, **JOINED[strategy])
    assert SAMPLES % 51 and together.summary.steps == 2 * (SAMPLES // 51 + 1)
    assert_equal_models(together.model, plain(task, 51, together.summary.steps), TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_compressed_or_the_reason_is_given(strategy: str, tmp_path: Path) -> None:
    kind = STRATEGIES[strategy]
    how = {"backups": 0} if strategy == "backup" else {}
    options: dict[str, Any] = {"compress": "topk", "ratio": 0.1, "steps": 3} | how
    world = kind.worlds[-1]
    if not kind.uncompressed:
        assert train(tmp_path / "run", world, strategy, 2, **options).summary.steps >= 3
        return
    with pytest.raises(BadInput) as refused:
        train(tmp_path / "run", world, strategy, 2, **options)
    assert f"{strategy} cannot compress gradients (compress: topk): {kind.uncompressed}; use" in str(refused.value)
