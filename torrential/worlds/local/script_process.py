"""A worker's program where the loop is a script's own; and the trial of a script, which ends at its first batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torrential import shipping
from torrential.config import RunConfig
from torrential.errors import BadInput, TorrentialError
from torrential.loop import script as scripts
from torrential.loop import session
from torrential.loop.blueprint import OwnLoop, Script
from torrential.randomness import seed_all
from torrential.strategies.roles import Role
from torrential.trainer.context import RoleContext
from torrential.usercode import failed
from torrential.worlds.base import Job
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import SupervisorLink

if TYPE_CHECKING:
    from torrential.worlds.local.orders import Spawn


def use_device(config: RunConfig, spawn: Spawn) -> torch.device:
    """Threads and the device of a worker, of which its host has several."""
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.settings.threads or max(1, cores // spawn.beside))
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", spawn.seat % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


# -- a worker ---------------------------------------------------------------------------------------------------------
def play_script(
    job: Job,
    loop: OwnLoop,
    spawn: Spawn,
    link: SupervisorLink,
    build: Callable[[session.WorkerRun], RoleContext],
) -> None:
    """Run the script; the strategy's program begins at its first batch."""
    config, rank = job.config, spawn.rank
    roles = job.strategy.roles(config.workers, config.servers)
    program = next(role.program for role in roles if isinstance(role, Role) and role.name == "worker")
    link.route(lambda item: None, m.Noted)  # a report is on record: nobody waits for that
    run = session.WorkerRun(
        loop.blueprint,
        config,
        rank,
        start=build,  # type: ignore[arg-type]
        play=lambda context: context.play(program),
        note=lambda evaluation, number: link.send(m.Recorded(evaluation, number)),
        stop=lambda: link.send(m.StopAsked()),
    )
    if rank or not loop.prints:
        print_to(job.directory / f"worker-{rank}.log")
    device = use_device(config, spawn)
    seed_all(device, config.seed, 0)
    session.enter(run)
    try:
        scripts.play(loop.script)
    except SystemExit as end:
        if (failure := run.left(end)) is not None:
            raise failure from end
    run.end()


def print_to(path: Path) -> None:
    """Have whatever is printed from here on go to a file: of several workers that print the same, one is read."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


# -- a trial ----------------------------------------------------------------------------------------------------------
def try_script(spawn: Spawn) -> int:
    """Run a script up to its first batch, and put what it has prepared, or what is wrong with it, into the parcel that
    it came in."""
    script, workers, seed = shipping.unpack_from(*spawn.around.parcel)
    print_to(Path(os.devnull))
    seed_all(torch.device("cpu"), seed, 0)
    try:
        found: object = _prepared(script, workers)
    except TorrentialError as error:
        found = error
    except BaseException as error:  # a script may raise anything
        found = failed(f"{script.name} raised", error)
    with shipping.opened(*spawn.around.parcel) as fds:
        for fd in fds:
            os.truncate(fd, 0)
        shipping.fill(fds, found)
    return 0


def _prepared(script: Script, workers: int) -> object:
    trial = session.TrialRun(workers)
    session.enter(trial)
    try:
        scripts.play(script)
    except session.TrialDone:
        return trial.blueprint()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise BadInput(f"{script.name} ended with sys.exit({end.code!r}) before its first batch") from end
    if not trial.asked_for:
        raise BadInput(f"{script.name} never calls tt.join(); call it, and run.prepare, as docs/loops.md shows")
    if trial.looked:
        raise BadInput(session.NO_STEP)
    raise BadInput(f"{script.name} ended without a batch or step; iterate over the prepared loader")
