"""Which samples a role trains on: its part of joined batches, or what the servers deal it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torrential.comm.protocol import Comm
from torrential.config import RunConfig
from torrential.data.deal import Batch, Deal, Order, Share
from torrential.optim.schedule import Schedule
from torrential.server.client import Client
from torrential.trainer.ahead import LookAhead

if TYPE_CHECKING:
    from torrential.trainer.staged import StagedReplica


class TrainingData:
    """Implements strategies.context.Data."""

    def __init__(
        self, config: RunConfig, comm: Comm, schedule: Schedule, client: Callable[[], Client], order: Order
    ) -> None:
        self._config, self._comm, self._schedule, self._client, self._order = config, comm, schedule, client, order
        self.deal = Deal(config.samples, config.seed, order=order)
        self.joined = 0
        self.used_up = False  # servers have nothing left to deal
        self.takers: Callable[[Sequence[int]], Sequence[int]] = lambda workers: workers  # those that take leases
        self.enough: Callable[[], bool] = lambda: False  # whether all steps are done that were asked for
        self.ahead: LookAhead | None = None  # what tells loaders of the next batches, where there are loaders
        self.begins: Callable[[int], None] = lambda clock: None  # hears of every clock that this role has samples for
        self.replica: StagedReplica | None = None  # of several workers, of which one takes the leases

    def order(self, epoch: int) -> Tensor:
        return self._order.whole(epoch)

    # -- joined batches -----------------------------------------------------------------------------------------
    def place(self, epoch: int, cursor: int) -> None:
        """Go on from there."""
        self.deal = Deal(self._config.samples, self._config.seed, epoch, cursor, self._order)

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
        if self.ahead is not None:
            self.ahead.share(self.deal, part, parts, batches)
        return self.deal.share(part, parts, self._config.batch_size, batches)

    # -- leases -------------------------------------------------------------------------------------------------
    def take(self, clock: int, minibatches: int = 1, after: int = 0) -> Batch | None:
        batch = self._take(clock, minibatches, after)
        if batch is not None:
            self.begins(clock)
        return batch

    def _take(self, clock: int, minibatches: int, after: int) -> Batch | None:
        if self.replica is None:
            return self._lease(clock, minibatches, after)
        partition = self.replica.partition
        batch = self._lease(clock, minibatches, after) if partition.leads else None
        dealt = partition.deal(batch, self.used_up)
        self._client().mark(dealt.marked, dealt.cut)
        if dealt.buffers:
            self.replica.exchange_buffers()
        if dealt.over or batch is not None:
            self.used_up = bool(dealt.used_up)
            return batch
        if self.ahead is not None:
            self.ahead.told(dealt.epoch, dealt.first, dealt.stop)
        indices = self._order.between(dealt.epoch, dealt.first, dealt.stop)
        return Batch(dealt.epoch, dealt.first, indices, dealt.total, lease=dealt.lease)

    def _lease(self, clock: int, minibatches: int, after: int) -> Batch | None:
        if self._comm.stop_requested() or self.enough():
            if self.ahead is not None:
                self.ahead.give_up(self._client())
            return None
        client, count = self._client(), minibatches * self._config.batch_size
        if self.ahead is None:
            answer = client.take(count, clock=clock, after=after).wait()
        else:
            workers = self.takers(self._comm.view.workers)
            answer = self.ahead.take(client, count, clock, after, workers, self._comm.rank)
        if answer.finished:
            self.used_up = True
            return None
        first, last = answer.indices
        indices = self._order.between(answer.epoch, first, last)
        return Batch(answer.epoch, first, indices, answer.total or max(1, last - first), lease=answer.lease)
