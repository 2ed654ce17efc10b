"""What a run's servers are made from: the same for every one of them, in every world."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torrential.config import RunConfig
from torrential.optim.recipe import adapt_model, adapt_optimizer
from torrential.params.layout import Layout, plan
from torrential.server.dealer import Dealer
from torrential.server.optimizer import bounds
from torrential.server.shard import Initial
from torrential.strategies.base import Strategy
from torrential.task import Task
from torrential.trainer.randomness import seed_all


class ServerPlan:
    def __init__(self, task: Task, config: RunConfig, strategy: Strategy) -> None:
        self._task, self._config, self._strategy = task, config, strategy
        model = self._model()
        self.layout = plan(model, strategy.bucket_bytes)
        own = adapt_optimizer(config.recipe, task.optimizer.with_lr(config.lr), model)
        self.spec = strategy.optimizer(own)
        self.consistency = strategy.consistency(config.workers)
        self.numel = sum(self.layout.sizes.values())
        self.bounds = bounds(self.layout, self.spec)  # where the key space may be cut; None: anywhere

    def initial(self) -> Initial:
        """What those begin with that are there when the run does."""
        config = self._config
        dealer = Dealer(config.samples, config.epochs, self._strategy.together)
        return Initial(_flat(self._model(), self.layout), dealer=dealer)

    def _model(self) -> nn.Module:
        seed_all(torch.device("cpu"), self._config.seed, 0)
        return adapt_model(self._config.recipe, self._task.model())


def _flat(model: nn.Module, layout: Layout) -> Tensor:
    ((dtype, numel),) = layout.sizes.items()
    flat, named = torch.zeros(numel, dtype=dtype), dict(model.named_parameters())
    for entry in layout.entries:
        entry.view(flat).copy_(named[entry.name].detach())
    return flat
