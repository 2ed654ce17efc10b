"""What a run's servers are made from: the same for every one of them, in every world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torrential.checkpoint import Checkpoint
from torrential.config import RunConfig
from torrential.optim.corrected import corrected
from torrential.optim.recipe import adapt_model, adapt_optimizer
from torrential.optimizers import OptimizerSpec
from torrential.params.layout import Layout, plan
from torrential.randomness import seed_all
from torrential.server.dealer import Dealer
from torrential.server.optimizer import Scalars, bounds, state_names
from torrential.server.shard import Initial
from torrential.server.shares import Shares, share_out
from torrential.strategies.base import Strategy, servers_of
from torrential.task import Task, build_model


class ServerPlan:
    def __init__(self, task: Task, config: RunConfig, strategy: Strategy, checkpoint: Checkpoint | None = None) -> None:
        self._task, self._config, self._strategy, self._checkpoint = task, config, strategy, checkpoint
        model = self._model()
        self.layout = plan(model, strategy.bucket_bytes)
        own = adapt_optimizer(config.recipe, task.optimizer_spec.with_lr(config.lr), model)
        self.spec = corrected(config.compression, strategy.optimizer(own).with_lr(config.lr), model)
        servers = servers_of(strategy, config.workers, config.servers)
        assert servers is not None, f"{strategy.name} declares no servers"
        self.servers, self.consistency, self.handlers = servers, servers.consistency, servers.handlers
        self.numel = sum(self.layout.sizes.values())
        self.bounds = bounds(self.layout, self.spec)  # where the key space may be cut; None: anywhere
        cuttable = strategy.cuttable(task, model)
        parts = [strategy.part(cuttable, stage, config.workers) for stage in range(servers.stages)]
        self.shares = shares_of(model, self.layout, parts)

    def initial(self) -> Initial:
        """The state of servers that are there from the beginning of the run."""
        config = self._config
        if self._checkpoint is not None:
            return resumed(self._checkpoint, self.layout, self.spec, self.servers.vectors)
        dealer = Dealer(config.samples, config.epochs, self.servers.joined)
        return Initial(_flat(self._model(), self.layout), dealer=dealer)

    def _model(self) -> nn.Module:
        seed_all(torch.device("cpu"), self._config.seed, 0)
        return adapt_model(self._config.recipe, build_model(self._task))


def shares_of(model: nn.Module, layout: Layout, stages: Sequence[nn.Module]) -> Shares:
    """Which stage has which parameters of a model, of which the stages have parts."""
    if len(stages) == 1:
        return Shares()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return share_out(layout, [{names[id(p)] for p in stage.parameters()} for stage in stages])


def resumed(
    checkpoint: Checkpoint, layout: Layout, spec: OptimizerSpec, vectors: Mapping[str, float] | None = None
) -> Initial:
    """The state of servers that go on from a checkpoint. `vectors`: what they keep beside the optimizer's state."""
    ((dtype, numel),) = layout.sizes.items()
    entries = {e.name: e for e in layout.entries}
    parameters = torch.zeros(numel, dtype=dtype)
    for name, entry in entries.items():
        entry.view(parameters).copy_(checkpoint.model[name])
    states = {key: torch.zeros(numel, dtype=dtype) for key in (*state_names(layout, spec), *(vectors or {}))}
    scalars: Scalars = {entries[name].index: {} for name, steps in checkpoint.applied.items() if steps}
    for name, tensor in checkpoint.optimizer.items():
        parameter, _, key = name.rpartition("/")
        if key in states:
            entries[parameter].view(states[key]).copy_(tensor)
        else:
            scalars.setdefault(entries[parameter].index, {})[key] = float(tensor)
    return Initial(parameters, states, scalars, checkpoint.step, dealer=checkpoint.dealer)


def _flat(model: nn.Module, layout: Layout) -> Tensor:
    ((dtype, numel),) = layout.sizes.items()
    flat, named = torch.zeros(numel, dtype=dtype), dict(model.named_parameters())
    for entry in layout.entries:
        entry.view(flat).copy_(named[entry.name].detach())
    return flat
