"""From what the user asked for to a run that is known to fit together: everything that can be checked before it starts.

Reads the task, the strategy's class, cluster files and this machine; writes nothing and makes no directory.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from torch import nn

from torrential.config import LocalSettings, RaySettings, Recipe, RunConfig
from torrential.errors import BadInput
from torrential.limits import check_target
from torrential.optim.built import over_model
from torrential.optim.own_schedule import bound
from torrential.optim.schedule import examine_schedule
from torrential.resolve.compression import check_compression
from torrential.resolve.compute import check_compiling, check_precision, check_recomputing, fit_segments
from torrential.resolve.machine import (
    check_loaders,
    check_local,
    check_one_memory,
    check_simulation,
    choose_device,
    count_servers,
    device_on_ray,
)
from torrential.resolve.request import ResolvedRun, RunRequest
from torrential.resolve.security import check_security
from torrential.resolve.settings import split_options
from torrential.resolve.steps import check_recipe
from torrential.strategies.base import Strategy
from torrential.strategies.ddp import Ddp
from torrential.strategies.fedavg import FedAvg
from torrential.strategies.hogwild import Hogwild
from torrential.strategies.registry import changed_options, plain_options, resolve_strategy
from torrential.task import Task, build_model, training_samples, with_validation
from torrential.trainer.slow import Slow
from torrential.tryout import try_once
from torrential.usercode import calling
from torrential.userfiles import absolute_spec


def resolve(asked: RunRequest) -> ResolvedRun:
    """Check everything that can be checked before a process is started."""
    found = resolve_strategy(asked.strategy)
    strategy, settings, recipe, compression = split_options(asked, found)
    _check_numbers(asked)
    task = _task(asked, strategy)
    joined = _samples_per_update(asked, strategy, task)
    task = _with_size(asked, task, joined)
    _check_task(asked, task)
    if asked.loop is None:
        model, sample = try_once(task)
        device = (
            choose_device(asked.device) if not isinstance(settings, RaySettings) else device_on_ray(asked, settings)
        )
    else:
        check_loop(asked, strategy)
        model, sample = build_model(task), None
        device = asked.loop.blueprint.device
    task = _with_optimizer(task, asked, strategy, model)
    servers = count_servers(asked, strategy, settings, model)
    strategy.refuse(task, model)
    changed = changed_options(strategy, found.source)
    with calling("fitted", whose=type(strategy).name):
        strategy = strategy.fitted(task, model, asked.workers)
    check_recomputing(strategy, settings, model)
    if settings.precision == "fp16" and compression.changes_gradients:
        raise BadInput("what compress= leaves behind cannot be taken back when fp16 overflows; use precision=bf16")
    check_precision(strategy, settings, model, device)
    check_compiling(strategy, settings, device)
    segments, said = fit_segments(settings, task, model)
    joined = _samples_per_update(asked, strategy, task)
    check_one_memory(strategy, settings, device)
    if isinstance(settings, LocalSettings):
        settings = check_local(asked, settings, servers, device)
        settings, idle = check_loaders(settings, task)
        settings, exposed = check_security(settings, strategy)
        idle += exposed
        if settings.loaders and isinstance(strategy, FedAvg):
            raise BadInput(f"clients read their data by themselves (loaders: {settings.loaders}); leave out loaders")
        if asked.loop is not None and asked.loop.blueprint.readers:
            readers = asked.loop.blueprint.readers
            idle.append(f"num_workers={readers} has no effect: each worker reads its batches in its own process")
        cluster = None
    else:
        cluster, idle = check_simulation(asked, settings, servers, device, strategy), []
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
        compression=compression,
        cluster=cluster,
        base_batch=recipe.base_batch or asked.task.batch_size,
        samples_per_step=joined if type(strategy).uses_rate else training_samples(task),
        script=None if asked.loop is None else (asked.loop.script.path, *asked.loop.script.args),
        minimize=not task.maximize,
        metric=task.metric_name,
        segments=segments,
        changed=changed,
    )
    schedule, described = examine_schedule(config, joined, task.schedule)
    config, task = msgspec.structs.replace(config, schedule=described), replace(task, schedule=schedule)
    changes, warnings = check_recipe(config, strategy, task, model, sample, asked)
    warnings += check_compression(config, strategy, task, model, asked.options)
    return ResolvedRun(config, task, strategy, changes, idle + said + warnings)


def _task(asked: RunRequest, strategy: Strategy) -> Task:
    """The task with what was asked for in the place of its own figures."""
    evaluated = asked.loop is None and strategy.evaluates
    task = with_validation(asked.task, asked.seed) if evaluated else asked.task
    return replace(
        task,
        batch_size=task.batch_size if asked.batch_size is None else asked.batch_size,
        epochs=task.epochs * type(strategy).passes if asked.epochs is None else asked.epochs,
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
    instead_of = {"recompute": "torch.utils.checkpoint", "precision": "torch.autocast", "compile": "torch.compile"}
    for option, instead in (instead_of | {"channels_last": "to(memory_format=torch.channels_last)"}).items():
        if option in asked.options:
            raise BadInput(f"{option} is for tasks, whose forward the run calls; use {instead} in the script")
    if issubclass(kind, Ddp):
        raise BadInput(f"{name} wraps the model, which a script's own loop has in its hands; use --strategy allreduce")
    if issubclass(kind, FedAvg | Hogwild):
        raise BadInput(
            f"{name} chooses by itself what each worker trains on, and a script's loop has its part of a joined batch; "
            "make a task of it, or use another strategy"
        )
    if any(role.name == "coordinator" for role in strategy.roles(asked.workers, 1)):
        raise BadInput(
            f"{name} has a coordinator that deals out the work, and a script's loop has its own order; "
            "make a task of it, or use another strategy"
        )
    if not strategy.has_whole_model():
        raise BadInput(f"{name} cuts the model, which a script's own loop has in its hands; use another strategy")
