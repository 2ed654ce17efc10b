"""What a forked process does: connect to the supervisor, build its role, run it, say how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING

import torch

from torrential import descriptors, shipping, streams
from torrential.comm.channel import TensorLetter
from torrential.comm.post import Post
from torrential.comm.protocol import OBSERVER, address_of, role_name
from torrential.data.deal import order_of
from torrential.data.loaders import LoaderProcess, Loaders, ReadBatch, end_loaders, fork_loaders, reader
from torrential.errors import RunFailed
from torrential.loop.session import WorkerRun
from torrential.server.messages import Message
from torrential.strategies.roles import Role
from torrential.trainer.context import RoleContext
from torrential.worlds.base import RETURNED, Job, going_on_from
from torrential.worlds.failure import describe
from torrential.worlds.hosts.loading import load_job
from torrential.worlds.local import messages as m
from torrential.worlds.local.agent import JOB
from torrential.worlds.local.comm import LocalComm
from torrential.worlds.local.link import AgentLink, Buffers, SupervisorLink
from torrential.worlds.local.mail import contact_text, open_post
from torrential.worlds.local.observing import observe
from torrential.worlds.local.outlet import LocalOutlet
from torrential.worlds.local.script_process import play_script, try_script, use_device
from torrential.worlds.local.server_process import serve
from torrential.worlds.trace import WorkerTrace

if TYPE_CHECKING:
    from torrential.worlds.local.orders import Spawn

CONNECT_SECONDS = 660.0  # as long as a run may take to start


def main(spawn: Spawn) -> int:
    if spawn.role == "trial":
        return try_script(spawn)
    if spawn.role == JOB:
        return load_job(spawn)
    if spawn.around.labelled:
        streams.label(role_name(address_of(spawn.role, spawn.rank)))
    loaders = fork_loaders(spawn.rank, spawn.loaders, lambda: _prepare_reading(spawn))  # before there are threads
    post = None if spawn.role == "observer" else open_post(spawn)
    hello = m.Hello(spawn.role, spawn.rank, spawn.life, contact_text(post) if post else "")
    link = SupervisorLink(spawn, hello, CONNECT_SECONDS)
    worker: RoleContext | None = None  # the context of its program, once it is built
    try:
        with descriptors.explained():
            job = _open(spawn)
            if spawn.role == "worker" and job.loop is not None:
                assert post is not None
                play_script(job, job.loop, spawn, link, lambda run: _build(job, spawn, link, post, run=run))
            elif spawn.role == "observer":
                observe(job, link, Buffers(AgentLink(spawn), OBSERVER))
            elif spawn.role == "server":
                assert post is not None
                serve(job, spawn.rank, link, AgentLink(spawn), post)
            else:
                assert post is not None
                role = _role(job, spawn.role)
                worker = _build(job, spawn, link, post, loaders)
                role.program(worker)
                end_loaders(loaders)
                if not link.dismissed:
                    raise RunFailed(RETURNED.format(name=f"{role.name} {spawn.rank}"))
        return 0
    except BaseException as error:  # user code may raise anything, SystemExit included
        link.send(m.Failed(describe(error, None if worker is None else worker.step + 1)))
        return 4


def _open(spawn: Spawn) -> Job:
    job = shipping.unpack_from(*spawn.around.parcel)
    assert isinstance(job, Job)
    return job


def _prepare_reading(spawn: Spawn) -> ReadBatch:
    job = _open(spawn)
    return reader(job.task, order_of(job.task, job.config))


def _build(
    job: Job,
    spawn: Spawn,
    link: SupervisorLink,
    post: Post,
    processes: Sequence[LoaderProcess] = (),
    run: WorkerRun | None = None,
) -> RoleContext:
    """The context of a role's program, which takes part from here on. `run`: that of the worker's script."""
    role = _role(job, spawn.role)
    config, rank, life = job.config, address_of(spawn.role, spawn.rank), spawn.life
    post.understand(reduce(or_, job.strategy.letters, Message | TensorLetter))
    device = use_device(config, spawn)
    own_gpu = device.type == "cuda" and spawn.beside <= torch.cuda.device_count()
    native = config.settings.algorithm == "native"
    backend = None if not native else ("nccl" if own_gpu else "gloo")
    buffers = Buffers(AgentLink(spawn), rank)
    kept = job.directory / "costs.json"
    comm = LocalComm(rank, config.workers, link, buffers, post, config.local, backend, kept)
    if config.settings.trace:
        comm.trace = WorkerTrace(job.directory, rank, life, comm.now)
    comm.own_memory = role.death in ("view", "restart")
    outlet = LocalOutlet(rank, link, buffers, comm.meter, comm.check, spawn.around.apart)
    reduce_device = device if backend == "nccl" else torch.device("cpu")
    checkpoint = going_on_from(job, role.death, life)
    loaders = Loaders(processes, config.settings.timeout) if processes else None
    parts = (config, job.strategy, comm, outlet, device, reduce_device, checkpoint, life)
    handed = None if job.handed is None else partial(shipping.unpack_from, *job.handed)
    if run is None:
        context = RoleContext(job.task, *parts, loaders=loaders, handed=handed)
    else:
        context = run.context_of(job.task, *parts)
    assert context.replica  # built before it joins: a slow model factory stalls nobody
    link.send(m.Ready())
    if role.name == "coordinator":
        link.until(lambda: comm.first is not None or link.dismissed, "the first view", 1e9)
    elif role.death == "view":
        comm.begin()
    return context


def _role(job: Job, name: str) -> Role:
    """A role as the strategy declares it."""
    roles = job.strategy.roles(job.config.workers, job.config.servers)
    return next(role for role in roles if isinstance(role, Role) and role.name == name)
