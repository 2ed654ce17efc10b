"""Whether a run can use an optimizer, so that what it computes is what a plain loop with that optimizer does."""

from __future__ import annotations

from torch import nn

from torrential.config import RunConfig
from torrential.errors import BadInput, RunFailed
from torrential.optim.schedule import Schedule
from torrential.optimizers import OptimizerSpec
from torrential.params.base import gradients, is_elementwise
from torrential.params.layout import Layout, plan
from torrential.params.whole import DRAWS, form_of
from torrential.server.optimizer import bounds
from torrential.strategies.base import Strategy, servers_of


def check_optimizer(
    config: RunConfig, strategy: Strategy, spec: OptimizerSpec, model: nn.Module, schedule: Schedule
) -> list[str]:
    """Raise BadInput if the run would not do with the optimizer what a plain loop does; returns what to warn of."""
    layout, name = plan(model, strategy.bucket_bytes), spec.kind.__name__
    servers = servers_of(strategy, config.workers, config.servers)
    has_servers = servers is not None
    on_gpu = config.device == "cuda" and not has_servers
    if servers is not None:
        _check_served(config.servers, servers.stages, spec, layout)
    if is_elementwise(spec):
        if not on_gpu:
            spec.build(gradients(model, layout), names=[entry.name for entry in layout.entries])
        return []
    try:
        form = form_of(spec, layout)
    except BadInput as error:
        if not on_gpu or isinstance(error.__cause__, RunFailed):
            raise
        return []  # it may need a GPU, which this process must not take hold of: workers try it there
    if form.draws and config.workers > 1:
        raise BadInput(DRAWS.format(name=name, workers=config.workers))
    joined = strategy.samples_per_update(config.workers, config.batch_size)
    if not (form.obeys or schedule.constant(joined)):
        raise BadInput(
            f"{name} takes no notice of a learning rate that changes, and this run's does; leave out what changes it "
            "(schedule, warmup, scaling, recipe), or have its step use group['lr']"
        )
    if form.unsaved is None:
        return []
    return [
        f"{name} keeps {form.unsaved}, which no checkpoint holds: this run cannot be resumed, and no worker can take "
        "another's place; keep tensors and numbers in self.state[parameter]"
    ]


def _check_served(servers: int, stages: int, spec: OptimizerSpec, layout: Layout) -> None:
    cuts = bounds(layout, spec)
    if cuts is None or max(servers, stages) <= len(set(cuts)):
        return
    name, tensors = spec.kind.__name__, len(layout.entries)
    form = form_of(spec, layout)
    if stages > len(set(cuts)):
        may = "looks" if not form.separable else "may look"
        raise BadInput(
            f"{name} {may} at all parameters together, so they cannot be stepped stage by stage (stages: {stages}); "
            "leave out stages, or use another optimizer"
        )
    if tensors > 1 and not form.separable:
        raise BadInput(
            f"{name} looks at all parameters together, so servers cannot share them out (servers: {servers}); "
            "use --servers 1"
        )
    if tensors > 1 and not form.per_parameter:
        raise BadInput(
            f"{name} may look at all parameters together, so servers do not share them out (servers: {servers}); use "
            f"--servers 1, or write per_parameter = True in class {name} if it always steps each parameter by itself"
        )
    raise BadInput(
        f"{servers} servers do not fit {len(set(cuts))} tensors, which {name} needs whole; "
        f"use --servers {len(set(cuts))} or fewer"
    )
