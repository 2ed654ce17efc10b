"""Whether the steps of a run can be taken: what the recipe changes, which optimizer runs, what is likely a mistake."""

from __future__ import annotations

from torch import nn

from torrential.config import Recipe, RunConfig
from torrential.data.resize import Resize
from torrential.errors import BadInput
from torrential.limits import idle_patience
from torrential.optim.built import over_model
from torrential.optim.corrected import corrected
from torrential.optim.recipe import adapt_model, adapt_optimizer, describe, without_effect
from torrential.optim.schedule import schedule_of
from torrential.optimizers import OptimizerSpec
from torrential.resolve.request import RunRequest
from torrential.schedulers import Scheduler
from torrential.strategies.base import Strategy, needs_servers
from torrential.task import Task
from torrential.trainer.optimizer import check_optimizer
from torrential.tryout import Sample, try_resized


def check_recipe(
    config: RunConfig, strategy: Strategy, task: Task, model: nn.Module, sample: Sample, asked: RunRequest
) -> tuple[str, list[str]]:
    """Refuse what cannot work; say in one line what the recipe changes, and in others what is likely a mistake."""
    recipe, joined = config.recipe, config.samples_per_step
    _check_steps(config, strategy)
    schedule = schedule_of(config, joined, task.schedule)
    adapted = adapt_optimizer(recipe, task.optimizer_spec, model)
    replaced = _servers_optimizer(config, strategy, adapted, over_model(asked.task.optimizer, model).lr)
    _check_moves(task, strategy, adapted)
    warnings = without_effect(recipe, asked.options, schedule, config.batch_size, model) + replaced
    warnings += idle_patience(config)
    if not type(strategy).uses_rate:
        idle = ["--lr"] * (asked.lr is not None) + [o for o in asked.options if o in Recipe.__struct_fields__]
        warnings += (
            [f"{type(strategy).name} finds its steps by itself: {', '.join(idle)} has no effect"] if idle else []
        )
    if recipe.layerwise == "lars" and asked.lr is None:
        warnings.append(
            f"LARS wants a much larger rate than SGD, 10 to 100 times (the task's: {config.lr:g}); "
            f"try --lr {40 * config.lr:g}"
        )
    model = adapt_model(recipe, model)
    used = corrected(config.compression, strategy.optimizer(adapt_optimizer(recipe, task.optimizer_spec, model)), model)
    warnings += check_optimizer(config, strategy, used, model, schedule)
    if recipe.resize is not None:
        try_resized(Resize.parse(recipe.resize), task, model, sample)
    return describe(recipe, schedule, joined, model), warnings


def _check_steps(config: RunConfig, strategy: Strategy) -> None:
    """Whether the recipe suits the strategy, and the data suffices for a step."""
    name, recipe, joined = type(strategy).name, config.recipe, config.samples_per_step
    refused = {"resize": recipe.resize is not None, "grow": recipe.grow, "scaling=loss": recipe.scaling == "loss"}
    if (needs_servers(strategy) or not strategy.has_whole_model()) and any(refused.values()):
        wrong = " and ".join(name for name, is_given in refused.items() if is_given)
        raise BadInput(f"{name} does not know {wrong}; leave it out, or use --strategy allreduce")
    if joined > config.samples and type(strategy).uses_rate:
        fits = config.samples * config.batch_size // joined
        several = [option for option in ("accumulate", "push_every") if option in strategy.__struct_fields__]
        smaller = f" and a smaller {several[0]}" if several and not fits else ""
        size = f"use --batch-size {fits or 1}" if config.script is None else f"give the loader batch_size={fits or 1}"
        raise BadInput(
            f"the joined batch is larger than the training set (samples a step: {joined}, samples: {config.samples}); "
            f"{size}{smaller}"
        )


def _check_moves(task: Task, strategy: Strategy, adapted: OptimizerSpec) -> None:
    """Whether the optimizer that is used has everything that the task's schedule moves."""
    if isinstance(task.schedule, Scheduler) and task.schedule.moves:
        used = strategy.optimizer(adapted)
        for option in task.schedule.moves:
            if option not in used.defaults():
                raise BadInput(
                    f"the task's schedule moves {option}, which {used.kind.__name__} has not, the optimizer of "
                    f"{type(strategy).name}; have the schedule move the rate alone (cycle_momentum=False)"
                )


def _servers_optimizer(config: RunConfig, strategy: Strategy, adapted: OptimizerSpec, own_rate: float) -> list[str]:
    """A warning where the servers have an optimizer of their own in the place of the task's."""
    name, layerwise = type(strategy).name, config.recipe.layerwise
    used = strategy.optimizer(adapted)
    decay = adapted.weight_decay()
    lost = f", without its weight decay of {decay:g}" if decay > used.weight_decay() else ""
    if not type(strategy).uses_rate:
        return [f"{name} does without the task's {adapted.kind.__name__}{lost}"] if lost else []
    if used.kind is adapted.kind:
        return []
    if layerwise != "none":
        raise BadInput(
            f"layerwise={layerwise} would have no effect: servers of {name} have an optimizer of their own; "
            "add --set server=task"
        )
    whose, remedy = "task", "--lr gives another rate, --set server=task keeps the task's optimizer"
    if config.script is not None:
        whose, remedy = "script", "leave out server=... to keep the script's optimizer"
    return [
        f"the servers of {name} use {used.kind.__name__} at {config.lr:g} in the place of the {whose}'s "
        f"{adapted.kind.__name__} at {own_rate:g}{lost}; {remedy}"
    ]
