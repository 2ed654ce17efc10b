"""What a stage does with a microbatch, as a span of a trace: its name, and what is known of it."""

from __future__ import annotations

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

NAMES = {Forward: "forward", Backward: "backward", BackwardInput: "backward (input)", BackwardWeight: "weight gradient"}
STEP = "step"  # a whole step of a worker, from the first forward to the update


def span_of(action: Action) -> tuple[str, dict[str, float]]:
    """The name of an action in a trace, and its microbatch and chunk."""
    match action:
        case OptimizerStep():
            return "update", {}
        case SendTo(to, microbatch, kind, chunk):
            return f"send {kind} {microbatch}", {"microbatch": microbatch, "chunk": chunk, "to": to}
        case ReceiveFrom(source, microbatch, kind, chunk):
            return f"receive {kind} {microbatch}", {"microbatch": microbatch, "chunk": chunk, "from": source}
        case Forward() | Backward() | BackwardInput() | BackwardWeight():
            about: dict[str, float] = {"microbatch": action.microbatch, "chunk": action.chunk}
            return f"{NAMES[type(action)]} {action.microbatch}", about
