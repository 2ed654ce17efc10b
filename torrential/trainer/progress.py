"""How far a run has come, as one role knows it: steps, samples, rates, records; and when evaluation is due."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

from torrential.checkpoint import Checkpoint
from torrential.comm.protocol import SERVERS, Comm
from torrential.config import RunConfig
from torrential.data.deal import Batch
from torrential.data.portions import Tally
from torrential.errors import NonFiniteLoss
from torrential.optim.schedule import Schedule
from torrential.records import Event, Work
from torrential.server.client import Answer
from torrential.trainer.data import TrainingData
from torrential.trainer.recorder import Recorder
from torrential.trainer.saving import Saving
from torrential.trainer.snapshot import Outlet


class TrainingProgress:
    """Implements strategies.context.Progress."""

    def __init__(
        self,
        config: RunConfig,
        comm: Comm,
        outlet: Outlet,
        data: TrainingData,
        schedule: Schedule,
        checkpoint: Checkpoint | None,
        late: bool,
    ) -> None:
        """`late`: this role takes the place of one that died, or joins when others have begun."""
        self._config, self._comm, self._data, self._schedule, self._late = config, comm, data, schedule, late
        self._outlet, self.recorder = outlet, Recorder(comm, outlet)
        self.step = self.samples = self.epoch = 0
        if checkpoint is not None:
            self.step, self.samples, self.epoch = checkpoint.step, checkpoint.samples, checkpoint.epoch
        data.enough = lambda: config.steps is not None and self.step >= config.steps
        self.begun = False  # whether this role has counted a step or a batch
        self.stopped = self._over = False
        self._ended_epoch = False
        self.loss, self.time = math.nan, 0.0
        self.figures: dict[str, float] = {}  # of this role's last backward, besides the loss
        self._last_rate = config.lr
        self._staleness: Counter[int] = Counter()
        self._dropped = 0
        self._counts = True  # whether gradients are counted here, or by another worker of the same replica
        self.saving: Saving | None = None  # saves what servers keep, where there are any
        self.takers: Callable[[Sequence[int]], Sequence[int]] = lambda workers: workers  # those that take batches
        self.give_snapshot: Callable[[], None] = lambda: None  # set where this role gives snapshots outside of rounds
        self._was_first = not late and comm.rank == 0
        self._saved = -1 if late else self._saves_due(self.epoch)  # checkpoints asked for so far; -1: not known

    def note(self, event: str, detail: str) -> None:
        worker = self._comm.rank if self._comm.rank < SERVERS else None
        self._outlet.record(Event(event=event, time=self._comm.now(), step=self.step, worker=worker, detail=detail))

    def delayed(self, updates: int) -> None:
        self._staleness[updates] += 1

    # -- rates --------------------------------------------------------------------------------------------------
    def rate(self, joined: int, batch: Batch | None = None, *, ahead: int = 0) -> float:
        seen = ahead + (self.samples if batch is None else self._place(batch))
        self._last_rate = self._schedule.rate(seen, joined)
        return self._last_rate

    def loss_scale(self, joined: int) -> float:
        return self._schedule.loss_scale(joined)

    def total_epochs(self) -> float:
        """The epochs that the run is of."""
        return self._schedule.total / self._config.samples

    def share_done(self) -> float:
        """The share of the run's samples that has been seen."""
        return self.samples / self._schedule.total

    def refuse(self, loss: float, batch: Batch | None = None, worker: int | None = None, joined: int = 0) -> NoReturn:
        """Fail on a loss that is no number: this role's on a batch, or a worker's in a round."""
        seen = self.samples if batch is None else self._place(batch)
        rate = self._schedule.rate(seen, joined) if joined else self._last_rate
        rank = self._comm.rank if worker is None else worker
        raise NonFiniteLoss(self.step + 1, rank, loss, self._schedule.remedy(seen, rate))

    def _place(self, batch: Batch) -> int:
        """Samples of the run that were dealt out before this batch's."""
        return batch.epoch * self._config.samples + batch.first

    # -- steps of all members, or of a coordinator --------------------------------------------------------------
    def finished(self) -> bool:
        limit = self._config.steps
        over = self._data.deal.epoch >= self._config.epochs or self._data.used_up
        return self.stopped or self._over or over or (limit is not None and self.step >= limit)

    def stepped(self, samples: int, loss: float, updates: int = 1) -> None:
        """A joined batch is done with, or several with an update each."""
        self.begun = True
        self.step += updates
        self.samples += samples
        before = self._data.deal.epoch
        self._data.deal.advance(samples)
        self.epoch = self._data.deal.epoch
        self._ended_epoch = self.epoch > before
        self.loss, self.time = loss, self._comm.now()
        if self.recorder.due(self.time) or self.finished() or self._comm.rank >= SERVERS:  # whose steps are long
            self._record()

    def conclude(self, samples: int, loss: float | None) -> None:
        if loss is not None and not math.isfinite(loss):
            self.refuse(loss)
        self.stopped = self._comm.stop_requested()
        self.stepped(samples, math.nan if loss is None else loss)
        self.give_snapshot()

    def go_on(self, step: int, samples: int, *, over: bool = False) -> None:
        self.step, self.samples = step, samples
        self._data.place(*divmod(samples, self._config.samples))
        self.epoch = self._data.deal.epoch
        if over:
            self._over, self.time = True, self._comm.now()
            self.give_snapshot()

    def end_early(self, why: str) -> None:
        self._over = True
        if why:
            self.note("ended", why)

    def took_part(self, step: int, samples: int, loss: float) -> None:
        self.begun = True
        self.step, self.samples, self.loss = step, samples, loss
        self.epoch = samples // self._config.samples
        if self.recorder.due(self._comm.now()):
            self._record()

    def left(self) -> None:
        """Record what this role has done since its last record, which is all."""
        self._record()

    def worked(self, tally: Tally, seconds: float) -> None:
        self._outlet.record(
            Work(
                time=self._comm.now(),
                step=self.step,
                seconds=seconds,
                portions=tally.portions,
                copies=tally.copies,
                wasted=tally.wasted,
                idle=tally.idle,
            )
        )

    def snapshot_due(self) -> bool:
        every = self._config.settings.evaluate_every
        if self.finished():
            return True
        if every is not None:
            return self.step % every == 0
        return self._data.deal.cursor == 0 or self._ended_epoch  # a coordinator's step may end amid one

    def _record(self) -> None:
        place = {"step": self.step, "epoch": self.epoch, "samples": self.samples}
        self.recorder.write(
            self._comm.now(), **place, loss=self.loss, figures=self.figures, staleness=dict(self._staleness)
        )

    # -- batches that servers deal ------------------------------------------------------------------------------
    def advance(self, batch: Batch, loss: float, answer: Answer | None = None) -> None:
        self.begun = True
        if answer is not None:
            self.count(batch, answer)
        if self.saving is not None:
            self.saving.poll()
        if not len(batch):
            return
        self.loss, self.epoch = loss, batch.epoch
        self.samples = self._place(batch) + len(batch)
        if self.recorder.due(self._comm.now()):
            self._record_served()
        ends = batch.first + batch.total >= self._config.samples
        if self.saving is not None:
            self._save_when_due(self.saving, self._saves_due(batch.epoch + ends))

    def lead(self, leads: bool, takers: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """The batches are a replica's of several workers, of which one counts them. `takers`: those of some workers
        that do."""
        self._counts, self.takers = leads, takers
        self._was_first = not self._late and self._comm.rank == takers(range(self._config.workers))[0]

    def begin_again(self) -> None:
        """A checkpoint that was being made is lost; make another, if this worker is the first."""
        self._was_first = False

    def count(self, batch: Batch, answer: Answer) -> None:
        self.step = max(self.step, answer.version)
        if not self._counts:
            return
        self._dropped += answer.dropped
        if len(batch) and not answer.dropped:
            self._staleness[answer.staleness] += 1

    def end_served(self) -> None:
        """The last batch is done with, and all counts are complete."""
        if self._data.used_up:
            self.epoch, self.samples = self._config.epochs, self._config.epochs * self._config.samples
        self._record_served()

    def _record_served(self) -> None:
        self.recorder.write(
            self._comm.now(),
            step=self.step,
            epoch=self.epoch,
            samples=self.samples,
            loss=self.loss,
            figures=self.figures,
            staleness=dict(self._staleness),
            dropped=self._dropped,
        )

    def _saves_due(self, epochs: int) -> int:
        """The number of checkpoints that belong to so many epochs, or to the steps taken so far; the last comes at the
        end."""
        every = self._config.settings.evaluate_every
        return min(epochs, self._config.epochs - 1) if every is None else self.step // every

    def _save_when_due(self, saving: Saving, due: int) -> None:
        first = self._comm.rank in self.takers(self._comm.view.workers)[:1]
        succeeded = first and not self._was_first and self._saved > 0  # the first one may have died before it had saved
        wanted = succeeded or (first and due > self._saved >= 0)
        if wanted and saving.busy:
            return  # as soon as that is done
        if wanted:
            saving.begin()
        self._saved, self._was_first = max(self._saved, due), first
