"""From an optimizer that somebody has built, or a function that builds it, to one that can be built over any slices.

    AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=1e-3)
      ──► OptimizerSpec(AdamW, 1e-3, groups=(names of biases: weight_decay=0, names of others))

The class is called again with what it keeps as its `defaults`, and what comes out must be like the optimizer given: a
class that keeps what it was given somewhere else is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torrential.errors import BadInput
from torrential.optim.outside import values_outside
from torrential.optimizers import OptimizerSpec, ParameterGroup, check_class, has_own_zero_grad
from torrential.usercode import calling, in_words

_BOOKKEEPING = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
_TORCHS = ("_opt_called", "_step_count", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")

Factory = Callable[[nn.Module], torch.optim.Optimizer]


def over_model(given: OptimizerSpec | Factory, model: nn.Module) -> OptimizerSpec:
    """A task's optimizer over its model: rules become groups, and a function that builds the optimizer is called."""
    if isinstance(given, OptimizerSpec):
        return given.over(model)
    with calling("optimizer factory", given):
        built = given(model)
    if not isinstance(built, torch.optim.Optimizer):
        raise BadInput(f"the task's optimizer factory must return a torch.optim.Optimizer (it returned {built!r})")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    spec = spec_of(built, names)
    held = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise BadInput(
            f"the optimizer factory leaves out {missing[0]} ({len(missing)} of the model's trained parameters); give "
            "it to the optimizer too, or set requires_grad=False for it in the model factory"
        )
    return spec


def spec_of(built: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerSpec:
    """The optimizer's class, options and groups. `names`: what each parameter is called, by its id.

    Each of its param_groups becomes a group with the same number, also one whose parameters are not trained."""
    kind = type(built)
    check_class(kind)
    if has_own_zero_grad(built):
        raise BadInput(f"{kind.__name__} has a zero_grad of its own, which no run calls; do in step what it does")
    if built._optimizer_step_pre_hooks or built._optimizer_step_post_hooks:
        raise BadInput(
            f"{kind.__name__} has hooks, which are lost when it is built again for a run; do in step what they do"
        )
    for group in built.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise BadInput(f"{kind.__name__} has a parameter that is not the model's; give it the model's alone")
        if "lr" not in group:
            raise BadInput(f"{kind.__name__} has no lr in its param_groups, which a run sets there; keep it there")
    lr = _base_rate(built)
    options = {name: value for name, value in built.defaults.items() if name in _unusual(kind, built.defaults)}
    groups = tuple(_group(built, number, lr, names) for number in range(len(built.param_groups)))
    if len(groups) == 1 and not groups[0].options:
        groups = ()
    spec = OptimizerSpec(kind, lr, options, groups)
    _check_alike(spec, built, names)
    return spec


def _base_rate(built: torch.optim.Optimizer) -> float:
    """The rate that the optimizer was given for groups without one of their own, or the largest of theirs."""
    rates = [float(group.get("initial_lr", group["lr"])) for group in built.param_groups]
    own = built.defaults.get("lr")
    return float(own) if isinstance(own, int | float | Tensor) and float(own) > 0 else max(rates)


def _unusual(kind: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> Iterator[str]:
    """The names of options that the class takes and that are not what they are when left out."""
    taken = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    for name, value in defaults.items():
        if name != "lr" and (name in taken or takes_all):
            usual = taken[name].default if name in taken else inspect.Parameter.empty
            if type(usual) is not type(value) or usual != value:
                yield name


def _group(built: torch.optim.Optimizer, number: int, lr: float, names: Mapping[int, str]) -> ParameterGroup:
    group = built.param_groups[number]
    options = {
        name: value
        for name, value in group.items()
        if name not in (*_BOOKKEEPING, "lr") and not (name in built.defaults and _same(built.defaults[name], value))
    }
    rate = float(group.get("initial_lr", group["lr"]))
    return ParameterGroup(
        frozenset(names[id(parameter)] for parameter in group["params"]),
        options if rate == lr else {"lr": rate, **options},
        number,
    )


def _check_alike(spec: OptimizerSpec, built: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raise BadInput if the optimizer that the class makes of its defaults is another one."""
    name = spec.kind.__name__
    parameters = [parameter for group in built.param_groups for parameter in group["params"]]
    kinds = {parameter.device.type for parameter in parameters}
    try:
        again = spec.build(parameters, next(iter(kinds), "cpu"), [names[id(p)] for p in parameters])
    except Exception as error:
        raise BadInput(
            f"{name} cannot be built again from its defaults ({in_words(error)}), as workers and servers must; have it "
            "keep all that it is given in them: super().__init__(params, dict(lr=lr, ...))"
        ) from error
    then, now = (dict(_attributes(each)) for each in (built, again))
    for where in sorted(then.keys() | now.keys()):
        if where not in then or where not in now or not _same(then[where], now[where]):
            raise BadInput(
                f"{name} was given {where} = {then.get(where)!r} and does not keep it in its defaults, so workers and "
                "servers cannot build it again; have it say super().__init__(params, dict(lr=lr, ...)) with all options"
            )
    for parameter in parameters:
        mine, fresh = built.state.get(parameter, {}), again.state.get(parameter, {})
        for where in mine:
            if where not in fresh or not _same(mine[where], fresh[where]):
                raise BadInput(
                    f"{name} has state already ({where} of {names[id(parameter)]}, from steps or load_state_dict), and "
                    "a run begins without; give it as it is made, and continue runs with --resume"
                )


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Numbers and tensors among the optimizer's attributes, but those that torch's own steps and schedulers put there:
    groups are compared by what they are made from."""
    for where, value in values_outside(optimizer):
        if not where.startswith("groups[") and where.partition("[")[0] not in _TORCHS:
            yield where, value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        alike = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
        return alike and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)
