"""From what the user asked for to a job that a world can run: everything that can be checked before it starts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from torrential import checkpoint as checkpoints
from torrential import records
from torrential.comm import futex
from torrential.comm.schedules import ALGORITHMS
from torrential.config import Recipe, RunConfig, Settings
from torrential.data.batches import Batches
from torrential.data.resize import Resize
from torrential.descriptors import check_descriptors
from torrential.errors import BadInput, UnknownName
from torrential.locks import lock_directory
from torrential.optim.recipe import adapt_model, adapt_optimizer, describe, make_recipe, without_effect
from torrential.optim.schedule import schedule_of
from torrential.options import make
from torrential.records import Evaluation, Summary
from torrential.strategies import STRATEGIES, make_strategy
from torrential.strategies.base import Strategy, needs_servers
from torrential.task import Task, build_model, with_validation
from torrential.tasks import check_own, load_task
from torrential.terminal import standard_error
from torrential.trainer.optimizer import check_optimizer
from torrential.trainer.slow import Slow
from torrential.usercode import calling
from torrential.version import __version__
from torrential.worlds.base import Job
from torrential.worlds.sim.cluster import make_cluster, read_cluster

WORLDS = ("local", "sim")
Sample = tuple[Any, Any]  # a few inputs and their targets

_held: dict[Path, int] = {}  # directories of runs under way in this process, locked


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for, not yet checked."""

    task: Task
    source: str | None = None
    strategy: str = "allreduce"
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
    cluster: str | dict[str, Any] | None = None  # to simulate: a file, the name of one that is shipped, or a table


def prepare(asked: Request, out: Path | None) -> Job:
    """Check everything that can be checked before a process is started, and make the run's directory."""
    strategy, settings, recipe = _split_options(asked.strategy, asked.options)
    task = with_validation(asked.task, asked.seed)
    task = replace(
        task,
        batch_size=task.batch_size if asked.batch_size is None else asked.batch_size,
        epochs=task.epochs if asked.epochs is None else asked.epochs,
        optimizer=task.optimizer.with_lr(strategy.optimizer(task.optimizer).lr if asked.lr is None else asked.lr),
        target=task.target if asked.target is None else asked.target,
    )
    for name, value in (("workers", asked.workers), ("steps", asked.steps)):
        if value is not None and value < 1:
            raise BadInput(f"--{name} must be at least 1 (given: {value})")
    if task.target is not None and task.metric_name == "accuracy" and not 0 <= task.target <= 1:
        raise BadInput(f"an accuracy is between 0 and 1 (target: {task.target}); try --target 0.97")
    samples = len(task.train)  # type: ignore[arg-type]
    if asked.workers > samples:
        raise BadInput(
            f"more workers than training samples (workers: {asked.workers}, samples: {samples}); "
            f"use --workers {samples}"
        )
    if settings.hosts > asked.workers:
        raise BadInput(f"more hosts than workers (hosts: {settings.hosts}, workers: {asked.workers}); use fewer hosts")
    model, sample = _try_once(task)
    device = _device(asked.device)
    _check_processes(settings, device)
    servers = _servers(asked, strategy, settings, model)
    cluster = _cluster(asked, settings, servers)
    if cluster is None:
        check_descriptors(asked.workers + servers)
        settings = _check_native(settings, device, asked.workers)
    Slow.parse(settings.slow, asked.workers)
    config = RunConfig(
        task=task.name,
        source=_lasting(asked.source),
        strategy=asked.strategy,
        options=msgspec.to_builtins(strategy),
        world=asked.world,
        workers=asked.workers,
        servers=servers,
        epochs=task.epochs,
        steps=asked.steps,
        target=task.target,
        samples=samples,
        batch_size=task.batch_size,
        lr=task.optimizer.lr,
        optimizer=task.optimizer.describe(),
        seed=asked.seed,
        device=device,
        settings=settings,
        recipe=recipe,
        cluster=cluster,
        base_batch=recipe.base_batch or asked.task.batch_size,
    )
    changes, warnings = _check_recipe(config, strategy, task, model, sample, asked)
    versions, hardware = records.describe_machine()
    manifest = records.Manifest(
        torrential=__version__,
        config=msgspec.to_builtins(config),
        versions=versions,
        hardware=hardware,
        seed=asked.seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=sys.argv,
    )
    directory = out or records.fresh_directory(f"{Path(task.name).stem}-{asked.strategy}")
    _begin(directory, manifest)
    return Job(config, task, strategy, directory, changes=changes, warnings=warnings)


def _check_processes(settings: Settings, device: str) -> None:
    if settings.processes and (settings.gradients == "off" or device != "cpu"):
        what = "gradients=off" if settings.gradients == "off" else f"device: {device}"
        raise BadInput(f"processes compute gradients on this machine's cores ({what}); leave processes out")
    cores = len(os.sched_getaffinity(0))
    if settings.processes > cores:
        best = f"use {cores - 1}, which leaves one for the simulation" if cores > 1 else "leave processes out"
        raise BadInput(f"more processes than cores (processes: {settings.processes}, cores: {cores}); {best}")


def _cluster(asked: Request, settings: Settings, servers: int) -> dict[str, Any] | None:
    """What is simulated, if it is."""
    if asked.world not in WORLDS:
        raise UnknownName("world", asked.world, WORLDS)
    if asked.world != "sim":
        if asked.cluster is not None:
            raise BadInput("--cluster is what is simulated; add --world sim, or leave it out")
        for option, given in (
            ("gradients=off", settings.gradients == "off"),
            ("trace", settings.trace),
            ("processes", settings.processes),
        ):
            if given:
                raise BadInput(f"{option} needs a simulation; add --world sim")
        return None
    if settings.gradients == "off" and asked.target is not None:
        raise BadInput(
            f"nothing is learnt with gradients=off, so no target is reached (target: {asked.target:g}); drop one"
        )
    if settings.algorithm not in ("auto", *ALGORITHMS):
        raise BadInput(
            f"algorithm={settings.algorithm} is for real processes; in a simulation use auto, {', '.join(ALGORITHMS)}"
        )
    table = read_cluster(asked.cluster) if isinstance(asked.cluster, str) else asked.cluster or {}
    make_cluster(table).check(asked.workers, servers)
    return table


def _servers(asked: Request, strategy: Strategy, settings: Settings, model: nn.Module) -> int:
    """How many there shall be."""
    strategy.roles(asked.workers, 1)  # refuses what does not go together
    if not needs_servers(strategy):
        if asked.servers:
            raise BadInput(f"{asked.strategy} needs no servers (given: {asked.servers}); leave out --servers")
        return 0
    servers = 1 if asked.servers is None else asked.servers
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
    if servers < 1:
        raise BadInput(f"{asked.strategy} needs a server (given: {servers}); use --servers 1")
    if servers > numel:
        raise BadInput(f"more servers than parameters (servers: {servers}, parameters: {numel})")
    if settings.replicas is not None and not 0 <= settings.replicas < servers:
        raise BadInput(f"{settings.replicas} replicas do not fit {servers} servers; use --set replicas={servers - 1}")
    if len(kinds) > 1:
        raise BadInput(f"servers keep parameters of one type (the model has {', '.join(kinds)}); convert some of them")
    if settings.algorithm != "auto":
        raise BadInput(f"{asked.strategy} sums nothing among workers; leave out algorithm={settings.algorithm}")
    return servers


def _check_recipe(
    config: RunConfig, strategy: Strategy, task: Task, model: nn.Module, sample: Sample, asked: Request
) -> tuple[str, list[str]]:
    """Refuse what cannot work; say in one line what the recipe changes, and in others what is likely a mistake."""
    recipe = config.recipe
    refused = {"resize": recipe.resize is not None, "grow": recipe.grow, "scaling=loss": recipe.scaling == "loss"}
    if needs_servers(strategy) and any(refused.values()):
        wrong = " and ".join(name for name, is_given in refused.items() if is_given)
        raise BadInput(f"{config.strategy} does not know {wrong}; leave it out, or use --strategy allreduce")
    joined = strategy.joined(config.workers, config.batch_size)
    if joined > config.samples:
        fits = config.samples * config.batch_size // joined
        several = "push_every" if needs_servers(strategy) else "accumulate"
        raise BadInput(
            f"the joined batch is larger than the training set (samples a step: {joined}, samples: {config.samples}); "
            f"use --batch-size {fits or 1}" + ("" if fits else f" and a smaller {several}")
        )
    schedule = schedule_of(config, joined)
    adapted = adapt_optimizer(recipe, task.optimizer, model)
    kind = strategy.optimizer(adapted).kind  # the servers'
    if recipe.layerwise != "none" and kind is not adapted.kind:
        raise BadInput(
            f"layerwise={recipe.layerwise} would have no effect: servers of {config.strategy} have an optimizer of "
            "their own; add --set server=task"
        )
    warnings = without_effect(recipe, asked.options, schedule, config.batch_size, model)
    if kind is not adapted.kind:
        warnings.append(
            f"the servers of {config.strategy} use {kind.__name__} at {config.lr:g} in the place of the task's "
            f"{adapted.kind.__name__} at {asked.task.optimizer.lr:g}; --lr gives another rate, --set server=task keeps "
            "the task's optimizer"
        )
    if recipe.layerwise == "lars" and asked.lr is None:
        warnings.append(
            f"LARS wants a much larger rate than SGD, 10 to 100 times (the task's: {config.lr:g}); "
            f"try --lr {40 * config.lr:g}"
        )
    model = adapt_model(recipe, model)
    check_optimizer(config, strategy, strategy.optimizer(adapt_optimizer(recipe, task.optimizer, model)), model)
    if recipe.resize is not None:
        _try_resized(Resize.parse(recipe.resize), task, model, sample)
    return describe(recipe, schedule, joined, model), warnings


def _try_resized(resize: Resize, task: Task, model: nn.Module, sample: Sample) -> None:
    """At every size that is to come."""
    inputs, targets = sample
    for scale in sorted({scale for _, scale in resize.stages}):
        small = resize.apply(inputs, scale)
        if small is inputs:
            continue
        try:
            with torch.no_grad():
                task.loss(model(small), targets)
        except Exception as error:
            (height, width), full = small.shape[2:], inputs.shape[2:]
            raise BadInput(
                f"the model does not run on images of {height} × {width} (resize={resize}, full size: {full[0]} × "
                f"{full[1]}): {type(error).__name__}: {error}; use larger scales, or leave resize out"
            ) from error


def prepare_resume(directory: Path, task: Task | None = None) -> Job:
    """A job that goes on from the last good checkpoint of a run."""
    manifest = records.read_manifest(directory)
    _lock(directory)
    try:
        return _resumed(directory, manifest, task)
    except BaseException:
        unlock(directory)
        raise


def _resumed(directory: Path, manifest: records.Manifest, task: Task | None) -> Job:
    try:
        config = msgspec.convert(manifest.config, RunConfig)
    except msgspec.ValidationError as error:
        path = directory / records.MANIFEST
        raise BadInput(f"{path} is damaged ({error}); take it from a copy, or start a new run") from error
    _device(config.device)  # which may not be here
    if task is None:
        if config.source is None:
            raise BadInput(f"the task of {directory} was made in a program; go on with tt.train(task, resume=...)")
        remedy = f"look at that file, then name the task yourself: torrential train TASK --resume {directory}"
        check_own(directory / records.MANIFEST, config.source, remedy)
        task = load_task(config.source)
    task = replace(
        with_validation(task, config.seed),
        batch_size=config.batch_size,
        epochs=config.epochs,
        optimizer=task.optimizer.with_lr(config.lr),
    )
    path = directory / records.RECORDS
    if path.exists() and any(isinstance(r, Summary) for r in records.read_records(path)):
        raise BadInput(f"the run in {directory} is finished; start another one, or look at it there")
    checkpoint, skipped = checkpoints.latest(directory / "checkpoints")
    _check_same(directory, config, task, checkpoint)
    for why in skipped:
        standard_error().print(f"skipped a damaged checkpoint: {why}", markup=False, highlight=False, soft_wrap=True)
    kept = records.trim_records(path, checkpoint.step if checkpoint else 0)
    if checkpoint is None:
        kept = []
        path.unlink(missing_ok=True)
    evaluations = [r for r in kept if isinstance(r, Evaluation)]
    if checkpoint and any(task.reaches(config.target, e.value) for e in evaluations):
        config = msgspec.structs.replace(config, steps=checkpoint.step)  # only the last word is missing
    return Job(
        config,
        task,
        make_strategy(config.strategy, config.options),
        directory,
        checkpoint,
        elapsed=max((r.time for r in kept if not isinstance(r, Summary)), default=0.0),
        evaluated={(e.split, e.step): e.time for e in evaluations},
    )


def _check_same(directory: Path, config: RunConfig, task: Task, checkpoint: checkpoints.Checkpoint | None) -> None:
    """A run goes on only with the task it was begun with."""
    samples = len(task.train)  # type: ignore[arg-type]
    if samples != config.samples:
        raise BadInput(
            f"the task of {directory} has changed (training samples: {config.samples} then, {samples} now); "
            "start another run"
        )
    if task.optimizer.describe() != config.optimizer:
        raise BadInput(f"the task's optimizer has changed ({config.optimizer} then, {task.optimizer.describe()} now)")
    if checkpoint is not None:
        now = {name: tuple(tensor.shape) for name, tensor in build_model(task).state_dict().items()}
        then = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}
        if now != then:
            odd = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
            raise BadInput(f"the task's model has changed since {directory} (at: {odd[0]}); start another run")


def _begin(directory: Path, manifest: records.Manifest) -> None:
    """Make the directory this run's own: of all that want to begin in it at once, one can."""
    records.make_directory(directory)
    _lock(directory)
    try:
        records.check_new_directory(directory)
        records.write_manifest(directory, manifest)
    except BaseException:
        unlock(directory)
        raise


def _lock(directory: Path) -> None:
    """Until `unlock`, or the end of this process."""
    _held[directory] = lock_directory(directory, "run")


def unlock(directory: Path) -> None:
    if directory in _held:
        os.close(_held.pop(directory))


def _split_options(name: str, options: dict[str, Any]) -> tuple[Strategy, Settings, Recipe]:
    """Options after --set belong to the strategy, the world or the recipe; each name to one of them."""
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES)
    of_strategy, of_world = STRATEGIES[name].__struct_fields__, Settings.__struct_fields__
    of_recipe = Recipe.__struct_fields__
    for option in options:
        if option not in (*of_strategy, *of_world, *of_recipe):
            raise UnknownName("option", option, (*of_strategy, *of_world, *of_recipe))
    strategy = make_strategy(name, {k: v for k, v in options.items() if k in of_strategy})
    settings = make(Settings, {k: v for k, v in options.items() if k in of_world})
    for option in ("threads", "evaluate_every", "timeout", "hosts"):
        value = getattr(settings, option)
        if value is not None and value <= 0:
            raise BadInput(f"{option} must be above zero (given: {value})")
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
    return strategy, settings, make_recipe({k: v for k, v in options.items() if k in of_recipe})


def _check_native(settings: Settings, device: str, workers: int) -> Settings:
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


def _try_once(task: Task) -> tuple[nn.Module, Sample]:
    """Run two samples through model and loss, so that what does not fit together is known before anything starts."""
    inputs, targets = Batches(task.train).fetch(torch.arange(min(2, len(task.train))))  # type: ignore[arg-type]
    model = build_model(task)
    if not any(p.requires_grad for p in model.parameters()):
        raise BadInput("the model has no trainable parameters; unfreeze some")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise BadInput("the model has lazy layers; give their sizes, or run one batch in the model's factory")
    odd = [name for name, value in model.state_dict().items() if not torch.is_tensor(value)]
    if odd:
        raise BadInput(f"the model keeps state that is not a tensor ({odd[0]}), which checkpoints cannot hold")
    with torch.no_grad():
        with calling(f"forward pass on {_sizes(inputs=inputs)}", task.model):
            outputs = model(inputs)
        with calling(f"loss on {_sizes(outputs=outputs, targets=targets)}"):
            loss = task.loss(outputs, targets)
    if not torch.is_tensor(loss) or loss.numel() != 1:
        raise BadInput(f"the task's loss must return one number, the mean over the batch (it returned {loss!r})")
    return model, (inputs, targets)


def _sizes(**values: Any) -> str:
    """What was given to the user's code, by shape or by kind: "outputs (2, 10) and targets (2,)"."""
    kinds = {name: type(value).__name__ for name, value in values.items()}
    return " and ".join(
        f"{name} {tuple(value.shape) if torch.is_tensor(value) else kinds[name]}" for name, value in values.items()
    )


def _device(asked: str) -> str:
    if asked not in ("auto", "cpu", "cuda"):
        raise BadInput(f"no device {asked!r}; use auto, cpu or cuda")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise BadInput("--device cuda: this machine has no usable GPU; use --device cpu")
    return "cuda" if available and asked != "cpu" else "cpu"


def _lasting(source: str | None) -> str | None:
    """A task's source that still holds in another working directory."""
    return str(Path(source).absolute()) if source and ".py" in source else source
