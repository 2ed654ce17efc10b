"""Backward in two halves: gradients of inputs, which the stage before waits for, and gradients of weights later.

    forward    the outputs of linear and convolution layers are noted as they are computed
    inputs     gradients of the stage's inputs and of those outputs; of weights only what cannot be put off
    weights    of each noted layer, from the gradient of its output: nothing is computed twice

What can be put off is decided for every microbatch from the graph that autograd has recorded: the weights of a layer
whose output leads to the loss, if nothing else in the stage has used them. A layer that is called twice, or whose
weights another one shares, has all its gradients in the first half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

DEFERRED = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d}  # the layers with the bulk of backward: no subclasses


class NotedCall(NamedTuple):
    """A call of a layer whose weight gradients can be computed apart."""

    parameters: list[nn.Parameter]
    output: GradientEdge


class DeferredGradient(NamedTuple):
    """A weight gradient that is still to be computed."""

    call: NotedCall
    slope: Tensor  # the gradient of the layer's output


def noting(module: nn.Module, calls: list[NotedCall]) -> Callable[[Any], Any]:
    """The module as a function that also notes the calls of layers in it."""

    def note(layer: nn.Module, given: Any, output: Tensor) -> None:
        parameters = [p for p in layer.parameters() if p.requires_grad]
        if parameters and output.requires_grad:
            calls.append(NotedCall(parameters, get_gradient_edge(output)))

    def run(value: Any) -> Any:
        hooks = [layer.register_forward_hook(note) for layer in module.modules() if type(layer) in DEFERRED]
        try:
            return module(value)
        finally:
            for hook in hooks:
                hook.remove()

    return run


def backward_input(
    ends: Sequence[Tensor],
    slopes: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Iterable[nn.Parameter],
    calls: Sequence[NotedCall],
) -> list[DeferredGradient]:
    """Add up the gradients of inputs, and of those parameters that cannot wait; returns what is left to do. `slopes`:
    the gradients of `ends`; none if that is a loss."""
    nodes, uses = _walk(ends)
    put_off = [c for c in calls if c.output.node in nodes and all(uses[id(p)] == 1 for p in c.parameters)]
    later = {id(p) for call in put_off for p in call.parameters}
    now = [*inputs, *(p for p in parameters if id(p) not in later and uses[id(p)])]
    targets = [*map(get_gradient_edge, now), *(call.output for call in put_off)]
    if not targets:
        return []
    found = torch.autograd.grad(ends, targets, slopes or None, retain_graph=bool(put_off), allow_unused=True)
    _add(now, found[: len(now)])
    rest = zip(put_off, found[len(now) :], strict=True)
    return [DeferredGradient(call, slope) for call, slope in rest if slope is not None]


def backward_weight(deferred: Iterable[DeferredGradient]) -> None:
    """Add up the gradients of weights that were put off."""
    for (parameters, output), slope in deferred:
        _add(parameters, torch.autograd.grad([output], parameters, [slope]))


def _add(targets: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for target, gradient in zip(targets, gradients, strict=True):
        if gradient is not None:
            target.grad = gradient if target.grad is None else target.grad.add_(gradient)


def _walk(ends: Sequence[Tensor]) -> tuple[set[Node], Counter[int]]:
    """All nodes of the graph behind some tensors, and how often the graph uses each leaf, by its id."""
    nodes, uses = set[Node](), Counter[int]()
    waiting = [end.grad_fn for end in ends if end.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in nodes:
            continue
        nodes.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                uses[id(getattr(following, "variable", None))] += 1
                waiting.append(following)
    return nodes, uses
