"""What a shell offers after a tab. Nothing here loads torch, for somebody waits at every keystroke."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import typer

STRATEGIES = Path(__file__).parent / "strategies"  # a file for each, and two that are none
CLUSTERS = Path(__file__).parent / "worlds" / "sim" / "clusters"


def tasks(incomplete: str) -> list[str]:
    """The built-in tasks. Where none begins so, the shell offers files."""
    from torrential.tasks import TASKS

    return _beginning(TASKS, incomplete)


def strategies(incomplete: str) -> list[str]:
    """The strategies; also the last one of a list, as in allreduce,ss."""
    names = (file.stem for file in sorted(STRATEGIES.glob("*.py")))
    return _last_of_list((name for name in names if name not in ("__init__", "base")), incomplete)


def clusters(incomplete: str) -> list[str]:
    """The clusters that are shipped. Where none begins so, the shell offers files."""
    return _last_of_list(sorted(file.stem for file in CLUSTERS.glob("*.toml")), incomplete)


def worlds(incomplete: str) -> list[str]:
    return _beginning(("local", "sim"), incomplete)


def devices(incomplete: str) -> list[str]:
    return _beginning(("auto", "cpu", "cuda"), incomplete)


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """What can be set with --set for the strategy that was given; where several can be, for any of them."""
    from torrential.config import Recipe, Settings, without_effect

    given = ctx.params.get("strategy") or ("" if "strategies" in ctx.params else "allreduce")
    found: set[str] = set()
    for name in [given] if given in strategies("") else strategies(""):
        own, served = _own_options(name)
        others = {*Settings.__struct_fields__, *Recipe.__struct_fields__} - without_effect(served)
        found |= own | others
    return _beginning((f"{option}=" for option in sorted(found)), incomplete)


def _own_options(strategy: str) -> tuple[set[str], bool]:
    """The options of a strategy alone, and whether it has servers: read from its file, which imports torch."""
    tree = ast.parse((STRATEGIES / f"{strategy}.py").read_text())
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    fields = {
        node.target.id: ast.unparse(node.annotation)
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {name for name, type_ in fields.items() if not type_.startswith("ClassVar")}, any(
        isinstance(n, ast.Name) and n.id == "Servers" for n in ast.walk(tree)
    )


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _last_of_list(names: Iterable[str], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(names, last)]
