"""How much memory activations take, from shapes alone: the model is built and run on torch's meta device, where tensors
have shapes and no contents.

What counts is the input and the output of every layer (modules without children), as if backward needed all of them.
A layer that works in place, or only looks at its input differently (nn.Flatten), adds nothing. What a kernel keeps
besides, such as the places of maxima, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from torrential.errors import BadInput
from torrential.usercode import calling, in_words


class LayerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The activation that one layer adds to what is kept."""

    name: str
    """The layer's name in the model; "input" for what the model is given."""
    kind: str
    activation_bytes: int


def estimate_activations(make_model: Callable[[], nn.Module], *inputs: Any) -> list[LayerMemory]:
    """What is kept for backward of a forward pass on `inputs`, layer by layer in the order of their calls, the input
    first. Of the inputs, nests of tensors, only shapes and types matter; tensors on the meta device will do."""
    with calling("model factory on the meta device", make_model), torch.device("meta"):
        model = make_model()
    model.to("meta").train()
    given = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, inputs)
    seen: dict[int, Tensor] = {}  # by storage; keeping the tensor keeps its number from being given again
    found = [LayerMemory(name="input", kind="", activation_bytes=_new_bytes(given, seen))]

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            found.append(LayerMemory(name=name, kind=type(module).__name__, activation_bytes=_new_bytes(output, seen)))

        return after

    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(note(name))
    try:
        with torch.no_grad():
            model(*given)
    except Exception as error:
        raise BadInput(
            f"the model does not run on shapes alone: {in_words(error)}; a forward pass that looks at values cannot be "
            "estimated"
        ) from error
    return found


def _new_bytes(nest: Any, seen: dict[int, Tensor]) -> int:
    """The bytes of those tensors whose memory is not known yet."""
    added = 0
    for tensor in tree_flatten(nest)[0]:
        if isinstance(tensor, Tensor) and (memory := tensor.untyped_storage()._cdata) not in seen:
            seen[memory] = tensor
            added += tensor.nbytes
    return added


def peak_activation_bytes(kept: Sequence[int], live: int, *, recompute: bool = False) -> int:
    """The most that a stage keeps at one time, with `live` microbatches (`Rehearsal.live`).

    `kept`: for one microbatch, the bytes of the stage's input and of the output of each of its layers. With `recompute`
    (GPipe's re-materialisation) only inputs are kept, and of the one microbatch that goes back everything.
    """
    stage_input, *outputs = kept
    return live * stage_input + (1 if recompute else live) * sum(outputs)


def live_microbatches(schedule: str, downstream: int, workers: int, microbatches: int) -> int:
    """The most microbatches (of "pipedream": minibatches) that a worker keeps at one time. `downstream`: the workers
    from its stage to the end of the pipeline, divided by the replicas of its stage and rounded up."""
    limits = {"pipedream": downstream, "1f1b": downstream, "zero-bubble": workers, "gpipe": microbatches}
    if schedule not in limits:
        raise BadInput(f"memory cannot be planned under schedule {schedule!r}; use one of {', '.join(limits)}")
    return limits[schedule] if schedule == "pipedream" else min(limits[schedule], microbatches)


def worker_bytes(schedule: str, parameter_bytes: int, activation_bytes: int, live: int, microbatches: int) -> int:
    """Weights and activations that a worker keeps. The bytes of activations are those of a minibatch, of which a
    microbatch is one of `microbatches` parts. PipeDream keeps a version of its weights for each minibatch."""
    if schedule == "pipedream":
        return live * (parameter_bytes + activation_bytes)
    return parameter_bytes + -(-live * activation_bytes // microbatches)
