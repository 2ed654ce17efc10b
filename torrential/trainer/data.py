"""Which samples a role trains on: its part of joined batches, or what the servers deal it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torrential.comm.protocol import Comm
from torrential.config import RunConfig
from torrential.data.deal import Batch, Deal, Share, order
from torrential.optim.schedule import Schedule
from torrential.server.client import Client


class TrainingData:
    """Implements strategies.context.Data."""

    def __init__(self, config: RunConfig, comm: Comm, schedule: Schedule, client: Callable[[], Client]) -> None:
        self._config, self._comm, self._schedule, self._client = config, comm, schedule, client
        self.deal = Deal(config.samples, config.seed)
        self.joined = 0
        self.used_up = False  # servers have nothing left to deal
        self.enough: Callable[[], bool] = lambda: False  # whether all steps are done that were asked for

    def order(self, epoch: int) -> Tensor:
        return order(self._config.samples, self._config.seed, epoch)

    # -- joined batches -----------------------------------------------------------------------------------------
    def place(self, epoch: int, cursor: int) -> None:
        """Go on from there."""
        self.deal = Deal(self._config.samples, self._config.seed, epoch, cursor)

    @property
    def seen(self) -> int:
        """Samples of all epochs that lie before the next joined batch."""
        return self.deal.epoch * self._config.samples + self.deal.cursor

    def share(self, batches: int = 1, *, part: int | None = None, parts: int | None = None) -> Share:
        members = self._comm.members
        parts = len(members) if parts is None else parts
        part = members.index(self._comm.rank) if part is None else part
        self.joined = parts * self._config.batch_size * batches
        batches *= self._schedule.growth(self.seen, self.joined)
        return self.deal.share(part, parts, self._config.batch_size, batches)

    # -- leases -------------------------------------------------------------------------------------------------
    def take(self, clock: int, minibatches: int = 1, after: int = 0) -> Batch | None:
        if self._comm.stop_requested() or self.enough():
            return None
        answer = self._client().take(minibatches * self._config.batch_size, clock=clock, after=after).wait()
        if answer.finished:
            self.used_up = True
            return None
        first, last = answer.indices
        indices = self.order(answer.epoch)[first:last]
        return Batch(answer.epoch, first, indices, answer.total or max(1, last - first), lease=answer.lease)
