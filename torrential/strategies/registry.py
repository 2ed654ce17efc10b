"""From what a user gives for a strategy to its class.

allreduce                 a name in the table of built-in strategies (strategies/__init__.py)
mine                      an entry point of an installed package, of the group torrential.strategies
path/to/file.py[:Class]   a class in a file; without a name, the file's only one
Mine, Mine(period=4)      a class or an object of a program
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from torrential.errors import BadInput, UnknownName
from torrential.options import check, make
from torrential.strategies import STRATEGIES
from torrential.strategies.base import Strategy
from torrential.usercode import calling, in_words, place_of
from torrential.userfiles import FILE_MODULE, import_file, split_spec

GROUP = "torrential.strategies"
Given = str | type[Strategy] | Strategy  # how a user names a strategy


@dataclass(frozen=True)
class Resolved:
    """A strategy's class, and the text by which a manifest names it."""

    kind: type[Strategy]
    source: str

    def make(self, options: dict[str, Any]) -> Strategy:
        """The strategy with these options, which may come as text from the command line."""
        for option in options:
            if option not in self.kind.__struct_fields__:
                raise UnknownName(f"option of {self.kind.name}", option, self.kind.__struct_fields__)
        for field in msgspec.structs.fields(self.kind):
            if field.required and field.name not in options:
                raise BadInput(f"{self.kind.name} has no default for {field.name}; give it with --set {field.name}=...")
        with calling("constructor", whose=self.kind.name):
            return make(self.kind, options)


def resolve_strategy(given: Given) -> Resolved:
    """The strategy that was given, by its name, its file, its class or an object of it."""
    if isinstance(given, str):
        return _named(given)
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, Strategy):
        raise BadInput(f"a strategy is a name, a subclass of tt.Strategy or an object of one (given: {given!r})")
    return Resolved(kind, _source_of(kind))


def check_object(strategy: Strategy) -> None:
    """Refuse an object of a program with options that could not have come from the command line."""
    plain_options(strategy)
    check(strategy)


def plain_options(strategy: Strategy) -> dict[str, Any]:
    """The options of a strategy as a manifest has them."""
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(strategy))
    except (TypeError, msgspec.MsgspecError) as error:
        kind = type(strategy).name
        raise BadInput(f"the options of {kind} cannot be recorded: {error}; use numbers, text and lists") from error
    return plain


def changed_options(strategy: Strategy, source: str) -> dict[str, Any]:
    """The options that are not at their defaults; all of a strategy that is not shipped, whose defaults may change."""
    defaults = plain_options(STRATEGIES[source]()) if source in STRATEGIES else {}
    return {name: value for name, value in plain_options(strategy).items() if value != defaults.get(name)}


def is_loadable(source: str) -> bool:
    """Whether a strategy can be had again from what a manifest says of it: not if a program made it."""
    return bool(split_spec(source)[0]) or ":" not in source


def registered() -> dict[str, str]:
    """The names that --strategy takes, each with a line about it. Strategies of packages are not loaded for it."""
    builtin = {name: kind.summary for name, kind in STRATEGIES.items()}
    return {point.name: f"of the package {_package(point)}" for point in entry_points(group=GROUP)} | builtin


def _named(spec: str) -> Resolved:
    file, name = split_spec(spec)
    if file:
        module, path = import_file(file, "strategy")
        kind = _pick(module, path, name)
        return Resolved(kind, f"{path}:{kind.__qualname__}")
    if spec in STRATEGIES:
        return Resolved(STRATEGIES[spec], spec)
    points = list(entry_points(group=GROUP, name=spec))
    if not points:
        raise UnknownName("strategy", spec, [*registered(), "path/to/file.py"])
    if len(points) > 1:
        several = " and ".join(sorted(map(_package, points)))
        raise BadInput(f"several packages have a strategy {spec} ({several}); remove all but one of them")
    return Resolved(_load(points[0]), spec)


def _pick(module: ModuleType, path: Path, name: str) -> type[Strategy]:
    members = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    kinds = {key: value for key, value in members.items() if isinstance(value, type) and issubclass(value, Strategy)}
    own = [key for key, kind in kinds.items() if kind.__module__ == module.__name__]
    if not name:
        if len(own) != 1:
            held = f"holds {len(own)} strategies ({', '.join(own)})" if own else "holds no subclass of tt.Strategy"
            raise BadInput(f"{path} {held}; say which: {path.name}:NAME" if own else f"{path} {held}; write one")
        name = own[0]
    if name in members and name not in kinds:
        raise BadInput(f"{name} in {path} is no subclass of tt.Strategy; make it one (it is a {_kind(members[name])})")
    if name not in kinds:
        raise UnknownName(f"strategy in {path}", name, own)
    return kinds[name]


def _kind(value: object) -> str:
    return "class" if isinstance(value, type) else type(value).__name__


def _load(point: EntryPoint) -> type[Strategy]:
    where = f"the strategy {point.name} of the package {_package(point)} ({point.value})"
    try:
        kind = point.load()
    except Exception as error:
        place = place_of(error)
        raise BadInput(
            f"{where} cannot be loaded: {in_words(error)}{place and f' ({place})'}; mend the package"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise BadInput(f"{where} is no subclass of tt.Strategy; mend the package")
    return kind


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "?"


def _source_of(kind: type[Strategy]) -> str:
    """The name that the class is registered under, its file if it was loaded from one, or its module."""
    path = f"{kind.__module__}:{kind.__qualname__}"
    for name, known in STRATEGIES.items():
        if known is kind:
            return name
    for point in entry_points(group=GROUP):
        if point.value == path:
            return point.name
    if kind.__module__.startswith(FILE_MODULE):
        return f"{sys.modules[kind.__module__].__file__}:{kind.__qualname__}"
    return path
