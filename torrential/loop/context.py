"""The context of a strategy's program in a worker whose script has a loop of its own."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torrential.errors import BadInput
from torrential.loop.data import LoopData
from torrential.loop.loader import order_of
from torrential.loop.optimizer import BackwardLosses, GroupOptions
from torrential.loop.progress import LoopProgress
from torrential.loop.replica import LoopReplica
from torrential.loop.turns import TakeStep, Turns
from torrential.optim.schedule import Schedule
from torrential.records import Evaluation
from torrential.trainer.context import RoleContext
from torrential.trainer.rounds import StepDropped


class LoopContext(RoleContext):
    """Implements strategies.context.Context."""

    replica_kind = LoopReplica
    data: LoopData
    progress: LoopProgress

    def __init__(
        self,
        *args: Any,
        turns: Turns,
        optimizers: Sequence[torch.optim.Optimizer],
        losses: BackwardLosses,
        saved: Mapping[str, Any],
        dataset: int,
        shuffle: bool,
        **options: Any,
    ) -> None:
        """`saved`: what the script wants saved with checkpoints, by name; `dataset`: samples in its data set."""
        self._turns, self._optimizers, self._losses = turns, optimizers, losses
        self._dataset, self._shuffle = dataset, shuffle
        super().__init__(*args, **options)
        self.between = self.data
        spec = self.task.optimizer_spec
        self._groups = GroupOptions(optimizers, len(spec.groups) or 1)
        self._replaced = self.strategy.optimizer(spec).kind is not spec.kind
        self._decided: list[float] | None = None  # options that the members have agreed on for a step
        self.progress.current_rate = self._rate
        self.progress.turns = turns
        self.data.progress, self.data.rates, self.data.use = self.progress, self._groups.values, self._use
        self.data.clip = lambda: self.replica.clip_norm
        self.data.step_done = lambda: self.replica.step_done()
        self.state.everybody("dealing", lambda: self.data.deal.state(), lambda state: self.data.deal.load(state))
        groups = _SavedGroups(optimizers)
        for name, thing in {"optimizer groups": groups, **saved}.items():
            self.state.everybody(name, *_as_tensors(name, thing), undo=False)

    def _make_data(self, schedule: Schedule) -> LoopData:
        order = order_of(self._dataset, self._shuffle, self.config.seed)
        return LoopData(self.config, self.comm, schedule, lambda: self.params, self._turns, order)

    def _make_progress(self, schedule: Schedule, late: bool) -> LoopProgress:
        return LoopProgress(self.config, self.comm, self.outlet, self.data, schedule, self._first, late)

    @cached_property
    def replica(self) -> LoopReplica:
        replica = super().replica
        assert isinstance(replica, LoopReplica)
        replica.attach(self._turns, self.data, self._optimizers, self._losses)
        return replica

    # -- learning rates -------------------------------------------------------------------------------------------
    def _use(self, options: Sequence[float], clip: float | None) -> None:
        self._decided = list(options)
        self.replica.use_clip(clip)

    def _rate(self) -> float:
        """What the script's optimizers have now, or what the members have agreed on for this step. A strategy's own
        optimizer, in the place of the script's, follows the script's rate from the one that it begins with."""
        options, self._decided = self._groups.values() if self._decided is None else self._decided, None
        wish = self._turns.wish
        rate = self._groups.rate(wish.optimizer if isinstance(wish, TakeStep) else 0, options)
        return self.config.lr * float(rate) / self.task.optimizer_spec.lr if self._replaced else rate

    # -- the program ----------------------------------------------------------------------------------------------
    def play(self, program: Callable[[Any], None]) -> None:
        """Run the strategy's program to its end, which is that of the script."""
        try:
            program(self)
        except StepDropped:
            self.leave()

    def evaluation(self, value: float, loss: float | None, epoch: int, figures: Mapping[str, float]) -> Evaluation:
        """What the script reports, and where in the run it does: after so many epochs. Where servers deal samples, this
        worker knows its own batches only: when there are no more of an epoch, all of its samples were dealt."""
        progress = self.progress
        dealt = 0 if self.servers is None else epoch * self.config.samples
        return Evaluation(
            split="validation",
            step=progress.step,
            epoch=epoch,
            samples=max(progress.samples, dealt),
            time=self.comm.now(),
            value=value,
            loss=loss,
            figures=dict(figures),
        )


class _SavedGroups:
    """The options of the script's optimizers, which schedulers change: their state is with the parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        return {
            str(number): [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for number, optimizer in enumerate(self._optimizers)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, optimizer in enumerate(self._optimizers):
            for group, saved in zip(optimizer.param_groups, state[str(number)], strict=True):
                group.update(saved)


def _as_tensors(
    name: str, thing: Any
) -> tuple[Callable[[], dict[str, Tensor]], Callable[[Mapping[str, Tensor]], None]]:
    """How an object with state_dict and load_state_dict is saved as a tensor, and loaded again."""

    def save() -> dict[str, Tensor]:
        out = io.BytesIO()
        torch.save(_without_numpy(thing.state_dict()), out)
        return {"state": torch.frombuffer(bytearray(out.getvalue()), dtype=torch.uint8)}

    def read(state: Mapping[str, Tensor]) -> Any:
        return torch.load(io.BytesIO(state["state"].contiguous().numpy().tobytes()), weights_only=True)

    try:
        read(save())
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        raise BadInput(
            f"the state of {name!r} holds {f'a {kind[1]}' if kind else 'an object'}, which no checkpoint can hold; "
            "keep tensors, numbers, texts, lists and dicts in its state_dict"
        ) from error
    return save, lambda state: thing.load_state_dict(read(state))


def _without_numpy(value: Any) -> Any:
    """The same with Python's numbers in the place of numpy's, which checkpoints do not hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {_without_numpy(key): _without_numpy(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_numpy, value))
    return value
