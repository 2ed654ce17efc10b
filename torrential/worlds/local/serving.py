"""The server's program in the local world."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from torrential.comm.post import Post
from torrential.comm.protocol import SERVERS
from torrential.optim.recipe import adapt_model, adapt_optimizer
from torrential.params.layout import Layout, plan
from torrential.server.dealer import Dealer
from torrential.server.optimizer import bounds
from torrential.server.role import Server
from torrential.server.shard import Initial
from torrential.trainer.randomness import seed_all
from torrential.worlds.base import Job
from torrential.worlds.local import messages as m
from torrential.worlds.local.link import Buffers, Link
from torrential.worlds.local.mail import ServerMail


def serve(job: Job, number: int, link: Link, post: Post) -> None:
    config, strategy = job.config, job.strategy
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.settings.threads or max(1, cores // max(config.workers, config.servers)))
    seed_all(torch.device("cpu"), config.seed, 0)
    model = adapt_model(config.recipe, job.task.model())
    layout = plan(model, strategy.bucket_bytes)
    own = adapt_optimizer(config.recipe, job.task.optimizer.with_lr(config.lr), model)
    spec = strategy.optimizer(own)
    dealer = Dealer(config.samples, config.epochs, strategy.together)
    address, shared = SERVERS + number, config.settings.transport == "shared"
    mail = ServerMail(address, link, Buffers(link, address), post, shared)
    link.send(m.Ready(sum(layout.sizes.values()), bounds(layout, spec)))
    link.until(lambda: mail.first is not None or link.dismissed, "the first view", 1e9)
    begins = mail.first == 1  # else the others have all there is
    initial = Initial(_flat(model, layout), dealer=dealer) if begins else None
    del model
    server = Server(
        mail,
        layout,
        spec,
        strategy.consistency(config.workers),
        initial=initial,
        filled=lambda version: link.send(m.Filled(version)),
    )
    del initial
    server.run()


def _flat(model: nn.Module, layout: Layout) -> Tensor:
    ((dtype, numel),) = layout.sizes.items()
    flat, named = torch.zeros(numel, dtype=dtype), dict(model.named_parameters())
    for entry in layout.entries:
        entry.view(flat).copy_(named[entry.name].detach())
    return flat
