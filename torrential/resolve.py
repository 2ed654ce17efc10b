"""From what the user asked for to a run that is known to fit together: everything that can be checked before it starts.

Reads the task, the strategy's class, cluster files and this machine; writes nothing and makes no directory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from torrential.comm import futex
from torrential.config import WORLDS, LocalSettings, Recipe, RunConfig, SimSettings
from torrential.data.batches import is_vectorised
from torrential.data.resize import Resize
from torrential.descriptors import check_descriptors
from torrential.errors import BadInput, UnknownName
from torrential.limits import check_target, idle_patience
from torrential.loop.blueprint import OwnLoop
from torrential.optim.built import over_model
from torrential.optim.own_schedule import bound
from torrential.optim.recipe import adapt_model, adapt_optimizer, describe, make_recipe, without_effect
from torrential.optim.schedule import examine_schedule, schedule_of
from torrential.optimizers import OptimizerSpec
from torrential.options import make
from torrential.schedulers import Scheduler
from torrential.strategies.base import Strategy, needs_servers
from torrential.strategies.ddp import Ddp
from torrential.strategies.registry import (
    Given,
    Resolved,
    changed_options,
    check_object,
    plain_options,
    resolve_strategy,
)
from torrential.task import Task, build_model, training_samples, with_validation
from torrential.trainer.optimizer import check_optimizer
from torrential.trainer.slow import Slow
from torrential.tryout import Sample, try_once, try_resized
from torrential.usercode import calling
from torrential.userfiles import absolute_spec
from torrential.worlds.sim.cluster import Cluster, make_cluster, read_cluster

AnySettings = LocalSettings | SimSettings
NEEDS = {  # what to say of an option of one world that is given in another
    "local": "is for real processes; leave it out, or use --world local",
    "sim": "needs a simulation; add --world sim",
}


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The run that the user asked for, not yet checked."""

    task: Task
    loop: OwnLoop | None = None  # the script that the task stands for
    source: str | None = None  # how to load it again: a built-in name or file.py[:name]
    strategy: Given = "allreduce"
    options: dict[str, Any]
    workers: int = 1
    servers: int | None = None  # what the strategy needs
    epochs: int | None = None
    steps: int | None = None
    target: float | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int = 0
    device: str = "auto"
    world: str = "local"
    cluster: str | dict[str, Any] | Cluster | None = None  # to simulate: a file, the name of a shipped one, or a table


@dataclass(frozen=True)
class ResolvedRun:
    """A run that can be started: all of its parts are there and fit together."""

    config: RunConfig
    task: Task
    strategy: Strategy
    changes: str  # what the recipe changes, in one line
    warnings: list[str]  # what is likely a mistake, a line each


def resolve(asked: RunRequest) -> ResolvedRun:
    """Check everything that can be checked before a process is started."""
    found = resolve_strategy(asked.strategy)
    strategy, settings, recipe = split_options(asked, found)
    _check_numbers(asked)
    task = _task(asked, strategy)
    joined = _samples_per_update(asked, strategy, task)
    task = _with_size(asked, task, joined)
    _check_task(asked, task)
    if asked.loop is None:
        model, sample = try_once(task)
        device = choose_device(asked.device)
    else:
        check_loop(asked, strategy)
        model, sample = build_model(task), None
        device = asked.loop.blueprint.device
    task = _with_optimizer(task, asked, strategy, model)
    servers = _servers(asked, strategy, settings, model)
    strategy.refuse(task, model)
    if isinstance(settings, LocalSettings):
        settings = _check_local(asked, settings, servers, device)
        settings, idle = _check_loaders(settings, task)
        if asked.loop is not None and asked.loop.blueprint.readers:
            readers = asked.loop.blueprint.readers
            idle.append(f"num_workers={readers} has no effect: each worker reads its batches in its own process")
        cluster = None
    else:
        cluster, idle = _check_simulation(asked, settings, servers, device, strategy), []
    Slow.parse(settings.slow, asked.workers)
    config = RunConfig(
        task=task.name,
        source=None if asked.source is None else absolute_spec(asked.source),
        strategy=found.source,
        options=plain_options(strategy),
        world=asked.world,
        workers=asked.workers,
        servers=servers,
        epochs=task.epochs,
        steps=asked.steps,
        target=task.target,
        samples=training_samples(task),
        batch_size=task.batch_size,
        lr=task.optimizer_spec.lr,
        optimizer=task.optimizer_spec.describe(),
        seed=asked.seed,
        device=device,
        settings=settings,
        recipe=recipe,
        cluster=cluster,
        base_batch=recipe.base_batch or asked.task.batch_size,
        samples_per_step=joined if type(strategy).uses_rate else training_samples(task),
        script=None if asked.loop is None else (asked.loop.script.path, *asked.loop.script.args),
        minimize=not task.maximize,
        metric=task.metric_name,
        changed=changed_options(strategy, found.source),
    )
    schedule, described = examine_schedule(config, joined, task.schedule)
    config, task = msgspec.structs.replace(config, schedule=described), replace(task, schedule=schedule)
    changes, warnings = _check_recipe(config, strategy, task, model, sample, asked)
    return ResolvedRun(config, task, strategy, changes, idle + warnings)


def _task(asked: RunRequest, strategy: Strategy) -> Task:
    """The task with what was asked for in the place of its own figures."""
    evaluated = asked.loop is None and strategy.evaluates
    task = with_validation(asked.task, asked.seed) if evaluated else asked.task
    return replace(
        task,
        batch_size=task.batch_size if asked.batch_size is None else asked.batch_size,
        epochs=task.epochs if asked.epochs is None else asked.epochs,
        target=task.target if asked.target is None else asked.target,
    )


def _with_optimizer(task: Task, asked: RunRequest, strategy: Strategy, model: nn.Module) -> Task:
    """The task with its optimizer and schedule made over the model, at the run's rate."""
    spec = over_model(task.optimizer, model)
    with calling("optimizer", whose=type(strategy).name):
        rate = strategy.optimizer(spec).lr if asked.lr is None else asked.lr
    return replace(task, optimizer=spec.with_lr(rate), schedule=bound(task.schedule, spec))


def _samples_per_update(asked: RunRequest, strategy: Strategy, task: Task) -> int:
    with calling("samples of a step", whose=type(strategy).name):
        joined = strategy.samples_per_update(asked.workers, task.batch_size)
    if not isinstance(joined, int) or joined < 1:
        options = ", ".join(f"{name}={value}" for name, value in plain_options(strategy).items())
        fact = f"samples_per_update of {type(strategy).name} gives {joined!r} ({options})"
        raise BadInput(f"{fact}; an update takes at least one sample")
    return joined


def _with_size(asked: RunRequest, task: Task, joined: int) -> Task:
    """The task with a number of samples: a stream without a length has as many as the steps that were asked for use."""
    if task.samples is not None or hasattr(task.train, "__len__"):
        return task
    if asked.steps is None:
        raise BadInput(
            f"train is a stream without a length ({type(task.train).__name__}); give the task samples=..., or the run "
            "a number of --steps"
        )
    return replace(task, samples=asked.steps * max(joined, asked.workers * task.batch_size))


def _check_numbers(asked: RunRequest) -> None:
    for name, value in (("workers", asked.workers), ("steps", asked.steps)):
        if value is not None and value < 1:
            raise BadInput(f"--{name} must be at least 1 (given: {value})")


def _check_task(asked: RunRequest, task: Task) -> None:
    check_target(task.target, task)
    samples = training_samples(task)
    if asked.workers > samples:
        raise BadInput(
            f"more workers than training samples (workers: {asked.workers}, samples: {samples}); "
            f"use --workers {samples}"
        )


def choose_device(asked: str) -> str:
    if asked not in ("auto", "cpu", "cuda"):
        raise BadInput(f"no device {asked!r}; use auto, cpu or cuda")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise BadInput("--device cuda: this machine has no usable GPU; use --device cpu")
    return "cuda" if available and asked != "cpu" else "cpu"


def check_loop(asked: RunRequest, strategy: Strategy) -> None:
    """Refuse what a script's own loop cannot be run with."""
    name, kind = type(strategy).name, type(strategy)
    if asked.world != "local":
        raise BadInput("a script cannot be run in simulated time; leave out --world sim, or make a task of it")
    if asked.lr is not None or asked.batch_size is not None:
        raise BadInput("learning rate and batch size are the script's own; change them there, or pass them after --")
    given = [option for option in asked.options if option in Recipe.__struct_fields__]
    if given:
        raise BadInput(f"{given[0]} is for tasks, whose loop the run has; do it in the script, and leave it out")
    if issubclass(kind, Ddp):
        raise BadInput(f"{name} wraps the model, which a script's own loop has in its hands; use --strategy allreduce")
    if any(role.name == "coordinator" for role in strategy.roles(asked.workers, 1)):
        raise BadInput(
            f"{name} has a coordinator that says who computes what, and a script's loop has its own order; "
            "make a task of it, or use another strategy"
        )
    if kind.part is not Strategy.part:
        raise BadInput(f"{name} cuts the model, which a script's own loop has in its hands; use another strategy")


# -- options ----------------------------------------------------------------------------------------------------------
def split_options(asked: RunRequest, found: Resolved) -> tuple[Strategy, AnySettings, Recipe]:
    """Options after --set belong to the strategy, the world or the recipe; each name to one of them."""
    if asked.world not in WORLDS:
        raise UnknownName("world", asked.world, WORLDS)
    owners = {"strategy": found.kind, "world": WORLDS[asked.world], "recipe": Recipe}
    parts: dict[str, dict[str, Any]] = {owner: {} for owner in owners}
    for option, value in asked.options.items():
        owner = next((name for name, kind in owners.items() if option in kind.__struct_fields__), None)
        if owner is None:
            raise _nobodys(option, asked.world, [name for kind in owners.values() for name in kind.__struct_fields__])
        parts[owner][option] = value
    if not isinstance(asked.strategy, Strategy):
        strategy = found.make(parts["strategy"])
    elif parts["strategy"]:
        wrong = next(iter(parts["strategy"]))
        raise BadInput(f"{wrong} is an option of the strategy, which was given as an object; set it there")
    else:
        strategy = asked.strategy
        check_object(strategy)
    settings = _make_settings(asked.world, parts["world"])
    if isinstance(settings, LocalSettings):
        settings = _with_transport(settings)
    return strategy, settings, make_recipe(parts["recipe"])


def _nobodys(option: str, world: str, known: list[str]) -> BadInput:
    """The error of an option that neither the strategy nor this world nor the recipe has."""
    for other, kind in WORLDS.items():
        if other != world and option in kind.__struct_fields__:
            return BadInput(f"{option} {NEEDS[other]}")
    return UnknownName("option", option, known)


def _make_settings(world: str, given: dict[str, Any]) -> AnySettings:
    """The settings of a world. A value that an option has in the other world only is refused by that world's name."""
    for option, value in given.items():
        for other, kind in WORLDS.items():
            if not _takes(WORLDS[world], option, value) and _takes(kind, option, value):
                raise BadInput(f"{option}={value} {NEEDS[other]}")
    return make(WORLDS[world], given)


def _takes(kind: type[AnySettings], option: str, value: Any) -> bool:
    try:
        make(kind, {option: value} if option in kind.__struct_fields__ else {})
    except BadInput:
        return False
    return option in kind.__struct_fields__


def _with_transport(settings: LocalSettings) -> LocalSettings:
    """The settings with a transport that the algorithm can use."""
    by_messages = settings.algorithm not in ("auto", "shared", "native", "nccl")
    if settings.transport == "shared" and (by_messages or not futex.supported()):
        settings = msgspec.structs.replace(settings, transport="unix")  # flags in memory need x86-64 on Linux
    if settings.algorithm == "hierarchical" and not futex.supported():
        raise BadInput("algorithm=hierarchical needs shared memory, which needs Linux on x86-64; use algorithm=ring")
    if settings.hosts > 1 and settings.algorithm != "hierarchical":
        raise BadInput(f"hosts={settings.hosts} needs algorithm=hierarchical (given: {settings.algorithm})")
    if settings.algorithm == "shared" and settings.transport != "shared":
        raise BadInput(
            f"algorithm=shared needs transport=shared (given: transport={settings.transport}); use algorithm=direct"
        )
    return settings


# -- worlds -----------------------------------------------------------------------------------------------------------
def _check_local(asked: RunRequest, settings: LocalSettings, servers: int, device: str) -> LocalSettings:
    """Whether this machine can run it; the settings as they are carried out."""
    if asked.cluster is not None:
        raise BadInput("--cluster is what is simulated; add --world sim, or leave it out")
    if settings.hosts > asked.workers:
        raise BadInput(f"more hosts than workers (hosts: {settings.hosts}, workers: {asked.workers}); use fewer hosts")
    check_descriptors(asked.workers + servers)
    return _check_native(settings, device, asked.workers)


def _check_loaders(settings: LocalSettings, task: Task) -> tuple[LocalSettings, list[str]]:
    """The settings without loaders that would have nothing to do, and what to say of that."""
    if not settings.loaders or task.collate is not None or not is_vectorised(task.train):
        return settings, []
    said = f"loaders={settings.loaders} has no effect: the training data is a TensorDataset, which is read at once"
    return msgspec.structs.replace(settings, loaders=0), [said]


def _check_native(settings: LocalSettings, device: str, workers: int) -> LocalSettings:
    """What torch.distributed does needs its libraries, and NCCL a GPU for each worker. From here on nccl is native."""
    if settings.algorithm not in ("native", "nccl"):
        return settings
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own_gpus = device == "cuda" and workers <= gpus
    if settings.algorithm == "nccl" and not own_gpus:
        here = f"GPUs here: {gpus}" if device == "cuda" or not gpus else f"given: --device {device}"
        raise BadInput(f"NCCL needs a GPU for each worker ({here}); use --set algorithm=native or auto")
    library, built = ("NCCL", dist.is_nccl_available()) if own_gpus else ("Gloo", dist.is_gloo_available())
    if not built:
        raise BadInput(
            f"algorithm={settings.algorithm} needs {library}, which this torch was built without; "
            "use --set algorithm=auto"
        )
    return msgspec.structs.replace(settings, algorithm="native")


def _check_simulation(
    asked: RunRequest, settings: SimSettings, servers: int, device: str, strategy: Strategy
) -> dict[str, Any]:
    """The cluster that is simulated, as plain data; refuses what cannot be."""
    if settings.gradients == "off" and asked.target is not None:
        raise BadInput(
            f"nothing is learnt with gradients=off, so no target is reached (target: {asked.target:g}); drop one"
        )
    if settings.gradients == "off" and (settings.patience or settings.keep_best):
        given = f"patience: {settings.patience}" if settings.patience else f"keep_best: {settings.keep_best}"
        raise BadInput(f"nothing is evaluated or saved with gradients=off ({given}); drop one")
    if settings.processes and (settings.gradients == "off" or device != "cpu"):
        what = "gradients=off" if settings.gradients == "off" else f"device: {device}"
        raise BadInput(f"processes compute gradients on this machine's cores ({what}); leave processes out")
    cores = len(os.sched_getaffinity(0))
    if settings.processes > cores:
        best = f"use {cores - 1}, which leaves one for the simulation" if cores > 1 else "leave processes out"
        raise BadInput(f"more processes than cores (processes: {settings.processes}, cores: {cores}); {best}")
    table = cluster_table(asked.cluster)
    roles = strategy.roles(asked.workers, max(1, servers))
    coordinators = sum(role.count for role in roles if role.name == "coordinator")
    make_cluster(table).check(asked.workers, servers, coordinators)
    return table


def cluster_table(cluster: str | dict[str, Any] | Cluster | None) -> dict[str, Any]:
    """The table of the cluster that is simulated, as in a cluster file: from a file, a shipped one, or an object."""
    if isinstance(cluster, str):
        return read_cluster(cluster)
    if isinstance(cluster, Cluster):
        table: dict[str, Any] = msgspec.to_builtins(cluster)
        return table
    return cluster or {}


# -- servers and the recipe -------------------------------------------------------------------------------------------
def _servers(asked: RunRequest, strategy: Strategy, settings: AnySettings, model: nn.Module) -> int:
    """The number of servers that the run has."""
    name = type(strategy).name
    if asked.world not in strategy.worlds:
        raise BadInput(f"{name} runs in --world {' or '.join(strategy.worlds)} only (given: {asked.world})")
    with calling("roles", whose=name):
        strategy.roles(asked.workers, 1)  # refuses what does not go together
    if not needs_servers(strategy):
        if asked.servers:
            raise BadInput(f"{name} needs no servers (given: {asked.servers}); leave out --servers")
        return 0
    servers = 1 if asked.servers is None else asked.servers
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
    if servers < 1:
        raise BadInput(f"{name} needs a server (given: {servers}); use --servers 1")
    if servers > numel:
        raise BadInput(f"more servers than parameters (servers: {servers}, parameters: {numel})")
    if settings.replicas is not None and settings.replicas >= servers:
        raise BadInput(f"{settings.replicas} replicas do not fit {servers} servers; use --set replicas={servers - 1}")
    if len(kinds) > 1:
        raise BadInput(f"servers keep parameters of one type (the model has {', '.join(kinds)}); convert some of them")
    if settings.algorithm != "auto":
        raise BadInput(f"{name} sums nothing among workers; leave out algorithm={settings.algorithm}")
    return servers


def _check_recipe(
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
    used = strategy.optimizer(adapt_optimizer(recipe, task.optimizer_spec, model))
    warnings += check_optimizer(config, strategy, used, model, schedule)
    if recipe.resize is not None:
        try_resized(Resize.parse(recipe.resize), task, model, sample)
    return describe(recipe, schedule, joined, model), warnings


def _check_steps(config: RunConfig, strategy: Strategy) -> None:
    """Whether the recipe suits the strategy, and the data suffices for a step."""
    name, recipe, joined = type(strategy).name, config.recipe, config.samples_per_step
    refused = {"resize": recipe.resize is not None, "grow": recipe.grow, "scaling=loss": recipe.scaling == "loss"}
    if needs_servers(strategy) and any(refused.values()):
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
