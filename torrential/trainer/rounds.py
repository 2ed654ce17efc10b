"""All-or-nothing steps among the members of a group: propose, vote, conclude.

    propose    each member does its part; nothing that others see changes
    vote       a small all-gather; when it is complete, the step is decided for everybody
    conclude   every member takes the step, and waits for no other

If a member dies or joins, all waits end with Regrouped. The members meet; a step whose votes are complete on any of
them is concluded by all, any other is put back, and proposed again by the current members, on the data still owed. A
member behind the others takes over their state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor

from torrential.checkpoint import Checkpoint
from torrential.comm.protocol import Agreement, Comm, Handle
from torrential.errors import Regrouped, RunFailed, UnequalSizes
from torrential.params.base import Finished, Parameters
from torrential.params.local import LocalParameters
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
        fellows: range,
        between: BetweenSteps | None = None,
    ) -> None:
        """`checkpoint`: where the run goes on from, if it does; `dry`: tensors have sizes and no contents; `redone`:
        whether a round is proposed again when a member has died, so that what it has changed must be put back;
        `fellows`: the workers that this one has a copy of the model together with (Strategy.fellows); `between`: what
        happens between two steps, where a script takes them."""
        self._redone, self._fellows, self._between, self._scale = redone, fellows, between, replica.loss_scale
        self._first = _FIRST + (self._scale is not None)  # where the strategy's own numbers begin
        self._comm, self._data, self._replica, self._state = comm, data, replica, state
        self._progress, self._snapshots, self._checkpoint, self._dry = progress, snapshots, checkpoint, dry
        self.ballot: Handle | None = None
        self._size = 0  # numbers of this member's ballot
        self._updates = 1  # that the step it has voted on is made of
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
                if self._scale is not None:
                    self._scale.begin()
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
        said += [] if self._scale is None else self._scale.ballot()
        self._first = _FIRST + len(said)
        mine = torch.tensor([*head, *said, *vote.numbers], dtype=torch.float64)
        self._size, self._updates = mine.numel(), vote.updates
        with self._equally_many():
            self.ballot = Finished(mine[None]) if len(self._comm.members) == 1 else self._comm.all_gather(mine)

    @contextlib.contextmanager
    def _equally_many(self) -> Iterator[None]:
        """Turn UnequalSizes into an error that names the numbers of votes of each worker."""
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
        if self._scale is not None:
            self._scale.decide(bool(votes[:, _FIRST : self._first].sum() > 0), self._updates)
        self._conclude(decision)
        self.ballot, self._votes = None, votes
        self._state.forget()
        self._progress.stopped = decision.stop
        self._progress.stepped(decision.samples, decision.loss, self._updates)
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
        parameters are each member's own, it is put back when it is known that no member has concluded it."""
        if self.ballot is not None and self.ballot.done():
            with contextlib.suppress(StepDropped):  # it is voted on again
                self._take_step()
        elif not self._parameters.own:
            self._state.put_back()
        self.ballot = None
        return self.applied

    def _adopt(self, agreement: Agreement) -> None:
        parameters = self._parameters
        loads = not parameters.own and (parameters.private or self._comm.rank == agreement.source)
        if self._checkpoint is not None and loads:  # parameters of one's own are named states
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
        if not isinstance(self._parameters, LocalParameters):  # whose counts are part of a named state
            for entry in self._replica.layout.entries:
                self._parameters.counts[entry.index] = saved.applied.get(entry.name, 0)
        self._snapshots.resumed()

    def _catch_up(self, agreement: Agreement) -> None:
        """The member that is furthest hands its state to those behind."""
        comm, parameters = self._comm, self._parameters
        if parameters.own and agreement.applied <= 0:
            return self._begin_alike(agreement)
        if parameters.own and comm.rank not in agreement.behind:
            self._state.put_back()  # so that nobody takes over what a round that is given up has changed
        told = self._broadcast(self._everything() if comm.rank == agreement.source else None, agreement.members)
        newcomer = self.applied < 0 <= agreement.applied
        late = parameters.own and comm.rank in agreement.behind and not newcomer
        if late:  # the votes did not reach this member; newcomers need what it has after the step
            self._decide(told[agreement.source]["votes"])
        states = self._own_states(agreement, newcomer) if parameters.own and not self._dry else {}
        if comm.rank in agreement.behind and not late:
            state = told[agreement.source] | states
            self._progress.step, epoch, cursor, self._progress.samples = state.pop("place").tolist()
            self._data.place(epoch, cursor)
            counts = state.pop("counts").tolist()
            if not parameters.own:
                parameters.counts[:] = counts
            if not self._dry:
                self._take_over(state, newcomer)

    def _begin_alike(self, agreement: Agreement) -> None:
        """No step was taken yet, and parameters are each member's own: all have what the seed gives them, which nobody
        else may have any more. What is everybody's is the source's."""
        common = self._state.tensors("everybody")
        if common and not self._dry:
            mine = {name: tensor.cpu().contiguous() for name, tensor in common.items()}
            told = self._broadcast(mine if self._comm.rank == agreement.source else None, agreement.members)
            if self._comm.rank in agreement.behind:
                self._state.load("everybody", told[agreement.source])

    def _own_states(self, agreement: Agreement, newcomer: bool) -> dict[str, Tensor]:
        """What members have of their own, for newcomers: each is sent what concerns it, by all members. Of several that
        have something of one name, a fellow's counts, else that of the one that is furthest."""
        comm, tag = self._comm, "own states"
        names = torch.frombuffer(bytearray("\n".join(self._replica.names).encode()), dtype=torch.uint8)
        asked = self._broadcast({"names": names} if newcomer else None, agreement.members)
        if not newcomer:
            sent = list[Handle]()
            for other, said in asked.items():
                blob = _blob(self._concerning(set(said["names"].numpy().tobytes().decode().split("\n"))))
                sent += [comm.send(tensor, other, tag) for tensor in (torch.tensor([blob.numel()]), blob)]
            for handle in sent:
                handle.wait()
            return {}
        found: dict[str, Tensor] = {}
        givers = [member for member in agreement.members if member not in asked and member != comm.rank]
        for giver in sorted(givers, key=lambda member: (member in self._fellows, member == agreement.source)):
            size = comm.recv(torch.empty(1, dtype=torch.int64), giver, tag).wait()
            found |= unpack(comm.recv(torch.empty(int(size), dtype=torch.uint8), giver, tag).wait().numpy().tobytes())
        self._refuse_gaps(found)
        return found

    def _refuse_gaps(self, given: Mapping[str, Tensor]) -> None:
        """Raise RunFailed if there are parameters that this newcomer has and no other member: what was trained of them
        died with the worker that it replaces."""
        names = [name for name in self._state.tensors("own") if name.startswith("parameters/")]
        if lost := [name.partition("/")[2] for name in names if f"own/{name}" not in given]:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise RunFailed(f"no worker has {lost[0]}{more} any more, nor a copy; resume the run")

    def _concerning(self, names: set[str]) -> dict[str, Tensor]:
        """This member's own states, without what is of parameters and buffers that are not among `names`."""
        foreign = set(self._replica.names) - names
        found = {}
        for name, tensor in self._state.tensors("own", handed=True).items():
            key = name.partition("/")[2]
            if key not in foreign and key.rpartition("/")[0] not in foreign:
                found[f"own/{name}"] = tensor.detach().cpu().contiguous()
        return found

    def _broadcast(self, mine: dict[str, Tensor] | None, members: tuple[int, ...]) -> dict[int, dict[str, Tensor]]:
        """The tensors that members have to give, by member."""
        comm, found = self._comm, dict[int, dict[str, Tensor]]()
        blob = torch.zeros(1, dtype=torch.uint8) if mine is None else _blob(mine)
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
            ("frozen", {} if parameters.own else self._replica.frozen()),
            ("everybody", self._state.tensors("everybody")),
            ("own", {} if parameters.own else self._state.tensors("own", handed=True)),  # of which each gives its own
            ("flat", parameters.flat() if parameters.private else {}),
            ("extra", parameters.extras() if parameters.private else {}),
        ):
            state |= {f"{kind}/{name}": t.detach().cpu().contiguous() for name, t in tensors.items()}
        return state

    def _take_over(self, state: dict[str, Tensor], newcomer: bool) -> None:
        def named(kind: str) -> dict[str, Tensor]:
            return {n.removeprefix(f"{kind}/"): t for n, t in state.items() if n.startswith(f"{kind}/")}

        if newcomer:  # others have states of their own
            for name, tensor in named("frozen").items():
                self._replica.frozen()[name].copy_(tensor)
            self._state.load("own", named("own"))
        self._state.load("everybody", named("everybody"))
        if self._parameters.private:
            self._parameters.load(named("flat"), named("extra"))


def _blob(tensors: dict[str, Tensor]) -> Tensor:
    return torch.frombuffer(bytearray(pack(tensors)), dtype=torch.uint8)
