"""A rehearsal: all stages of a pipeline run their lists in memory, on a clock of given costs.

Channels hold one message: sending waits while the slot is full, receiving while it is empty or its message is still on
its way. Every rule that a schedule must keep is checked; what comes out says who did what when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torrential.stages.rules import BrokenSchedule, check_work
from torrential.stages.schedules import all_stages
from torrential.stages.schedules.base import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Kind,
    ReceiveFrom,
    SendTo,
)


@dataclass(frozen=True)
class StageCosts:
    """The seconds that each stage needs for a microbatch, all its chunks together."""

    forward: Sequence[float]
    backward: Sequence[float]
    communication: float | Sequence[float] = 0.0
    """The seconds that a message is on its way; or those between a stage and the next, for each stage but the last."""
    weight_share: float = 0.5
    """The part of backward that computes gradients of weights, where a schedule has it apart."""

    def message_seconds(self, stage: int, other: int) -> float:
        """The seconds that a message between two stages is on its way."""
        if isinstance(self.communication, float | int):
            return self.communication
        return self.communication[min(stage, other)]

    def seconds(self, action: Action, stage: int, chunks: int) -> float:
        match action:
            case Forward():
                return self.forward[stage] / chunks
            case Backward():
                return self.backward[stage] / chunks
            case BackwardInput():
                return self.backward[stage] * (1 - self.weight_share) / chunks
            case BackwardWeight():
                return self.backward[stage] * self.weight_share / chunks
            case _:
                return 0.0


class Span(NamedTuple):
    """What a stage did, and when: waiting is part of sending and receiving."""

    stage: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal."""

    timeline: list[Span]
    """Everything that happened, stage by stage."""
    seconds: float
    """From the first action to the end of the last one."""
    busy: list[float]
    """The seconds that each stage computed."""
    live: list[int]
    """The most microbatches whose activations each stage has kept at one time, counted for each chunk."""

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they do not compute."""
        total = self.seconds * len(self.busy)
        return 1 - sum(self.busy) / total if total else 0.0


class _Channel(NamedTuple):
    source: int
    to: int
    kind: Kind


@dataclass
class _Message:
    """What is in a channel's slot."""

    microbatch: int
    part: int  # of the model, that has made it
    arrives: float


@dataclass
class _Slot:
    message: _Message | None = None
    free_since: float = 0.0


@dataclass
class _Runner:
    """One stage on its way through its list."""

    stage: int
    actions: Sequence[Action]
    at: int = 0
    now: float = 0.0
    live: int = 0
    most_live: int = 0
    busy: float = 0.0
    spans: list[Span] = field(default_factory=list)


def rehearse(lists: Sequence[Sequence[Action]], costs: StageCosts) -> Rehearsal:
    """Run the lists of all stages to their end. Raises BrokenSchedule, with who waits for what, where they cannot."""
    stages = len(lists)
    chunks = 1 + max((getattr(action, "chunk", 0) for actions in lists for action in actions), default=0)
    for stage, actions in enumerate(lists):
        check_work(stage, stages, chunks, actions)
    slots: dict[_Channel, _Slot] = {}
    runners = [_Runner(stage, actions) for stage, actions in enumerate(lists)]
    while any([_advance(runner, slots, costs, stages, chunks) for runner in runners]):
        pass
    stuck = [_waits(runner, slots) for runner in runners if runner.at < len(runner.actions)]
    if stuck:
        raise BrokenSchedule("nobody can go on: " + "; ".join(stuck))
    for channel, slot in slots.items():
        if slot.message is not None:
            raise BrokenSchedule(f"{_named(channel, slot.message.microbatch)} was never received")
    return Rehearsal(
        timeline=[span for runner in runners for span in runner.spans],
        seconds=max(runner.now for runner in runners),
        busy=[runner.busy for runner in runners],
        live=[runner.most_live for runner in runners],
    )


def rehearse_schedule(name: str, costs: StageCosts, microbatches: int, virtual: int = 1) -> Rehearsal:
    """Rehearse a schedule by its name, with as many stages as there are costs for."""
    return rehearse(all_stages(name, len(costs.forward), microbatches, virtual), costs)


def _advance(runner: _Runner, slots: dict[_Channel, _Slot], costs: StageCosts, stages: int, chunks: int) -> bool:
    """Run as many actions as can be; whether there was one."""
    began = runner.at
    while runner.at < len(runner.actions):
        action, stage, begin = runner.actions[runner.at], runner.stage, runner.now
        part = getattr(action, "chunk", 0) * stages + stage
        match action:
            case SendTo(to, microbatch, kind):
                slot = slots.setdefault(_Channel(stage, to, kind), _Slot())
                if slot.message is not None:
                    break
                runner.now = max(begin, slot.free_since)
                slot.message = _Message(microbatch, part, runner.now + costs.message_seconds(stage, to))
            case ReceiveFrom(source, microbatch, kind):
                channel = _Channel(source, stage, kind)
                slot = slots.setdefault(channel, _Slot())
                if slot.message is None:
                    break
                expected = (microbatch, part - 1 if kind == "activation" else part + 1)
                if (slot.message.microbatch, slot.message.part) != expected:
                    raise BrokenSchedule(
                        f"stage {stage} expects {_named(channel, microbatch)}, made by part {expected[1]}, and gets "
                        f"that of microbatch {slot.message.microbatch}, made by part {slot.message.part}"
                    )
                runner.now = slot.free_since = max(begin, slot.message.arrives)
                slot.message = None
            case _:
                _compute(runner, action, costs.seconds(action, stage, chunks))
        runner.spans.append(Span(stage, action, begin, runner.now))
        runner.at += 1
    return runner.at > began


def _compute(runner: _Runner, action: Action, seconds: float) -> None:
    runner.now += seconds
    runner.busy += seconds
    if isinstance(action, Forward):
        runner.live += 1
        runner.most_live = max(runner.most_live, runner.live)
    elif isinstance(action, Backward | BackwardWeight):
        runner.live -= 1


def _waits(runner: _Runner, slots: dict[_Channel, _Slot]) -> str:
    action = runner.actions[runner.at]
    match action:
        case SendTo(to, microbatch, kind):
            channel = _Channel(runner.stage, to, kind)
            held = slots[channel].message
            full = "" if held is None else f", whose slot holds that of microbatch {held.microbatch}"
            return f"stage {runner.stage} waits to send {_named(channel, microbatch)}{full}"
        case ReceiveFrom(source, microbatch, kind):
            return f"stage {runner.stage} waits for {_named(_Channel(source, runner.stage, kind), microbatch)}"
        case _:
            raise AssertionError(f"stage {runner.stage} does not go on with {action}")


def _named(channel: _Channel, microbatch: int) -> str:
    return f"the {channel.kind} of microbatch {microbatch} from stage {channel.source} to {channel.to}"
