"""GPipe (Huang et al. 2018): all forwards, then all backwards in reverse order, then one step.

    K = 3, M = 4     F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0
                      . F0 F1 F2 F3  .  . B3 B2 B1 B0  .
                      .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .

The share of idle time is (K-1)/(M+K-1); every stage keeps M activations.
"""

from __future__ import annotations

from torrential.stages.schedules.base import Backward, Forward, OptimizerStep, PipelineSchedule, Work


def work(stages: int, microbatches: int, stage: int, virtual: int) -> list[Work]:
    forwards: list[Work] = [Forward(m) for m in range(microbatches)]
    return [*forwards, *(Backward(m) for m in reversed(range(microbatches))), OptimizerStep()]


GPIPE = PipelineSchedule("gpipe", "all forwards, then all backwards", work)
