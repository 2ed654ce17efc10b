"""What a role's program may use: one context, made of parts. A program takes the parts that it needs.

    ctx.comm        what it can say to others: letters, tensors, collectives in groups; buffers; the clock
    ctx.data        which samples it trains on
    ctx.replica     the model as this role has it, forward and backward
    ctx.rounds      all-or-nothing steps of the members: propose, vote, conclude
    ctx.params      the servers that keep the parameters
    ctx.state       what must outlive this process, by name
    ctx.progress    how far the run has come, and what is due

Anything that a program needs from outside (time, randomness, messages, files) comes through these, so that the same
file runs on processes and in simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from torrential.comm.protocol import Comm, Handle
from torrential.config import RunConfig
from torrential.data.deal import Batch, Share
from torrential.data.portions import Tally
from torrential.params.layout import Bucket, Layout
from torrential.params.local import LocalParameters
from torrential.params.synchronized import Synchronized
from torrential.params.unlocked import UnlockedParameters
from torrential.server.client import Answer, Client
from torrential.task import Task

T = TypeVar("T")


class Data(Protocol):
    """The samples that this role trains on."""

    joined: int  # samples that all members together take in one step, before it grows

    def share(self, batches: int = 1, *, part: int | None = None, parts: int | None = None) -> Share:
        """One part of the next joined batch, in so many minibatches. By default there are as many parts as members, and
        each member gets its own. Nothing is consumed until the round is concluded."""

    def take(self, clock: int, minibatches: int = 1, after: int = 0) -> Batch | None:
        """The next samples to train on, from the servers; None when there are none left, or the run is to stop. All
        workers but the first get none before `after` updates have been made."""

    def order(self, epoch: int) -> Tensor:
        """The order of all samples in an epoch, the same on every member."""


class Replica(Protocol):
    """The model as this role has it: all of it, or a part that the strategy gives it."""

    model: nn.Module
    layout: Layout

    def synchronized(self) -> Synchronized:
        """Parameters that all members hold alike: gradients are summed over them, and one step is taken for all."""

    def local(self, *, own: bool = False, alike: bool = False, undo: bool = True) -> LocalParameters:
        """Parameters and an optimizer of this role alone. With `own` the parameters are saved for each worker; else
        they are the same on all members whenever a round is concluded. `alike`: the optimizer's state is the same on
        all members, too. Without `undo` neither parameters of one's own nor the optimizer's state are put back when a
        round is given up: for programs that change them in `conclude` alone."""

    def unlocked(self, *, count_lost: bool = False) -> UnlockedParameters:
        """One copy of the parameters in memory that all members see, which each of them changes without locks, with an
        optimizer of its own. For strategies with `one_memory`. `count_lost`: make it possible to count updates."""

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        """Run forward by the module that `wrapper` makes of the model."""

    def vector(self) -> Tensor:
        """All parameters as one flat registered vector; the model's parameters become views of it."""

    def gradient(self) -> Tensor:
        """A flat registered vector; from now on backward leaves the gradient there, clipped as the task says."""

    def backward(
        self,
        batches: Sequence[Batch],
        ready: Callable[[Bucket], None] | None = None,
        after: Handle | None = None,
        finite: bool = True,
    ) -> float:
        """Forward and backward over some batches, whose gradients are added up by their weights; returns the mean loss
        of their samples. `ready` is called with each bucket as its gradients are complete, in the same order on every
        member. The flat gradient is written when `after` is done: the handle of an operation that still reads it. A
        loss that is not finite ends the run, unless `finite` is False."""

    def backward_with_others(self, batches: Sequence[Batch], share: float) -> float:
        """Forward and backward of a model whose layers wait for those of other workers on the same batches; gradients
        are added up by the batches' weights, and the mean loss of their samples is returned, finite or not. `share`:
        this worker's share of the work on the whole model."""

    def push_scale(self) -> float:
        """The `scale` that the last gradient is pushed with: 1, or 0 where it overflowed in half precision, so that the
        update which it would be part of is left out."""

    def keep_batches(self) -> None:
        """Keep the samples that are read from now on, for programs that ask for the same batches again and again."""

    def weight_decay(self) -> list[tuple[int, int, float]]:
        """The optimizer's weight decay, as (start, stop, weight) for ranges of the flat vector."""

    def reached(self) -> list[int] | None:
        """The entries of the layout that got gradients in the last backward; None: all."""

    def fetch(self, batch: Batch) -> Any:
        """The batch as the task's data gives it, on this role's device: (inputs, targets), or the task's own form."""

    def compute(self, batch: Batch, work: Callable[[], T], share: float = 1.0, part: int | None = 0) -> T:
        """Do some of the work on a batch. Random numbers in it are drawn by the batch's place in the run, and by
        `part`, the number of the model's part that works (None: the generators go on from where they are). In simulated
        time it takes `share` of the time of a whole forward and backward."""

    def collected(self) -> Tensor:
        """The gradients that autograd has left at the parameters, as one flat registered vector, not clipped."""


@dataclass(frozen=True)
class Vote:
    """A member's vote, cast when its part of a round is done."""

    loss: float  # mean over its samples
    samples: int
    numbers: Sequence[float] = ()  # the strategy's own
    updates: int = 1  # of the parameters, that the round is made of: the same on all members


@dataclass(frozen=True)
class Decision:
    """The outcome of all members' votes: the same on every member."""

    loss: float  # mean over all samples
    samples: int
    stop: bool  # whether a member was asked to stop
    numbers: Tensor  # (members, n): everybody's


class Progress(Protocol):
    """The run's progress: steps, samples, rates and records."""

    step: int
    samples: int

    def finished(self) -> bool:
        """Whether all steps or epochs are done, or the run is to stop."""

    def rate(self, joined: int, batch: Batch | None = None, *, ahead: int = 0) -> float:
        """The learning rate of an update made of `joined` samples, at this point of the run or at a batch's place, or
        so many samples `ahead`."""

    def loss_scale(self, joined: int) -> float:
        """The factor of the gradient, where the recipe scales the gradient instead of the rate."""

    def advance(self, batch: Batch, loss: float, answer: Answer | None = None) -> None:
        """Count and record a finished batch from the servers; save when a checkpoint is due."""

    def count(self, batch: Batch, answer: Answer) -> None:
        """Count an answer that came after its batch was recorded."""

    def delayed(self, updates: int) -> None:
        """Count an update whose gradient belongs to parameters that were so many updates older."""

    def note(self, event: str, detail: str) -> None:
        """Put an event on record."""

    def conclude(self, samples: int, loss: float | None) -> None:
        """Count and record a step that was taken outside of rounds; evaluate and save when that is due. None: there is
        no loss to record."""

    def go_on(self, step: int, samples: int, *, over: bool = False) -> None:
        """Continue from this step and number of samples: a coordinator that takes another's place knows them better
        than a checkpoint. `over`: nothing is left to do but to save."""

    def end_early(self, why: str) -> None:
        """Finish with the step at hand, for a reason that goes on record."""

    def took_part(self, step: int, samples: int, loss: float) -> None:
        """Record what this role has done for a step that a coordinator takes, a few times a second."""

    def worked(self, tally: Tally, seconds: float) -> None:
        """Put the counts of a batch's portions on record."""


class State(Protocol):
    """State that outlives this process: it is saved with checkpoints, loaded on resuming, and handed to newcomers.

    `save` returns a dict of tensors by names of your own; it is called when the state is registered, too, which checks
    it. `load` is given such a dict and takes it over, copying into the tensors that the program goes on with; in a
    resumed run that happens when the state is registered, so that is refused once the first step has begun."""

    def everybody(
        self, name: str, save: Callable[[], Mapping[str, Tensor]], load: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Keep state that is the same on all members whenever a round is concluded."""

    def own(
        self,
        name: str,
        save: Callable[[], Mapping[str, Tensor]],
        load: Callable[[Mapping[str, Tensor]], None],
        *,
        undo: bool = True,
        handed: bool = True,
    ) -> None:
        """Keep state of this role alone. A newcomer begins with the state of a member that was there, or with its own
        if `handed` is False. With `undo` the state is put back when a round is given up."""


class Context(Protocol):
    """The context of a role's program. `task` and `config` are the run's; `comm` is what this role can say to others:
    help("torrential.comm.protocol.Comm")."""

    task: Task
    config: RunConfig
    comm: Comm

    @property
    def data(self) -> Data:
        """The samples that this role trains on: help("torrential.strategies.context.Data")."""

    @property
    def replica(self) -> Replica:
        """The model as this role has it, forward and backward: help("torrential.strategies.context.Replica")."""

    @property
    def state(self) -> State:
        """State that must outlive this process, by name: help("torrential.strategies.context.State")."""

    @property
    def progress(self) -> Progress:
        """How far the run has come, and what is due: help("torrential.strategies.context.Progress")."""

    @property
    def params(self) -> Client:
        """The servers' client; the run takes part from its first use: help("torrential.server.client.Client")."""

    def rounds(self, propose: Callable[[], Vote], conclude: Callable[[Decision], None]) -> None:
        """Take steps with the other members until the run is finished; each is taken by all of them or by none.

        `propose` does this member's part; nothing that others see may change by it, and what it changes here must be
        registered state. When the votes of all members are in, the step is decided and `conclude` takes it, without
        waiting for any member. If a member dies or joins, a decided step is concluded by all; an undecided one is put
        back and proposed again by the current members, on the data still owed."""

    def as_replica(self, program: Callable[[Context], None]) -> None:
        """Run a program as one of the workers of a replica, each with a stage of the model: they train on the same
        batches, and each exchanges the parameters of its own stage with the servers. When one of them dies, what is
        under way is given up; the program begins again, with the servers' parameters, once it has been replaced."""

    def leave(self) -> None:
        """Say that this role's program is finished; returns when every role's is."""
