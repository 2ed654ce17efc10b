"""What training takes of a worker's memory: parameters, gradients, optimizer state, activations."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from torrential.compute.activations import kept_bytes
from torrential.compute.recompute import chain_of, rows_of
from torrential.compute.segments import halves_plan, peak_bytes, recomputed, square_root_plan
from torrential.optimizers import OptimizerSpec
from torrential.params.base import state_keys
from torrential.params.layout import plan
from torrential.params.whole import form_of
from torrential.task import Task

PRECISIONS = ("float32", "bf16")  # fp16 takes what bf16 does


class ActivationBytes(NamedTuple):
    """The most that a step keeps of activations, by precision and recomputation."""

    precision: str
    recompute: str
    peak: int
    again: int
    """The layers that are computed again."""
    layers: int


def activation_bytes(task: Task, model: nn.Module, batch_size: int) -> list[ActivationBytes]:
    """What a step on so many samples takes in each precision, plain and recomputed."""
    chain, found = chain_of(rows_of(model)), list[ActivationBytes]()
    plans = {"none": tuple(range(chain.layers)), "sqrt": square_root_plan(chain), "recursive": halves_plan(chain)}
    for precision in PRECISIONS:
        kept = kept_bytes(task, model, batch_size, precision)
        for mode, chosen in plans.items():
            peak = peak_bytes(chosen, kept.layers) + kept.elsewhere
            found.append(ActivationBytes(precision, mode, peak, recomputed(chosen), chain.layers))
    return found


class StateBytes(NamedTuple):
    """What a worker keeps from one step to the next, and its gradients, in bytes."""

    parameters: int
    """Those that are trained, those that are not, and buffers."""
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


def state_bytes(model: nn.Module, spec: OptimizerSpec) -> StateBytes:
    """What a worker that has a model and an optimizer of its own keeps."""
    tensors = [*model.parameters(), *model.buffers()]
    trained = [p for p in model.parameters() if p.requires_grad]
    return StateBytes(
        sum(tensor.nbytes for tensor in tensors), sum(p.nbytes for p in trained), _optimizer_bytes(model, spec)
    )


def _optimizer_bytes(model: nn.Module, spec: OptimizerSpec) -> int:
    """The state that has the shapes of parameters."""
    layout = plan(model, 1)
    sizes = {dtype: state_keys(spec, dtype) for dtype in layout.sizes}
    if None not in sizes.values():
        return sum(len(sizes[e.dtype] or ()) * e.shape.numel() * e.dtype.itemsize for e in layout.entries)
    elements = form_of(spec, layout, "cpu").elements
    return sum(len(elements[e.index]) * e.shape.numel() * e.dtype.itemsize for e in layout.entries)
