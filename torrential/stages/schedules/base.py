"""A pipeline's schedule as data: what one stage does, in which order. Nothing here computes or moves a byte.

A model is cut into `stages`; a minibatch into `microbatches`, numbered from 0. Each stage runs its list of actions from
the first to the last. With virtual stages a stage has several `chunks` of the model: chunk c of stage s is part
c x stages + s, so the parts go round the stages `virtual` times.

    stage 0   Forward(0) SendTo(1, 0, "activation") Forward(1) ... ReceiveFrom(1, 0, "gradient") Backward(0)
    stage 1   ReceiveFrom(0, 0, "activation") Forward(0) Backward(0) SendTo(0, 0, "gradient") ...

A channel leads from one stage to another for each kind of message; messages arrive in the order in which they were
sent. A result is sent as soon as it is there, and received right before it is needed. Lists are made so that a channel
needs to hold one message only: whoever sends a second one waits until the first is received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Forward:
    """Run this stage's chunk forward on a microbatch, and keep what backward needs."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Run this stage's chunk backward: gradients of its input and of its weights, which are added up."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """The half of backward that the stage before waits for: the gradient of the chunk's input."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The half of backward that nobody waits for: gradients of the chunk's weights, which are added up."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send what this stage's `chunk` has made of a microbatch: the activation onward, or the gradient of its input
    back."""

    to: int
    microbatch: int
    kind: Kind
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveFrom:
    """Receive what this stage's `chunk` needs of a microbatch: its input, or the gradient of its output."""

    source: int
    microbatch: int
    kind: Kind
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update this stage's parameters with the gradients since the last step."""


Compute = Forward | Backward | BackwardInput | BackwardWeight
Work = Compute | OptimizerStep
Action = Work | SendTo | ReceiveFrom


@dataclass(frozen=True)
class PipelineSchedule:
    """One way to run a pipeline."""

    name: str
    summary: str
    work: Callable[[int, int, int, int], list[Work]]
    """What a stage computes, in order, given (stages, microbatches, stage, virtual)."""
    chunked: bool = False
    """Whether stages may have several chunks."""
    asynchronous: bool = False
    """Whether parameters change after every microbatch, which then is a minibatch of its own."""


def one_forward_one_backward(forwards: list[Compute], backwards: list[Compute], ahead: int) -> Iterator[Compute]:
    """`ahead` forwards; then a forward and a backward in turns; then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def with_messages(work: Iterable[Work], stages: int, stage: int, virtual: int) -> list[Action]:
    """The work of a stage, with what is received before and sent after each part of it."""
    actions: list[Action] = []
    before, after = (stage - 1) % stages, (stage + 1) % stages
    for item in work:
        if stages == 1 or isinstance(item, BackwardWeight | OptimizerStep):
            actions.append(item)
            continue
        first = item.chunk == 0 and stage == 0
        last = item.chunk == virtual - 1 and stage == stages - 1
        if isinstance(item, Forward):
            receive = [] if first else [ReceiveFrom(before, item.microbatch, "activation", item.chunk)]
            send = [] if last else [SendTo(after, item.microbatch, "activation", item.chunk)]
        else:
            receive = [] if last else [ReceiveFrom(after, item.microbatch, "gradient", item.chunk)]
            send = [] if first else [SendTo(before, item.microbatch, "gradient", item.chunk)]
        actions += [*receive, item, *send]
    return actions
