"""Wherever the user's code raises, one sentence says which part of the task, what, and where: the same in both worlds.

What is found before a run begins is bad input (exit code 2); what happens in a run makes it fail (1).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torrential.data.deal import order
from torrential.errors import BadInput, Diverged, TaskFailed, TorrentialError, WorkerFailed
from torrential.run import train

HEAD = """
import asyncio
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
import torrential as tt

inputs, targets = torch.arange(1.0, 49).repeat(3, 1).t() / 48, torch.arange(48) % 2
data = TensorDataset(inputs, targets)

class Own(BaseException):
    pass

def boom(kind=ValueError):
    raise kind("boom")  # here

class Poisoned(Dataset):
    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return boom() if index == self.sample else (inputs[index], targets[index])

class Model(nn.Linear):
    steps = 0

    def forward(self, x):
        self.steps += self.training and torch.is_grad_enabled()
        return boom() if self.steps == 3 else super().forward(x)

class Sgd(torch.optim.SGD):
    def __init__(self, params, lr, raises=ValueError):
        super().__init__(params, lr=lr)
        self.raises = raises

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return boom(self.raises) if self.steps == 5 else super().step(closure)

class LastBatch:
    \"\"\"A loss that is special in the last of twelve batches.\"\"\"
    steps = 0

    def __init__(self, value):
        self.value = value

    def __call__(self, outputs, targets):
        self.steps += torch.is_grad_enabled()
        return F.cross_entropy(outputs, targets) if self.steps < 12 else self.value(outputs)

def make(**changes):
    given = dict(model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, train=data, test=data, validation=data,
                 optimizer=tt.optimizer("sgd", lr=0.01), batch_size=4, epochs=1)
    return tt.Task(**given | changes)
"""
OTHER = "{}: boom ({{file}}:{{here}})".format  # an exception of another class
BOOM = OTHER("ValueError")
LAST = "{out}/checkpoints/step-00000012"
NONE = "; no checkpoint was made yet"
CLUSTER = {"compute": {"seconds_per_sample": 0.001}}

BEFORE = {
    "syntax": ("x = (\n", "{file} cannot be loaded: SyntaxError: '(' was never closed ({file}:{end})"),
    "import": (
        "import nowhere\n",
        "{file} cannot be loaded: ModuleNotFoundError: No module named 'nowhere' ({file}:{end})",
    ),
    "top level": ("boom()\n", f"{{file}} cannot be loaded: {BOOM}"),
    "exit": ("raise SystemExit(0)\n", "{file} cannot be loaded: SystemExit: 0 ({file}:{end})"),
    "top level, cancelled": ("boom(asyncio.CancelledError)\n", f"{{file}} cannot be loaded: {OTHER('CancelledError')}"),
    "model factory, no Exception": (
        "task = make(model=lambda: boom(Own))\n",
        f"the task's model factory raised {OTHER('Own')}",
    ),
    "top level, a KeyboardInterrupt of its own": (
        "boom(KeyboardInterrupt)\n",
        f"{{file}} cannot be loaded: {OTHER('KeyboardInterrupt')}",
    ),
    "task function": ("def task(): boom()\n", f"{{file}} cannot be loaded: {BOOM}"),
    "model factory": ("task = make(model=boom)\n", f"the task's model factory raised {BOOM}"),
    "no model": (
        "task = make(model=lambda: 7)\n",
        "the task's model factory must return a torch.nn.Module (it returned 7)",
    ),
    "training data": ("task = make(train=Poisoned(1))\n", f"the task's training data raised {BOOM}"),
    "forward": (
        "task = make(model=lambda: nn.Linear(5, 2))\n",
        "the task's forward pass on inputs (2, 3) raised RuntimeError: mat1 and mat2 shapes cannot be multiplied "
        "(2x3 and 5x2) (model factory at {file}:{end})",
    ),
    "loss": (
        "task = make(loss=lambda outputs, targets: boom())\n",
        f"the task's loss on outputs (2, 2) and targets (2,) raised {BOOM}",
    ),
}
IN_A_RUN = {
    "training data": (
        f"train=Poisoned({int(order(48, 0, 0)[40])})",  # dealt at step 11, in batches of 4
        f"worker 0 failed at step 11: the task's training data raised {BOOM}{NONE}",
    ),
    "forward": (
        "model=lambda: Model(3, 2)",
        f"worker 0 failed at step 3: the task's forward pass raised {BOOM}{NONE}",
    ),
    "loss": (
        "loss=LastBatch(lambda outputs: boom())",
        f"worker 0 failed at step 12: the task's loss raised {BOOM}{NONE}",
    ),
    "optimizer": (
        "optimizer=tt.optimizer(Sgd, lr=0.01)",
        f"worker 0 failed at step 5: {BOOM}{NONE}",
    ),
    "loss, no Exception": (
        "loss=LastBatch(lambda outputs: boom(Own))",
        f"worker 0 failed at step 12: the task's loss raised {OTHER('Own')}{NONE}",
    ),
    "optimizer, cancelled": (
        "optimizer=tt.optimizer(Sgd, lr=0.01, raises=asyncio.CancelledError)",
        f"worker 0 failed at step 5: {OTHER('CancelledError')}{NONE}",
    ),
    "metric, cancelled": (
        "metric=lambda outputs, targets: boom(GeneratorExit)",
        f"observer failed: the task's metric on validation data raised {OTHER('GeneratorExit')}{NONE}",
    ),
    "loss, a KeyboardInterrupt of its own": (
        "loss=LastBatch(lambda outputs: boom(KeyboardInterrupt))",
        f"worker 0 failed at step 12: the task's loss raised {OTHER('KeyboardInterrupt')}{NONE}",
    ),
    "optimizer, a KeyboardInterrupt of its own": (
        "optimizer=tt.optimizer(Sgd, lr=0.01, raises=KeyboardInterrupt)",
        f"worker 0 failed at step 5: {OTHER('KeyboardInterrupt')}{NONE}",
    ),
    "metric, a KeyboardInterrupt of its own": (
        "metric=lambda outputs, targets: boom(KeyboardInterrupt)",
        f"observer failed: the task's metric on validation data raised {OTHER('KeyboardInterrupt')}{NONE}",
    ),
    "validation data": (
        "validation=Poisoned(7)",
        f"observer failed: the task's validation data raised {BOOM}{NONE}",
    ),
    "metric": (
        "metric=lambda outputs, targets: boom()",
        f"observer failed: the task's metric on validation data raised {BOOM}{NONE}",
    ),
    "test data": (
        "test=Poisoned(7)",
        f"observer failed: the task's test data raised {BOOM}; the last good checkpoint is {LAST}",
    ),
    "nan": (
        "loss=LastBatch(lambda outputs: outputs.sum() * float('nan'))",
        "the loss turned nan on worker 0 at step 12; the rate was 0.01; lower --lr, clip with clip_norm, or look for "
        f"nan in the data{NONE}",
    ),
}


@pytest.fixture(autouse=True)
def same_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def failure(directory: Path, text: str, world: str, **options: Any) -> tuple[TorrentialError, dict[str, Any]]:
    """What a run of a file fails with, and what of it is in the message."""
    file, out = directory / "mine.py", directory / world
    file.write_text(HEAD + text)
    lines = file.read_text().splitlines()
    (here,) = (number for number, line in enumerate(lines, start=1) if line.endswith("# here"))
    more = {"cluster": CLUSTER} if world == "sim" and "cluster" not in options else {}
    with pytest.raises(TorrentialError) as caught:
        train(str(file), world=world, out=out, progress=False, device="cpu", **more, **options)
    return caught.value, {"file": file, "here": here, "end": len(lines), "out": out}


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize("place", BEFORE)
def test_before_a_run(place: str, world: str, tmp_path: Path) -> None:
    text, sentence = BEFORE[place]
    error, about = failure(tmp_path, text, world)
    assert str(error) == sentence.format(**about)
    assert isinstance(error, BadInput) and error.exit_code == 2
    assert not about["out"].exists()


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize("place", IN_A_RUN)
def test_in_a_run(place: str, world: str, tmp_path: Path) -> None:
    changes, sentence = IN_A_RUN[place]
    error, about = failure(tmp_path, f"task = make({changes})\n", world)
    assert str(error) == sentence.format(**about)
    assert type(error) is (Diverged if place == "nan" else WorkerFailed) and error.exit_code == 1


@pytest.mark.parametrize("world", ["local", "sim"])
def test_in_a_run_with_servers(world: str, tmp_path: Path) -> None:
    error, about = failure(tmp_path, "task = make(model=lambda: Model(3, 2))\n", world, strategy="bsp")
    assert str(error) == f"worker 0 failed at step 3: the task's forward pass raised {BOOM}{NONE}".format(**about)
    (trace,) = error.__notes__
    frames = [line.strip() for line in trace.splitlines() if line.lstrip().startswith("File")]
    assert [frame.rpartition(" ")[2] for frame in frames] == ["forward", "boom"]
    assert all(f'File "{about["file"]}"' in frame for frame in frames)


@pytest.mark.parametrize("kind", ["ValueError", "Own"])
def test_what_is_built_for_a_simulation_has_a_role(kind: str, tmp_path: Path) -> None:
    """A factory that builds one model only, for the trial before the run: the next one is the observer's."""
    once = f"def once(): return boom({kind}) if built else built.append(1) or nn.Linear(3, 2)"
    text = f"built = []\n{once}\ntask = make(model=once)\n"
    error, about = failure(tmp_path, text, "sim")
    assert str(error) == f"observer failed: the task's model factory raised {OTHER(kind)}{NONE}".format(**about)
    assert not isinstance(error, TaskFailed) and error.exit_code == 1


def test_what_is_raised_while_a_simulation_measures_says_so(tmp_path: Path) -> None:
    """The third call of the loss raises: in a run of processes that would be at a step."""
    third = "loss = LastBatch(lambda outputs: boom())\nloss.steps = 9\ntask = make(loss=loss)\n"
    error, about = failure(tmp_path, third, "sim", cluster={"compute": {"seconds_per_sample": "measure"}})
    measured = "worker 0 failed: while compute time was measured, before step 1: the task's loss raised"
    assert str(error) == f"{measured} {BOOM}{NONE}".format(**about)


@pytest.mark.parametrize("world", ["local", "sim"])
def test_an_interrupt_is_none_of_the_tasks_errors(world: str, tmp_path: Path) -> None:
    """SIGINT that comes while the user's code runs: here in the model factory, which is called in this process."""
    (tmp_path / "mine.py").write_text(
        f"{HEAD}\nimport os, signal\n"
        "task = make(model=lambda: os.kill(os.getpid(), signal.SIGINT) or nn.Linear(3, 2))\n"
    )
    with pytest.raises(KeyboardInterrupt):
        train(str(tmp_path / "mine.py"), world=world, out=tmp_path / "run", progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
