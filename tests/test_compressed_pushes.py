"""Servers that are pushed compressed gradients: the same steps as without servers, counted bytes, deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torrential as tt
from tests.test_averaging import SAMPLES, task, train
from tests.test_compressed_runs import BIASES, STEPS, WEIGHTS, model
from tests.test_equivalence import TOLERANCE, assert_equal_models
from torrential.compression.sparse import message_bytes, wanted
from torrential.optimizers import OptimizerSpec, optimizer
from torrential.records import Event, Step
from torrential.server.encoding import idle_at_zero

PLAIN: dict[str, dict[str, Any]] = {"bsp": {}, "ssp": {"staleness": 0}, "backup": {"backups": 0}}


def sgd(**options: Any) -> OptimizerSpec:
    return optimizer("sgd", **{"lr": 0.1} | options)


def made(out: Path, strategy: str, spec: OptimizerSpec | None = None, **options: Any) -> tt.TrainResult:
    steps = {} if "epochs" in options else {"steps": STEPS, "epochs": 9}
    given = steps | ({} if strategy == "allreduce" else {"servers": 2})
    return train(strategy, out, task(spec or sgd(), model=model), **given | options)


@pytest.mark.parametrize("strategy", PLAIN)
@pytest.mark.parametrize(
    "spec",
    [sgd(), sgd(momentum=0.9, weight_decay=0.01), optimizer("adam", lr=0.01)],
    ids=["sgd", "momentum and decay", "adam"],
)
@pytest.mark.parametrize("compress", ["topk", "dgc"])
def test_servers_take_the_steps_of_allreduce(compress: str, spec: OptimizerSpec, strategy: str, tmp_path: Path) -> None:
    """Also where elements that are not sent are moved by momentum or decay."""
    options: dict[str, Any] = {"compress": compress, "ratio": 0.1}
    together = made(tmp_path / "allreduce", "allreduce", spec, **options)
    served = made(tmp_path / "served", strategy, spec, **PLAIN[strategy], **options)
    assert_equal_models(served.model, together.model, 1e-5 if spec.kind is torch.optim.Adam else TOLERANCE)


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize(("strategy", "more"), [("downpour", {"workers": 1}), ("bsp", {})], ids=["downpour", "bsp"])
def test_pushes_of_everything_change_nothing(strategy: str, more: dict[str, Any], world: str, tmp_path: Path) -> None:
    plain = made(tmp_path / "plain", strategy, world=world, **more)
    sent = made(tmp_path / "sent", strategy, world=world, compress="topk", ratio=1.0, **more)
    assert_equal_models(sent.model, plain.model, TOLERANCE)


def test_pushes_in_half_precision_are_about_the_same(tmp_path: Path) -> None:
    plain = made(tmp_path / "plain", "bsp")
    half = made(tmp_path / "half", "bsp", wire="bf16")
    assert_equal_models(half.model, plain.model, 2e-2)
    with pytest.raises(AssertionError):
        assert_equal_models(half.model, plain.model, 0.0)


def pushed(out: Path, **options: Any) -> float:
    """The bytes that a worker sends in a step, to two servers together."""
    totals = []
    for steps in (STEPS, 2 * STEPS):
        result = made(out / str(steps), "bsp", steps=steps, epochs=9, **options)
        sent = [s.bytes_sent for s in result.history if isinstance(s, Step) and s.worker == 1]
        totals.append(max(sent))
    return (totals[1] - totals[0]) / STEPS


def test_the_bytes_of_pushes_are_counted_exactly(tmp_path: Path) -> None:
    elements = sum(wanted(numel, 0.05) for numel in WEIGHTS) + sum(BIASES)
    assert pushed(tmp_path / "topk", compress="topk", ratio=0.05) == 4 + message_bytes(elements, torch.float32)
    assert pushed(tmp_path / "fp16", compress="topk", ratio=0.05, wire="fp16") == 4 + message_bytes(
        elements, torch.float16
    )
    dense = pushed(tmp_path / "dense")
    assert pushed(tmp_path / "half", wire="bf16") * 2 == dense


@pytest.mark.parametrize("strategy", ["bsp", "ssp", "downpour"])
def test_deaths_of_workers_and_servers_are_survived(strategy: str, tmp_path: Path) -> None:
    faults = [
        {"kind": "crash", "worker": 1, "at": 0.1, "lasts": 0.05},
        {"kind": "crash", "server": 1, "at": 0.15, "lasts": 0.05},
    ]
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "detection": 0.02, "faults": faults}
    runs = [
        made(tmp_path / str(i), strategy, workers=3, epochs=6, cluster=cluster, compress="dgc", ratio=0.05)
        for i in range(2)
    ]
    events = [record.event for record in runs[0].history if isinstance(record, Event)]
    assert events.count("worker_lost") == 1 and events.count("server_lost") == 1
    assert runs[0].summary.samples >= 6 * SAMPLES
    assert_equal_models(runs[0].model, runs[1].model, 0.0)


@pytest.mark.parametrize(("compress", "world"), [("topk", "sim"), ("dgc", "sim"), ("dgc", "local")])
def test_a_resumed_run_is_the_same_bit_for_bit(compress: str, world: str, tmp_path: Path) -> None:
    """What stays behind is every worker's own part of checkpoints, also of those that are made amid the run."""
    options: dict[str, Any] = {"compress": compress, "ratio": 0.05, "world": world, "sparsity_warmup": 1.5}
    of = task(sgd(momentum=0.9), model=model)
    through = made(tmp_path / "through", "bsp", of.optimizer, epochs=3, keep_best=9, **options)
    made(tmp_path / "parts", "bsp", of.optimizer, epochs=2, **options)
    resumed = tt.train(of, resume=tmp_path / "parts", epochs=3, progress=False)
    assert resumed.summary.steps == through.summary.steps
    assert_equal_models(resumed.model, through.model, 0.0)
    kinds = {"residual", "pushes"} | ({"momentum"} if compress == "dgc" else set())
    amid, last = (saved_of(tmp_path / name, through.summary.steps * 2 // 3) for name in ("through", "parts"))
    assert {tuple(name.split("/")[:3]) for name in last} == {(w, "compression", k) for w in "01" for k in kinds}
    assert amid.keys() == last.keys() and all(torch.equal(tensor, last[name]) for name, tensor in amid.items())


def saved_of(out: Path, step: int) -> dict[str, torch.Tensor]:
    """What the checkpoint of a step has of the workers' own."""
    return load_file(out / "checkpoints" / f"step-{step:08d}" / "workers.safetensors")


def test_what_is_left_alone_by_a_gradient_of_zero() -> None:
    assert idle_at_zero(sgd()) and idle_at_zero(optimizer("adagrad", lr=0.1))
    for moved in (
        *(sgd(momentum=0.9), sgd(weight_decay=0.1), optimizer("adam", lr=0.1)),
        *(optimizer("adagrad", lr=0.1, lr_decay=0.1), optimizer("rmsprop", lr=0.1)),
    ):
        assert not idle_at_zero(moved)
