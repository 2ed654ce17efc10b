"""Each module imports only from the layers below it, so that any of them can be read, and tested, on its own."""

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "torrential"

LAYERS = [
    {
        "errors",
        "records",
        "optimizers",
        "schedulers",
        "partitions",
        "task",
        "step",
        "config",
        "options",
        "usercode",
        "version",
        "cache",
    }
    | {"randomness"}
    | {"descriptors", "files", "fused", "locks", "processes", "search_path", "streams"},
    {"data", "optim", "compression", "shipping", "tasks", "userfiles"},
    {"comm"},
    {"params", "server", "membership", "stages", "splits", "compute"},
    {"strategies"},
    {"checkpoint", "trainer", "loop"},
    {
        "worlds",
        "tryout",
        "limits",
        "listeners",
        "resolve",
        "opening",
        "run",
        "launching",
        "exporting",
        "progress",
        "reducing",
    }
    | {"completion", "terminal"},
    {"study", "bench", "testing", "stages_command"},
    {"reporting", "cli", "__main__"},
]
SHARED = {
    "base",
    "context",
    "roles",
    "portioned",
    "averaging",
    "parameter_server",
    "staged",
}  # files of strategies/ that strategies may import
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def violations(package: Path) -> list[str]:
    """Every broken rule, one sentence each:

    - a module imports from lower layers, and from its neighbours in its own as long as there is no cycle;
    - files of strategies/ never import one another, except that all may import the package itself and what they
      share (SHARED);
    - nothing but __main__ imports cli;
    - nothing imports names from the package's __init__.py, which is there for users.
    """
    found = []
    edges: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if parts == ("__init__",):
            continue
        where, top = file.relative_to(package.parent).as_posix(), parts[0]
        if top not in RANK:
            found.append(f"{where}: {top!r} is in no layer; add it to LAYERS in tests/test_layers.py")
            continue
        for line, target in sorted(imports(file, package)):
            wrong = judge(parts, target)
            if wrong:
                found.append(f"{where}:{line}: {wrong}")
            elif target[0] != top:
                edges.setdefault(top, set()).add(target[0])
    return found + cycle(edges)


def judge(source: tuple[str, ...], target: tuple[str, ...]) -> str | None:
    """What is wrong with `source` (a file's path as parts) importing `target` (likewise, () is the package itself)."""
    if not target:
        return "imports the package itself; import from the module that defines the name"
    top, other = source[0], target[0]
    if other not in RANK:
        return f"imports {other!r}, which is in no layer; add it to LAYERS in tests/test_layers.py"
    if other == "cli" and top not in ("cli", "__main__"):
        return "imports cli; only __main__ may"
    if RANK[other] > RANK[top]:
        return f"{top} (layer {RANK[top]}) imports {other} (layer {RANK[other]}), which is above it"
    siblings = top == other == "strategies" and source[1:] != ("__init__",)
    if siblings and target[1:] and target[1] not in SHARED | {source[1]}:
        return f"strategy {source[1]!r} imports strategy {target[1]!r}; share through strategies/base.py"
    return None


def cycle(edges: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return [f"cycle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def imports(file: Path, package: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and target of each import of our own modules, wherever in the file, except those for type checkers only."""
    home = file.relative_to(package).parent.parts
    for node in walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            dotted = [
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            ]
        elif isinstance(node, ast.ImportFrom):
            base = (package.name, *home)[: len(home) + 2 - node.level] if node.level else ()
            base = ".".join([*base, *([node.module] if node.module else [])])
            dotted = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in dotted:
            root, *parts = name.split(".")
            if root == package.name:
                if isinstance(node, ast.ImportFrom) and not is_module(package.joinpath(*parts)):
                    parts = parts[:-1]  # a name inside a module
                yield node.lineno, tuple(parts)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Like ast.walk, without the bodies of `if TYPE_CHECKING:`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in child.orelse:
                yield from walk(other)
        else:
            yield from walk(child)


def called(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_the_package_keeps_its_layers():
    assert violations(PACKAGE) == []


GOOD = {
    "__init__.py": "from torrential.run import train",
    "__main__.py": "from torrential.cli import main",
    "cli.py": "from torrential import reporting, study",
    "reporting.py": "",
    "study/__init__.py": "import torrential.run",
    "run.py": "from torrential.worlds.local import World",
    "worlds/local.py": "from ..trainer import Trainer\nfrom . import wire",
    "worlds/wire.py": "import torch",
    "trainer.py": "from .strategies import STRATEGIES",
    "strategies/__init__.py": "from torrential.strategies.allreduce import AllReduce",
    "strategies/allreduce.py": "from typing import TYPE_CHECKING\nfrom .base import Strategy\n"
    "if TYPE_CHECKING:\n    from torrential.trainer import Trainer\n    from .downpour import Downpour",
    "strategies/downpour.py": "from torrential.strategies.base import Strategy",
    "strategies/base.py": "from torrential.comm import Comm",
    "comm/__init__.py": "from torrential.errors import WaitedTooLong",
    "errors.py": "",
    "task.py": "from torrential import errors",
}

BAD = [
    ("strategies/base.py", "import torrential.trainer", "strategies (layer 4) imports trainer (layer 5)"),
    ("comm/__init__.py", "import torrential.server.shard", "comm (layer 2) imports server (layer 3)"),
    ("comm/__init__.py", "from ..worlds import local", "comm (layer 2) imports worlds (layer 6)"),
    ("comm/ring.py", "def f():\n    from torrential.worlds.local import World", "comm/ring.py:2: comm (layer 2)"),
    ("comm/ring.py", "import importlib\nimportlib.import_module('torrential.run')", "comm (layer 2) imports run"),
    ("comm/ring.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import torrential.run", "ring.py:4: comm (layer 2)"),
    ("strategies/downpour.py", "from .allreduce import AllReduce", "strategy 'downpour' imports strategy 'allreduce'"),
    ("strategies/downpour.py", "from torrential.strategies import allreduce", "imports strategy 'allreduce'"),
    ("strategies/base.py", "from torrential.strategies import allreduce", "strategy 'base' imports"),
    ("errors.py", "from torrential.task import Task", "cycle: "),
    ("worlds/wire.py", "import torrential.run", "cycle: "),
    ("reporting.py", "from torrential.cli import main", "imports cli; only __main__ may"),
    ("trainer.py", "from torrential import Task", "imports the package itself"),
    ("trainer.py", "import torrential as tt", "imports the package itself"),
    ("worlds/local.py", "from .. import __version__", "imports the package itself"),
    ("utils.py", "", "'utils' is in no layer; add it to LAYERS"),
    ("trainer.py", "import torrential.helpers", "'helpers', which is in no layer; add it to LAYERS"),
]


def write(package: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return package


def test_the_checker_accepts_a_good_tree(tmp_path):
    assert violations(write(tmp_path / "torrential", GOOD)) == []


@pytest.mark.parametrize(("file", "source", "said"), BAD)
def test_the_checker_flags(tmp_path, file, source, said):
    found = violations(write(tmp_path / "torrential", GOOD | {file: source}))
    assert len(found) == 1 and said in found[0]


def test_no_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 200, "the package's classes were not found"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
