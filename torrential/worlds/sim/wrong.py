"""What is wrong with a table that shall be a struct: the key, the value given and what it must be, in one line.

compute.seconds_per_sample must be a number above 0 up to 1e+06 or "measure" (given: 'fast')
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect as kinds

from torrential.options import limits


def in_words(error: msgspec.ValidationError, table: dict[str, Any], kind: type[msgspec.Struct]) -> str:
    """The sentence for an error that msgspec found in a table; its own end with the place: ` - at `$.faults[0].at``."""
    text, _, path = str(error).partition(" - at `$")
    node: Any = kinds.type_info(kind)
    value: Any = table
    steps = re.findall(r"\.(\w+)|\[(\d+)\]", path)
    for name, index in steps:
        node = _struct(node)
        if name:
            node = next(field.type for field in node.fields if field.name == name)
        else:
            node = node.item_type
        value = value[int(index) if index else name]
    place = path.rstrip("`").lstrip(".")
    if found := re.search(r"unknown field `(.*)`", text):
        known = ", ".join(field.name for field in _struct(node).fields)
        return f"{place or 'it'} has no key {found[1]!r}; known: {known}"
    if found := re.search(r"missing required field `(.*)`", text):
        return f"{place} has no {found[1]}; give one"
    return f"{place} must be {_wanted(node, place)} (given: {value!r})"


def _struct(node: Any) -> Any:
    """The type itself, of one that may be left out."""
    if isinstance(node, kinds.UnionType):
        (node,) = (one for one in node.types if isinstance(one, kinds.StructType | kinds.VarTupleType))
    return node


def _wanted(node: Any, place: str) -> str:
    match node:
        case kinds.UnionType(types=types):
            return " or ".join(_wanted(one, place) for one in types if not isinstance(one, kinds.NoneType))
        case kinds.Metadata(extra_json_schema={"examples": [example]}):
            return f'text as in "{example}"'
        case kinds.LiteralType(values=values):
            return " or ".join(f'"{value}"' for value in values)
        case kinds.IntType():
            return f"a whole number{limits(node)}"
        case kinds.FloatType():
            return f"a number{limits(node)}"
        case kinds.BoolType():
            return "true or false"
        case kinds.StructType():
            table = re.sub(r"\[\d+\]$", "", place)
            brackets = f"[[{table}]]" if table != place else f"[{place}]"
            return f"one table, as below {brackets}"
        case kinds.VarTupleType(item_type=kinds.StructType()):
            return f"a list of tables, each below two pairs of brackets: [[{place}]]"
        case kinds.VarTupleType(item_type=item):
            return f"a list, in brackets, each {_wanted(item, place)}"
    return "text"
