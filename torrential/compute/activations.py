"""What a step keeps for backward, in bytes: asked of autograd itself, on tensors that have sizes and no contents.

Forward and loss run on fake tensors (torch's own, as its compiler uses them) of a whole batch, and every tensor that
autograd saves counts once, for the layer in whose forward it is saved first. Nothing is computed, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten

from torrential.compute.precision import autocast
from torrential.compute.recompute import LayerRow, rows_of
from torrential.compute.segments import LayerBytes
from torrential.data.batches import training_batches
from torrential.data.nest import mapped
from torrential.errors import BadInput
from torrential.randomness import CPU, SeparateDraws
from torrential.step import run_step
from torrential.task import Task, training_samples
from torrential.usercode import in_words


class KeptBytes(NamedTuple):
    """The activations of a step, in bytes."""

    layers: list[LayerBytes]
    """What the layers of the model's rows keep (compute/recompute.py)."""
    elsewhere: int
    """What is kept beside them: by the loss, and by modules that stand in no row."""

    @property
    def total(self) -> int:
        return sum(layer.kept for layer in self.layers) + self.elsewhere


class _Step(nn.Module):
    """A task's step as a module, so that it can be called with other tensors for its parameters."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, batch: Any) -> Tensor:
        return run_step(self.task, self.model, batch).loss


def kept_bytes(task: Task, model: nn.Module, batch_size: int, precision: str = "float32") -> KeptBytes:
    """What a step of the task on so many samples keeps for backward."""
    batch = training_batches(task).fetch(torch.arange(min(batch_size, training_samples(task))))
    step = _Step(task, model.train())
    count = _Count(rows_of(model), [*step.parameters(), *step.buffers()])
    try:
        with SeparateDraws(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            tensors: dict[str, Tensor] = {name: fake.from_tensor(tensor) for name, tensor in _tensors_of(step)}
            given = mapped(lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
            count.known(tensors.values())
            with count.listening(), autocast(precision, CPU):
                loss = functional_call(step, tensors, (given,))
        del loss
    except Exception as error:  # of the user's model, which has run on real tensors
        said = in_words(error.__cause__ or error)
        raise BadInput(
            f"what the model keeps for backward cannot be told from sizes alone: {said}; a forward pass that looks at "
            "values cannot be planned: use recompute=sqrt"
        ) from error
    return count.found()


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class _Count:
    """Counts what autograd saves while a step runs, layer by layer."""

    def __init__(self, rows: Sequence[LayerRow], own: Sequence[Tensor]) -> None:
        self._modules = [layer for row in rows for layer in row.layers]
        self._kept = [0] * len(self._modules)
        self._given = [0] * len(self._modules)
        self._elsewhere, self._now = 0, list[int]()
        self._seen: dict[int, Tensor] = {}  # by storage; keeping the tensor keeps its number from being given again

    def known(self, tensors: Any) -> None:
        """Of these nothing is counted: parameters and buffers."""
        self._seen |= {_storage(tensor): tensor for tensor in tensors}

    @contextmanager
    def listening(self) -> Iterator[None]:
        hooks = []
        for place, module in enumerate(self._modules):
            hooks.append(module.register_forward_pre_hook(self._before(place), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after, always_call=True))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, place: int) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._now.append(place)
            leaves = tree_flatten((args, kwargs))[0]
            self._given[place] = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

        return note

    def _after(self, *_: Any) -> None:
        self._now.pop()

    def _save(self, tensor: Tensor) -> Tensor:
        if (memory := _storage(tensor)) not in self._seen:
            self._seen[memory] = tensor
            if self._now:
                self._kept[self._now[0]] += tensor.untyped_storage().nbytes()
            else:
                self._elsewhere += tensor.untyped_storage().nbytes()
        return tensor

    def found(self) -> KeptBytes:
        layers = [LayerBytes(given, kept) for given, kept in zip(self._given, self._kept, strict=True)]
        return KeptBytes(layers, self._elsewhere)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
