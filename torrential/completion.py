"""What a shell offers after a tab. Nothing here loads torch, for somebody waits at every keystroke."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import typer

STRATEGIES = Path(__file__).parent / "strategies"  # a file for each, and what they share
CLUSTERS = Path(__file__).parent / "worlds" / "sim" / "clusters"


def tasks(incomplete: str) -> list[str]:
    """The built-in tasks. Where none begins so, the shell offers files."""
    from torrential.tasks import TASKS

    return _beginning(TASKS, incomplete)


def strategies(incomplete: str) -> list[str]:
    """The strategies; also the last one of a list, as in allreduce,ss."""
    from importlib.metadata import entry_points

    names = _built_in() | {point.name for point in entry_points(group="torrential.strategies")}
    return _last_of_list(sorted(names), incomplete)


def _built_in() -> set[str]:
    """The files of the strategies that come with Torrential, which have their names: those whose classes are in the
    table of strategies/__init__.py, which is read as text, since to import it would load torch."""
    lines = ast.parse((STRATEGIES / "__init__.py").read_text()).body
    (table,) = (node for node in lines if isinstance(node, ast.AnnAssign))
    classes = {node.id for node in ast.walk(table) if isinstance(node, ast.Name)} - {"Strategy"}
    imports = [node for node in lines if isinstance(node, ast.ImportFrom)]
    return {str(node.module).rpartition(".")[2] for node in imports if classes & {each.name for each in node.names}}


def clusters(incomplete: str) -> list[str]:
    """The clusters that are shipped. Where none begins so, the shell offers files."""
    return _last_of_list(sorted(file.stem for file in CLUSTERS.glob("*.toml")), incomplete)


def worlds(incomplete: str) -> list[str]:
    return _beginning(("local", "hosts", "ray", "sim"), incomplete)


def devices(incomplete: str) -> list[str]:
    return _beginning(("auto", "cpu", "cuda"), incomplete)


def loggers(incomplete: str) -> list[str]:
    return _last_of_list(("mlflow", "tensorboard", "wandb"), incomplete)


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """The options that --set takes with the strategy and the world that were given; where several may be meant, those
    of any."""
    from torrential.config import WORLDS, Compression, Recipe, without_effect

    given = ctx.params.get("strategy") or ("" if "strategies" in ctx.params else "allreduce")
    files = [Path(given.partition(":")[0])] if given.partition(":")[0].endswith(".py") else [STRATEGIES / f"{given}.py"]
    if not files[0].is_file():
        files = [STRATEGIES / f"{name}.py" for name in strategies("")]
    world = ctx.params.get("world") or ("sim" if ctx.params.get("cluster") else "local")
    kinds = [WORLDS[world]] if world in WORLDS else list(WORLDS.values())
    found = {option for file in files for option in _own_options(file)}
    found |= {option for kind in (*kinds, Recipe, Compression) for option in kind.__struct_fields__}
    if len(files) == 1:
        found -= without_effect(with_servers="Servers(" in files[0].read_text(errors="replace"))
    return _beginning((f"{option}=" for option in sorted(found)), incomplete)


def _own_options(file: Path) -> set[str]:
    """The options of the strategies in a file. They are read from its text: a file of ours would load torch, and one of
    the user's should not run at every tab."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return set()  # a shell shows no errors
    fields = {
        node.target.id: ast.unparse(node.annotation)
        for kind in tree.body
        if isinstance(kind, ast.ClassDef) and not _is_other(kind)
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own = {name for name, type_ in fields.items() if "ClassVar" not in type_}
    return own.union(*(_own_options(STRATEGIES / f"{name}.py") for name in _bases(tree)))


def _bases(tree: ast.Module) -> set[str]:
    """Files of ours that have a base of a strategy in this one."""
    names = {
        base.id
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for base in kind.bases
        if isinstance(base, ast.Name)
    }
    found = {
        node.module.removeprefix("torrential.strategies.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torrential.strategies.")
        if names & {alias.name for alias in node.names}
    }
    return found - {"base"}


def _is_other(kind: ast.ClassDef) -> bool:
    """Whether a class is a message or a note, not a strategy."""
    return any(ast.unparse(base).endswith("Struct") for base in kind.bases)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _last_of_list(names: Iterable[str], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(names, last)]
