"""Which samples a script trains on, and where the strategy's program and the script give way to each other.

    idle, take   the parameters are up to date; the script goes on until it wants a batch, or a step on the one it has
    backward     the script computes on the batches of a step, until it calls step() (loop/replica.py)

A batch that the script asks for after another without a step between belongs to the same step: scripts add gradients
up. A step without a new batch is one more on the same samples: scripts have several optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from torch import Tensor

from torrential.comm.protocol import Agreement, Comm
from torrential.config import RunConfig
from torrential.data.deal import Batch, Order, Share
from torrential.errors import RunFailed
from torrential.loop.dealing import KeptDeal
from torrential.loop.progress import LoopProgress
from torrential.loop.turns import AtEnd, BeginPass, NextBatch, Place, TakeStep, Turns
from torrential.optim.schedule import Schedule
from torrential.server.client import Client
from torrential.trainer.data import TrainingData
from torrential.trainer.rounds import StepDropped

NO_SAY = -1.0
GOES_ON, STOPS, ENDED = 0.0, 1.0, 2.0  # what a member says of the step to come: its script wants none after the first
OPTIMIZERS = 1000  # more than a script has


class SameSamples(Share):
    """A further step on samples that were counted before."""

    @property
    def samples(self) -> int:
        return 0


class LoopData(TrainingData):
    """Implements strategies.context.Data, and trainer.rounds.BetweenSteps."""

    progress: LoopProgress

    def __init__(
        self,
        config: RunConfig,
        comm: Comm,
        schedule: Schedule,
        client: Callable[[], Client],
        turns: Turns,
        order: Order,
    ) -> None:
        self._turns = turns
        super().__init__(config, comm, schedule, client, order)
        self.place(0, 0)
        self.again = False  # whether the share was dealt before, and the script has computed on it
        self.repeated = False  # whether the step is one more on the same samples
        self.step_done: Callable[[], None] = lambda: None  # have the script's step() return
        self.rates: Callable[[], list[float]] = list  # of the optimizers' groups, as the script has them now
        self.use: Callable[[Sequence[float], float | None], None] = lambda rates, clip: None  # rates, and where to clip
        self.clip: Callable[[], float | None] = lambda: None
        self._share: Share | None = None  # of the step under way
        self._last: list[Batch] = []  # the batches of the last step, for another on the same samples
        self._taken = 0  # joined batches in the share
        self._begun = 0  # the steps taken when the share was dealt
        self._carried = 0, 0  # joined batches, and batches of this member, that the share has of passes before
        self._broken: set[int] = set()  # epochs that the script has left in the middle, where servers deal
        self.left_out = False  # whether the batch is of such an epoch, and the script does not see it
        self.stopping = False  # whether this script has called run.stop()
        self.dropped = False  # whether the last step was not taken, because a script had called run.stop() before it
        self._ahead: Batch | None = None  # of the next epoch, leased but not handed to the script yet

    deal: KeptDeal

    def place(self, epoch: int, cursor: int) -> None:
        before = getattr(self, "deal", None)
        self.deal = KeptDeal(self._config.samples, self._config.seed, epoch, cursor, self._order)
        if isinstance(before, KeptDeal):
            self.deal.load(before.state())

    # -- rounds: implements BetweenSteps --------------------------------------------------------------------------
    def met(self, agreement: Agreement) -> None:
        if agreement.generation == 1:
            self.deal.roster = agreement.members
        self.progress.ended = False  # perhaps not everybody has heard of the end: it is voted on again
        if self.dropped:
            self.dropped = self.progress.stopped = False

    def idle(self) -> None:
        if self._share is not None and self.progress.step > self._begun:  # it was concluded, here or by the others
            self._last, self._share = self._share.batches, None
            self.step_done()
        while True:
            wish = self._turns.awaited()
            if isinstance(wish, Place):
                self._turns.grant(self.deal.next_epoch())
            elif isinstance(wish, BeginPass):
                self.deal.leave_before(wish.epoch)
                self._turns.grant()
            elif isinstance(wish, NextBatch) and self._is_over(wish, self.deal.next_epoch()):
                self._turns.grant(None)
            else:
                if self._ending() != GOES_ON:
                    self._share = None
                return

    def _ending(self) -> float:
        """Whether this member's script wants the step to come, or why it does not."""
        wish = self._turns.wish
        if self.stopping and isinstance(wish, NextBatch | AtEnd):
            return STOPS
        return ENDED if isinstance(wish, AtEnd) else GOES_ON

    def finish(self) -> None:
        self.step_done()
        while not isinstance(wish := self._turns.awaited(), AtEnd):
            self._turns.grant(self.deal.next_epoch() if isinstance(wish, Place) else None)
        self.progress.end()

    @staticmethod
    def _is_over(wish: NextBatch, epoch: int) -> bool:
        """Whether the epoch that the script iterates over has no more samples."""
        return epoch > wish.epoch

    def ballot(self) -> list[float]:
        wish, clip = self._turns.wish, self.clip()
        silent = not isinstance(wish, TakeStep)
        said = NO_SAY if silent else self._taken * OPTIMIZERS + wish.optimizer  # type: ignore[union-attr]
        place = self.deal.next_epoch()
        return [self._ending(), said, place, math.inf if clip is None else clip, *self.rates()]

    def decided(self, numbers: Tensor) -> None:
        endings = dict(zip(self._comm.members, numbers[:, 0].tolist(), strict=True))
        rows = dict(zip(self._comm.members, numbers[:, 1:].tolist(), strict=True))
        if any(endings.values()):
            self._end_before_step(endings)
        said = {rank: row for rank, row in rows.items() if row[0] != NO_SAY}
        if len({row[0] for row in said.values()}) > 1:
            raise self._come_apart({rank: divmod(int(row[0]), OPTIMIZERS) for rank, row in said.items()})
        if not said:  # all that there was to train on was dealt to one that has died: it is owed now
            self.deal.agree(1, self._comm.members)
            return
        first, epoch, clip, *rates = said[min(said)]
        places = {rank: int(row[1]) for rank, row in rows.items() if rank in self.deal.roster}
        if len({*places.values()}) > 1:
            raise self._differ("; ".join(f"worker {r} is in epoch {place}" for r, place in sorted(places.items())))
        other = next((rank for rank, row in said.items() if row[2:] != [clip, *rates]), None)
        if other is not None:
            raise self._set_apart(min(said), [clip, *rates], other, said[other][2:])
        self.deal.leave_before(int(epoch))  # where this member has come in the meantime
        self.deal.agree(int(first) // OPTIMIZERS, self._comm.members)
        self.use(rates, None if math.isinf(clip) else clip)

    def _end_before_step(self, endings: dict[int, float]) -> NoReturn:
        """Some scripts want no further step: it is not taken, and all end here."""
        ended = [rank for rank, ending in endings.items() if ending == ENDED]
        if STOPS in endings.values():
            self.dropped = self.stopping = self.progress.stopped = True
        elif len(ended) == len(endings):
            wish = self._turns.wish
            assert isinstance(wish, AtEnd)
            self.deal.leave_before(wish.epoch)
            self.progress.end()
        else:
            others = [rank for rank in endings if rank not in ended]
            step = self.progress.step + 1
            raise RunFailed(
                f"{_workers(ended)} came to the end of the script before step {step}, and {_workers(others)} "
                f"wait{'s' * (len(others) == 1)} for all to take it; have them take the same steps, or end the run "
                "with run.stop()"
            )
        raise StepDropped

    def _come_apart(self, said: dict[int, tuple[int, int]]) -> RunFailed:
        did = [
            f"worker {rank} took {batches} batch{'es' * (batches != 1)} for it and called step() of optimizer {number}"
            for rank, (batches, number) in sorted(said.items())
        ]
        return self._differ("; ".join(did))

    def _set_apart(self, rank: int, mine: Sequence[float], other: int, others: Sequence[float]) -> RunFailed:
        """`mine`: where a worker clips, and the options of its optimizers' groups."""
        one, two = next((a, b) for a, b in zip(mine, others, strict=True) if a != b)
        what = "run.clip_grad_norm_ clips at" if mine[0] != others[0] else "an option of the optimizer (lr, say) is"
        return RunFailed(
            f"the scripts of workers differ at step {self.progress.step + 1}: {what} {one:g} on worker {rank} and "
            f"{two:g} on worker {other}; set it from what all have alike, and prepare schedulers with run.prepare"
        )

    def _differ(self, what: str) -> RunFailed:
        return RunFailed(
            f"the scripts of workers differ at step {self.progress.step + 1}: {what}; have them take the same steps "
            "(with drop_last=True in the loader all have equally many batches)"
        )

    def share(self, batches: int = 1, *, part: int | None = None, parts: int | None = None) -> Share:
        if part is not None or parts is not None:
            raise RunFailed("a script's own loop has one part of a joined batch for each worker; use another strategy")
        deal, present = self.deal, self._comm.members
        if self._ending() != GOES_ON:
            deal.begin_round(self._config.batch_size, batches)
            self.joined, self.again = deal.size, False
            return Share([], 0)
        self.again = self._share is not None
        if not self.again:
            deal.begin_round(self._config.batch_size, batches)
            self.joined = deal.size
            self.repeated = isinstance(self._turns.awaited(), TakeStep)
            self._begun, self._taken = self.progress.step, 0 if self.repeated else 1
            self._carried = 0, 0
        if self.repeated:
            self._need_batch()
            self._share = SameSamples(self._last, 0)
            return self._share
        pieces = [b for n in range(self._taken) for b in deal.pieces(n, self._comm.rank, present)]
        self._share = Share(pieces, sum(b.total for b in pieces))
        return self._share

    def _need_batch(self) -> None:
        if not self._last:
            raise RunFailed("optimizer.step() was called before the loader has given a batch; iterate over the loader")

    def further(self, wish: NextBatch) -> list[Batch] | None:
        """One more joined batch for the step under way: what this member has of it; None at the end of an epoch."""
        assert self._share is not None
        while True:
            epoch = self.deal.span(self._taken)[0]
            if self._is_over(wish, epoch):
                return None
            pieces = self.deal.pieces(self._taken, self._comm.rank, self._comm.members)
            self._taken += 1
            self._share.batches.extend(pieces)
            if pieces:
                return pieces

    def begin_pass(self, wish: BeginPass, trained: bool) -> None:
        """The script begins a pass in the middle of a step. Batches of a pass before that it has computed gradients on
        (`trained`) stay part of the step; else it begins anew."""
        assert self._share is not None
        batches, pieces = self._carried
        if wish.unused and batches:
            self._taken = batches
            del self._share.batches[pieces:]
        elif trained and not wish.unused and not wish.broken:
            self._carried = self._taken, len(self._share.batches)
        else:
            self._share = None
            raise StepDropped

    # -- leases ---------------------------------------------------------------------------------------------------
    def take(self, clock: int, minibatches: int = 1, after: int = 0) -> Batch | None:
        self.step_done()
        while True:
            wish = self._turns.awaited()
            if isinstance(wish, AtEnd):
                return None
            if self.stopping and isinstance(wish, NextBatch):
                self.finish()
                return None
            if isinstance(wish, Place):
                self._turns.grant(self.progress.epoch if self._ahead is None else self._ahead.epoch)
            elif isinstance(wish, BeginPass):
                if wish.broken:
                    self._broken.add(wish.epoch - 1)
                self._turns.grant()
            elif isinstance(wish, TakeStep):
                self._need_batch()
                self.repeated, self.left_out = True, False
                return replace(self._last[-1], lease=0)
            else:
                self.progress.save_now()
                batch = self._ahead or super().take(clock, minibatches, after)
                self._ahead = None
                if batch is None:
                    self.finish()
                    return None
                if len(batch) and self._is_over(wish, batch.epoch):
                    self._ahead = batch
                    self._turns.grant(None)
                    continue
                self.repeated, self.left_out = False, batch.epoch in self._broken
                if len(batch) and not self.left_out:
                    self._last = [batch]
                return batch


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
