"""What a forked process does: connect to the supervisor, build its role, run it, say how it ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch

from torrential import descriptors, shipping
from torrential.comm.channel import TensorLetter
from torrential.comm.post import Post
from torrential.comm.protocol import address_of
from torrential.data.deal import order_of
from torrential.data.loaders import LoaderProcess, Loaders, ReadBatch, end_loaders, fork_loaders, reader
from torrential.errors import RunFailed
from torrential.server.messages import Message
from torrential.strategies.roles import Role
from torrential.trainer.context import RoleContext
from torrential.worlds.base import RETURNED, Job, going_on_from
from torrential.worlds.failure import describe
from torrential.worlds.local import messages as m
from torrential.worlds.local.comm import LocalComm
from torrential.worlds.local.link import Buffers, SupervisorLink
from torrential.worlds.local.mail import open_post
from torrential.worlds.local.observing import observe
from torrential.worlds.local.outlet import LocalOutlet
from torrential.worlds.local.server_process import serve

if TYPE_CHECKING:
    from torrential.worlds.local.nursery import Spawn

CONNECT_SECONDS = 660.0  # as long as a run may take to start


def main(spawn: Spawn) -> int:
    loaders = fork_loaders(spawn.rank, spawn.loaders, lambda: _prepare_reading(spawn))  # before there are threads
    post = None if spawn.role == "observer" else open_post(spawn)
    hello = m.Hello(spawn.role, spawn.rank, spawn.life, os.getpid(), post.where if post else "")
    link = SupervisorLink(spawn.address, spawn.token, hello, CONNECT_SECONDS)
    worker: RoleContext | None = None  # the context of its program, once it is built
    try:
        with descriptors.explained():
            job = _open(spawn)
            if spawn.role == "observer":
                observe(job, link)
            elif spawn.role == "server":
                assert post is not None
                serve(job, spawn.rank, link, post)
            else:
                assert post is not None
                role = _role(job, spawn.role)
                post.understand(reduce(or_, job.strategy.letters, Message | TensorLetter))
                worker, comm = _build(job, role, spawn, link, post, loaders)
                link.send(m.Ready())
                if role.name == "coordinator":
                    link.until(lambda: comm.first is not None or link.dismissed, "the first view", 1e9)
                elif role.death == "view":
                    comm.begin()
                role.program(worker)
                end_loaders(loaders)
                if not link.dismissed:
                    raise RunFailed(RETURNED.format(name=f"{role.name} {spawn.rank}"))
        return 0
    except BaseException as error:  # user code may raise anything, SystemExit included
        link.send(m.Failed(describe(error, None if worker is None else worker.step + 1)))
        return 4


def _open(spawn: Spawn) -> Job:
    supervisor, pickled, tensors = spawn.parcel
    fds = [os.open(f"/proc/{supervisor}/fd/{fd}", os.O_RDWR) for fd in (pickled, tensors)]
    try:
        job = shipping.unpack(*fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert isinstance(job, Job)
    return job


def _prepare_reading(spawn: Spawn) -> ReadBatch:
    job = _open(spawn)
    return reader(job.task, order_of(job.task, job.config))


def _build(
    job: Job, role: Role, spawn: Spawn, link: SupervisorLink, post: Post, processes: Sequence[LoaderProcess]
) -> tuple[RoleContext, LocalComm]:
    config, rank, life = job.config, address_of(spawn.role, spawn.rank), spawn.life
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.settings.threads or max(1, cores // config.workers))
    device = torch.device(config.device)
    own_gpu = False
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        own_gpu = config.workers <= torch.cuda.device_count()
        torch.cuda.set_device(device)
    native = config.settings.algorithm == "native"
    backend = None if not native else ("nccl" if own_gpu else "gloo")
    buffers = Buffers(link, rank)
    kept = job.directory / "costs.json"
    comm = LocalComm(rank, config.workers, link, buffers, post, config.local, backend, kept)
    comm.own_memory = role.death in ("view", "restart")
    outlet = LocalOutlet(rank, link, buffers, comm.meter, comm.check)
    reduce_device = device if backend == "nccl" else torch.device("cpu")
    checkpoint = going_on_from(job, role.death, life)
    loaders = Loaders(processes, config.settings.timeout) if processes else None
    context = RoleContext(
        job.task, config, job.strategy, comm, outlet, device, reduce_device, checkpoint, life, loaders=loaders
    )
    assert context.replica  # built before it joins: a slow model factory stalls nobody
    return context, comm


def _role(job: Job, name: str) -> Role:
    """A role as the strategy declares it."""
    roles = job.strategy.roles(job.config.workers, job.config.servers)
    return next(role for role in roles if isinstance(role, Role) and role.name == name)
