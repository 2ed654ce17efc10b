"""What servers do with vectors for a coordinator that never sees them: operations travel, values stay.

    vectors      a list of operations on the range, under a number; the answer has their scalars
    accumulate   a worker's sum of some portions' gradients, under a ticket
    survey       what a coordinator that takes another's place has to know
    close        there is nothing left to do, which workers that come late have to know

A coordinator may die and its successor say the same again. So a numbered list of operations is carried out once: later
the scalars that it gave are given again, until the coordinator has said that it will not ask for them (`forget`). A
sum is added once, too, though another worker may compute it again under another ticket that `replaces` the first.

What is remembered lies in `shard.notes` and is replicated with the range. Where a range was cut since, the scalars are
with its first piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from torrential.optim.lbfgs import GRADIENT
from torrential.server.shard import Handler, Shard

PARAMETERS = "parameters"
BLOCK = 1 << 16  # elements that all operations of a list are done on before the next ones, so that they stay in cache


def vectors(shard: Shard, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Carry out a list of operations, unless that was done before; returns its scalars."""
    answers: dict[int, tuple[int, list[float]]] = shard.notes.setdefault("answers", {})
    number = options["number"]
    for old in [old for old in answers if old < options["forget"]]:
        del answers[old]
    if number in answers:
        start, scalars = answers[number]
        return [_scalars(scalars if start == shard.start else [_nothing(c) for c in options["commands"] if _gives(c)])]
    if options["word"] is not None:
        shard.notes["word"] = options["word"]
    scalars = _carry_out(shard, options["commands"])
    answers[number] = shard.start, scalars
    return [_scalars(scalars)]


def _scalars(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _gives(command: Sequence[Any]) -> bool:
    return command[0] in ("dot", "sum_abs", "max_abs", "decay", "value")


def _nothing(command: Sequence[Any]) -> float:
    return float(command[1]) if command[0] == "value" else 0.0


def combined(commands: Sequence[Sequence[Any]], parts: Sequence[Tensor]) -> list[float]:
    """The scalars of a list of operations, given those of each range."""
    kinds = [command[0] for command in commands if _gives(command)]
    if not kinds:
        return []
    table = torch.stack(list(parts)).tolist()
    found = list[float]()
    for place, kind in enumerate(kinds):
        column = [row[place] for row in table]
        found.append(max(column) if kind in ("max_abs", "value") else sum(column))
    return found


def _carry_out(shard: Shard, commands: Sequence[Sequence[Any]]) -> list[float]:
    named = {PARAMETERS: shard.parameters} | shard.states
    used = {operand for command in commands for operand in command[1:] if isinstance(operand, str)}
    blocks = {name: named[name].split(BLOCK) for name in used}
    totals = [0.0] * len(commands)
    for number, first in enumerate(range(0, shard.stop - shard.start, BLOCK)):
        for place, (kind, *operands) in enumerate(commands):
            given: list[Any] = [blocks[o][number] if isinstance(o, str) else o for o in operands]
            match kind:
                case "dot":
                    totals[place] += _dot(*given)
                case "axpy":  # y += a x
                    given[0].add_(given[2], alpha=given[1])
                case "scale":
                    given[0].mul_(given[1])
                case "copy":
                    given[0].copy_(given[1])
                case "step":  # z = x + a y
                    torch.add(given[1], given[3], alpha=given[2], out=given[0])
                case "difference":
                    torch.sub(given[1], given[2], out=given[0])
                case "sum_abs":
                    totals[place] += float(given[0].abs().sum(dtype=torch.float64))
                case "max_abs":
                    totals[place] = max(totals[place], float(given[0].abs().max()))
                case "decay":  # the gradient of the sum of w²/2 by weights, added; gives that sum
                    gradient, parameters, weights = given
                    totals[place] += _decay(gradient, parameters, weights, shard.start + first)
                case "value":
                    totals[place] = float(operands[0])
                case "begin":
                    given[0].zero_()
                    shard.notes["pass"], shard.notes["applied"] = operands[1], {}
                case _:
                    raise AssertionError(f"no operation {kind!r} on vectors")
    return [total for total, command in zip(totals, commands, strict=True) if _gives(command)]


def _dot(one: Tensor, other: Tensor) -> float:
    """In the vectors' own precision inside a block, which is as exact as gradients are; blocks are added in float64."""
    return torch.dot(one, other).item()


def _decay(gradient: Tensor, parameters: Tensor, weights: Sequence[Sequence[float]], start: int) -> float:
    total = 0.0
    for first, last, weight in weights:
        begin, end = max(0, int(first) - start), min(gradient.numel(), int(last) - start)
        if begin < end and weight:
            piece = parameters[begin:end]
            gradient[begin:end].add_(piece, alpha=weight)
            total += 0.5 * weight * _dot(piece, piece)
    return total


def accumulate(shard: Shard, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Add a sum of gradients, unless it is here already; whether it is here now. It is not where the pass is over, or
    the ticket was called in."""
    notes, ticket = shard.notes, options["ticket"]
    if options["pass"] != notes.get("pass") or ticket < notes.get("least", 0) or ticket in notes.get("fenced", ()):
        return [torch.zeros(1)]
    applied: dict[int, Any] = notes["applied"]
    if ticket not in applied:
        if not any(old in applied for old in options["replaces"]):
            shard.states[GRADIENT].add_(tensors[0])
        applied[ticket] = options["portions"], options["loss"]
    return [torch.ones(1)]


def fence(shard: Shard, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Refuse a ticket from now on; whether its sum was added before."""
    notes, ticket = shard.notes, options["ticket"]
    notes["fenced"] = [*notes.get("fenced", ())[-64:], ticket]
    return [torch.ones(1) if ticket in notes.get("applied", {}) else torch.zeros(1)]


def survey(shard: Shard, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Refuse all tickets below `least` from now on, and tell what is remembered."""
    notes = shard.notes
    notes["least"] = max(options["least"], notes.get("least", 0))
    told = Survey(
        notes.get("word"),
        sorted(notes.get("answers", {})),
        notes.get("pass", 0),
        {ticket: (list(portions), loss) for ticket, (portions, loss) in notes.get("applied", {}).items()},
        notes["least"],
        notes.get("closed", False),
    )
    return [torch.frombuffer(bytearray(msgspec.msgpack.encode(told)), dtype=torch.uint8)]


class Survey(msgspec.Struct, frozen=True, array_like=True):
    """What a range remembers of a coordinator's work."""

    word: bytes | None  # the coordinator's own note, last given with a list of operations
    answered: list[int]  # numbers of lists of operations whose scalars are kept
    number: int  # of the pass
    applied: dict[
        int, tuple[list[int], float]
    ]  # by ticket: the portions of each sum added in this pass, and their loss
    least: int
    closed: bool = False  # no batch is to come any more


def close(shard: Shard, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Remember that no batch is to come any more, for workers that come late."""
    shard.notes["closed"] = True
    return []


def read_survey(tensor: Tensor) -> Survey:
    return msgspec.msgpack.decode(tensor.numpy().tobytes(), type=Survey)


HANDLERS: dict[str, Handler] = {
    "vectors": vectors,
    "accumulate": accumulate,
    "fence": fence,
    "survey": survey,
    "close": close,
}
