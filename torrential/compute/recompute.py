"""Recomputation: a model's layers in segments, of which forward keeps the input alone (Chen et al. 2016).

    forward    input ─► segment ─► input ─► segment ─► input ─► last layers, kept
    backward                       └─ computed again ─► its gradients ─► gone

What is computed again is what was computed: random numbers are drawn as they were, buffers (statistics of batch norm)
are those of then and afterwards those of now, autocast is as it was; so gradients are the same to the bit. The row of
layers is an nn.Sequential, nested ones included; of any other model each nn.Sequential in it, and each member of an
nn.ModuleList or nn.ModuleDict, which is a row of its own. torch.utils.checkpoint does the work.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torrential.compute.segments import Chain, Plan, halves_plan, layers_of, recomputed, spans_plan, square_root_plan
from torrential.config import RunConfig
from torrential.errors import BadInput, RunFailed


class LayerRow(NamedTuple):
    """Layers that are called one after the other."""

    owner: nn.Module
    """The module whose forward calls them; the only one of them, where it is a block by itself."""
    layers: list[nn.Module]


def rows_of(model: nn.Module) -> list[LayerRow]:
    """The rows of layers of a model, in the order of their modules."""
    if _is_plain(model, nn.Sequential):
        return [LayerRow(model, _flat(model))]
    found = []
    for child in model.children():
        if _is_plain(child, nn.ModuleList) or _is_plain(child, nn.ModuleDict):
            for member in child.children():
                found += rows_of(member) if _is_plain(member, nn.Sequential) else [LayerRow(member, [member])]
        else:
            found += rows_of(child)
    return found


def chain_of(rows: Sequence[LayerRow]) -> Chain:
    """The layers of all rows, numbered."""
    ranges, fragile, first = [], set[int](), 0
    for row in rows:
        ranges.append(range(first, first + len(row.layers)))
        fragile |= {first + place for place, layer in enumerate(row.layers) if getattr(layer, "inplace", False)}
        first += len(row.layers)
    return Chain(ranges, frozenset(fragile))


def recompute(model: nn.Module, config: RunConfig) -> float:
    """Have a model's forward keep what the run says, and backward compute the rest again; returns how many times a
    layer is computed in a step, on the average: 1 without recomputation."""
    mode = config.settings.recompute
    if mode in ("none", "stage"):  # the stages of pipelines are computed again by who runs them
        return 1.0
    rows = rows_of(model)
    chain = chain_of(rows)
    if mode == "auto":
        plan = spans_plan(chain, config.segments)
    else:
        plan = square_root_plan(chain) if mode == "sqrt" else halves_plan(chain)
    follow(rows, chain, plan)
    return 1.0 + recomputed(plan) / max(1, chain.layers)


def follow(rows: Sequence[LayerRow], chain: Chain, plan: Plan) -> None:
    """Have the rows' forwards follow a plan."""
    for row, places in zip(rows, chain.rows, strict=True):
        part = tuple(step for step in plan if next(layers_of((step,))) in places)
        if any(not isinstance(step, int) for step in part):
            alone = row.layers == [row.owner]
            calls: list[Callable[..., Any]] = [row.owner.forward] if alone else [*row.layers]
            row.owner.forward = _Forward(row.layers, calls, places.start, part)


def check_recompute(model: nn.Module, mode: str) -> None:
    """Refuse a model in which there is nothing to compute again."""
    if mode not in ("none", "stage") and chain_of(rows_of(model)).layers < 2:
        raise BadInput(
            f"recompute={mode} found no layers to compute again (model: {type(model).__name__}); put them into an "
            "nn.Sequential or an nn.ModuleList"
        )


class _Forward:
    """The forward of a row's owner, in the place of its class's."""

    def __init__(self, layers: list[nn.Module], calls: list[Callable[..., Any]], first: int, plan: Plan) -> None:
        self._layers, self._calls, self._first, self._plan = layers, calls, first, plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            for call in self._calls:
                args, kwargs = (call(*args, **kwargs),), {}
            return args[0]
        return self._run(self._plan, *args, **kwargs)

    def _run(self, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        for step in plan:
            if isinstance(step, int):
                given = self._calls[step - self._first](*args, **kwargs)
            else:
                given = self._again(step, args, kwargs)
            args, kwargs = (given,), {}
        return args[0]

    def _again(self, segment: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
        modules = [self._layers[place - self._first] for place in layers_of(segment)]
        moment = _Moment(modules)

        def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
            return contextlib.nullcontext(), moment.again()

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in tensors]
        run = partial(self._run, segment)
        output = checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if versions != [tensor._version for tensor in tensors]:
            kinds = ", ".join(type(module).__name__ for module in modules)
            raise RunFailed(
                f"layers that recompute begins again with have changed their input in place ({kinds}); use "
                "inplace=False there, or leave out recompute"
            )
        return output


class _Moment:
    """What a segment begins with, besides its input and torch's random numbers: buffers, and other generators."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._buffers = [b.data for module in modules for b in module.buffers()]
        self._then = [buffer.clone() for buffer in self._buffers]
        self._draws = random.getstate(), np.random.get_state()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A block in which the segment is computed again."""
        now = [buffer.clone() for buffer in self._buffers]
        draws = random.getstate(), np.random.get_state()
        self._set(self._then, self._draws)
        try:
            yield
        finally:
            self._set(now, draws)

    def _set(self, values: Sequence[Tensor], draws: tuple[Any, Any]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)
        random.setstate(draws[0])
        np.random.set_state(draws[1])


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its class does, and nobody listens to its calls."""
    hooks = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks, *module._backward_pre_hooks]
    return isinstance(module, kind) and type(module).forward is kind.forward and not hooks


def _flat(row: nn.Module) -> list[nn.Module]:
    """The layers of an nn.Sequential, those of nested ones among them."""
    found = []
    for layer in row._modules.values():
        if layer is not None:
            found += _flat(layer) if _is_plain(layer, nn.Sequential) and len(layer._modules) else [layer]
    return found
