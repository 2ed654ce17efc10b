"""Built-in tasks, and tasks from the user's files."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from torrential.data.batches import Batches
from torrential.data.deal import Deal
from torrential.errors import BadInput, TaskFailed, UnknownName
from torrential.task import Task
from torrential.tasks import TASKS, load_task
from torrential.tasks.fashion import SOURCE, fashion, fashion_mlp, fashion_resnet

GOOD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torrential.task import Task

data = TensorDataset(torch.randn(8, 3), torch.zeros(8).long())
task = Task(model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, train=data, test=data, name="mine")
"""


@pytest.fixture(autouse=True)
def same_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def write(directory: Path, text: str, name: str = "mine.py") -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def write_idx(path: Path, values: Tensor) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, values.dim()]) + sizes + values.numpy().tobytes()))


@pytest.fixture
def tiny_fashion(tmp_path: Path) -> Path:
    for part, samples in (("train", 36), ("t10k", 7)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", torch.randint(256, (samples, 28, 28), dtype=torch.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", (torch.arange(samples) % 10).to(torch.uint8))
    return tmp_path


def train_epochs(task: Task, batch_size: int, epochs: int) -> float:
    torch.manual_seed(0)
    model, batches = task.model(), Batches(task.train)
    optimizer, deal = task.optimizer.build(model.parameters()), Deal(len(batches), seed=0)
    while deal.epoch < epochs:
        share = deal.share(0, 1, batch_size)
        inputs, targets = batches.fetch(share.indices)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        deal.advance(share.total)
    test = Batches(task.test)
    with torch.no_grad():
        inputs, targets = test.fetch(torch.arange(len(test)))
        return float(task.metric(model.eval()(inputs), targets))


@pytest.mark.parametrize(("name", "least"), [("digits", 0.95), ("digits-mlp", 0.90)])
def test_digits_learn(name: str, least: float) -> None:
    task = load_task(name)
    assert task.name == name and TASKS[name].description
    sizes = [len(Batches(part)) for part in (task.train, task.validation, task.test) if part is not None]
    assert sizes == [1350, 150, 297]
    assert train_epochs(task, 64, 10) >= least


def test_digits_split_is_fixed_and_whole() -> None:
    first, second = load_task("digits"), load_task("digits-mlp")
    parts = [(a.tensors[0], b.tensors[0]) for a, b in zip(_parts(first), _parts(second), strict=True)]
    assert all(torch.equal(a, b) for a, b in parts)
    images = torch.cat([a for a, _ in parts])
    assert images.shape == (1797, 1, 8, 8) and len(torch.unique(images, dim=0)) == 1797
    labels = torch.cat([part.tensors[1] for part in _parts(first)])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def _parts(task: Task) -> list[torch.utils.data.TensorDataset]:
    return [task.train, task.validation, task.test]  # type: ignore[list-item]


@pytest.mark.parametrize("build", [fashion, fashion_mlp, fashion_resnet])
def test_fashion(tiny_fashion: Path, build: type[Task]) -> None:
    task: Task = build(data_dir=tiny_fashion)  # type: ignore[call-arg]
    assert [len(part) for part in _parts(task)] == [33, 3, 7]
    inputs, targets = Batches(task.train).fetch(torch.arange(8))
    assert inputs.dtype == torch.uint8 and inputs.shape == (8, 1, 28, 28) and targets.dtype == torch.long
    assert task.model()(inputs).shape == (8, 10) and inputs.dtype == torch.uint8
    train_epochs(task, 8, 1)


def test_fashion_refuses_other_files(tiny_fashion: Path) -> None:
    names = list(SOURCE.files)
    good = (tiny_fashion / names[1]).read_bytes()
    write_idx(tiny_fashion / names[1], torch.full((36,), 10, dtype=torch.uint8))
    with pytest.raises(BadInput, match=r"label above 9 \(10\)"):
        fashion(tiny_fashion)
    write_idx(tiny_fashion / names[1], torch.zeros(35, dtype=torch.uint8))
    with pytest.raises(BadInput, match=r"36 images .* 35 labels"):
        fashion(tiny_fashion)
    (tiny_fashion / names[1]).write_bytes(good)
    write_idx(tiny_fashion / names[0], torch.zeros(36, 32, 32, dtype=torch.uint8))
    with pytest.raises(BadInput, match=r"shape: \(36, 32, 32\)"):
        fashion(tiny_fashion)


def test_every_builtin_resolves() -> None:
    for name, builtin in TASKS.items():
        assert callable(getattr(__import__(builtin.module, fromlist=["x"]), builtin.function)), name


def test_file_with_a_task(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    assert load_task(file).name == load_task(f"{file}:task").name == "mine"
    assert sys.path[0] == str(tmp_path)
    assert load_task(file).model.__module__ in sys.modules


def test_file_with_functions_and_siblings(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "sibling_of_mine.py")
    file = write(
        tmp_path, "import sibling_of_mine\ndef build():\n    return sibling_of_mine.task\ndef task(): return build()\n"
    )
    assert load_task(f"{file}:build").name == load_task(file).name == "mine"


@pytest.mark.parametrize(
    ("spec", "named"),
    [("mine.py", "mine"), ("mine.py:task", "mine"), ("mine.py:other", "mine-other"), ("mine.py:build", "mine-build")],
)
def test_a_task_without_a_name_is_called_after_its_file(spec: str, named: str, tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace(', name="mine"', "") + "other = task\ndef build(): return task\n")
    assert load_task(f"{tmp_path}/{spec}").name == named


def test_a_name_that_was_given_stays(tmp_path: Path) -> None:
    for given in ("given", "mine"):
        write(tmp_path, GOOD.replace('"mine"', f'"{given}"') + "other = task\n")
        for spec in ("mine.py", "mine.py:task", "mine.py:other"):
            assert load_task(f"{tmp_path}/{spec}").name == given


def test_a_task_of_a_program_is_called_after_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.zeros(2, 3), torch.zeros(2).long())
    make = partial(Task, model=lambda: torch.nn.Linear(3, 2), loss=torch.nn.functional.cross_entropy)
    main = sys.modules["__main__"]
    for file, named in ((tmp_path / "script.py", "script"), (tmp_path / "program" / "__main__.py", "program")):
        monkeypatch.setattr(main, "__file__", str(file), raising=False)
        assert make(train=data, test=data).name == named
    monkeypatch.delattr(main, "__file__")
    assert make(train=data, test=data).name == "task"


def test_the_only_task_needs_no_name(tmp_path: Path) -> None:
    assert load_task(write(tmp_path, GOOD.replace("task = ", "other = "))).name == "mine"
    with pytest.raises(BadInput, match=r"holds 2 tasks \(one, two\)"):
        load_task(write(tmp_path, GOOD.replace("task = ", "one = two = ")))
    with pytest.raises(BadInput, match="holds no Task"):
        load_task(write(tmp_path, "x = 1"))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="no task named 'digitz'; did you mean 'digits'"):
        load_task("digitz")
    with pytest.raises(UnknownName, match="did you mean 'digits-mlp'"):
        load_task("digits_mlp")
    with pytest.raises(UnknownName):
        load_task("")
    with pytest.raises(UnknownName, match=r"mine.py named 'tusk'; did you mean 'task'"):
        load_task(f"{write(tmp_path, GOOD)}:tusk")
    with pytest.raises(BadInput, match=r"no file nowhere/to.py"):
        load_task("nowhere/to.py:task")
    with pytest.raises(BadInput, match=r"data in .* is a TensorDataset, not a Task"):
        load_task(f"{write(tmp_path, GOOD)}:data")
    with pytest.raises(BadInput, match="is a int, not a Task"):
        load_task(write(tmp_path, "def task(): return 3"))


def test_a_file_that_raises_shows_its_own_lines_only(tmp_path: Path) -> None:
    write(tmp_path, "def inner():\n    return 1 / 0\n", "failing_sibling.py")
    file = write(tmp_path, "import failing_sibling\n\nfailing_sibling.inner()\n")
    with pytest.raises(TaskFailed) as caught:
        load_task(file)
    assert str(caught.value) == (
        f"{file} cannot be loaded: ZeroDivisionError: division by zero ({tmp_path}/failing_sibling.py:2)"
    )
    (trace,) = caught.value.__notes__
    assert [line for line in trace.splitlines() if line.strip("~^ ")] == [
        f'  File "{file}", line 3, in <module>',
        "    failing_sibling.inner()",
        f'  File "{tmp_path}/failing_sibling.py", line 2, in inner',
        "    return 1 / 0",
    ]
    assert not any(
        name.startswith("torrential_file_mine") and sys.modules[name].__file__ == file for name in sys.modules
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def task(:\n", "SyntaxError"),
        ("import torch\ntorch.zeros(2) + torch.zeros(3)\n", "RuntimeError: The size of tensor"),
        ("import nothing_by_this_name\n", "ModuleNotFoundError: No module named 'nothing_by_this_name'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("def task(size): return size\n", "TypeError: task() missing 1 required positional argument"),
    ],
)
def test_other_failures(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TaskFailed) as caught:
        load_task(write(tmp_path, text))
    assert says in str(caught.value) and "importlib" not in str(caught.value)


def test_bad_values_are_placed(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace('name="mine"', "epochs=0"))
    with pytest.raises(BadInput, match=r"mine.py:9: epochs must be a whole number of at least 1 \(got 0\)"):
        load_task(file)
