"""Which layers of a model are split, and how: read from what a user says, or found in the model.

A plan is a dict of layers' names to ways of splitting (splits/layers.py): {"0": "colwise", "2": "rowwise"}. In what a
user says, names may be patterns: "blocks.*.mlp.0=colwise,blocks.*.mlp.2=rowwise". What is not in the plan is whole on
every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.conv import _ConvNd

from torrential.errors import BadInput, UnknownName
from torrential.splits.group import SplitGroup
from torrential.splits.layers import CONVOLUTIONS, DROPOUTS, NORMS, WAYS, LayerSplitter

Plan = dict[str, str]

_ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanhshrink, nn.Identity,
)  # fmt: skip
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip


# -- what a user says -----------------------------------------------------------------------------------------------
def read_plan(text: str) -> Plan:
    """Patterns and ways, from "0=colwise,2=rowwise"."""
    plan = Plan()
    for item in text.split(","):
        pattern, _, way = (each.strip() for each in item.rpartition("="))
        if not pattern or not way:
            raise BadInput(f'split has layer=way with commas (given: {text!r}); try split="0=colwise,2=rowwise"')
        plan[pattern] = way
    return plan


def write_plan(plan: Mapping[str, str]) -> str:
    """The plan as text, as `read_plan` reads it."""
    return ",".join(f"{name}={way}" for name, way in plan.items())


def matched(patterns: Mapping[str, str], model: nn.Module) -> Plan:
    """The layers that patterns are of, in the order of the model; of two patterns for one layer the later counts."""
    modules = dict(model.named_modules())
    for pattern, way in patterns.items():
        if way not in WAYS:
            raise UnknownName("way to split", way, WAYS)
        if not any(name and fnmatchcase(name, pattern) for name in modules):
            raise UnknownName("layer", pattern, [name for name in modules if name])
    ways = {name: way for pattern, way in patterns.items() for name in modules if name and fnmatchcase(name, pattern)}
    return {name: ways[name] for name in modules if name in ways}


# -- what is found in a model ---------------------------------------------------------------------------------------
def found_plan(model: nn.Module, ways: int) -> Plan:
    """The layers of a model that can be split without a word of its author: attention by heads, the two linear layers
    of a transformer's block, and pairs of layers in an nn.Sequential with nothing between them that mixes channels."""
    plan = Plan()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            if module.linear1.out_features % ways == 0 and _is_trained(module.linear1) and _is_trained(module.linear2):
                plan |= {f"{prefix}linear1": "colwise", f"{prefix}dropout": "sliced", f"{prefix}linear2": "rowwise"}
        elif type(module) is nn.MultiheadAttention:
            plain = module.bias_k is None and not module.add_zero_attn and _is_trained(module)
            if plain and module.num_heads % ways == 0:
                plan[name] = "heads"
        elif _is_sequence(module) and not (name and _is_sequence(model.get_submodule(name.rpartition(".")[0]))):
            plan |= _pairs(list(_leaves(prefix, module)), ways)
    return {name: plan[name] for name, _ in model.named_modules() if name in plan}


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _leaves(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence, and of sequences in it, in the order in which they are run."""
    for name, child in module._modules.items():
        if child is not None and _is_sequence(child):
            yield from _leaves(f"{prefix}{name}.", child)
        elif child is not None:
            yield f"{prefix}{name}", child


def _pairs(layers: Sequence[tuple[str, nn.Module]], ways: int) -> Plan:
    """Splits that begin with a layer of which each worker has some outputs, and end with one that sums."""
    plan, place = Plan(), 0
    while place < len(layers):
        run, count = _run(layers[place:], ways)
        plan |= run
        place += count
    return plan


def _run(layers: Sequence[tuple[str, nn.Module]], ways: int) -> tuple[Plan, int]:
    """The split that begins with the first of these layers, if it comes to an end; and how many layers it takes."""
    way = _begins(layers[0][1], ways)
    if way is None:
        return {}, 1
    plan = {layers[0][0]: way}
    for count, (name, layer) in enumerate(layers[1:], start=2):
        if _ends(layer, ways):
            return {**plan, name: "rowwise"}, count
        kind = _between(layer, ways)
        if kind is None:
            break
        if kind:
            plan[name] = kind
    return {}, 1


def _begins(layer: nn.Module, ways: int) -> str | None:
    if not _is_trained(layer):
        return None
    if type(layer) is nn.Linear:
        return "colwise" if layer.out_features % ways == 0 else None
    convolution = _convolution(layer)
    if convolution is None:
        return None
    if convolution.groups == 1:
        return "colwise" if convolution.out_channels % ways == 0 else None
    return "sliced" if convolution.groups % ways == 0 else None


def _ends(layer: nn.Module, ways: int) -> bool:
    if not _is_trained(layer):
        return False
    if type(layer) is nn.Linear:
        return layer.in_features % ways == 0
    convolution = _convolution(layer)
    return convolution is not None and convolution.groups == 1 and convolution.in_channels % ways == 0


def _between(layer: nn.Module, ways: int) -> str | None:
    """The way to split a layer that treats channels apart: "" for one that has nothing to split, None for one that
    mixes channels."""
    kind = type(layer)
    if not _is_trained(layer):
        return None
    if kind in _ELEMENTWISE or kind in _POOLS or (kind is nn.Flatten and layer.start_dim == 1):
        return ""
    if isinstance(layer, nn.PReLU):
        return "" if layer.num_parameters == 1 else "sliced"
    if kind in DROPOUTS or kind in NORMS:
        return "sliced"
    if isinstance(layer, nn.GroupNorm):
        return "sliced" if layer.num_groups % ways == 0 else None
    convolution = _convolution(layer)
    return "sliced" if convolution is not None and convolution.groups > 1 and convolution.groups % ways == 0 else None


def _convolution(layer: nn.Module) -> _ConvNd | None:
    return layer if isinstance(layer, _ConvNd) and type(layer) in CONVOLUTIONS else None


def _is_trained(layer: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in layer.parameters())


def split_group_of(model: nn.Module) -> SplitGroup | None:
    """The place of a model among its group's, if it is a part of one."""
    found = getattr(model, "split_group", None)
    return found if isinstance(found, SplitGroup) else None


# -- the model of a worker ------------------------------------------------------------------------------------------
def cut_model(model: nn.Module, plan: Mapping[str, str], group: SplitGroup) -> nn.Module:
    """Make a model one worker's part of it, in place."""
    splitter = LayerSplitter(group)
    model.split_group = group  # type: ignore[assignment]
    for name, way in plan.items():
        splitter.split(name, model.get_submodule(name), way)
    whole = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    tied = next((whole[each] for each in splitter.replaced() if each in whole), None)
    if tied is not None:
        raise BadInput(f"{tied} is shared by a layer that is split and one that is not; split both, or neither")
    return model
