"""Tasks travel to real child processes, and their data is there once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from torrential.errors import TaskFailed
from torrential.shipping import pack, unpack
from torrential.task import Task
from torrential.tasks import load_task


def round_trip(obj: Any) -> Any:
    before = list(sys.path)
    with pack(obj) as parcel:
        try:
            return unpack(*parcel.fds)
        finally:
            sys.path[:] = before


def task(**changes: Any) -> Task:
    data = TensorDataset(torch.randn(8, 3), torch.zeros(8).long())
    given: dict[str, Any] = dict(model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, train=data, test=data)
    return Task(**{**given, **changes})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 400),
        torch.randn(3),
        torch.empty(0, 5),
        torch.tensor(7),
        torch.randn(300, 400).t()[5:, ::2],
        torch.randint(256, (70_001,), dtype=torch.uint8),
        torch.randn(90, 900, dtype=torch.float64),
        torch.randn(90_000, dtype=torch.bfloat16),
        torch.rand(90_000) > 0.5,
        torch.randn(20_000, dtype=torch.cfloat).conj(),
    ],
)
def test_tensors_round_trip(tensor: torch.Tensor) -> None:
    got = round_trip(tensor)
    assert got.dtype == tensor.dtype and got.stride() == tensor.stride() and torch.equal(got, tensor)


def test_sparse_tensors_parameters_and_arrays_round_trip() -> None:
    sparse = torch.eye(50_000, 10).to_sparse()
    array = np.arange(100_000).reshape(100, 1000)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    got = round_trip({"sparse": sparse, "array": array, "f": np.asfortranarray(array), "model": model})
    assert torch.equal(got["sparse"].to_dense(), sparse.to_dense())
    assert (got["array"] == array).all() and (got["f"] == array).all() and got["array"].flags.writeable
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in got["model"].state_dict().items())
    assert isinstance(got["model"][0].weight, nn.Parameter) and got["model"][0].weight.requires_grad


@pytest.mark.parametrize("size", [10, 100_000])
def test_views_of_one_storage_stay_so(size: int) -> None:
    base = torch.zeros(size)
    a, b, c, bits = round_trip([base, base[3:], base, base.view(torch.int32)])
    assert a is c and a.data_ptr() + 12 == b.data_ptr() and bits.data_ptr() == a.data_ptr()
    a[3] = 1
    assert b[0] == 1
    assert size == 10 or a.data_ptr() % 64 == 0


def test_large_data_is_in_the_second_file_once() -> None:
    images = torch.zeros(1_000_000, dtype=torch.uint8)
    whole = TensorDataset(images, images)
    with pack([whole, Subset(whole, range(5)), images[:10]]) as parcel:
        assert os.fstat(parcel.fds[0]).st_size < 20_000
        assert os.fstat(parcel.fds[1]).st_size == 1_000_000


def test_children_do_not_see_each_others_writes() -> None:
    with pack(torch.zeros(100_000)) as parcel:
        first, second = unpack(*parcel.fds), unpack(*parcel.fds)
    first.fill_(1)
    assert second.sum() == 0


def test_closing() -> None:
    parcel = pack(1)
    fds = parcel.fds
    parcel.close()
    parcel.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


SIBLING = "def double(x):\n    return x * 2\n"
FILE = """
import torch
from torch import nn
from shipped_sibling import double
from torrential.task import Task

BIG = torch.ones(50_000)

class Pairs:
    def __len__(self): return 4
    def __getitem__(self, i): return BIG[i], double(i)

class Net(nn.Module):
    pass

task = Task(model=lambda: Net(), loss=lambda o, t: (o - t).mean(), train=Pairs(), test=Pairs())
"""
SCRIPT = """
import torch

class Mine:
    value = torch.arange(100_000)
    def total(self): return helper(self.value)

def helper(x): return x.sum().item()
"""
CHILD = """
import sys
from torrential.shipping import unpack
builtin, file, script = unpack(int(sys.argv[1]), int(sys.argv[2]))
images = builtin.train.tensors[0]
print(builtin.name, len(builtin.train), images.sum().item(), builtin.model()(images[:2]).shape)
print(file.train[3][1], type(file.model()).__name__, file.loss(file.train[1][0], 0.5).item())
print(script.total())
"""


def test_to_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in task; one from a file with lambdas, classes and a sibling module; what a script defines."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "shipped_sibling.py").write_text(SIBLING)
    (tmp_path / "shipped.py").write_text(FILE)
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    digits = load_task("digits")
    with pack((digits, load_task(str(tmp_path / "shipped.py")), script["Mine"]())) as parcel:
        command = [sys.executable, "-c", CHILD, *map(str, parcel.fds)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(
            command,
            pass_fds=parcel.fds,
            capture_output=True,
            text=True,
            cwd=tmp_path.parent,
            env=environment,
            timeout=50,
        )
    total = digits.train.tensors[0].sum().item()  # type: ignore[attr-defined]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"digits 1350 {total} torch.Size([2, 10])", "6 Net 0.5", "4999950000"]


def test_unsendable_things_are_named() -> None:
    lock = threading.Lock()
    with pytest.raises(
        TaskFailed, match=r"task's 'loss' cannot be sent .*cannot pickle '_thread.lock' object .*create them"
    ):
        pack(task(loss=lambda o, t: lock))
    with pytest.raises(TaskFailed, match=r"this generator cannot be sent .*type builtins.generator"):
        pack(i for i in range(3))
    with socket.socket() as link, pytest.raises(TaskFailed, match=r"'model' cannot be sent .*'socket' object"):
        pack(task(model=lambda: link))

    class Stubborn:
        def __reduce__(self) -> Any:
            raise RuntimeError("not me")

    with pytest.raises(TaskFailed, match=r"'metric' cannot be sent .*RuntimeError: not me .*Stubborn"):
        stubborn = Stubborn()
        pack(task(metric=lambda o, t: stubborn))


def test_what_cannot_be_rebuilt_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "soon_gone.py").write_text("def f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import soon_gone  # type: ignore[import-not-found]

    with pack(soon_gone.f) as parcel:
        (tmp_path / "soon_gone.py").unlink()
        monkeypatch.delitem(sys.modules, "soon_gone")
        with pytest.raises(
            TaskFailed, match="cannot be rebuilt in a worker: ModuleNotFoundError: No module named 'soon_gone'"
        ):
            unpack(*parcel.fds)
