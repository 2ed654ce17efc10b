"""Backward of a stage, which adds up the gradients of linear layers' weights as they are computed.

    autograd    weight.grad += slope.t() @ given       a product in memory of its own, which is then read and added
    here        weight.grad.addmm_(slope.t(), given)   the same product, added up where it belongs

With small microbatches that is a good part of backward: the product has as many numbers as the weight, however few
samples it is of. Autograd does the rest. Which weights can be treated so is read from the graph that it has recorded:
those that were used once, in a product with what is known not to have changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torrential.stages.parameters import GradientPlace

GIVEN = {"AddmmBackward0": (2, "_saved_mat1"), "MmBackward0": (1, "_saved_self")}
"""By the product's node: which of its factors is the weight, and where it keeps the other one."""


class Product(NamedTuple):
    """A linear layer as it was computed: given @ weight.t(), perhaps with a bias."""

    node: Node
    weight: Tensor
    given: Tensor  # (rows, inputs)

    def add(self, slope: Tensor) -> None:
        """Add the gradient of the weight, from that of the output."""
        weight = self.weight
        if weight.grad is None:
            weight.grad = torch.mm(slope.t(), self.given, out=_place(weight))
        else:
            weight.grad.addmm_(slope.t(), self.given)
        _accumulated(weight)


def backward(ends: Sequence[Tensor], slopes: Sequence[Tensor]) -> None:
    """Add up the gradients of all leaves of the graph, as `torch.autograd.backward` does. `slopes`: the gradients of
    `ends`; none if that is a loss."""
    uses = _walk(ends)
    leaves = _leaves(uses)
    products = _products(uses, leaves)
    if not products:
        return torch.autograd.backward(ends, slopes or None)
    apart = {id(product.weight) for product in products}
    rest = [leaf for leaf in leaves.values() if id(leaf) not in apart]
    targets = [*map(get_gradient_edge, rest), *(GradientEdge(p.node, 0) for p in products)]
    found = torch.autograd.grad(ends, targets, slopes or None, allow_unused=True)
    for leaf, gradient in zip(rest, found, strict=False):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
            _accumulated(leaf)
    for product, slope in zip(products, found[len(rest) :], strict=True):
        if slope is not None:
            product.add(slope)


def most_inputs(modules: Iterable[nn.Module]) -> int:
    """The inputs of the widest linear layer of some modules: microbatches of more rows are left to autograd."""
    shapes = [p.shape for module in modules for p in module.parameters() if p.requires_grad]
    return max((shape[1] for shape in shapes if len(shape) == 2), default=0)


def products_of(ends: Sequence[Tensor]) -> list[Product]:
    """The products behind some tensors whose weights' gradients `backward` adds up in place."""
    uses = _walk(ends)
    return _products(uses, _leaves(uses))


def _leaves(nodes: Iterable[Node]) -> dict[Node, Tensor]:
    return {node: cast(Tensor, node.variable) for node in nodes if hasattr(node, "variable")}


def _walk(ends: Sequence[Tensor]) -> dict[Node, int]:
    """All nodes of the graph behind some tensors, with how often the graph leads to each."""
    waiting = [get_gradient_edge(end).node for end in ends if end.requires_grad]
    uses = dict.fromkeys(waiting, 1)
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following in uses:
                uses[following] += 1
            elif following is not None:
                uses[following] = 1
                waiting.append(following)
    return uses


def _products(uses: dict[Node, int], leaves: dict[Node, Tensor]) -> list[Product]:
    """The products whose weights' gradients are better added up here: those with fewer rows than inputs. A gradient
    that is the first of its parameter, and that belongs nowhere, is autograd's."""
    found = []
    for node in uses:
        place, kept = GIVEN.get(node.name(), (0, ""))
        turned = node.next_functions[place][0] if kept else None
        if turned is None or turned.name() != "TBackward0" or uses[turned] > 1:
            continue
        leaf = turned.next_functions[0][0]
        weight = leaves.get(leaf) if leaf is not None else None
        if leaf is None or weight is None or uses[leaf] > 1 or weight._backward_hooks:
            continue
        if getattr(node, "_saved_alpha", 1) != 1 or (weight.grad is None and _place(weight) is None):
            continue
        given: Tensor = getattr(node, kept)
        if given.shape[0] <= given.shape[1] and given.dtype == weight.dtype:
            found.append(Product(node, weight, given.detach()))
    return found


def _place(parameter: Tensor) -> Tensor | None:
    """The memory that a parameter's gradient belongs in, if there is such."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return next((hook.place() for hook in hooks if isinstance(hook, GradientPlace)), None)


def _accumulated(leaf: Tensor) -> None:
    """Do what is to be done with a gradient once it has been added up, as autograd does."""
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        hook(leaf)
