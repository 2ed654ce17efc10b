"""What a strategy is: the roles it needs, and a program for each, written as the algorithm in its paper.

A program is plain blocking code. Everything that it needs from outside (time, randomness, messages) comes through `ctx`
(strategies/context.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import msgspec
from torch import Tensor, nn

from torrential.config import owner_of
from torrential.data.deal import Batch
from torrential.errors import BadInput
from torrential.optimizers import OptimizerSpec
from torrential.server.client import Answer
from torrential.strategies.context import Context
from torrential.strategies.roles import Role, Roles, Servers
from torrential.task import Task

MANY = 1 << 16  # workers: more than an option of a strategy refuses as too few


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which workers cooperate. A subclass has its options as fields with defaults, and its roles' programs.

    A string below a field explains the option to `torrential strategies`, as the class's docstring does the strategy.
    """

    name: ClassVar[str] = ""
    """The name of the strategy in messages and directories; by default that of its class."""
    summary: ClassVar[str] = ""
    """The strategy in one line; by default the first of its docstring."""
    worlds: ClassVar[tuple[str, ...]] = ("local", "hosts", "ray", "sim")
    """The worlds that the strategy runs in."""
    uses_rate: ClassVar[bool] = True
    """Whether the optimizer and its learning rate have an effect."""
    passes: ClassVar[int] = 1
    """How many times as often as the task says a run goes over the data, unless the run itself says how often."""
    evaluates: ClassVar[bool] = True
    """Whether there is a model to evaluate; without one no validation data are needed."""
    one_memory: ClassVar[bool] = False
    """Whether all workers have to see the same memory: they are on one host, and compute on CPUs."""
    uncompressed: ClassVar[str] = (
        'it does not say that its gradients are summed by ctx.replica.synchronized(): uncompressed = ""'
    )
    """Why gradients cannot be compressed on their way, in words that follow its name; empty where they can."""
    bucket_bytes: ClassVar[int] = 1 << 22
    letters: ClassVar[tuple[type[msgspec.Struct], ...]] = ()
    """The kinds of letters that its roles send to one another, besides what servers understand."""

    def roles(self, workers: int, servers: int) -> Roles:
        """The roles that a world runs, given the numbers that were asked for; without servers by default."""
        return (Role("worker", workers, self.worker, "regroup"),)

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
        """The program of a worker."""
        raise NotImplementedError

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        """The number of samples, of all workers together, whose gradients make one update of the parameters."""
        return workers * batch_size

    def optimizer(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The optimizer that the strategy uses, given the task's. Its rate is the run's, unless --lr gives another."""
        return spec

    def refuse(self, task: Task, model: nn.Module) -> None:
        """Raise BadInput, before anything is started, for a task that the strategy cannot train; none by default."""

    def fitted(self, task: Task, model: nn.Module, workers: int) -> Self:
        """The strategy with options filled in that depend on the task, such as where its model is cut; by default the
        strategy as it is. What it returns is on record, and a run that is resumed has the same."""
        return self

    def has_whole_model(self) -> bool:
        """Whether every worker has the whole model; by default, unless the class defines `part`."""
        return type(self).part is Strategy.part

    def recomputes(self) -> tuple[str, ...]:
        """The values of `recompute` that the strategy can carry out; by default those for a whole model."""
        return ("none", "sqrt", "recursive", "auto") if self.has_whole_model() else ("none",)

    def cuttable(self, task: Task, model: nn.Module) -> nn.Module:
        """The model in a form that `part` cuts, such as a row of traced layers; by default the model as it is. Its
        parameters are those of `model`."""
        return model

    def part(self, model: nn.Module, rank: int, workers: int) -> nn.Module:
        """The part of a model, as `cuttable` has made it, that a worker has; by default all of it. Its parameters are
        those of `model`, or slices of them (splits/slices.py); `model` may be changed."""
        return model

    def fellows(self, rank: int, workers: int) -> range:
        """The workers that hold one copy of the model together, this one among them. A newcomer takes its state from
        them, as far as they have it, rather than from workers of another copy. By default this worker alone."""
        return range(rank, rank + 1)

    def assembled(self, parts: Mapping[int, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The tensors of the model that is evaluated and saved, by the names of its parameters and buffers, made from
        the workers' own states by rank. By default none: the model is that of the first member, or the servers'."""
        return {}


def exchange(ctx: Context, batch: Batch, clock: int, rate: float, gradient: Tensor, vector: Tensor) -> Answer:
    """Push the gradient of a batch, if that had samples, to end a clock, and pull the parameters that the next one
    begins with, in one round trip."""
    return ctx.params.push_pull(
        gradient if len(batch) else None,
        vector,
        clock=clock,
        lr=rate,
        scale=ctx.replica.push_scale(),
        used=ctx.replica.reached(),
        lease=batch.lease,
    ).wait()


def servers_of(strategy: Strategy, workers: int, servers: int = 1) -> Servers | None:
    """The servers that a strategy declares, if it does."""
    return next((role for role in strategy.roles(workers, servers) if isinstance(role, Servers)), None)


def needs_servers(strategy: Strategy | type[Strategy]) -> bool:
    """Whether a strategy, or a class of them with its default options, declares servers."""
    given = strategy() if isinstance(strategy, type) else strategy
    return servers_of(given, workers=MANY) is not None
