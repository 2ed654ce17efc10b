"""ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism): 1F1B with backward in two halves.

The gradient of a stage's input (B) is what the stage before waits for; that of its weights (W) can be computed at any
later time. W is put off until the bubble, on stage s for s microbatches:

    K = 3, M = 4     F0 F1 F2  .  . B0 W0 F3 B1 W1 B2 W2 B3 W3
                      . F0 F1  . B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                      .  . F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

Every stage keeps min(M, K) microbatches, as the first stage of 1F1B does. With f, b and w the seconds of the three, the
idle time is (K-1)(f+b-w), where that of 1F1B is (K-1)(f+b+w): a third of it if all three are equal.
"""

from __future__ import annotations

from torrential.stages.schedules.base import (
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    OptimizerStep,
    PipelineSchedule,
    Work,
    one_forward_one_backward,
)


def work(stages: int, microbatches: int, stage: int, virtual: int) -> list[Work]:
    forwards: list[Compute] = [Forward(m) for m in range(microbatches)]
    backwards: list[Compute] = [BackwardInput(m) for m in range(microbatches)]
    found: list[Work] = []
    for item in one_forward_one_backward(forwards, backwards, stages - 1 - stage):
        found.append(item)
        if isinstance(item, BackwardInput) and item.microbatch >= stage:
            found.append(BackwardWeight(item.microbatch - stage))
    left = range(max(0, microbatches - stage), microbatches)
    return [*found, *(BackwardWeight(m) for m in left), OptimizerStep()]


ZERO_BUBBLE = PipelineSchedule("zero-bubble", "1f1b with the gradients of weights in the bubble (ZB-H1)", work)
