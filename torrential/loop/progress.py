"""How far a script's own loop has come: learning rates are the script's, and so is the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NoReturn

from torrential.data.deal import Batch
from torrential.errors import NonFiniteLoss
from torrential.loop.dealing import KeptDeal
from torrential.loop.turns import TakeStep, Turns
from torrential.trainer.progress import TrainingProgress
from torrential.trainer.saving import Saving


class LoopProgress(TrainingProgress):
    """Implements strategies.context.Progress."""

    turns: Turns
    ended = False  # whether the script has come to its end
    current_rate: Callable[[], float]  # the script's, as it is now

    _leaves = False  # whether this is the end of its part
    _kept = 0  # the last step with a snapshot
    _due: tuple[Saving, int] | None = None

    def rate(self, joined: int, batch: Batch | None = None, *, ahead: int = 0) -> float:
        self._last_rate = self.current_rate()
        return self._last_rate

    def loss_scale(self, joined: int) -> float:
        return 1.0

    def refuse(self, loss: float, batch: Batch | None = None, worker: int | None = None, joined: int = 0) -> NoReturn:
        rank = self._comm.rank if worker is None else worker
        remedy = "lower the script's learning rate, clip with run.clip_grad_norm_, or look for nan in the data"
        raise NonFiniteLoss(self.step + 1, rank, loss, remedy)

    def finished(self) -> bool:
        if self.ended or self.stopped or self._data.enough():
            return True
        deal = self._data.deal
        over = (deal.next_epoch() if isinstance(deal, KeptDeal) else deal.epoch) >= self._config.epochs
        if isinstance(self.turns.wish, TakeStep):
            return False  # one more step on the last samples
        return over or self._data.used_up

    def end(self) -> None:
        """The script has come to its end, and with it this member's steps."""
        if not self.ended and self.step and self.recorder.newest < self.step:
            self._record()
        self.ended = True

    def end_served(self) -> None:
        self._leaves = True
        super().end_served()

    def _record_served(self) -> None:
        if self._leaves or not math.isnan(self.loss):  # else the script still adds gradients up for its first step
            super()._record_served()

    def stepped(self, samples: int, loss: float, updates: int = 1) -> None:
        super().stepped(samples, loss if samples else self.loss, updates)

    # -- snapshots: when the script wants its next batch, and has done all that belongs to the one before -----------
    def snapshot_due(self) -> bool:
        every, deal = self._config.settings.evaluate_every, self._data.deal
        if self.finished():
            return True
        if isinstance(self.turns.wish, TakeStep):
            return False
        if every is None:
            due = deal.cursor == 0 and not (isinstance(deal, KeptDeal) and deal.owed)
        else:
            due = self.step == self._kept or self.step // every > self._kept // every
        if due:
            self._kept = self.step
        return due

    def _save_when_due(self, saving: Saving, due: int) -> None:
        self._due = saving, due

    def save_now(self) -> None:
        """Ask the servers for a checkpoint, if one was due when the last batch was done with."""
        if self._due is not None:
            super()._save_when_due(*self._due)
            self._due = None
