"""The models as a script has them: it runs them forward and backward, and what it leaves in `grad` is taken from there.

Gradients are those of the mean over this worker's own batch. Each is multiplied by the batch's weight where it is
copied anyway, or the sum of all is multiplied by what their weights have in common; only a batch that is smaller than
the others' costs a pass of its own. Buckets are announced when the script calls step(): it may call backward several
times before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Handle
from torrential.data.deal import Batch
from torrential.errors import BadInput, RunFailed
from torrential.loop.data import LoopData
from torrential.loop.optimizer import BackwardLosses, parameters_of
from torrential.loop.turns import AtEnd, BeginPass, NextBatch, Place, TakeStep, Turns
from torrential.params.base import flat_gradient
from torrential.params.layout import Bucket
from torrential.params.local import LocalParameters
from torrential.params.synchronized import Synchronized
from torrential.trainer.replica import ModelReplica
from torrential.trainer.rounds import StepDropped


class LoopReplica(ModelReplica):
    """Implements strategies.context.Replica."""

    hears_backward = False

    def attach(
        self, turns: Turns, data: LoopData, optimizers: Sequence[torch.optim.Optimizer], losses: BackwardLosses
    ) -> None:
        """`losses`: what the script has called backward on."""
        self._turns, self._data, self._losses = turns, data, losses
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._members = [
            {places[id(p)] for p in parameters_of(optimizer) if id(p) in places} for optimizer in optimizers
        ]
        self._optimizers = optimizers
        self._known = set(places)
        self._sync: Synchronized | None = None
        self.clip_norm: float | None = None  # as the script has asked for in this step
        self._mine: set[int] = set()  # entries that the step is of
        self._stashed: list[Tensor | None] | None = None  # what the script had in `grad`, while a step is taken
        self._weight = self._applied = 1.0  # of the gradient, and as far as `grad` has been multiplied by it
        self._memory: list[int] = []  # where the parameters lie
        self._loss = math.nan
        self._waits_for_more = False  # the script goes on with another batch before it takes a step

    def _placed(self, model: nn.Module) -> nn.Module:
        return model  # where the script has put it, and in the mode that it is in

    def _make_gradients(self) -> None:
        return None

    def _register_buffers(self) -> None:
        """The script has computed on its batch already when a round is given up, so buffers stay as they are."""
        if self.buffers():
            self._state.own("buffers", self.buffers, self._load_buffers, undo=False)

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        raise BadInput("the strategy wraps the model, which a script's own loop has in its hands; use allreduce")

    def synchronized(self) -> Synchronized:
        self._sync = super().synchronized()
        return self._sync

    # -- a step ---------------------------------------------------------------------------------------------------
    def backward(
        self,
        batches: Sequence[Batch],
        ready: Callable[[Bucket], None] | None = None,
        after: Handle | None = None,
        finite: bool = True,
    ) -> float:
        batches = [batch for batch in batches if len(batch)]
        if not batches:
            return math.nan if ready is None else self._announce_nothing(ready)
        if self._data.left_out:
            self._waits_for_more = True
        elif not self._data.again:
            self.step_done()  # of a batch before this one, in the same round
            began = self._comm.now()
            self._compute(batches)
            self._brake.hold(began)
        self._data.again = False
        if after is not None:
            after.wait()
        if self._waits_for_more:
            return self._push_nothing()
        self._set_aside()
        if self._gradient is not None:
            self._collect(self._gradient)
        else:
            self._apply_weight(batches[-1].weight)
        if ready is not None:
            self._announce(ready, self._mine)
        elif not math.isfinite(self._loss):
            self._progress.refuse(self._loss, batches[0])
        return self._loss

    def _compute(self, batches: Sequence[Batch]) -> None:
        """Hand the batches to the script, and further ones if it wants them, until it has taken a step for each."""
        turns, left, steps = self._turns, deque(batches), len(batches)
        handed, summed = self._data.repeated, list[Tensor | None]()
        self._applied, self._waits_for_more, self.clip_norm = 1.0, False, None if not handed else self.clip_norm
        self._weight = batches[-1].weight
        self._memory = self._memory or self.memory()
        while True:
            wish = turns.awaited()
            if isinstance(wish, AtEnd):
                raise StepDropped
            if isinstance(wish, Place):
                turns.grant(batches[0].epoch)
            elif isinstance(wish, BeginPass):
                if self._gradient is None:
                    self._begin_pass(wish, left, begun=bool(summed))
                elif wish.unused:
                    left, handed = deque(batches), False
                else:  # the lease is completed by a push of nothing, and what is left of the epoch is left out
                    self._waits_for_more = True
                    return
                turns.grant()
            elif isinstance(wish, NextBatch):
                if not left and not self._more(wish, left):
                    if self._waits_for_more:
                        return
                    continue
                self._change_weight(left[0].weight, handed)
                handed = True
                turns.grant(left.popleft())
            elif not handed:
                raise RunFailed(
                    "optimizer.step() was called twice on one batch, where the strategy adds several batches up; use "
                    "accumulate=1 or push_every=1"
                )
            elif steps > 1:
                steps -= 1
                self._choose(wish)
                summed = self._added(summed)
                turns.grant()
            else:
                return self._complete(wish, summed)

    def _begin_pass(self, wish: BeginPass, left: deque[Batch], begun: bool) -> None:
        """`begun`: whether the script has called step() for some of the batches that the strategy adds up."""
        try:
            self._data.begin_pass(wish, self._losses.pending)
        except StepDropped:
            if begun:
                raise RunFailed(
                    "the loop over batches was left in the middle of a step, where the strategy adds several batches "
                    "up; use accumulate=1"
                ) from None
            raise
        left.clear()

    def _more(self, wish: NextBatch, left: deque[Batch]) -> bool:
        """Whether there is another batch for the same step."""
        if self._gradient is not None:  # its lease is completed by a push of nothing, and the next is a new one
            self._waits_for_more = True
            return False
        further = self._data.further(wish)
        if further is None:
            self._turns.grant(None)
            return False
        left.extend(further)
        return True

    def _complete(self, wish: TakeStep, summed: list[Tensor | None]) -> None:
        self._choose(wish)
        if summed:
            for parameter, total in zip(self._parameters, self._added(summed), strict=True):
                parameter.grad = total
            self._applied = self._factor()
        self._loss = self._losses.total()
        if not any(self._parameters[index].grad is not None for index in self._mine):
            raise RunFailed(
                "optimizer.step() was called, and backward has left no gradient; call loss.backward() first"
            )

    def _choose(self, wish: TakeStep) -> None:
        """Note the optimizer whose parameters the step changes."""
        optimizer = self._optimizers[wish.optimizer]
        if any(p.grad is not None and id(p) not in self._known for p in parameters_of(optimizer)):
            raise RunFailed(
                "the optimizer has a parameter that was not trained when the loop began; set requires_grad before"
            )
        self.check_memory(self._memory)
        self._mine = self._members[wish.optimizer]

    # -- weights --------------------------------------------------------------------------------------------------
    def _common(self) -> float:
        """The factor that the weights of all members' gradients have in common; the sum is multiplied by it."""
        return 1.0 if self._sync is None else 1.0 / max(1, len(self._data.deal.roster))

    def _factor(self) -> float:
        """What this member's gradient is multiplied by before it is summed."""
        return self._weight / self._common()

    def _change_weight(self, weight: float, handed: bool) -> None:
        """The next batch has this weight; what was added up by those before it keeps theirs."""
        if handed and weight != self._weight:
            self._multiply(self._weight / weight)
        self._weight = weight

    def _apply_weight(self, weight: float) -> None:
        self._weight = weight
        factor = self._factor()
        if not math.isclose(factor, self._applied, rel_tol=1e-12):
            self._multiply(factor / self._applied)
            self._applied = factor
        if self._sync is not None:
            self._sync.factor = self._common()

    def _multiply(self, factor: float) -> None:
        present = [p.grad for p in self._parameters if p.grad is not None]
        if present:
            torch._foreach_mul_(present, factor)

    def _added(self, summed: list[Tensor | None]) -> list[Tensor | None]:
        """The sum of what was added up and this batch's weighted gradient, which is taken from the parameters."""
        factor, result = self._factor(), list[Tensor | None]()
        for parameter, before in zip(self._parameters, summed or [None] * len(self._parameters), strict=True):
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                grad = grad * factor if before is None else before.add_(grad, alpha=factor)
            result.append(before if grad is None else grad)
        return result

    # -- what the strategy sees -------------------------------------------------------------------------------------
    def _set_aside(self) -> None:
        """Leave in `grad` only gradients that belong to the step; the others are put back when it is done."""
        if self._stashed is None:
            self._stashed = [parameter.grad for parameter in self._parameters]
        for index, (parameter, grad) in enumerate(zip(self._parameters, self._stashed, strict=True)):
            parameter.grad = grad if index in self._mine else None

    def step_done(self) -> None:
        """The step that the script waits for is taken: it goes on, and finds its gradients as it left them."""
        if self._stashed is None:
            return
        for parameter, grad in zip(self._parameters, self._stashed, strict=True):
            parameter.grad = grad
        self._stashed = None
        if isinstance(self._turns.wish, TakeStep):
            self._turns.grant()

    def _announce(self, ready: Callable[[Bucket], None], mine: set[int]) -> None:
        assert self._watch is not None
        if self._sync is not None:
            self._sync.clip_norm = self.clip_norm
        self._watch.begin(ready)
        present = [p for i, p in enumerate(self._parameters) if i in mine and p.grad is not None]
        self._watch.replay([], present)

    def _announce_nothing(self, ready: Callable[[Bucket], None]) -> float:
        """This member has no samples: it takes part in the step without its script."""
        self._mine, self.clip_norm = set(), None
        self._set_aside()
        if self._sync is not None:
            self._sync.factor = self._common()
        self._announce(ready, set())
        if self._sync is not None:
            self._sync.clip_norm = math.inf  # whether the others clip is known when they have voted: its part counts
        return 0.0

    def _push_nothing(self) -> float:
        assert self._gradient is not None
        self._gradient.zero_()
        return self._loss

    def reached(self) -> list[int] | None:
        return [] if self._waits_for_more else super().reached()

    def _collect(self, gradient: Tensor) -> None:
        factor = self._factor() / self._applied
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            grad = flat_gradient(parameter)
            target = gradient[entry.start : entry.stop]
            target.zero_() if grad is None else torch.mul(grad, factor, out=target)
        if self.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
            gradient *= min(1.0, self._weight * self.clip_norm / (norm + 1e-6))

    def use_clip(self, clip: float | None) -> None:
        """Clip the sum in the same way on every member."""
        if self._sync is not None:
            self._sync.clip_norm = clip
        elif isinstance(self.parameters, LocalParameters):
            self.parameters.clip_norm = clip
