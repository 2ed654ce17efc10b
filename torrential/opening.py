"""The directory of a run: made for a new one, or gone on with; locked from here until the run ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from torrential import checkpoint as checkpoints
from torrential import processes, records
from torrential.config import RaySettings, RunConfig, read_config
from torrential.data.query import Query
from torrential.errors import BadInput
from torrential.limits import check_target, differences, extended, idle_patience, jumps, reached
from torrential.locks import lock_directory
from torrential.loop.blueprint import OwnLoop
from torrential.optim.schedule import examine_schedule
from torrential.records import Evaluation, Summary
from torrential.resolve import RunRequest, choose_device, resolve
from torrential.strategies.base import Strategy
from torrential.strategies.registry import Given, is_loadable, plain_options, resolve_strategy
from torrential.task import Task, build_model, training_samples
from torrential.tasks import load_task
from torrential.terminal import standard_error
from torrential.userfiles import check_own, split_spec
from torrential.version import __version__
from torrential.worlds.base import Job
from torrential.worlds.configured import configured
from torrential.worlds.failure import resuming

DYING_SECONDS = 5.0  # that the processes of a run which was killed may take to end
_held: dict[Path, int] = {}  # directories of runs under way in this process, locked


# -- a new run --------------------------------------------------------------------------------------------------------
def open_run(asked: RunRequest, out: Path | None) -> Job:
    """A run that was checked, in a directory of its own: `out`, or a fresh one."""
    run = resolve(asked)
    versions, hardware = records.describe_machine()
    manifest = records.Manifest(
        torrential=__version__,
        config=msgspec.to_builtins(run.config),
        versions=versions,
        hardware=hardware,
        seed=asked.seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=sys.argv,
    )
    directory = out or records.fresh_directory(f"{Path(run.task.name).stem}-{type(run.strategy).name}")
    _begin(directory, manifest)
    return Job(
        run.config, run.task, run.strategy, directory, changes=run.changes, warnings=run.warnings, loop=asked.loop
    )


def _begin(directory: Path, manifest: records.Manifest) -> None:
    """Make the directory this run's own: of all that want to begin in it at once, one can."""
    records.make_directory(directory)
    _lock(directory)
    try:
        records.check_new_directory(directory)
        records.write_manifest(directory, manifest)
        processes.mark_begun(directory)
    except BaseException:
        unlock(directory)
        raise


def _lock(directory: Path, seconds: float = 0.0) -> None:
    """Lock the run's directory until `unlock`, or the end of this process. `seconds`: how long to wait for it."""
    _held[directory] = lock_directory(directory, "run", seconds)


def unlock(directory: Path) -> None:
    if directory in _held:
        os.close(_held.pop(directory))


# -- one to go on with ------------------------------------------------------------------------------------------------
def resume_run(
    directory: Path,
    task: Task | None = None,
    strategy: Given | None = None,
    limits: Mapping[str, Any] | None = None,
    loop: OwnLoop | None = None,
) -> Job:
    """A run that goes on from its last good checkpoint. A task or a strategy that is not given is loaded again.
    `limits`: epochs, steps and the like in the place of the run's own, to go on further; `loop`: the script that the
    task stands for."""
    manifest = records.read_manifest(directory)
    _lock(directory, DYING_SECONDS)
    try:
        job = _resumed(directory, manifest, task, strategy, limits or {}, loop)
        processes.mark_begun(directory)
        return job
    except BaseException:
        unlock(directory)
        raise


def config_of(directory: Path) -> RunConfig:
    """The configuration of the run in a directory."""
    return _read_config(directory, records.read_manifest(directory))


def _resumed(
    directory: Path,
    manifest: records.Manifest,
    task: Task | None,
    given: Given | None,
    limits: Mapping[str, Any],
    loop: OwnLoop | None,
) -> Job:
    config = _read_config(directory, manifest)
    if not isinstance(config.settings, RaySettings):
        choose_device(config.device)  # which may not be here
    if config.script is not None and loop is None:
        raise BadInput(f"the run in {directory} is of a script; go on with: torrential launch --resume {directory}")
    if task is None:
        task = _load_task(directory, config)
    model = build_model(task)
    strategy = _same_strategy(directory, config, given, task, model)
    task, given_schedule = configured(config, task, model, loop is None and strategy.evaluates)
    path = directory / records.RECORDS
    checkpoint, skipped = checkpoints.latest(directory / "checkpoints")
    _check_same(directory, config, task, model, checkpoint)
    for why in skipped:
        standard_error().print(f"skipped a damaged checkpoint: {why}", markup=False, highlight=False, soft_wrap=True)
    then = config
    config, task, warnings = _with_limits(then, task, checkpoint, limits)
    over = _check_unfinished(directory, config, task, checkpoint, given_limits=bool(limits))
    if config != then:
        schedule, described = examine_schedule(config, config.samples_per_step, given_schedule)
        task, config = replace(task, schedule=schedule), msgspec.structs.replace(config, schedule=described)
        records.write_manifest(directory, msgspec.structs.replace(manifest, config=msgspec.to_builtins(config)))
    kept = records.trim_records(path, checkpoint.step if checkpoint else 0)
    if checkpoint is None:
        kept = []
        path.unlink(missing_ok=True)
    elif checkpoint.dealer is not None:
        dealer = msgspec.structs.replace(checkpoint.dealer, epochs=config.epochs)
        checkpoint = replace(checkpoint, dealer=dealer)
    evaluations = [r for r in kept if isinstance(r, Evaluation)]
    last_word = {"steps": checkpoint.step} if checkpoint and over else {}  # which is all that is missing
    return Job(
        msgspec.structs.replace(config, **last_word),
        task,
        strategy,
        directory,
        checkpoint,
        warnings=warnings,
        extended=differences(then, config),
        elapsed=max((r.time for r in kept if not isinstance(r, Summary)), default=0.0),
        evaluated={(e.split, e.step): e.time for e in evaluations},
        loop=loop,
    )


def _with_limits(
    then: RunConfig, task: Task, checkpoint: checkpoints.Checkpoint | None, limits: Mapping[str, Any]
) -> tuple[RunConfig, Task, list[str]]:
    """The configuration and the task with other limits, and lines on what is not as it was."""
    config = extended(then, limits)
    if config == then:
        return config, task, []
    check_target(config.target, task)
    schedule, described = examine_schedule(config, config.samples_per_step, task.schedule)
    config = msgspec.structs.replace(config, schedule=described)
    task = replace(task, epochs=config.epochs, schedule=schedule)
    changed = [] if checkpoint is None else jumps(then, config, checkpoint, schedule)
    return config, task, idle_patience(config) + changed


def _check_unfinished(
    directory: Path, config: RunConfig, task: Task, checkpoint: checkpoints.Checkpoint | None, given_limits: bool
) -> bool:
    """Whether the run has come to its limits, and only its last word is missing. Refuses one that has said it, and
    limits that leave nothing to do."""
    path = directory / records.RECORDS
    history = records.read_records(path) if path.exists() else []
    finished = any(isinstance(record, Summary) for record in history)
    if checkpoint is None:
        if finished:
            raise BadInput(f"the run in {directory} is finished, and has left no checkpoint to go on from")
        return False
    so_far = [record for record in history if isinstance(record, Evaluation) and record.step <= checkpoint.step]
    why = reached(config, task, checkpoint, so_far)
    if why and (finished or given_limits):
        fact = f"the run in {directory} {'is finished' if finished else 'has nothing left to do'}: {', and '.join(why)}"
        raise BadInput(f"{fact}; to go on further, give it more of that")
    return bool(why)


def _read_config(directory: Path, manifest: records.Manifest) -> RunConfig:
    try:
        return read_config(manifest.config)
    except msgspec.ValidationError as error:
        path = directory / records.MANIFEST
        raise BadInput(f"{path} is damaged ({error}); take it from a copy, or start a new run") from error


def _load_task(directory: Path, config: RunConfig) -> Task:
    if config.source is None:
        raise BadInput(f"the task of {directory} was made in a program; {resuming(directory)}")
    remedy = f"look at that file, then name the task yourself: torrential train TASK --resume {directory}"
    check_own(directory / records.MANIFEST, config.source, remedy)
    return load_task(config.source)


def _same_strategy(directory: Path, config: RunConfig, given: Given | None, task: Task, model: nn.Module) -> Strategy:
    """The strategy that the run was begun with: loaded again, or given by the program that made it."""
    if given is None:
        given = _source_of_strategy(directory, config)
    found = resolve_strategy(given)
    then, now = (source.rpartition(":")[2] for source in (config.strategy, found.source))  # files may have moved
    if then != now:
        raise BadInput(f"the strategy of {directory} has changed ({then} then, {now} now); start another run")
    if not isinstance(given, Strategy):
        return found.make(config.options)
    given = given.fitted(task, model, config.workers)
    if (options := plain_options(given)) != config.options:
        raise BadInput(f"the options of {now} have changed ({config.options} then, {options} now); start another run")
    return given


def _source_of_strategy(directory: Path, config: RunConfig) -> str:
    """The source from which the run's strategy is loaded, unless that is not there or not the caller's own."""
    if not is_loadable(config.strategy):
        kind = config.strategy.rpartition(":")[2]
        raise BadInput(
            f"the strategy of {directory} was made in a program ({config.strategy}); go on there with "
            f"tt.train(task, {kind}(...), resume={str(directory)!r})"
        )
    if split_spec(config.strategy)[0]:
        remedy = f"look at that file, then name it yourself: torrential train --resume {directory} --strategy FILE"
        check_own(directory / records.MANIFEST, config.strategy, remedy)
    return config.strategy


def _check_same(
    directory: Path, config: RunConfig, task: Task, model: nn.Module, checkpoint: checkpoints.Checkpoint | None
) -> None:
    """A run goes on only with the task or script it was begun with."""
    samples, begun_with = training_samples(task), "task" if config.script is None else "script"
    if samples != config.samples:
        what, unit = ("data", "rows") if isinstance(task.step, Query) else (begun_with, "training samples")
        raise BadInput(
            f"the {what} of {directory} has changed ({unit}: {config.samples} then, {samples} now); start another run"
        )
    if (described := task.optimizer_spec.describe()) != config.optimizer:
        raise BadInput(f"the {begun_with}'s optimizer has changed ({config.optimizer} then, {described} now)")
    if checkpoint is not None:
        now = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        then = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}
        if now != then:
            odd = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
            raise BadInput(f"the {begun_with}'s model has changed since {directory} (at: {odd[0]}); start another run")
