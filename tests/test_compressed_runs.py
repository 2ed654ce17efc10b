"""Runs whose gradients are compressed: golden equivalences, counted bytes, deaths, resumption; off is as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torrential as tt
from tests.killing import Killing
from tests.test_averaging import SAMPLES, task, train
from tests.test_equivalence import TOLERANCE, assert_equal_models
from torrential import checkpoint as checkpoints
from torrential.comm.protocol import slices
from torrential.compression import int8
from torrential.compression.sparse import message_bytes, room, wanted
from torrential.compression.wire import wire_dtype
from torrential.records import Event, Step

STEPS = 10
COMPRESSORS = ["topk", "dgc", "powersgd", "int8"]
WEIGHTS, BIASES = (16 * 6, 3 * 16), (16, 3)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def made(out: Path, *, of: tt.Task | None = None, **options: Any) -> tt.TrainResult:
    given = {"steps": STEPS, "epochs": 9} if "epochs" not in options else {}
    momentum = tt.optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=0.01)
    return train("allreduce", out, of or task(momentum, model=model), **given | options)


def by_worker(result: tt.TrainResult) -> list[int]:
    """The bytes that each worker has sent."""
    steps = [record for record in result.history if isinstance(record, Step) and record.of_worker]
    return [max(s.bytes_sent for s in steps if s.worker == worker) for worker in sorted({s.worker for s in steps})]


# -- equivalences -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize(
    "options",
    [
        {"compress": "topk", "ratio": 1.0},
        {"compress": "dgc", "ratio": 1.0, "momentum_masking": False},
        {"compress": "dgc", "ratio": 1.0, "momentum_correction": False},
        {"compress": "powersgd", "rank": 16},  # no factors are smaller
    ],
    ids=str,
)
def test_a_compressor_that_sends_everything_changes_nothing(
    options: dict[str, Any], world: str, tmp_path: Path
) -> None:
    """Momentum and weight decay of every worker by itself included."""
    plain = made(tmp_path / "plain", world=world)
    sent = made(tmp_path / "sent", world=world, **options)
    assert_equal_models(sent.model, plain.model, TOLERANCE)


def test_nesterovs_momentum_is_corrected_too(tmp_path: Path) -> None:
    nesterov = task(tt.optimizer("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01), model=model)
    plain = made(tmp_path / "plain", of=nesterov)
    sent = made(tmp_path / "sent", of=nesterov, compress="dgc", ratio=1.0, momentum_masking=False)
    assert_equal_models(sent.model, plain.model, TOLERANCE)


def test_with_masking_and_everything_sent_matrices_have_no_momentum(tmp_path: Path) -> None:
    matrices = [("*.weight", {"momentum": 0.0})]
    without = task(tt.optimizer("sgd", lr=0.1, momentum=0.9, groups=matrices), model=model)
    plain = made(tmp_path / "plain", of=without)
    sgd = task(tt.optimizer("sgd", lr=0.1, momentum=0.9), model=model)
    masked = made(tmp_path / "masked", of=sgd, compress="dgc", ratio=1.0)
    assert_equal_models(masked.model, plain.model, TOLERANCE)


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"wire": "bf16"}, 2e-2), ({"wire": "fp16"}, 2e-3), ({"compress": "int8"}, 2e-2)],
    ids=str,
)
def test_fewer_bits_are_about_the_same(options: dict[str, Any], tolerance: float, world: str, tmp_path: Path) -> None:
    plain = made(tmp_path / "plain", world=world)
    rounded = made(tmp_path / "rounded", world=world, **options)
    assert_equal_models(rounded.model, plain.model, tolerance)
    with pytest.raises(AssertionError):
        assert_equal_models(rounded.model, plain.model, 0.0)


def test_off_is_bit_for_bit_what_it_is_without(tmp_path: Path) -> None:
    plain = made(tmp_path / "plain", world="local")
    off = made(tmp_path / "off", world="local", compress="none", wire="float32", ratio=0.5)
    assert_equal_models(off.model, plain.model, 0.0)
    assert by_worker(off) == by_worker(plain)


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_both_worlds_and_all_carriers_give_the_same_bits(compress: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"compress": compress, "ratio": 0.05, "rank": 1, "workers": 3}
    there = made(tmp_path / "sim", world="sim", **options)
    for transport in ("shared", "unix"):
        here = made(tmp_path / transport, world="local", transport=transport, **options)
        assert_equal_models(here.model, there.model, TOLERANCE)


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_what_is_kept_back_is_learnt_in_the_end(compress: str, tmp_path: Path) -> None:
    compressed = made(tmp_path / "run", epochs=12, compress=compress, ratio=0.05, rank=1)
    assert compressed.summary.value > 0.7


# -- bytes ------------------------------------------------------------------------------------------------------------
def vote() -> int:
    """A member's vote: loss, samples, stop, norm, and whether each of four parameters was reached, as float64."""
    return 8 * (3 + 1 + 4)


def per_step(out: Path, **options: Any) -> float:
    """The bytes that all workers together send in a step; what is sent before the first one is not counted."""
    short, long = (sum(by_worker(made(out / str(n), steps=n, epochs=9, **options))) for n in (STEPS, 2 * STEPS))
    return (long - short) / STEPS


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_the_bytes_of_sparse_messages_are_counted_exactly(wire: str, workers: int, tmp_path: Path) -> None:
    found = per_step(tmp_path, workers=workers, compress="topk", ratio=0.01, wire=wire, algorithm="direct")
    counts, dtype = [wanted(numel, 0.01) for numel in WEIGHTS], wire_dtype(wire, torch.float32)
    message = message_bytes(room(sum(counts), sum(WEIGHTS)), dtype)
    assert message == 4 + (1 + 1) * (2 + dtype.itemsize)
    others = workers - 1
    assert found == others * (workers * (message + vote()) + 2 * sum(BIASES) * dtype.itemsize)


def test_vectors_are_summed_where_messages_would_be_more(tmp_path: Path) -> None:
    """Half of all elements, to two others, are three bytes for each element; a sum sends 8/3."""
    numel = sum(WEIGHTS) + sum(BIASES)
    found = per_step(tmp_path, workers=3, compress="topk", ratio=0.5, algorithm="direct")
    assert found == 2 * (3 * vote() + 2 * 4 * numel)


def test_the_bytes_of_factors_are_counted_exactly(tmp_path: Path) -> None:
    factors = (16 + 6) + (3 + 16)
    found = per_step(tmp_path, compress="powersgd", rank=1, algorithm="direct")
    assert found == 2 * vote() + 2 * 4 * (factors + sum(BIASES))


def test_the_bytes_of_int8_are_counted_exactly(tmp_path: Path) -> None:
    lengths = [stop - start for start, stop in slices(sum(WEIGHTS) + sum(BIASES), 2)]
    sent = sum(int8.message_bytes(length) for length in lengths) + 2 * int8.message_bytes(max(lengths))
    assert per_step(tmp_path, compress="int8") == 2 * vote() + sent


def test_half_precision_halves_the_bytes(tmp_path: Path) -> None:
    whole, half = (
        per_step(tmp_path / wire, wire=wire, algorithm="direct") - 2 * vote() for wire in ("float32", "fp16")
    )
    assert whole == 2 * half > 0


# -- deaths, resumption -----------------------------------------------------------------------------------------------
FAULTS = [{"kind": "crash", "worker": 1, "at": 0.1, "lasts": 0.05}, {"kind": "crash", "worker": 0, "at": 0.21}]


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_deaths_are_survived_and_repeat_to_the_byte(compress: str, tmp_path: Path) -> None:
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "detection": 0.02, "faults": FAULTS}
    runs = [
        made(tmp_path / str(i), workers=3, epochs=6, cluster=cluster, compress=compress, ratio=0.05, rank=1)
        for i in range(2)
    ]
    events = [record.event for record in runs[0].history if isinstance(record, Event)]
    assert events.count("worker_lost") == 2 and events.count("worker_joined") == 1
    assert runs[0].summary.samples == 6 * SAMPLES
    assert_equal_models(runs[0].model, runs[1].model, 0.0)


@pytest.mark.parametrize("compress", COMPRESSORS)
def test_a_killed_worker_costs_what_it_had_not_sent_and_no_more(compress: str, tmp_path: Path) -> None:
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Step) and record.step >= 5)
    options: dict[str, Any] = {"compress": compress, "ratio": 0.05, "rank": 1, "restart": True}
    run = made(tmp_path / "run", world="local", workers=3, epochs=30, listeners=[killing], **options)
    assert killing.killed.is_set() and run.summary.samples == 30 * SAMPLES
    assert "worker_lost" in [record.event for record in run.history if isinstance(record, Event)]


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize("compress", COMPRESSORS)
def test_a_resumed_run_is_the_same_bit_for_bit(compress: str, world: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"compress": compress, "ratio": 0.05, "rank": 1, "world": world, "sparsity_warmup": 1.5}
    options["of"] = of = task(tt.optimizer("sgd", lr=0.1, momentum=0.9), model=model)
    through = made(tmp_path / "through", epochs=4, **options)
    made(tmp_path / "parts", epochs=2, **options)
    resumed = tt.train(of, resume=tmp_path / "parts", epochs=4, progress=False)
    assert resumed.summary.steps == through.summary.steps
    assert_equal_models(resumed.model, through.model, 0.0)
    saved, _ = checkpoints.latest(tmp_path / "parts" / "checkpoints")
    assert saved is not None
    kinds = {name.split("/")[2] for name in saved.workers if name.startswith("0/compression/")}
    assert kinds == ({"residual", "momentum"} if compress == "dgc" else {"residual"})


def test_without_gradients_every_byte_is_sent_all_the_same(tmp_path: Path) -> None:
    for compress in COMPRESSORS:
        options: dict[str, Any] = {"compress": compress, "ratio": 0.05, "rank": 1, "sparsity_warmup": 0.0}
        on = per_step(tmp_path / f"{compress}-on", **options)
        assert per_step(tmp_path / f"{compress}-off", gradients="off", **options) == on, compress
