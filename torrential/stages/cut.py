"""Where a model is cut into stages: which of its layers each has, so that all have about as much to compute.

A model that is an nn.Sequential is cut between its children. What a layer costs is counted on the meta device, from the
shapes of two samples: multiplications of its matrices, and a few operations for each element of its output. The result
is the same wherever it is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from torrential.data.batches import training_batches
from torrential.data.nest import mapped
from torrential.errors import BadInput
from torrential.step import pair
from torrential.task import Task, training_samples

ELEMENT_COST = 10.0  # operations that an element of an output costs beside its sums


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers between which a model can be cut, by name."""
    own = isinstance(model, nn.Sequential) and type(model).forward is not nn.Sequential.forward
    hooks = [*model._forward_hooks, *model._forward_pre_hooks, *model._backward_hooks, *model._backward_pre_hooks]
    if own or hooks:
        raise BadInput(
            f"the model ({type(model).__name__}) has {'a forward of its own' if own else 'hooks'}, which stages would "
            "not run; put that into a layer"
        )
    if not isinstance(model, nn.Sequential):
        raise BadInput(
            f"only an nn.Sequential can be cut into stages (the model is a {type(model).__name__}); write its layers "
            "as children of one, blocks of any kind"
        )
    return [(name, layer) for name, layer in model._modules.items() if layer is not None]  # one may be there twice


def layer_costs(task: Task, model: nn.Module) -> list[float]:
    """What each layer costs: operations of its forward, for two samples; or, where these cannot be counted without
    computing, the numbers of their parameters."""
    inputs, _ = pair(training_batches(task).fetch(torch.arange(min(2, training_samples(task)))))
    value = mapped(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
    costs = []
    for _, layer in layers_of(model):
        empty = {name: tensor.to("meta") for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]}
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                value = functional_call(layer, empty, (value,))
        except Exception:  # of the user's layers, which need numbers
            return [1.0 + sum(p.numel() for p in each.parameters()) for _, each in layers_of(model)]
        elements = sum(leaf.numel() for leaf in tensors_of(value))
        costs.append(counter.get_total_flops() + ELEMENT_COST * elements)
    return costs


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


def read_cuts(text: str, layers: int, parts: int) -> list[int]:
    """The layers at which parts begin, as a user has written them: "2,4"."""
    try:
        cuts = [int(each) for each in text.split(",")]
    except ValueError as error:
        raise BadInput(f'cuts are numbers of layers with commas (given: {text!r}); try cuts="2,4"') from error
    if len(cuts) != parts - 1 or not all(a < b for a, b in itertools.pairwise([0, *cuts, layers])):
        raise BadInput(
            f"cuts={text!r} does not cut {layers} layers into {parts} parts; give {parts - 1} of the "
            f"numbers from 1 to {layers - 1}, in rising order"
        )
    return cuts


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
