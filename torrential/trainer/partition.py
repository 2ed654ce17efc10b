"""A worker's place in a replica that is of several workers, each with a stage of the model.

    leader   take ──► what it was dealt ──► the others       samples are dealt to the worker that has key 0
    all      passes over microbatches, then the loss and the gradient's norm of all stages together
    all      push and pull, each its own parameters, then what the servers have answered all of them together

So all of them take the same turns of the same program, at the same clocks. When one dies, the servers forget the whole
replica, and its samples are dealt to others; all waits of its workers end with Regrouped. The replica begins again,
with the servers' parameters, when another worker has replaced the dead one. An era is the time between two such
changes: a number that each of a replica's workers computes from the lives of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torrential.comm.protocol import Comm
from torrential.config import LocalSettings, RunConfig
from torrential.data.deal import Batch
from torrential.errors import Regrouped, RunFailed
from torrential.server.client import Answer, Client, PendingRequest
from torrential.server.messages import Marking, View
from torrential.server.shares import OwnedSpan, Shares

PAUSE_SECONDS = 0.25  # between two looks for a worker that is not there
MOMENT_SECONDS = 0.01  # between two looks for an answer


class Dealt(NamedTuple):
    """What the leader tells the others about their next batch."""

    over: bool  # there is none
    used_up: bool = False  # since servers have no samples left
    epoch: int = 0
    first: int = 0
    stop: int = 0
    total: int = 0
    lease: int = 0
    marked: int = 0  # the newest checkpoint to mark, as in server.messages.Marking
    cut: int = -1
    buffers: bool = False  # whether module buffers are told one another, for a checkpoint


class Partition:
    """Implements server.client.Fellows."""

    def __init__(self, comm: Comm, config: RunConfig, shares: Shares, owned: Sequence[OwnedSpan]) -> None:
        self._comm, self._config, self.shares, self.owned = comm, config, shares, owned
        self.ranks = shares.replica(comm.rank)
        self.leader = shares.leader(comm.rank)
        self._others = [rank for rank in self.ranks if rank != comm.rank]
        self._era = 0
        self._seen: View | None = None  # the view that was last looked at, in which nobody had changed
        self._closed = False
        self._marking = Marking(number=0)
        self.wants_buffers = False

    @property
    def leads(self) -> bool:
        return self._comm.rank == self.leader

    # -- who is there -----------------------------------------------------------------------------------------------
    def meet(self, client: Callable[[], Client]) -> bool:
        """Wait until all workers of the replica are there; False if the run ends without it. `client` makes a client of
        this worker alone, to ask the servers how far the run has come."""
        while (era := self._current()) is None:
            if not self._wait_for_others(client()):
                self._closed = True
                return False
        self._era, self._seen, self._marking, self.wants_buffers = era, None, Marking(number=0), False
        self._comm.join(self.ranks, era, self.check)
        return True

    def _wait_for_others(self, client: Client) -> bool:
        """Wait until the replica is complete; False if the run ends without it. Raises RunFailed when no replica trains
        any more."""
        comm, timeout = self._comm, self._config.settings.timeout
        asked: PendingRequest | None = None
        idle = again = comm.now()  # since when nobody trains, and when to ask again, as letters may be lost
        while self._current() is None:
            now = comm.now()
            if comm.stop_requested():
                return False
            if self.shares.leaders(comm.view.workers):
                asked, idle, again = None, now, now
            elif asked is not None and asked.done():
                if self._is_over(asked.wait()):
                    return False
                if not self._replaced or now - idle > timeout:
                    raise self._broken(now - idle)
                asked = None
            elif now >= again:
                if now - idle > timeout:
                    raise self._broken(now - idle)
                asked, again = client.look(), now + PAUSE_SECONDS
            client.receive(PAUSE_SECONDS if asked is None else MOMENT_SECONDS)
        return True

    def _current(self) -> int | None:
        """The era that it is; None if the replica lacks a worker."""
        there, lives = set(self._comm.view.workers), self._comm.lives
        return 1 + sum(lives[rank] for rank in self.ranks) if there.issuperset(self.ranks) else None

    def _is_over(self, answer: Answer) -> bool:
        steps = self._config.steps
        return answer.finished or (steps is not None and answer.version >= steps)

    @property
    def _replaced(self) -> bool:
        """Whether another worker may come in the place of one that is gone."""
        settings = self._config.settings
        return not isinstance(settings, LocalSettings) or settings.restart

    def _broken(self, seconds: float) -> RunFailed:
        there, stages = self._comm.view.workers, self.shares.stages
        gone = " and ".join(
            f"worker {rank} (stage {rank % stages} of replica {rank // stages})"
            for rank in self.ranks
            if rank not in there
        )
        long = f" for {seconds:.0f} s" if self._replaced else ""
        remedy = "resume the run" if self._replaced else "resume the run, or have workers replaced (--set restart=true)"
        return RunFailed(f"no replica has all its stages any more: {gone} is gone{long}; {remedy}")

    def check(self) -> None:
        """Raise Regrouped if the workers of the replica are not the same any more."""
        view = self._comm.view
        if view is self._seen or self._closed:
            return
        if self._current() != self._era:
            raise Regrouped(self._era)
        self._seen = view

    def close(self) -> None:
        """Wait until all workers have finished their last batch. None leaves before: servers would not answer the
        others then."""
        try:
            self.gather([0.0])
        except Regrouped:  # they have left, or died: nothing more is wanted of them
            pass
        finally:
            self._closed = True

    # -- what they tell one another ---------------------------------------------------------------------------------
    def deal(self, batch: Batch | None, used_up: bool) -> Dealt:
        """The next batch: the leader's, of which it tells the others."""
        if not self.leads:
            into = torch.empty(len(Dealt._fields), dtype=torch.int64)
            return Dealt(*self._comm.recv(into, self.leader, "batch").wait().tolist())
        mark = self._marking.number, self._marking.cut
        if batch is None:
            dealt = Dealt(True, used_up, marked=mark[0], cut=mark[1], buffers=True)
        else:
            place = batch.epoch, batch.first, batch.stop, batch.total, batch.lease
            dealt = Dealt(False, used_up, *place, *mark, self.wants_buffers)
        self.wants_buffers = False
        said = torch.tensor(dealt, dtype=torch.int64)
        for handle in [self._comm.send(said, rank, "batch") for rank in self._others]:
            handle.wait()
        return dealt

    def gather(self, numbers: Sequence[float]) -> Tensor:
        """The numbers of all workers, by stage."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        sent = [self._comm.send(mine, rank, "numbers") for rank in self._others]
        rows = {rank: self._comm.recv(torch.empty_like(mine), rank, "numbers").wait() for rank in self._others}
        for handle in sent:
            handle.wait()
        return torch.stack([rows.get(rank, mine) for rank in self.ranks])

    def exchange(self, mine: Sequence[Tensor], places: dict[int, list[Tensor]]) -> None:
        """Send tensors to all others, and receive theirs, by stage, into `places`."""
        sent = [self._comm.send(tensor, rank, "buffers") for rank in self._others for tensor in mine]
        for rank in self._others:
            for place in places[rank % self.shares.stages]:
                self._comm.recv(place, rank, "buffers").wait()
        for handle in sent:
            handle.wait()

    # -- implements server.client.Fellows ---------------------------------------------------------------------------
    def agree(self, answer: Answer) -> Answer:
        told = answer.version, answer.clock, answer.ahead, answer.dropped, answer.staleness
        rows = self.gather(told)
        leader = rows[self.ranks.index(self.leader)]
        return answer._replace(
            version=int(rows[:, 0].min()),
            clock=int(rows[:, 1].min()),
            ahead=int(rows[:, 2].max()),
            dropped=bool(leader[3]),
            staleness=int(leader[4]),
        )

    def marking(self, message: Marking) -> None:
        """Note a checkpoint to mark, as the leader: it tells the others with the next batch. Other workers wait for
        that."""
        if message.number > self._marking.number:
            self._marking = message
