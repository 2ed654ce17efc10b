"""What a script prepares, as plain data: known from a trial of the script before a run of it begins.

Servers and the observer never run the script. What they need of its models are names, shapes and first values, and a
stand-in with those is a module that has everything but a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torrential.errors import BadInput
from torrential.optimizers import OptimizerSpec


@dataclass(frozen=True)
class Script:
    """The program that every worker runs: a file with its arguments, or a function."""

    path: str = ""
    args: tuple[str, ...] = ()
    function: Callable[[], Any] | None = None

    @property
    def name(self) -> str:
        """The name by which messages call it."""
        if self.function is None:
            return self.path.rpartition("/")[2]
        return str(getattr(self.function, "__name__", type(self.function).__name__))


@dataclass(frozen=True)
class PreparedTensor:
    """A parameter or buffer of the models that a script has prepared."""

    name: str
    value: Tensor
    kind: str  # "trained", "frozen", "buffer", or "passing": a buffer that state_dict leaves out
    same_as: str = ""  # the name of the tensor that it is tied to
    marks: Mapping[str, Any] | None = None  # attributes that the model has given a parameter


class StandIn(nn.Module):
    """Parameters and buffers of a script's models, without what the script computes with them."""

    def forward(self, *args: Any, **options: Any) -> NoReturn:
        raise BadInput(
            "the model of a launched script has parameters and no forward pass; load them into a model of the script's "
            "class, with model.load_state_dict(result.model.state_dict())"
        )


@dataclass(frozen=True)
class Blueprint:
    """What a script had prepared when it came to its first batch."""

    tensors: tuple[PreparedTensor, ...]
    optimizer: OptimizerSpec
    dataset: int  # samples in the loader's data set
    batch_size: int
    shuffle: bool
    drop_last: bool
    epochs: int | None  # as run.epochs() was told; None: the script alone knows
    device: str
    readers: int = 0  # processes that the script's loader would read with
    keeps_place: bool = False  # whether the script asks for the epoch to go on with

    def samples(self, joined: int) -> int:
        """Samples of an epoch, where all workers together take `joined` in a step."""
        return self.dataset // joined * joined if self.drop_last else self.dataset

    def stand_in(self) -> nn.Module:
        """A module with the parameters and buffers that the script's models begin with, and no forward pass."""
        root, made = StandIn(), dict[str, Tensor]()
        for tensor in self.tensors:
            *path, leaf = tensor.name.split(".")
            module = root
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            made[tensor.name] = value = made[tensor.same_as] if tensor.same_as else _made(tensor)
            if isinstance(value, nn.Parameter):
                module.register_parameter(leaf, value)
            else:
                module.register_buffer(leaf, value, persistent=tensor.kind != "passing")
        return root

    def copied(self) -> Blueprint:
        """The same with values of its own, which stay when the script goes on to compute with its models."""
        return replace(self, tensors=tuple(replace(tensor, value=tensor.value.clone()) for tensor in self.tensors))

    def differs(self, other: Blueprint) -> str | None:
        """What another run of the script has prepared otherwise, in words; None: nothing."""
        mine, theirs = ({t.name: (tuple(t.value.shape), t.kind) for t in b.tensors} for b in (self, other))
        if mine != theirs:
            odd = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            return f"its models (at: {odd[0]})"
        if self.optimizer.kind.__name__ != other.optimizer.kind.__name__:
            return f"its optimizer ({self.optimizer.kind.__name__}, then {other.optimizer.kind.__name__})"
        for what in ("dataset", "batch_size"):
            if getattr(self, what) != getattr(other, what):
                return f"its loader ({what}: {getattr(self, what)}, then {getattr(other, what)})"
        return None


@dataclass(frozen=True)
class OwnLoop:
    """A script that is launched, and what its trial has found it to prepare."""

    script: Script
    blueprint: Blueprint
    prints: bool = True  # whether what worker 0 prints is shown


def _made(tensor: PreparedTensor) -> Tensor:
    value = tensor.value.detach().clone()
    if tensor.kind not in ("trained", "frozen"):
        return value
    parameter = nn.Parameter(value, requires_grad=tensor.kind == "trained")
    vars(parameter).update(tensor.marks or {})
    return parameter


def named_models(models: list[nn.Module]) -> dict[str, nn.Module]:
    """Several models by the names of their classes, numbered where a class occurs twice."""
    kinds = [type(model).__name__ for model in models]
    names = [kind if kinds.count(kind) == 1 else f"{kind}{kinds[:i].count(kind) + 1}" for i, kind in enumerate(kinds)]
    return dict(zip(names, models, strict=True))


def join_models(models: list[nn.Module]) -> nn.Module:
    """One module that has the parameters of all models; of one model, itself."""
    return models[0] if len(models) == 1 else nn.ModuleDict(named_models(models))


def describe_model(model: nn.Module) -> tuple[PreparedTensor, ...]:
    """All parameters and buffers of a model, tied ones under each of their names."""
    kept = set(model.state_dict())
    seen: dict[int, str] = {}
    found = []
    for parameter in model.parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise BadInput("the model has lazy layers; run one batch before run.prepare, or give their sizes")
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if isinstance(tensor, nn.Parameter):
            kind, marks = "trained" if tensor.requires_grad else "frozen", dict(vars(tensor))
        else:
            kind, marks = "buffer" if name in kept else "passing", None
        found.append(PreparedTensor(name, tensor.detach(), kind, seen.get(id(tensor), ""), marks))
        seen.setdefault(id(tensor), name)
    odd = [name for name in kept if name not in {t.name for t in found}]
    if odd:
        raise BadInput(f"the model keeps state that is not a tensor ({odd[0]}), which checkpoints cannot hold")
    return tuple(found)


def load_first_values(model: nn.Module, tensors: tuple[PreparedTensor, ...]) -> None:
    """Give a model the values that all workers begin with."""
    first = {tensor.name: tensor.value for tensor in tensors}
    with torch.no_grad():
        for name, mine in [*model.named_parameters(), *model.named_buffers()]:
            if name in first and first[name].shape == mine.shape:
                mine.copy_(first[name])
