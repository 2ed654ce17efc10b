"""The rules that the list of one stage must keep, whatever the other stages do."""

from __future__ import annotations

from collections.abc import Sequence

from torrential.stages.schedules.base import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    OptimizerStep,
    ReceiveFrom,
    SendTo,
)


class BrokenSchedule(AssertionError):
    """A schedule breaks a rule of pipelines: a fault of the schedule, not of whoever runs it."""


def check_work(stage: int, stages: int, chunks: int, actions: Sequence[Action]) -> None:
    """Each microbatch must go forward once and then back once, on every chunk, from what has been received; and no
    gradient may be left without a step."""
    had: dict[tuple[str, int, int], None] = {}

    def take(what: str, microbatch: int, chunk: int, *after: str) -> None:
        where = f"of microbatch {microbatch} (stage {stage}, chunk {chunk})"
        for needed in after:
            if (needed, microbatch, chunk) not in had:
                raise BrokenSchedule(f"{what} {where} comes before its {needed}")
        if (what, microbatch, chunk) in had:
            raise BrokenSchedule(f"{what} {where} comes twice")
        had[what, microbatch, chunk] = None

    waiting = 0  # gradients since the last step
    for action in actions:
        match action:
            case Forward(microbatch, chunk):
                first = stage == 0 and chunk == 0
                take("forward", microbatch, chunk, *([] if first or stages == 1 else ["input"]))
            case Backward(microbatch, chunk) | BackwardInput(microbatch, chunk):
                last = stage == stages - 1 and chunk == chunks - 1
                take("backward", microbatch, chunk, "forward", *([] if last or stages == 1 else ["gradient"]))
                if isinstance(action, Backward):
                    take("weight gradient", microbatch, chunk)
                    waiting += 1
            case BackwardWeight(microbatch, chunk):
                take("weight gradient", microbatch, chunk, "backward")
                waiting += 1
            case ReceiveFrom(_, microbatch, "activation", chunk):
                take("input", microbatch, chunk)
            case ReceiveFrom(_, microbatch, "gradient", chunk):
                take("gradient", microbatch, chunk)
            case SendTo(_, microbatch, "activation", chunk):
                take("sending of the activation", microbatch, chunk, "forward")
            case SendTo(_, microbatch, "gradient", chunk):
                take("sending of the gradient", microbatch, chunk, "backward")
            case OptimizerStep():
                waiting = 0
    if waiting:
        raise BrokenSchedule(f"stage {stage} ends with {waiting} gradients that no step was taken on")
    for what, microbatch, chunk in [key for key in had if key[0] == "forward"]:
        if ("weight gradient", microbatch, chunk) not in had:
            raise BrokenSchedule(f"microbatch {microbatch} goes {what} on stage {stage}, chunk {chunk}, and not back")
