"""The places where a worker's parameters live, and what is asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Agreement, Comm, Handle
from torrential.optim.corrected import CorrectedSGD
from torrential.optimizers import OptimizerSpec
from torrential.params.layout import Bucket, Layout


@dataclass(frozen=True)
class Update:
    """A decided step: the same on every member."""

    lr: float
    scale: float  # what clipping leaves of the gradient
    used: tuple[bool, ...]  # by entry: whether any member's backward reached it


class StepGuard(Protocol):
    """Says which steps are left out, because gradients were too large for half precision."""

    overflowed: bool  # whether this member's last gradient was
    skipping: bool  # whether all members leave out the step that they conclude


class Parameters(Protocol):
    """The parameters of a role, and the state that is kept with them."""

    layout: Layout
    counts: list[int]  # by entry: updates so far
    private: bool  # whether each member has a copy of its own
    own: bool  # whether these are parameters that no other member has

    def wait_for_everybody(self) -> None:
        """Wait until every member's part of the last step can be seen here."""

    def regroup(self, agreement: Agreement) -> None:
        """Make the state whole after a change of members. Waits for the members."""

    def rebuild(self) -> None:
        """Make optimizers anew for the members, the state and the `counts` that the regrouping left."""

    def flat(self) -> dict[str, Tensor]:
        """Parameters ("float32") and optimizer state of their shape ("float32/momentum_buffer") as flat vectors."""

    def extras(self) -> dict[str, Tensor]:
        """Optimizer state of any other shape, by "<parameter>/<key>"."""

    def load(self, flat: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
        """Copy the values that `flat` and `extras` of other parameters have returned."""


class CommonParameters(Parameters, Protocol):
    """Parameters that all members hold alike."""

    def reduce(self, bucket: Bucket) -> Handle:
        """Start summing a bucket whose gradients are complete on this worker. Called from autograd hooks."""

    def square_norm(self) -> float:
        """This member's part of the squared norm of the summed gradient; the parts add up to it."""

    def apply(self, update: Update) -> None:
        """Take the step. Waits for no member."""


class Finished:
    """The handle of something that needed no waiting."""

    def __init__(self, result: Any = None) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> Any:
        return self._result


def gradients(model: nn.Module, layout: Layout) -> list[nn.Parameter]:
    """The parameters in the layout's order; their `.grad` is what backward leaves."""
    named = dict(model.named_parameters())
    return [named[e.name] for e in layout.entries]


def flat_gradient(parameter: nn.Parameter) -> Tensor | None:
    grad = parameter.grad
    if grad is None:
        return None
    return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# These very classes treat every element alike and keep, besides tensors of the parameter's shape, only a step count. A
# subclass may do anything.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    CorrectedSGD,
)


def is_elementwise(spec: OptimizerSpec) -> bool:
    """Whether the optimizer may be run on any part of a flat vector; all others get whole tensors (params/whole.py)."""
    dampened = any(options.get("dampening") for options in spec.option_sets())  # with which the first step is another
    return spec.kind in ELEMENTWISE and not dampened


def state_keys(spec: OptimizerSpec, dtype: torch.dtype) -> dict[str, float] | None:
    """The optimizer's per-element state and its initial value, or None if it cannot be run on slices of tensors."""
    if not is_elementwise(spec):
        return None
    found: dict[str, float] = {}
    for options in spec.option_sets():  # a group may keep more than others, as with momentum of its own
        initial, state = _try(OptimizerSpec(spec.kind, spec.lr, options), dtype)
        found = {k: initial.get(k, 0.0) for k, v in state.items() if v.numel() == 2} | found
    return found


def counts_steps(spec: OptimizerSpec) -> bool:
    """Whether the optimizer keeps a step count for each parameter."""
    return "step" in _try(OptimizerSpec(spec.kind, spec.lr, spec.options), torch.float32)[1]


def _try(spec: OptimizerSpec, dtype: torch.dtype) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The optimizer's tensors for a parameter of two elements: their values at first, and all after one step."""
    probe = torch.zeros(2, dtype=dtype)
    optimizer = spec.build([probe])
    initial = {k: float(v.flatten()[0]) for k, v in optimizer.state[probe].items() if torch.is_tensor(v)}
    probe.grad = torch.zeros(2, dtype=dtype)
    optimizer.step()
    return initial, {k: v for k, v in optimizer.state[probe].items() if torch.is_tensor(v)}


def computing_device(device: torch.device) -> str:
    """The kind of device on which an optimizer can be tried: nothing is computed on torch's meta device."""
    return "cpu" if device.type == "meta" else device.type


def choose(comm: Comm, spec: OptimizerSpec, device: torch.device) -> bool:
    """Whether one common copy can be used: memory is shared, on the host, and the optimizer works on slices."""
    return comm.shares_memory and device.type == "cpu" and is_elementwise(spec)
