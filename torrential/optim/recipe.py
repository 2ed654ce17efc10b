"""The large-minibatch recipe: what it makes of options, of a model and of an optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from torrential.config import Recipe
from torrential.errors import BadInput
from torrential.optim.lamb import LAMB
from torrential.optim.lars import LARS
from torrential.optim.norms import exempt, ghost, zero_last_gamma
from torrential.optim.schedule import Schedule
from torrential.options import make
from torrential.task import OptimizerSpec

RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "goyal": {
        "scaling": "linear",
        "schedule": "step",
        "decay_norms": False,
        "zero_gamma": True,
    },
}
_LAYERWISE = {"lars": (torch.optim.SGD, LARS), "lamb": (torch.optim.Adam, LAMB)}


def make_recipe(options: dict[str, Any]) -> Recipe:
    """From options, which may come as text: what the named recipe says, except where an option says otherwise."""
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
    if not recipe.decay_norms or recipe.layerwise != "none":
        spec = dataclasses.replace(spec, exempt=frozenset(exempt(model)))
    if recipe.layerwise == "none":
        return spec
    ordinary, layerwise = _LAYERWISE[recipe.layerwise]
    if not issubclass(spec.kind, ordinary):
        raise BadInput(
            f"layerwise={recipe.layerwise} goes with {ordinary.__name__} "
            f"(the task's optimizer: {spec.kind.__name__}); give the task optimizer({ordinary.__name__.lower()!r}, ...)"
        )
    kept = ("momentum", "weight_decay") if layerwise is LARS else ("betas", "eps", "weight_decay")
    options = {name: value for name, value in spec.options.items() if name in kept}
    if layerwise is LARS:
        options["trust"] = recipe.trust
    return dataclasses.replace(spec, kind=layerwise, options=options)


def describe(recipe: Recipe, schedule: Schedule, joined: int, model: nn.Module) -> str:
    """In one line, what the recipe changes; nothing if it changes nothing."""
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
        at = ", ".join(f"{m * schedule.total / schedule.samples:.3g}" for m in recipe.milestones)
        what = f"batch × {1 / recipe.factor:g}" if recipe.grow else f"rate × {recipe.factor:g}"
        parts.append(f"{what} at epochs {at}")
    elif recipe.schedule != "constant":
        parts.append(f"{recipe.schedule} decay")
    if not recipe.decay_norms:
        parts.append(f"no weight decay on {len(exempt(model))} norm and bias tensors")
    if recipe.zero_gamma and (blocks := zero_last_gamma(model)):
        parts.append(f"last gamma zero in {len(blocks)} blocks")
    if recipe.ghost is not None:
        parts.append(f"batch norm over {recipe.ghost} samples")
    if recipe.layerwise != "none":
        parts.append(recipe.layerwise.upper())
    if recipe.resize is not None:
        parts.append(f"images resized {recipe.resize}")
    return "; ".join(parts)
