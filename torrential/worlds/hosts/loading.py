"""The job of a run, made on another host than the supervisor's: of the configuration and that host's own files, or of
what the supervisor has packed, where somebody else has brought that here and vouches for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from torrential import checkpoint as checkpoints
from torrential import shipping
from torrential.config import RunConfig
from torrential.data import find
from torrential.errors import BadInput, TaskFailed
from torrential.records import MANIFEST
from torrential.strategies.base import Strategy
from torrential.strategies.registry import resolve_strategy
from torrential.task import Task, build_model, training_samples
from torrential.tasks import load_task
from torrential.trainer.handed import IN_FILE_BYTES, build_whole
from torrential.userfiles import split_spec
from torrential.worlds.base import Job
from torrential.worlds.configured import configured
from torrential.worlds.failure import describe
from torrential.worlds.hosts.messages import JobRequest, RunPlan, digest

if TYPE_CHECKING:
    from torrential.worlds.local.orders import Spawn

T = TypeVar("T")
REFUSED = 4


def load_job(spawn: Spawn) -> int:
    """Put the job into the parcel in which the request came; or what is wrong, in words."""
    with shipping.opened(*spawn.around.parcel) as fds:
        request = msgspec.msgpack.decode(os.pread(fds[0], os.fstat(fds[0]).st_size, 0), type=JobRequest)
        os.truncate(fds[0], 0)
        try:
            shipping.fill(fds, _job(request))
        except BaseException as error:  # user code may raise anything
            for fd in fds:
                os.truncate(fd, 0)
            os.pwrite(fds[0], describe(error).text.encode(), 0)
            return REFUSED
    return 0


def _job(request: JobRequest) -> Job:
    plan, directory = request.plan, Path(request.plan.directory)
    if not (directory / MANIFEST).is_file() or digest(directory / MANIFEST) != plan.manifest:
        raise BadInput(f"the run's directory {directory} is not seen here; give --out a path that all hosts see")
    config = msgspec.msgpack.decode(plan.config, type=RunConfig)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("there is no usable GPU here, and the run computes on GPUs; use --device cpu")
    if request.packed is None:
        job = _of_files(request, config, directory)
    else:
        job = shipping.unpack_from(*request.packed)
    if plan.cut:
        _hand_over(request, job)
        job = replace(job, handed=request.model)
    return job


def _of_files(request: JobRequest, config: RunConfig, directory: Path) -> Job:
    plan = request.plan
    find.set_data_dir(None if request.data is None else Path(request.data))
    source = request.task or config.source
    assert source is not None
    task: Task = _loaded(plan, "task", source, lambda: load_task(source))
    kind = _loaded(plan, "strategy", config.strategy, lambda: resolve_strategy(config.strategy))
    strategy: Strategy = kind.make(config.options)
    model = build_model(task)
    task, _ = configured(config, task, model, strategy.evaluates)
    if (samples := training_samples(task)) != config.samples:
        raise BadInput(f"the task has {samples} training samples here, and {config.samples} on host 0; copy its data")
    return Job(config, task, strategy, directory, _checkpoint(plan, config, directory))


def _loaded(plan: RunPlan, what: str, source: str, load: Callable[[], T]) -> T:
    """What a file of this host defines, if it is the file that host 0 has."""
    file, _ = split_spec(source)
    if not file:
        return load()
    if not Path(file).is_file():
        raise BadInput(f"the {what}'s file {file} is not there; copy it from host 0")
    if digest(Path(file)) != plan.files.get(what):
        raise BadInput(f"the {what}'s file {file} differs from that of host 0; copy it from there")
    return load()


def _checkpoint(plan: RunPlan, config: RunConfig, directory: Path) -> checkpoints.Checkpoint | None:
    if plan.checkpoint is None:
        return None
    checkpoint = checkpoints.load(checkpoints.path_of(directory / "checkpoints", plan.checkpoint))
    if checkpoint.dealer is None:
        return checkpoint
    return replace(checkpoint, dealer=msgspec.structs.replace(checkpoint.dealer, epochs=config.epochs))


def _hand_over(request: JobRequest, job: Job) -> None:
    """Build the whole model into the place that the agent keeps for it (trainer/handed.py)."""
    whole = build_whole(job.task, job.config, job.strategy, torch.device(job.config.device))
    with shipping.opened(*request.model) as fds:
        try:
            shipping.fill(fds, whole, IN_FILE_BYTES)
        except TaskFailed as error:
            raise BadInput(f"the model cannot be handed to the workers here, as it is on host 0: {error}") from error
