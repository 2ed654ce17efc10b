"""1F1B with a flush (PipeDream-Flush, Narayanan et al. 2021): a backward as soon as there is one, then one step.

    K = 3, M = 4     F0 F1 F2  .  . B0 F3 B1  . B2  . B3
                      . F0 F1  . B0 F2 B1 F3 B2  . B3  .
                      .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .

Stage s runs K-1-s forwards ahead, then a forward and a backward in turns. As long as GPipe, with (K-1)/(M+K-1) of the
time idle; but stage s keeps min(M, K-s) activations, however many microbatches there are.
"""

from __future__ import annotations

from torrential.stages.schedules.base import (
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
    return [*one_forward_one_backward(forwards, backwards, stages - 1 - stage), OptimizerStep()]


ONE_F_ONE_B = PipelineSchedule("1f1b", "a forward and a backward in turns", work)
