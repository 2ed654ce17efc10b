"""Runs of strategies that average, elastically, federated or in turn: stopped and gone on with, they end in the same
bits as runs that were not stopped, in both worlds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torrential as tt
from tests.test_averaging import data, task

SAMPLES = 90  # of three workers with batches of 4: epochs end with an uneven batch
MOMENTUM = tt.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = tt.optimizer(torch.optim.AdamW, lr=0.01)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


CLIENTS = {"partition": tt.partition(7, alpha=0.5)}
CASES: dict[str, tuple[tt.Strategy, dict[str, Any]]] = {
    "local": (tt.Local(period=3), {}),
    "local keep": (tt.Local(period=3, inner="keep"), {}),
    "local reset": (tt.Local(period=3, inner="reset"), {}),
    "local average": (tt.Local(period=3, inner="average", outer_momentum=0.4, outer_rate=0.9), {}),
    "adacomm": (tt.AdaComm(period=6, interval=0.4), {}),
    "adacomm keep": (tt.AdaComm(period=6, interval=0.7, inner="keep"), {}),
    "adacomm reset": (tt.AdaComm(period=6, interval=0.7, inner="reset"), {}),
    "diloco": (tt.DiLoCo(period=3), {}),
    "diloco half": (tt.DiLoCo(period=3, half=True), {}),
    "streaming": (tt.StreamingDiLoCo(period=4, fragments=2), {}),
    "streaming own": (tt.StreamingDiLoCo(period=6, fragments=3, own=0.2, outer_rate=0.5), {}),
    "easgd": (tt.Easgd(period=2, waits=True), {}),
    "eamsgd": (tt.Easgd(period=2, waits=True, momentum=0.7, beta=0.6), {}),
    "fedavg": (tt.FedAvg(clients=7), {}),
    "fedavg sampled": (tt.FedAvg(sampled=3, local_epochs=2), CLIENTS),
    "fedavg steps": (tt.FedAvg(share=0.5, local_steps=2), CLIENTS),
    "hogwild": (tt.Hogwild(period=5, turns="step"), {}),
}


def make(name: str, kind: str) -> tt.Task:
    """`normed`: a model that has statistics of its own, and draws; with a rate that falls."""
    options: dict[str, Any] = {"train": data(SAMPLES), "epochs": 3} | CASES[name][1]
    if kind == "adam":
        return task(ADAM, **options)
    return task(MOMENTUM, model=normed, schedule=lambda done: 1.0 - 0.5 * done, **options)


def checkpoint(out: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint."""
    newest = max((out / "checkpoints").glob("step-*"))
    files = sorted(newest.glob("*.safetensors"))
    return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("world", "kind"), [("sim", "adam"), ("sim", "normed"), ("local", "normed")])
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_goes_on_ends_in_the_same_bits(name: str, world: str, kind: str, tmp_path: Path) -> None:
    """From a checkpoint amid the run: what came after it is removed, as if all processes had been killed then."""
    of, strategy = make(name, kind), CASES[name][0]
    servers: dict[str, Any] = {"servers": 2} if isinstance(strategy, tt.Easgd) else {}
    out = tmp_path / "run"
    tt.train(of, strategy, workers=3, seed=3, world=world, out=out, progress=False, **servers)
    whole, saved = checkpoint(out), sorted((out / "checkpoints").glob("step-*"))
    assert len(saved) > 1
    for later in saved[1:]:
        shutil.rmtree(later)
    tt.train(of, strategy, resume=out, progress=False)
    found = checkpoint(out)
    assert found.keys() == whole.keys()
    assert {n: (t, whole[n]) for n, t in found.items() if not torch.equal(t, whole[n])} == {}
