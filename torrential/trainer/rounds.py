"""All-or-nothing steps among the members of a group: propose, vote, conclude.

    propose    each member does its part; nothing that others see changes
    vote       a small all-gather; when it is complete, the step is decided for everybody
    conclude   everybody takes the step, and waits for nobody

If a member dies or joins, all waits end with Regrouped. The members meet; a step whose votes are complete on any of
them is concluded by all, any other is put back, and proposed again by those who are there, on the data still owed. A
member behind the others takes over their state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor

from torrential.checkpoint import Checkpoint
from torrential.comm.protocol import Agreement, Comm, Handle
from torrential.errors import Regrouped, RunFailed, UnequalSizes
from torrential.params.base import Finished, Parameters
from torrential.strategies.context import Decision, Vote
from torrential.trainer.data import TrainingData
from torrential.trainer.progress import TrainingProgress
from torrential.trainer.replica import ModelReplica
from torrential.trainer.snapshot import from_checkpoint
from torrential.trainer.snapshots import Snapshots
from torrential.trainer.state import NamedStates

_LOSS, _SAMPLES, _STOP, _FIRST = 0, 1, 2, 3  # places in a ballot; from _FIRST on: the script's, the strategy's own


class StepDropped(Exception):
    """The step is not taken: a script's own loop has come to its end in the middle of it, or begun anew, or the members
    have voted that scripts want no further step."""


class BetweenSteps(Protocol):
    """What a script's own loop has to say between two steps (loop/data.py)."""

    def met(self, agreement: Agreement) -> None:
        """This member has met the others."""

    def idle(self) -> None:
        """The parameters are up to date: the script goes on until it wants another step."""

    def ballot(self) -> list[float]:
        """What the script has to say of the step: always equally many numbers."""

    def decided(self, numbers: Tensor) -> None:
        """The numbers (members, n) of all are in; the step is about to be concluded. Raises StepDropped if it is not to
        be."""

    def finish(self) -> None:
        """There are no more steps: the script goes on until its end."""


class Rounds:
    """The rounds of one member."""

    def __init__(
        self,
        comm: Comm,
        data: TrainingData,
        replica: ModelReplica,
        state: NamedStates,
        progress: TrainingProgress,
        snapshots: Snapshots,
        checkpoint: Checkpoint | None,
        dry: bool,
        redone: bool,
        between: BetweenSteps | None = None,
    ) -> None:
        """`checkpoint`: where the run goes on from, if it does; `dry`: tensors have sizes and no contents; `redone`:
        whether a round is proposed again when a member has died, so that what it has changed must be put back;
        `between`: what happens between two steps, where a script takes them."""
        self._redone, self._between, self._first = redone, between, _FIRST
        self._comm, self._data, self._replica, self._state = comm, data, replica, state
        self._progress, self._snapshots, self._checkpoint, self._dry = progress, snapshots, checkpoint, dry
        self.ballot: Handle | None = None
        self._size = 0  # numbers of this member's ballot
        self.applied = -1  # steps taken; -1 before anything was agreed
        self._votes: Tensor | None = None  # of the last step that was taken
        self._conclude: Callable[[Decision], None] = lambda decision: None

    @property
    def _parameters(self) -> Parameters:
        parameters = self._replica.parameters
        assert parameters is not None, (
            "say where parameters live (ctx.replica.synchronized() or .local()) before rounds"
        )
        return parameters

    def run(self, propose: Callable[[], Vote], conclude: Callable[[Decision], None]) -> None:
        self._conclude = conclude
        self._resume()
        self.join()
        while True:
            try:
                self._comm.check()
                self._parameters.wait_for_everybody()
                if self._between is not None:
                    self._between.idle()
                self._snapshots.give_when_due()
                if self._progress.finished():
                    if self._between is not None:
                        self._between.finish()
                    return self._comm.leave()
                if self._redone and len(self._comm.members) > 1:
                    self._state.remember()
                self._vote(propose())
                self._take_step()
            except Regrouped:
                self.join()
            except StepDropped:
                continue  # the script is asked again

    # -- a step -------------------------------------------------------------------------------------------------
    def _vote(self, vote: Vote) -> None:
        if not isinstance(vote, Vote):
            raise RunFailed(f"propose returned {vote!r}; it must return a tt.Vote")
        head = [vote.loss * vote.samples if vote.samples else 0.0, vote.samples, self._comm.stop_requested()]
        said = [] if self._between is None else self._between.ballot()
        self._first = _FIRST + len(said)
        mine = torch.tensor([*head, *said, *vote.numbers], dtype=torch.float64)
        self._size = mine.numel()
        with self._equally_many():
            self.ballot = Finished(mine[None]) if len(self._comm.members) == 1 else self._comm.all_gather(mine)

    @contextlib.contextmanager
    def _equally_many(self) -> Iterator[None]:
        """Say whose votes have how many numbers, if they differ."""
        try:
            yield
        except UnequalSizes as error:
            scale = self._size / error.sizes[self._comm.rank]  # where others' votes were passed on, they are several
            numbers = {rank: round(size * scale) - self._first for rank, size in error.sizes.items()}
            given = ", ".join(f"{count} on worker {rank}" for rank, count in sorted(numbers.items()))
            raise RunFailed(f"Vote.numbers must be equally many on all members ({given})") from error

    def _take_step(self) -> None:
        assert self.ballot is not None
        with self._equally_many():
            votes: Tensor = self.ballot.wait()  # (members, self._first + numbers)
        self._decide(votes)

    def _decide(self, votes: Tensor) -> None:
        """Take the step that these votes are for."""
        losses = votes[:, _LOSS].tolist()
        for place, loss in enumerate(losses):
            if not math.isfinite(loss):
                self._progress.refuse(loss, worker=self._comm.members[place], joined=self._data.joined)
        loss, samples, stop = (float(total) for total in votes[:, :_FIRST].sum(0))
        decision = Decision(loss / max(1.0, samples), int(samples), stop > 0, votes[:, self._first :])
        if self._between is not None:
            try:
                self._between.decided(votes[:, _FIRST : self._first])
            except StepDropped:
                self.ballot = None
                self._state.put_back()
                self._snapshots.give_again()  # it may be the last one now
                raise
        self._conclude(decision)
        self.ballot, self._votes = None, votes
        self._state.forget()
        self._progress.stopped = decision.stop
        self._progress.stepped(decision.samples, decision.loss)
        self.applied = self._progress.step

    # -- members come and go ------------------------------------------------------------------------------------
    def join(self) -> None:
        """Meet the other members, and go on from where the furthest of them stands."""
        while True:
            try:
                return self._adopt(self._comm.regroup(self._stand))
            except Regrouped:
                continue

    def _stand(self) -> int:
        """Conclude the step if its ballot is complete, else put it back; called when every member has stopped. Where
        parameters are each member's own, it is put back when it is known that nobody has concluded it."""
        if self.ballot is not None and self.ballot.done():
            with contextlib.suppress(StepDropped):  # it is voted on again
                self._take_step()
        elif not self._parameters.own:
            self._state.put_back()
        self.ballot = None
        return self.applied

    def _adopt(self, agreement: Agreement) -> None:
        parameters = self._parameters
        if self._checkpoint is not None and (parameters.private or self._comm.rank == agreement.source):
            parameters.load(*from_checkpoint(self._checkpoint, self._replica.layout))
        parameters.regroup(agreement)
        if agreement.behind:
            self._catch_up(agreement)
        if parameters.own:
            self._state.put_back()
        parameters.rebuild()
        self._checkpoint = None
        self.applied = self._progress.step
        if self._between is not None:
            self._between.met(agreement)
        self._snapshots.members_changed(agreement.generation)
        self._progress.recorder.hurry()  # the first step of a generation is always recorded

    def _resume(self) -> None:
        saved = self._checkpoint
        if saved is None:
            return
        self.applied = saved.step
        self._data.place(saved.epoch, saved.cursor)
        for entry in self._replica.layout.entries:
            self._parameters.counts[entry.index] = saved.applied.get(entry.name, 0)
        self._snapshots.resumed()

    def _catch_up(self, agreement: Agreement) -> None:
        """The member that is furthest hands its state to those behind."""
        comm, parameters = self._comm, self._parameters
        if parameters.own and comm.rank not in agreement.behind:
            self._state.put_back()  # so that nobody takes over what a round that is given up has changed
        told = self._broadcast(self._everything() if comm.rank == agreement.source else None, agreement.members)
        newcomer = self.applied < 0 <= agreement.applied
        states = self._own_states(agreement, newcomer) if parameters.own and not self._dry else {}
        if comm.rank in agreement.behind:
            state = told[agreement.source]
            if parameters.own and not newcomer and agreement.applied >= 0:
                return self._decide(state["votes"])  # which did not reach this member
            state |= states
            self._progress.step, epoch, cursor, self._progress.samples = state.pop("place").tolist()
            self._data.place(epoch, cursor)
            counts = state.pop("counts").tolist()
            if not parameters.own:
                parameters.counts[:] = counts
            if not self._dry:
                self._take_over(state, newcomer)

    def _own_states(self, agreement: Agreement, newcomer: bool) -> dict[str, Tensor]:
        """What members have of their own, for newcomers: each takes what it finds there under its names."""
        own = {f"own/{name}": t.detach().cpu().contiguous() for name, t in self._state.tensors("own").items()}
        told = self._broadcast(None if newcomer else own, agreement.members)
        if not newcomer:
            return {}
        last = told.pop(agreement.source, {})
        return {name: tensor for state in told.values() for name, tensor in state.items()} | last

    def _broadcast(self, mine: dict[str, Tensor] | None, members: tuple[int, ...]) -> dict[int, dict[str, Tensor]]:
        """The tensors that members have to give, by member."""
        comm, found = self._comm, dict[int, dict[str, Tensor]]()
        blob = torch.frombuffer(bytearray(b"" if mine is None else pack(mine)) or bytearray(1), dtype=torch.uint8)
        sizes = comm.all_gather(torch.tensor([0 if mine is None else blob.numel()])).wait()[:, 0].tolist()
        for member, size in zip(members, sizes, strict=True):
            if not size:
                continue
            shelf = comm.buffer(f"catch-up/{size}", size, torch.uint8)
            if self._dry:
                shelf = torch.empty(size, dtype=torch.uint8)
            if comm.rank == member:
                shelf.copy_(blob)
            comm.broadcast(shelf, member).wait()
            if comm.rank != member:
                found[member] = unpack(shelf.numpy().tobytes())
        return found

    def _everything(self) -> dict[str, Tensor]:
        """The state that a member needs that is behind."""
        deal, parameters = self._data.deal, self._parameters
        place = [self._progress.step, deal.epoch, deal.cursor, self._progress.samples]
        state = {"place": torch.tensor(place), "counts": torch.tensor(parameters.counts)}
        if parameters.own and self._votes is not None:
            state["votes"] = self._votes.contiguous()
        if self._dry:
            return state
        for kind, tensors in (
            ("frozen", self._replica.frozen()),
            ("everybody", self._state.tensors("everybody")),
            ("own", self._state.tensors("own")),
            ("flat", parameters.flat() if parameters.private else {}),
            ("extra", parameters.extras() if parameters.private else {}),
        ):
            state |= {f"{kind}/{name}": t.detach().cpu().contiguous() for name, t in tensors.items()}
        return state

    def _take_over(self, state: dict[str, Tensor], newcomer: bool) -> None:
        def named(kind: str) -> dict[str, Tensor]:
            return {n.removeprefix(f"{kind}/"): t for n, t in state.items() if n.startswith(f"{kind}/")}

        if newcomer:  # others have states of their own
            for name, tensor in self._replica.frozen().items():
                tensor.copy_(named("frozen")[name])
            self._state.load("own", named("own"))
        self._state.load("everybody", named("everybody"))
        if self._parameters.private:
            self._parameters.load(named("flat"), named("extra"))
