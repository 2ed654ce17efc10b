"""Where a model is cut into stages: which of its layers each has, so that all have about as much to compute.

A model that is an nn.Sequential is cut between its children; any other one is traced (stages/trace.py), and cut where
modules of it begin. What a layer costs is counted for two samples, on the meta device where that will do:
multiplications of its matrices, and a few operations for each element of its output. The result is the same wherever it
is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from torrential.data.batches import training_batches
from torrential.data.nest import mapped
from torrential.errors import BadInput
from torrential.randomness import SeparateDraws
from torrential.stages.trace import trace_model
from torrential.step import pair
from torrential.task import Task, training_samples

ELEMENT_COST = 10.0  # operations that an element of an output costs beside its sums


class Layers(NamedTuple):
    """The layers between which a model can be cut."""

    model: nn.Sequential
    """The layers, one after the other. Their parameters are those of the model."""
    names: list[str]
    """What a cut before each of them is called, the first one left out."""


def is_row(model: nn.Module) -> bool:
    """Whether a model does no more than to call its children one after the other."""
    hooks = [*model._forward_hooks, *model._forward_pre_hooks, *model._backward_hooks, *model._backward_pre_hooks]
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and not hooks


def needs_tracing(model: nn.Module, cuts: str) -> bool:
    """Whether a model has to be traced to be cut there: it is no row of layers, or cuts are names of modules."""
    return not is_row(model) or not all(cut.strip().isdecimal() for cut in cuts.split(",") if cuts)


def layers_for(task: Task, model: nn.Module, cuts: str) -> Layers:
    """The layers of a model: its children; where it has to be traced, the parts that `cuts` makes, or its blocks."""
    if needs_tracing(model, cuts):
        parts, names = trace_model(task, model, [cut.strip() for cut in cuts.split(",")] if cuts else None)
        return Layers(parts, names)
    assert isinstance(model, nn.Sequential)
    return Layers(model, [str(place) for place in range(1, len(row_of(model)))])


def row_of(model: nn.Module) -> list[nn.Module]:
    """The children of a row of layers. One may be there twice."""
    return [layer for layer in model._modules.values() if layer is not None]


def layer_costs(task: Task, model: nn.Sequential) -> list[float]:
    """What each layer costs: operations of its forward, for two samples, counted on the meta device or else by
    computing; where neither can be done, the numbers of their parameters."""
    inputs, _ = pair(training_batches(task).fetch(torch.arange(min(2, training_samples(task)))))
    for device in ("meta", "cpu"):
        try:
            return list(_operations(model, inputs, device))
        except Exception:  # of the user's layers, which need numbers
            continue
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in row_of(model)]


def _operations(model: nn.Sequential, inputs: Any, device: str) -> Iterator[float]:
    value = mapped(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, inputs)
    for layer in row_of(model):
        own = itertools.chain(layer.named_parameters(), layer.named_buffers())
        tensors = {name: tensor.to(device, copy=True) for name, tensor in own}
        with SeparateDraws(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            value = functional_call(layer, tensors, (value,))
        yield counter.get_total_flops() + ELEMENT_COST * sum(leaf.numel() for leaf in tensors_of(value))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nest."""
    found: list[Tensor] = []
    mapped(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, value)
    return found


def balanced_cuts(costs: Sequence[float], parts: int) -> list[int]:
    """The layers at which parts 1, 2, ... begin, so that the most expensive part is as cheap as it can be; of several
    such, the one whose first parts are larger."""
    sums = [0.0, *itertools.accumulate(costs)]
    count = len(costs)
    best = {(1, last): (sums[last], 0) for last in range(count + 1)}  # (parts, layers): largest part, its beginning
    for number in range(2, parts + 1):
        for last in range(number, count + 1):
            best[number, last] = min(
                (max(best[number - 1, first][0], sums[last] - sums[first]), -first) for first in range(number - 1, last)
            )
    cuts, last = [], count
    for number in range(parts, 1, -1):
        last = -best[number, last][1]
        cuts.append(last)
    return cuts[::-1]


def read_cuts(text: str, names: Sequence[str], parts: int) -> list[int]:
    """The layers at which parts begin, as a user has written them: "2,4", or "layers.2,layers.4"."""
    cuts = [each.strip() for each in text.split(",")]
    places = [names.index(cut) + 1 for cut in cuts if cut in names]
    if len(places) != len(cuts) or len(cuts) != parts - 1 or not all(a < b for a, b in itertools.pairwise(places)):
        some = ", ".join(names) if len(names) <= 12 else f"{names[0]} to {names[-1]}"
        raise BadInput(
            f"cuts={text!r} does not cut {len(names) + 1} layers into {parts} parts; give {parts - 1} of {some}, in "
            "rising order"
        )
    return places


def read_costs(text: str, parts: int) -> list[float]:
    """What the parts of a model cost, as a user has written it: "1,2,1"."""
    try:
        costs = [float(each) for each in text.split(",")]
    except ValueError as error:
        raise BadInput(f'costs are numbers with commas (given: {text!r}); try costs="1,2,1"') from error
    if len(costs) != parts or not all(cost > 0 for cost in costs):
        raise BadInput(f"costs={text!r} must be {parts} numbers above 0, one for each part of the model")
    return costs


def spans(cuts: Sequence[int], layers: int) -> Iterator[range]:
    """The layers of each part."""
    for first, last in itertools.pairwise([0, *cuts, layers]):
        yield range(first, last)
