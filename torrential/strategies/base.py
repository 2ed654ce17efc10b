"""The strategy contract: a strategy is its options and a small set of role programs.

A program is plain blocking code. Whatever it needs from outside (time, randomness, messages) comes through `ctx`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec
from torch import Tensor

from torrential.comm.protocol import Comm, Handle
from torrential.config import RunConfig, owner_of
from torrential.data.deal import Share
from torrential.errors import BadInput
from torrential.params.home import Home, Update
from torrential.params.layout import Bucket
from torrential.server.client import Answer, Client, Pending
from torrential.server.consistency import Consistency
from torrential.task import OptimizerSpec


@dataclass(frozen=True)
class Decision:
    """What a complete ballot says: the same on every member."""

    update: Update
    loss: float  # mean over the joined batch
    samples: int
    stop: bool


class Context(Protocol):
    """What a worker's program may use."""

    comm: Comm
    home: Home
    ballot: Handle | None

    def join(self, conclude: Callable[[Context], None]) -> None:
        """Meet the other members, settle with them where everybody stands, and take over the current parameters.
        If this member's ballot turns out to be complete, `conclude` is called first: that step was decided."""

    def finished(self) -> bool: ...

    def leave(self) -> None:
        """Wait until all members are finished."""

    def share(self, accumulate: int = 1) -> Share:
        """This member's part of the next joined batch. Nothing is consumed until `advance`."""

    def backward(self, share: Share, ready: Callable[[Bucket], None]) -> float:
        """Forward and backward over a share. `ready` is called with each bucket as its gradients are complete, in
        the same order on every member. Returns the sum of the losses of its samples."""

    def vote(self, share: Share, loss: float) -> None:
        """Tell the others that this member's part of the step is done; sets `ballot`."""

    def decide(self) -> Decision:
        """Wait for everybody's vote."""

    def advance(self, decision: Decision) -> None:
        """The step is taken: count it, record it."""

    def settle(self) -> None:
        """Wait until everybody has taken the step; snapshots are made here."""


@dataclass(frozen=True)
class Batch:
    """Samples that a worker has taken to train on."""

    lease: int  # to be named in the push
    epoch: int
    first: int  # place of the first of them in the epoch's order
    indices: Tensor
    total: int  # of all workers together, where they are dealt one joined batch; else its own

    @property
    def stop(self) -> int:
        return self.first + len(self.indices)

    def split(self, size: int) -> list[Batch]:
        """In minibatches; one of nothing if it is empty."""
        pieces = self.indices.split(size) if len(self.indices) > size else (self.indices,)
        firsts = range(self.first, self.first + max(1, len(self.indices)), size)
        return [
            Batch(self.lease, self.epoch, first, piece, len(piece)) for first, piece in zip(firsts, pieces, strict=True)
        ]


class ServedContext(Protocol):
    """What the program of a worker may use whose parameters are kept by servers."""

    comm: Comm
    params: Client
    config: RunConfig
    vector: Tensor  # this worker's copy of the parameters, flat and registered: what pulls go into
    gradient: Tensor  # flat and registered: what backward leaves, to be pushed
    used: list[int] | None  # entries that the last backward reached; None: all

    def begin(self) -> int:
        """Take part, with the current parameters in `vector`; returns the clock to begin with."""

    def take(self, clock: int, minibatches: int = 1, after: int = 0) -> Batch | None:
        """The next samples to train on; None when there are none left, or the run is to stop. All workers but the first
        get none before `after` updates have been made."""

    def backward(self, batch: Batch, weight: float, after: Pending | None = None) -> float:
        """The mean gradient over the batch times `weight`, in `gradient` (once `after`, an earlier push of it, is
        answered); returns the mean loss."""

    def rate(self, batch: Batch, joined: int) -> float:
        """The learning rate for an update made of `joined` samples, by the batch's place in the run."""

    def exchange(self, batch: Batch, clock: int, rate: float) -> Answer:
        """Push the gradient, if the batch had samples, to end `clock`, and pull the parameters that the next begins
        with, in one round trip."""

    def advance(self, batch: Batch, loss: float, answer: Answer | None) -> None:
        """The batch is done with; count it, record it, evaluate when that is due."""

    def count(self, batch: Batch, answer: Answer) -> None:
        """An answer that came after the batch was done with: no other follows it."""

    def leave(self) -> None: ...


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """How workers cooperate: a subclass has its options as fields with defaults, and the programs of its roles.

    A string below a field explains the option to `torrential strategies`, as the class's docstring does the strategy.
    """

    name: ClassVar[str] = ""
    """What the strategy is called in messages and directories; by default as its class is."""
    summary: ClassVar[str] = ""
    """The strategy in one line; by default the first of its docstring."""
    bucket_bytes: ClassVar[int] = 1 << 22
    served: ClassVar[bool] = False  # whether parameters are kept by servers
    together: ClassVar[bool] = False  # if served: whether the workers of a clock are dealt one joined batch
    handlers: ClassVar[Mapping[str, Callable[..., Sequence[Tensor]]]] = {}
    """If served: what `ctx.params.call(name)` has the servers do, given a shard, options and tensors."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for field in cls.__dict__["__slots__"]:  # the fields that this class adds; msgspec sets the others up later
            owner = "Strategy" if hasattr(Strategy, field) else owner_of(field)
            if owner is not None:
                raise BadInput(
                    f"{cls.__name__} has an option {field!r}, which is a name of {owner} already; give it another name"
                )
        if "name" not in cls.__dict__:
            cls.name = cls.__name__
        if "summary" not in cls.__dict__:
            cls.summary = (inspect.cleandoc(cls.__doc__ or "").splitlines() or [""])[0]

    def worker(self, ctx: Context) -> None:
        raise NotImplementedError

    def joined(self, workers: int, batch_size: int) -> int:
        """Samples that make one step."""
        return workers * batch_size

    def consistency(self, workers: int) -> Consistency:
        """Of the servers, if it is served."""
        raise NotImplementedError

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The servers' optimizer, given the task's. Its rate is the run's, unless another is asked for."""
        return spec


def needs_servers(strategy: Strategy | type[Strategy]) -> bool:
    """Whether the strategy's parameters are kept by servers."""
    return strategy.served
