"""The large-minibatch recipe: what it makes of options, of a model and of an optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torrential.config import Recipe
from torrential.errors import BadInput
from torrential.optim.lamb import LAMB
from torrential.optim.lars import LARS
from torrential.optim.norms import exempt, ghost, zero_last_gamma
from torrential.optim.schedule import Schedule
from torrential.optimizers import OptimizerSpec
from torrential.options import make

RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "goyal": {
        "scaling": "linear",
        "schedule": "step",
        "decay_norms": False,
        "zero_gamma": True,
    },
}
_LAYERWISE = {"lars": ((torch.optim.SGD,), LARS), "lamb": ((torch.optim.Adam, torch.optim.AdamW), LAMB)}
_FOR_SPEED = ("fused", "foreach", "capturable", "differentiable")  # options that change no number


def make_recipe(options: dict[str, Any]) -> Recipe:
    """The recipe that options, which may come as text, make: the named one, except where an option says otherwise."""
    recipe = make(Recipe, RECIPES[make(Recipe, options).recipe] | options)
    for option in ("base_batch", "ghost", "trust"):
        value = getattr(recipe, option)
        if value is not None and value <= 0:
            raise BadInput(f"{option} must be above zero (given: {value})")
    return recipe


def adapt_model(recipe: Recipe, model: nn.Module) -> nn.Module:
    """A freshly built model as the recipe wants it."""
    if recipe.zero_gamma:
        zero_last_gamma(model)
    return model if recipe.ghost is None else ghost(model, recipe.ghost)


def adapt_optimizer(recipe: Recipe, spec: OptimizerSpec, model: nn.Module) -> OptimizerSpec:
    """The task's optimizer as the recipe wants it, over the whole model."""
    if recipe.layerwise != "none":
        spec = _layerwise(recipe, spec)
    elif recipe.decay_norms:
        return spec
    spared = {"weight_decay": 0.0, "layerwise": False}
    known = spec.defaults()
    different = {name: value for name, value in spared.items() if name in known}
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    names = trained & exempt(model)
    return spec.divided(names, trained, different) if different and names else spec


def _layerwise(recipe: Recipe, spec: OptimizerSpec) -> OptimizerSpec:
    """LARS or LAMB in the place of the task's optimizer."""
    ordinary, layerwise = _LAYERWISE[recipe.layerwise]
    first = ordinary[0].__name__
    if spec.kind not in ordinary:  # a subclass would lose what it does by itself
        raise BadInput(
            f"layerwise={recipe.layerwise} goes with {first} "
            f"(the task's optimizer: {spec.kind.__name__}); give the task optimizer({first.lower()!r}, ...)"
        )
    kept = ("momentum", "weight_decay") if layerwise is LARS else ("betas", "eps", "weight_decay")
    given = {name: value for options in reversed(spec.option_sets()) for name, value in options.items() if value}
    lost = [f"{name}={value!r}" for name, value in given.items() if name not in kept + _FOR_SPEED]
    if lost:
        raise BadInput(f"{layerwise.__name__} has no {', '.join(lost)}, which the task's optimizer has; leave it out")
    more = {"trust": recipe.trust} if layerwise is LARS else {}
    return spec.replaced(layerwise, spec.lr, kept, **more)


def describe(recipe: Recipe, schedule: Schedule, joined: int, model: nn.Module) -> str:
    """One line about what the recipe changes; empty if it changes nothing."""
    parts: list[str] = []
    times = schedule.scale(joined)
    if recipe.scaling == "loss":
        parts.append(f"gradient × {schedule.loss_scale(joined):g} (batch {schedule.base_batch} → {joined})")
    elif recipe.scaling != "none":
        parts.append(
            f"rate {schedule.base:g} → {schedule.base * times:.4g} "
            f"({recipe.scaling}, batch {schedule.base_batch} → {joined})"
        )
    if schedule.warmup:
        parts.append(f"{recipe.warmup_kind} warm-up over {schedule.warmup / schedule.samples:.3g} epochs")
    if recipe.schedule == "step":
        parts += _steps(recipe, schedule, joined)
    elif recipe.schedule != "constant":
        parts.append(f"{recipe.schedule} decay")
    if schedule.own is not None:
        parts.append(schedule.own.in_words())
    if not recipe.decay_norms:
        parts.append(f"no weight decay on {len(exempt(model))} norm and bias tensors")
    if recipe.zero_gamma:
        blocks = zero_last_gamma(model)
        parts.append(f"last gamma zero in {len(blocks)} blocks" if blocks else "no last gamma to set to zero")
    if recipe.ghost is not None:
        parts.append(f"batch norm over {recipe.ghost} samples")
    if recipe.layerwise != "none":
        parts.append(recipe.layerwise.upper())
    if recipe.resize is not None:
        parts.append(f"images resized {recipe.resize}")
    return "; ".join(parts)


def _steps(recipe: Recipe, schedule: Schedule, joined: int) -> list[str]:
    """The effects of a step schedule at its milestones: first the batch grows, as long as it may, then the rate
    falls."""
    grows = schedule.growths(joined)
    at = [f"{m * schedule.total / schedule.samples:.3g}" for m in recipe.milestones]
    parts = [f"batch × {1 / recipe.factor:g} at epochs {', '.join(at[:grows])}"] if grows else []
    if at[grows:]:
        more = "no more" if grows else "nowhere"
        why = f" (batch grows {more}: it would pass a tenth of the data, {schedule.samples // 10} samples)"
        parts.append(f"rate × {recipe.factor:g} at epochs {', '.join(at[grows:])}" + (why if recipe.grow else ""))
    return parts


def without_effect(
    recipe: Recipe, given: Collection[str], schedule: Schedule, batch_size: int, model: nn.Module
) -> list[str]:
    """A line for each option that was given and changes nothing because of others. Refuses what the model has no place
    for."""
    if recipe.ghost is not None and not any(isinstance(m, _BatchNorm) for m in model.modules()):
        raise BadInput(f"ghost={recipe.ghost} is for batch norm, which the model has none of; leave it out")
    if recipe.zero_gamma and "zero_gamma" in given and not zero_last_gamma(model):
        raise BadInput(
            "zero_gamma finds no residual block in the model; give its blocks a property last_norm, or leave it out"
        )
    used = {
        "milestones": (recipe.schedule == "step", "schedule=step"),
        "factor": (recipe.schedule == "step", "schedule=step"),
        "power": (recipe.schedule == "poly", "schedule=poly"),
        "trust": (recipe.layerwise == "lars", "layerwise=lars"),
        "warmup_kind": (schedule.warmup > 0, "warmup"),
        "base_batch": (recipe.scaling != "none", "scaling"),
    }
    idle = [name for name, (is_used, _) in used.items() if name in given and not is_used]
    lines = [f"{name} has no effect without {used[name][1]}" for name in idle]
    if recipe.ghost is not None and recipe.ghost > batch_size:
        lines.append(f"ghost={recipe.ghost} has no effect: batches are of {batch_size} samples per worker")
    return lines
