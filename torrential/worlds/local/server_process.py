"""The server's program in the local world."""

from __future__ import annotations

import gc
import os

import torch

from torrential.comm.post import Post
from torrential.comm.protocol import SERVERS
from torrential.server.server import Server
from torrential.trainer.server_plan import ServerPlan
from torrential.worlds.base import Job
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import AgentLink, Buffers, SupervisorLink
from torrential.worlds.local.mail import ServerMail
from torrential.worlds.local.nursery import return_freed_memory


def serve(job: Job, number: int, link: SupervisorLink, agent: AgentLink, post: Post) -> None:
    config = job.config
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.settings.threads or max(1, cores // max(config.workers, config.servers)))
    plan = ServerPlan(job.task, config, job.strategy, job.checkpoint)
    address = SERVERS + number
    mail = ServerMail(address, link, Buffers(agent, address), post, config.local)
    link.send(m.Ready(plan.numel, plan.bounds, list(plan.shares.starts)))
    link.until(lambda: mail.first is not None or link.dismissed, "the first view", 1e9)
    begins = mail.first == 1  # else the others have all there is
    mail.server = Server(
        mail,
        plan.layout,
        plan.spec,
        plan.consistency,
        initial=plan.initial() if begins else None,
        handlers=plan.handlers,
        vectors=plan.servers.vectors,
        shares=plan.shares,
        filled=lambda version: link.send(m.Filled(version)),
    )
    gc.set_threshold(20_000)  # letters are small objects, and refer to none that refer to them
    return_freed_memory()  # of the models that the first parameters were made from
    mail.server.run()
