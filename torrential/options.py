"""Options are fields of frozen structs (config.py, strategies): made from what a user gave, explained for one to read.

make(Recipe, {"schedule": "foo"})    schedule must be constant, step, cosine or poly (given: 'foo')
explain(Recipe)                      names, choices, bounds and defaults, and what the string below each field says
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import math
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec.inspect import FloatType, IntType, ListType, NoneType, StrType, Type, UnionType, VarTupleType, type_info

from torrential.errors import BadInput

S = TypeVar("S", bound=msgspec.Struct)


# -- from what a user gave --------------------------------------------------------------------------------------------
def make(kind: type[S], given: dict[str, Any]) -> S:
    """A struct of options, whose values may come as text. The first that cannot be used is refused."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return kind(**{name: _convert(name, value, types[name]) for name, value in given.items()})


def check(made: msgspec.Struct) -> None:
    """Check a struct of options that a program has made. The first that is not of its type, or out of its bounds, is
    refused as `make` refuses it."""
    for field in msgspec.structs.fields(made):
        _convert(field.name, getattr(made, field.name), field.type, strict=True)


def _convert(name: str, given: Any, kind: Any, strict: bool = False) -> Any:
    """`strict`: text is no number, and no list."""
    a_list = isinstance(_type(kind), VarTupleType | ListType) and isinstance(given, str | int | float) and not strict
    try:
        plain = msgspec.to_builtins(given) if strict else given
        value = msgspec.convert(str(given).split(",") if a_list else plain, kind, strict=strict)
    except msgspec.ValidationError as error:
        near = difflib.get_close_matches(str(given), _choices(kind), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadInput(f"{name} must be {_wanted(kind)} (given: {given!r}){hint}") from error
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise BadInput(f"{name} must be {_wanted(kind)}, and finite (given: {given!r})")
    return value


def _type(kind: Any) -> Type:
    """The type of a field; where it may also be None, the other type that it may have."""
    info = type_info(kind)
    if isinstance(info, UnionType):
        others = [one for one in info.types if not isinstance(one, NoneType)]
        return others[0] if len(others) == 1 else info
    return info


def _choices(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    named = [get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return [str(choice) for choices in named for choice in choices]


def _wanted(kind: Any) -> str:
    if choices := _choices(kind):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    match _type(kind):
        case IntType() as number:
            return f"a whole number{limits(number)}"
        case FloatType() as number:
            return f"a number{limits(number)}"
        case VarTupleType(item_type=FloatType() | IntType()) | ListType(item_type=FloatType() | IntType()):
            return "a list of numbers, as in 0.5,0.75"
        case VarTupleType() | ListType():
            return "a list, as in a,b"
        case StrType():
            return "text"
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def limits(number: IntType | FloatType) -> str:
    """The bounds of a number, in words that go on from "a number"."""
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "up to"}
    found = [f"{word} {limit:g}" for name, word in words.items() if (limit := getattr(number, name)) is not None]
    return f" {' '.join(found)}" if found else ""


# -- for a user to read -----------------------------------------------------------------------------------------------
class Option(NamedTuple):
    name: str
    default: str  # as it would be given; empty: none
    choices: list[str]  # empty: not just a few
    bounds: str  # of a number, as in "at least 1"; empty: none
    about: str


def explain(kind: type[msgspec.Struct]) -> Iterator[Option]:
    """Every option of a struct, with the string that stands below it in the source."""
    about: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            about |= _strings_below_fields(base)
    for field in msgspec.structs.fields(kind):
        default = field.default_factory() if callable(field.default_factory) else field.default
        number = _type(field.type)
        bounds = limits(number).removeprefix(" of").strip() if isinstance(number, IntType | FloatType) else ""
        yield Option(field.name, _text(default), _choices(field.type), bounds, about.get(field.name, ""))


def _strings_below_fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text below each field that the class adds, by name; none where its source is not to be had, as in a
    console."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for pair in itertools.pairwise(tree.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _text(default: Any) -> str:
    match default:
        case None | msgspec.NODEFAULT:
            return ""
        case bool():
            return str(default).lower()
        case float():
            return f"{default:g}"
        case tuple() | list():
            return ",".join(f"{item:.3g}" if isinstance(item, float) else str(item) for item in default)
    return str(default)
