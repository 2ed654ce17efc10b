"""Interleaved 1F1B (Narayanan et al. 2021): each stage has V chunks of the model, and the bubble is V times smaller.

Microbatches go through in groups of K. A group passes chunk 0 of all stages, then chunk 1, and so on; backward the
other way round. With K = 2, V = 2, M = 2 (small letters are chunk 1):

    F0 F1 f0 f1  . b0  . b1 B0 B1
     . F0 F1 f0 b0 f1 b1 B0 B1  .

Stage s runs 2(K-1-s) + (V-1)K forwards ahead. The share of idle time is (K-1)/(VM+K-1) where K divides M. Where it does
not, the list is that of the next multiple of K, without the microbatches that there are not: it takes no longer than
with them, and stages idle for no longer than in 1F1B.
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
    groups = [range(first, first + stages) for first in range(0, microbatches, stages)]
    forwards: list[Compute] = [Forward(m, c) for group in groups for c in range(virtual) for m in group]
    backwards: list[Compute] = [Backward(m, c) for group in groups for c in reversed(range(virtual)) for m in group]
    ahead = 2 * (stages - 1 - stage) + (virtual - 1) * stages
    turns = one_forward_one_backward(forwards, backwards, ahead)
    return [*(item for item in turns if item.microbatch < microbatches), OptimizerStep()]


INTERLEAVED = PipelineSchedule("interleaved", "1f1b with several chunks of the model on each stage", work, chunked=True)
