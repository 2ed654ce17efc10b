"""Passes of PipeDream: every minibatch has a step of its own, and goes back with the weights that it went forward with.

    stage 0 of 3   F0  F1  F2  .  .  B0 step  F3  B1 step  F4  B2 step ...
    its weights    v0  v0  v0        v0  v1   v1  v0  v2   v2  v0  v3

A stage keeps every version that a minibatch in flight was computed with (weight stashing): a step leaves such a one
where it is, and writes the next to other memory. With vertical sync all stages use the version that the minibatch
entered the pipeline with, so that later stages keep older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from torrential.comm.protocol import Comm
from torrential.data.deal import Batch
from torrential.stages.passes import PassPlan, StagePasses, StageReplica

Weights = dict[nn.Parameter, Tensor]


class StashedPasses(StagePasses):
    """Forward and backward passes of the stages that one worker runs, with a step after every minibatch."""

    def __init__(
        self,
        comm: Comm,
        replica: StageReplica,
        loss: Callable[[Any, Any], Tensor],
        plan: PassPlan,
        runners: Sequence[tuple[int, list[int]]],
        vertical: bool,
        step: Callable[[int], None],
    ) -> None:
        """`step(n)` updates the parameters with the gradients of minibatch n, which it finds at the parameters."""
        super().__init__(comm, replica, loss, plan, runners)
        self._vertical, self._update = vertical, step
        self._trained = [p for modules in self._modules for m in modules for p in m.parameters() if p.requires_grad]
        self._versions: dict[int, Weights] = {}  # kept, by the number of steps before it
        self._in_flight: dict[int, tuple[int, Weights]] = {}  # by minibatch: its version, as leaves of its own graph
        self._steps = 0
        self.delays: list[int] = []
        """By minibatch: the steps between the version that its gradient is of and the one that it is applied to."""
        self.most_versions = 1
        """The most versions of the weights that were there at one time."""

    def run(self, batches: Sequence[Batch], meanwhile: Callable[[], None] | None = None) -> tuple[float, int]:
        """Train on these minibatches, one step for each, and drain the pipeline."""
        self._versions, self._in_flight, self._steps, self.delays = {}, {}, 0, []
        return super().run(batches, meanwhile)

    # -- versions -----------------------------------------------------------------------------------------------------
    def _version_for(self, number: int) -> int:
        """The version that a minibatch is computed with whose forward comes now, or next. The first stage takes its
        first step after the backward of minibatch 0, when as many others as there are stages after it have entered."""
        return max(0, number - (self._count - 1)) if self._vertical else self._steps

    def _runnable(self, number: int, chunk: int, module: nn.Module) -> Callable[[Any], Any]:
        version, leaves = self._in_flight.setdefault(number, (self._version_for(number), {}))
        if version == self._steps and self._last:
            return module  # backward comes before the next step
        if version == self._steps:
            self._keep_newest()
        kept = self._versions[version]
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        leaves |= {p: kept[p].detach().requires_grad_() for p in named.values() if p not in leaves}
        given = {name: leaves[p] for name, p in named.items()}
        return lambda value: functional_call(module, given, (value,))

    def _keep_newest(self) -> None:
        """Have the next step leave the weights where they are, and write to others."""
        self._versions.setdefault(self._steps, {p: p.data for p in self._trained})
        self.most_versions = max(self.most_versions, len(self._versions))

    # -- steps --------------------------------------------------------------------------------------------------------
    def _step(self) -> None:
        number = self._steps  # backwards come in order
        version, leaves = self._in_flight.pop(number)
        self.delays.append(number - version)
        for parameter, leaf in leaves.items():
            parameter.grad = leaf.grad
        if self._vertical and self._place > 0 and number <= self._version_for(len(self._microbatches) - 1):
            self._keep_newest()  # for minibatches to come
        if number in self._versions:
            for parameter in self._trained:
                parameter.data = parameter.data.clone()
        self._update(number)
        for parameter in self._trained:
            parameter.grad = None
        self._steps += 1
        following = self._version_for(number + self._count - self._place)  # of the next forward
        oldest = min([following, *(used for used, _ in self._in_flight.values())])
        self._versions = {v: weights for v, weights in self._versions.items() if v >= oldest}
