"""An optimizer yet to be built: its class, learning rate, other options, and groups of parameters with their own.

    optimizer("adamw", lr=1e-3, weight_decay=0.1, groups=[
        ("*.bias", {"weight_decay": 0.0}),                     a pattern for names
        (lambda name, p: p.ndim < 2, {"weight_decay": 0.0}),   or a function
        ("head.*", {"lr": 1e-2}),                              the first that matches counts
    ])

Over a model these rules become groups of names (`over`). A group is known by the names in it, so that it can be built
over any slices of the parameters: `build` takes the name of the tensor that each slice belongs to.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torrential.errors import BadInput, UnknownName
from torrential.fused import agrees, has_fused_kernel
from torrential.usercode import calling

Match = str | Callable[[str, nn.Parameter], bool]
Rule = tuple[Match, Mapping[str, Any]]
NUMBER = "torrential_number"  # the key of a group's number in a built optimizer, which ignores what it does not know


_IN_GRADIENTS = (  # classes whose weight decay is added to gradients, unless they are told to keep it apart
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
)


@dataclass(frozen=True)
class ParameterGroup:
    """Trained parameters of a model, by name, with options of their own."""

    names: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)  # those that differ from the optimizer's, `lr` among them
    number: int = 0  # the place of its options among those that a schedule moves (optim/rates.py)


OF_RUNS: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""The optimizers of this process that are a run's, not the user's."""


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer yet to be built: its class, learning rate and other options. Made by `optimizer()`."""

    kind: type[torch.optim.Optimizer]
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[ParameterGroup, ...] = ()  # every trained parameter is in one of them; none: all have the options
    rules: tuple[Rule, ...] = ()  # what `over` makes groups of

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, int | float) and math.isfinite(self.lr) and self.lr > 0):
            raise BadInput(f"the learning rate must be a positive number (lr: {self.lr!r}); try lr=0.1")

    # -- building -------------------------------------------------------------------------------------------------
    def build(
        self, params: Iterable[Tensor], device_type: str = "cpu", names: Iterable[str] = ()
    ) -> torch.optim.Optimizer:
        """The optimizer over `params`, with torch's fused kernel wherever that is only a matter of speed. `names` are
        those that the model has for the parameters, or for the tensors that they are parts of."""
        params = list(params)
        options = dict(self.options)
        kind = self.kind if options.get("differentiable") else _without_compiler(self.kind)  # type: ignore[arg-type]
        # torch refuses fused with foreach or differentiable, and for parameters that are not floating point;
        # it also has no fused kernel for sparse gradients: a task with those sets fused=False.
        # SGD's kernel also refuses a parameter that is first used later than others; we start momentum from zero to
        # avoid that, which is the same unless there is dampening.
        sets = self.option_sets()
        chosen = any({"fused", "foreach", "differentiable"} & each.keys() or each.get("dampening") for each in sets)
        may = has_fused_kernel(self.kind, device_type) and all(p.is_floating_point() for p in params)
        if may and not chosen and not self._wrongly_fused(kind, params, device_type):
            options["fused"] = True
        built = kind(self._grouped(params, list(names)), lr=self.lr, **options)  # type: ignore[call-arg]
        OF_RUNS.add(built)
        asked = any(each.get("fused") for each in sets)
        if may and asked and (wrong := self._wrongly_fused(kind, params, device_type)):
            raise BadInput(
                f"torch's fused {kind.__name__} does not give the numbers of the ordinary one for parameters of "
                f"{', '.join(wrong)} on {device_type}; leave out fused=True"
            )
        return built

    def option_sets(self) -> list[dict[str, Any]]:
        """The options of the optimizer itself, then those of each group in full; all but rates."""
        own = [{**self.options, **group.options} for group in self.groups]
        return [{name: value for name, value in each.items() if name != "lr"} for each in (self.options, *own)]

    def _wrongly_fused(self, kind: type[torch.optim.Optimizer], params: list[Tensor], device_type: str) -> list[str]:
        """The dtypes for which the fused kernel is not to be trusted."""
        sets = [{name: value for name, value in each.items() if name != "fused"} for each in self.option_sets()]
        dtypes = {str(p.dtype).removeprefix("torch."): p.dtype for p in params}
        return [n for n, dtype in dtypes.items() if not all(agrees(kind, dtype, device_type, each) for each in sets)]

    def _grouped(self, params: list[Tensor], names: list[str]) -> list[Any]:
        if not self.groups:
            return params
        named = list(zip(names, params, strict=True))
        found: list[dict[str, Any]] = []
        for group in self.groups:
            members = [parameter for name, parameter in named if name in group.names]
            if members:
                found.append({"params": members, NUMBER: group.number, **group.options})
        assert sum(len(group["params"]) for group in found) == len(params), "every parameter is in one group"
        return found

    def defaults(self) -> dict[str, Any]:
        """All options that the class has, with their values for parameters of no group."""
        return dict(dataclasses.replace(self, groups=(), rules=()).build([_probe()]).defaults)

    def settings(self) -> list[dict[str, Any]]:
        """Every option with its value, once for each group of parameters, those that the class makes by itself
        included."""
        made = dataclasses.replace(self, groups=(), rules=()).build([_probe()]).param_groups
        groups = self.groups or (ParameterGroup(frozenset()),)
        return [{**each, **group.options} for group in groups for each in made]

    def weight_decay(self) -> float:
        """The largest weight decay of any group, as the class has it: added to gradients, or apart from them."""
        return max(float(each.get("weight_decay", 0.0)) for each in self.settings())

    def decays_gradients(self) -> bool:
        """Whether weight decay is known to be part of the gradients, as that of SGD is. One that is apart from them, as
        of AdamW, is small beside a step; in gradients the same number may be large."""
        apart = any(each.get("decoupled_weight_decay") for each in self.settings())
        return issubclass(self.kind, _IN_GRADIENTS) and not apart

    # -- groups ---------------------------------------------------------------------------------------------------
    def over(self, model: nn.Module) -> OptimizerSpec:
        """The same with groups of this model's trained parameters in the place of rules: of those that match a
        parameter, the first one counts."""
        if not self.rules:
            return self
        found: list[set[str]] = [set() for _ in self.rules]
        rest: set[str] = set()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                first = next((i for i, (match, _) in enumerate(self.rules) if _matches(match, name, parameter)), None)
                (rest if first is None else found[first]).add(name)
        groups: list[ParameterGroup] = []
        for names, (match, options) in zip(found, self.rules, strict=True):
            if not names:
                raise BadInput(_without_members(match, model))
            groups.append(ParameterGroup(frozenset(names), options, len(groups)))
        if rest:
            groups.append(ParameterGroup(frozenset(rest), {}, len(groups)))
        return dataclasses.replace(self, groups=tuple(groups), rules=())

    def divided(self, names: frozenset[str], all_names: frozenset[str], options: Mapping[str, Any]) -> OptimizerSpec:
        """The same with `options` on top for some of the model's parameters. Their rates stay with their groups."""
        groups: list[ParameterGroup] = []
        for group in self.groups or (ParameterGroup(all_names),):
            inside, outside = group.names & names, group.names - names
            if inside:
                groups.append(dataclasses.replace(group, names=inside, options={**group.options, **options}))
            if outside:
                groups.append(dataclasses.replace(group, names=outside))
        return dataclasses.replace(self, groups=tuple(groups))

    def replaced(
        self, kind: type[torch.optim.Optimizer], lr: float, kept: Collection[str], **options: Any
    ) -> OptimizerSpec:
        """Another class with some of the options, and `options`; groups keep the ratio of their rates to `lr`."""
        scaled = self.with_lr(lr)
        groups = tuple(dataclasses.replace(g, options=_only(g.options, (*kept, "lr"))) for g in scaled.groups)
        rules = tuple((match, _only(own, (*kept, "lr"))) for match, own in scaled.rules)
        return OptimizerSpec(kind, lr, _only(self.options, kept) | options, groups, rules)

    def with_lr(self, lr: float) -> OptimizerSpec:
        """The same at another rate; groups with rates of their own keep the ratio."""
        if lr == self.lr:
            return self
        spec = dataclasses.replace(self, lr=lr)
        ratio = lr / self.lr
        groups = tuple(dataclasses.replace(g, options=_scaled(g.options, ratio)) for g in self.groups)
        rules = tuple((match, _scaled(own, ratio)) for match, own in self.rules)
        return dataclasses.replace(spec, groups=groups, rules=rules)

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that the optimizer depends on, as something to look up by."""
        groups = tuple((g.names, repr(sorted(g.options.items())), g.number) for g in self.groups)
        return self.kind, self.lr, repr(sorted(self.options.items())), groups

    def describe(self) -> dict[str, Any]:
        """Plain JSON values, for manifests."""
        plain = {"kind": self.kind.__name__, "lr": self.lr, **{name: _plain(v) for name, v in self.options.items()}}
        groups = [
            {"parameters": sorted(g.names), **{name: _plain(v) for name, v in g.options.items()}} for g in self.groups
        ]
        return plain | ({"groups": groups} if groups else {})


def _only(options: Mapping[str, Any], kept: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in kept}


def _scaled(options: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    return {name: value * ratio if name == "lr" else value for name, value in options.items()}


def _matches(match: Match, name: str, parameter: nn.Parameter) -> bool:
    if isinstance(match, str):
        return fnmatch.fnmatchcase(name, match)
    with calling(f"rule for a group, given {name!r},"):
        return bool(match(name, parameter))


def _without_members(match: Match, model: nn.Module) -> str:
    if not isinstance(match, str):
        return f"a function for a group ({_name_of(match)}) leaves it without a parameter; correct it, or its place"
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if any(fnmatch.fnmatchcase(name, match) for name in names):
        return f"all parameters of the group {match!r} are in groups before it, where the first counts; put it earlier"
    some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"no trained parameter is named like {match!r} (there are: {some}); correct the pattern of the group"


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


# -- what a user gives ------------------------------------------------------------------------------------------------
def optimizer(
    kind: str | type[torch.optim.Optimizer], *, lr: float, groups: Sequence[Rule] = (), **options: Any
) -> OptimizerSpec:
    """An optimizer by its class or its name in torch.optim (any case), tried once so that a bad option shows here.

    `groups` gives some parameters options of their own: pairs of a pattern for names ("*.bias"), or a function of name
    and parameter, and a dict of options. The first that matches counts."""
    cls = _named_optimizer(kind) if isinstance(kind, str) else kind
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise BadInput(f"an optimizer is a name or a class of torch.optim (got {cls!r}); try optimizer('sgd', lr=0.1)")
    check_class(cls)
    spec = OptimizerSpec(cls, lr, options)
    built = _tried(spec)
    if has_own_zero_grad(built):
        raise BadInput(
            f"{cls.__name__} has a zero_grad of its own, which no run calls, since gradients are new in every step; do "
            "in step what it does, and leave zero_grad as it is in torch.optim.Optimizer"
        )
    return dataclasses.replace(spec, rules=tuple(_rule(each, spec, built.defaults) for each in groups))


def _tried(spec: OptimizerSpec) -> torch.optim.Optimizer:
    try:
        return spec.build([_probe()])
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in {"lr": spec.lr, **spec.options}.items())
        raise BadInput(f"torch.optim refuses {spec.kind.__name__}({given}): {error}; correct the option") from error


def _probe() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 2))


def _rule(given: Any, spec: OptimizerSpec, known: Mapping[str, Any]) -> Rule:
    """A rule for a group, checked: torch itself takes any option of a group without a word."""
    if not (isinstance(given, list | tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise BadInput(f'a group is a pair of pattern and options, ("*.bias", {{"lr": 0.01}}) (got {given!r})')
    match, options = given[0], dict(given[1])
    if not (isinstance(match, str) or callable(match)):
        raise BadInput(f"a group is chosen by a pattern or a function of name and parameter (got {match!r})")
    for name in options:
        if name not in known:
            raise UnknownName(f"option of {spec.kind.__name__}", name, known)
    lr = options.get("lr", spec.lr)
    if isinstance(lr, bool) or not (isinstance(lr, int | float) and math.isfinite(lr) and lr >= 0):
        raise BadInput(f"the learning rate of a group must not be negative (lr: {lr!r}); try lr=0.01, or 0 to freeze")
    others = {name: value for name, value in options.items() if name != "lr"}
    _tried(dataclasses.replace(spec, options={**spec.options, **others}))
    return match, options


def check_class(kind: type[torch.optim.Optimizer]) -> None:
    """Raise BadInput if steps of this class cannot be taken without a closure."""
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise BadInput(
            f"{kind.__name__} needs a closure that computes loss and gradients anew within a step, and here all "
            "workers together compute them once for each; use an optimizer whose step() takes nothing, such as adam"
        )


def has_own_zero_grad(built: torch.optim.Optimizer) -> bool:
    """Whether an optimizer clears gradients in another way than torch's."""
    method = getattr(built.zero_grad, "__func__", built.zero_grad)
    return inspect.unwrap(method) is not inspect.unwrap(torch.optim.Optimizer.zero_grad)


@functools.cache
def _without_compiler(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class with torch's marks for its compiler taken off three methods.

    The marks load the compiler on first use, which costs every process more than a second and a hundred megabytes.
    Outside of compiled code they do nothing else but switch gradients off during `step`.
    """
    if not cls.__module__.startswith(("torch.optim", "torrential.optim")):
        return cls
    bare = {n: getattr(cls, n).__wrapped__ for n in ("add_param_group", "zero_grad") if _marked(getattr(cls, n))}
    if _marked(cls.step):
        bare["step"] = torch.no_grad()(cls.step.__wrapped__)  # type: ignore[attr-defined]
    return type(cls.__name__, (cls,), bare)


def _marked(method: Any) -> bool:
    return hasattr(method, "__wrapped__")


def _named_optimizer(name: str) -> type[torch.optim.Optimizer]:
    known = {
        attr.lower(): cls
        for attr, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    if name.lower() not in known:
        raise UnknownName("optimizer", name.lower(), known)
    return known[name.lower()]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return repr(value)


def default_optimizer() -> OptimizerSpec:
    """The optimizer of a task that names none."""
    return OptimizerSpec(torch.optim.SGD, 0.1, {"momentum": 0.9})
