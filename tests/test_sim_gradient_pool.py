"""Processes that compute gradients beside a simulation: whatever becomes of them, the run is the same to the byte."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential import checkpoint as checkpoints
from torrential.errors import BadInput, RunFailed, WorkerFailed
from torrential.records import RECORDS
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers
from torrential.worlds.sim import world
from torrential.worlds.sim.gradient_pool import GradientPool

FAST: dict[str, Any] = {"compute": {"seconds_per_sample": 1e-3, "spread": "lognormal"}, "detection": 0.05}
CRASH = {"kind": "crash", "worker": 2, "at": 0.2, "lasts": 0.2}


class Fickle(nn.Module):
    """All that could differ elsewhere: randomness of three kinds, buffers, a frozen parameter, one that is not always
    used, and weights in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm, self.drop = nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.head, self.rare = nn.Linear(4 * 64, 10), nn.Linear(10, 10)
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        noise = random.random() + np.random.rand()
        found = self.head(self.drop(F.relu(self.norm(self.conv(images)))).flatten(1)) * self.frozen
        return found + 0.01 * noise + (self.rare(found) if noise > 1 else 0)


def fickle(loss: Any = F.cross_entropy) -> tt.Task:
    data = TensorDataset(torch.randn(240, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(240) % 10)
    return tt.Task(name="fickle", model=Fickle, loss=loss, train=data, validation=data, test=data, batch_size=10)


class Ready(GradientPool):
    """Here before the first work."""

    made: list[Ready]

    def _start(self, model: nn.Module) -> None:
        super()._start(model)
        if self in self.made:
            return
        self.made.append(self)
        limit = time.monotonic() + 60
        while not all(helper.free for helper in self._helpers.values()):
            assert time.monotonic() < limit, "helpers do not start"
            self._collect(1.0)


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ready]]:
    Ready.made = []
    monkeypatch.setattr(world, "GradientPool", Ready)
    yield Ready.made
    for helpers in Ready.made:
        assert not helpers._helpers  # closed with the run


def simulate(out: Path, strategy: str, task: Any = None, **options: Any) -> Any:
    return tt.train(
        task or fickle(),
        strategy,
        workers=4,
        servers=2 if needs_servers(STRATEGIES[strategy]) else None,
        world="sim",
        out=out,
        device="cpu",
        progress=False,
        **{"epochs": 3, "cluster": FAST | {"faults": [CRASH]}} | options,
    )


def same(one: Any, other: Any) -> bool:
    found = []
    for result in (one, other):
        latest, _ = checkpoints.latest(result.out / "checkpoints")
        assert latest is not None
        records = (result.out / RECORDS).read_text().replace(str(result.out), "")
        found.append(({name: value.tolist() for name, value in latest.model.items()}, records))
    return found[0] == found[1]


@pytest.mark.parametrize(
    "strategy",
    [name for name, k in STRATEGIES.items() if "sim" in k.worlds and k.uses_rate and k().has_whole_model()],
)
def test_the_same_to_the_byte_with_any_number(strategy: str, tmp_path: Path, ready: list[Ready]) -> None:
    alone = simulate(tmp_path / "alone", strategy)
    helped = simulate(tmp_path / "helped", strategy, processes=2)
    assert ready[0].done > 10, "helpers did nothing"
    assert same(alone, helped)


def test_several_portions_a_step(tmp_path: Path, ready: list[Ready]) -> None:
    options = {"accumulate": 3, "cluster": FAST}
    alone = simulate(tmp_path / "alone", "allreduce", **options)
    assert same(alone, simulate(tmp_path / "helped", "allreduce", processes=1, **options)) and ready[0].done


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_dead_or_hung_one_had_begun_is_computed_here(
    sign: signal.Signals, tmp_path: Path, ready: list[Ready], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = GradientPool.begin

    def strike(self: GradientPool, work: Any) -> Any:
        job = begin(self, work)
        if self.done > 5 and job.helper is not None and not struck:
            struck.append(job.helper._process.pid)
            os.kill(struck[0], sign)
        return job

    struck: list[int] = []
    monkeypatch.setattr(GradientPool, "begin", strike)
    options = {"timeout": 1.0, "cluster": FAST}
    alone = simulate(tmp_path / "alone", "ssp", **options)
    assert same(alone, simulate(tmp_path / "helped", "ssp", processes=2, **options))
    assert struck and not psutil.pid_exists(struck[0]) and ready[0].done > 5


def test_an_error_is_the_same_error(tmp_path: Path, ready: list[Ready]) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ValueError("no such loss")
        return F.cross_entropy(outputs, targets)

    for processes in (0, 2):
        with pytest.raises(
            WorkerFailed, match=r"^worker \d failed at step 1: the task's loss raised ValueError: no such loss \("
        ):
            simulate(tmp_path / str(processes), "allreduce", fickle(loss), processes=processes)


class AtHome(nn.Linear):
    """Cannot be built in another process."""

    def __init__(self) -> None:
        if os.getpid() != int(os.environ.get("TEST_HOME", "0")):
            raise OSError("not at home")
        super().__init__(64, 10)


def test_a_task_that_others_cannot_build(tmp_path: Path, ready: list[Ready], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_HOME", str(os.getpid()))
    data = TensorDataset(torch.randn(64, 64), torch.arange(64) % 10)
    task = tt.Task(name="home", model=AtHome, loss=F.cross_entropy, train=data, validation=data, test=data)
    with pytest.raises(
        RunFailed, match=r"in another process: the task's model factory raised OSError: not at home \(.*\); leave"
    ):
        simulate(tmp_path / "run", "allreduce", task, processes=1, batch_size=4, cluster=FAST)


class Replacing(nn.Module):
    """Puts another buffer, of another type, in the place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("seen", torch.tensor(0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen * 0.9 + inputs.mean().detach()
        return self.layer(inputs) * (1 + self.seen)


class Overlapping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)
        whole = torch.zeros(4)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[:2])


class AnotherThere(nn.Sequential):
    def __init__(self) -> None:
        smaller = os.getpid() != int(os.environ.get("TEST_HOME", "0"))
        super().__init__(nn.Linear(64, 5 if smaller else 50), nn.Linear(5 if smaller else 50, 10))


class Locked(TensorDataset):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.lock = threading.Lock()


def small(model: Any, dataset: Any = TensorDataset) -> tt.Task:
    data = TensorDataset(torch.linspace(-1, 1, 64 * 64).view(64, 64), torch.arange(64) % 10)
    train = dataset(*data.tensors)
    return tt.Task(
        name="small", model=model, loss=F.cross_entropy, train=train, validation=data, test=data, batch_size=4
    )


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_buffers_that_are_replaced(strategy: str, tmp_path: Path, ready: list[Ready]) -> None:
    task, options = small(Replacing), {"cluster": FAST, "epochs": 2}
    alone = simulate(tmp_path / "alone", strategy, task, **options)
    assert same(alone, simulate(tmp_path / "helped", strategy, task, processes=1, **options))


def test_torchs_own_settings_go_with_them(tmp_path: Path, ready: list[Ready]) -> None:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        alone = simulate(tmp_path / "alone", "bsp", cluster=FAST)
        assert same(alone, simulate(tmp_path / "helped", "bsp", processes=1, cluster=FAST)) and ready[0].done
    finally:
        torch.backends.mkldnn.enabled = before


@pytest.mark.parametrize(
    ("task", "strategy", "words"),
    [
        (lambda: small(Overlapping), "downpour", "share no memory; leave processes out"),
        (lambda: small(AnotherThere), "allreduce", r"ValueError: its model is another one there .*; leave processes"),
        (lambda: small(nn.Linear, Locked), "allreduce", r"cannot be given to other processes: .*; leave processes out"),
    ],
)
def test_where_they_cannot_help(
    task: Any, strategy: str, words: str, tmp_path: Path, ready: list[Ready], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_HOME", str(os.getpid()))
    made = task()
    if made.model is nn.Linear:
        made = replace(made, model=lambda: nn.Linear(64, 10))
    with pytest.raises(RunFailed, match=words):
        simulate(tmp_path / "run", strategy, made, processes=1, cluster=FAST)


def test_before_they_have_started_it_goes_on_without_them(tmp_path: Path) -> None:
    alone = simulate(tmp_path / "alone", "downpour", epochs=1)
    assert same(alone, simulate(tmp_path / "helped", "downpour", epochs=1, processes=1))


def lives(process: psutil.Process) -> bool:
    """What has ended and was not reaped by whoever adopted it does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("delay", [0.0, 1.0, 6.0])  # seconds; it takes a few to be ready
def test_they_end_with_a_simulation_that_is_killed(delay: float, tmp_path: Path) -> None:
    program = (
        "import torrential as tt; tt.train('digits', 'downpour', workers=8, world='sim', processes=2, epochs=9999, "
        f"progress=False, out={str(tmp_path / 'run')!r})"
    )
    simulation = subprocess.Popen([sys.executable, "-c", program])
    try:
        limit, helpers = time.monotonic() + 60, list[psutil.Process]()
        while len(helpers) < 2 and time.monotonic() < limit:
            helpers = psutil.Process(simulation.pid).children()
            time.sleep(0.05)
        assert len(helpers) == 2
        time.sleep(delay)
    finally:
        simulation.kill()
        simulation.wait()
    limit = time.monotonic() + 2  # at once, whatever they were at
    while alive := [helper for helper in helpers if lives(helper)]:
        assert time.monotonic() < limit, alive
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": -1}, "processes must be"),
        ({"processes": 1000}, r"more processes than cores \(processes: 1000, cores: \d+\)"),
        ({"processes": 2, "world": "local"}, "processes needs a simulation; add --world sim"),
        ({"processes": 2, "gradients": "off"}, r"gradients=off\); leave processes out"),
    ],
)
def test_where_there_is_nothing_to_help_with(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        tt.train("digits", "allreduce", **{"world": "sim", "out": tmp_path / "run", "progress": False} | options)
