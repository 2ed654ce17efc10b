"""What `import torrential` promises: these names, and nothing else happening."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import torrential

NAMES = [
    "AdaComm",
    "AllReduce",
    "Backup",
    "Batch",
    "Bsp",
    "Cluster",
    "Comparison",
    "Consistency",
    "Context",
    "Ddp",
    "Decision",
    "DiLoCo",
    "Downpour",
    "Easgd",
    "Estimate",
    "FedAvg",
    "Hogwild",
    "Listener",
    "Local",
    "MLflow",
    "PipeDream",
    "Pipeline",
    "Reduction",
    "Role",
    "Roles",
    "RunHandle",
    "Sandblaster",
    "Servers",
    "Shard",
    "Ssp",
    "Strategy",
    "StreamingDiLoCo",
    "Task",
    "TensorBoard",
    "TensorParallel",
    "TorrentialError",
    "TrainResult",
    "View",
    "Vote",
    "WandB",
    "__version__",
    "accuracy",
    "compare",
    "export",
    "join",
    "launch",
    "load_task",
    "map_reduce",
    "optimizer",
    "partition",
    "read_records",
    "report",
    "scheduler",
    "solve_normal",
    "train",
]


def test_the_public_names_are_exactly_these():
    assert torrential.__all__ == NAMES
    assert dir(torrential) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_resolves(name):
    assert getattr(torrential, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(torrential.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == torrential._HOME


@pytest.mark.parametrize("name", [name for name in NAMES if name[0].islower()])
def test_what_is_called_explains_itself_and_all_its_arguments_are_typed(name: str) -> None:
    function = getattr(torrential, name)
    assert function.__doc__
    untyped = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
    assert untyped == [] and "return" in function.__annotations__


def test_no_module_has_the_name_of_something_public() -> None:
    """Importing a module sets its name in its package, in the place of what was there."""
    modules = {path.stem for path in Path(torrential.__file__).parent.iterdir()}
    assert modules & {*NAMES} == set()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'torrential' has no attribute 'tarin'"):
        torrential.tarin  # noqa: B018


# Run in a fresh interpreter. An audit hook sees every file opened for writing, every socket and every process started.
IMPORT_AND_TELL = """
import json, os, sys, threading

seen = []

def watch(event, args):
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event.startswith(("socket.", "subprocess.", "os.fork", "os.mkdir", "os.posix_spawn")):
        seen.append(f"{event} {args}")

before = set(sys.modules)
sys.addaudithook(watch)
import torrential
print(json.dumps({
    "effects": seen,
    "threads": threading.active_count(),
    "modules": sorted(set(sys.modules) - before),
}))
"""


def test_import_has_no_side_effects():
    done = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_AND_TELL], capture_output=True, text=True, timeout=30, check=True
    )
    told = json.loads(done.stdout)
    assert told["effects"] == []
    assert told["threads"] == 1
    heavy = {"torch", "numpy", "msgspec", "typer", "rich"}
    assert not heavy & {name.partition(".")[0] for name in told["modules"]}
    assert [name for name in told["modules"] if name.startswith("torrential")] == ["torrential", "torrential.version"]
