"""PipeDream (Narayanan et al. 2019): 1F1B without a flush. Every minibatch goes through whole, and each stage takes a
step after each of its backwards.

    K = 3            F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 ...
                      . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 ...
                      .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 ...

After the start nobody waits: stage s has K-s minibatches in flight. Between the forward and the backward of a minibatch
it takes K-1-s steps, so it needs K-s versions of its weights, of which the forward's one is used again in the backward
(weight stashing). `microbatches` counts minibatches here; the end of the list drains the pipeline, as the end of an
epoch, an evaluation or a checkpoint must.
"""

from __future__ import annotations

from collections.abc import Sequence

from torrential.stages.schedules.base import (
    Action,
    Backward,
    Compute,
    Forward,
    OptimizerStep,
    PipelineSchedule,
    Work,
    one_forward_one_backward,
)


def work(stages: int, microbatches: int, stage: int, virtual: int) -> list[Work]:
    forwards: list[Compute] = [Forward(m) for m in range(microbatches)]
    backwards: list[Compute] = [Backward(m) for m in range(microbatches)]
    found: list[Work] = []
    for item in one_forward_one_backward(forwards, backwards, stages - 1 - stage):
        found += [item, OptimizerStep()] if isinstance(item, Backward) else [item]
    return found


def versions_used(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """For each minibatch, the steps that its stage had taken at its forward and at its backward: the version of the
    weights that it is computed with, and the newest version when its gradient is there."""
    steps, at_forward, used = 0, {}, {}
    for action in actions:
        match action:
            case Forward(microbatch):
                at_forward[microbatch] = steps
            case Backward(microbatch):
                used[microbatch] = (at_forward[microbatch], steps)
            case OptimizerStep():
                steps += 1
    return [used[microbatch] for microbatch in sorted(used)]


PIPEDREAM = PipelineSchedule("pipedream", "1f1b without a flush, a step for each minibatch", work, asynchronous=True)
