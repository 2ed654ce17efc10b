"""Ways to run a pipeline, each as data: `SCHEDULES` holds them by name, `schedule` gives the list of one stage."""

from __future__ import annotations

from torrential.errors import BadInput, UnknownName
from torrential.stages.schedules.base import Action, PipelineSchedule, with_messages
from torrential.stages.schedules.gpipe import GPIPE
from torrential.stages.schedules.interleaved import INTERLEAVED
from torrential.stages.schedules.one_f_one_b import ONE_F_ONE_B
from torrential.stages.schedules.pipedream import PIPEDREAM
from torrential.stages.schedules.zero_bubble import ZERO_BUBBLE

SCHEDULES: dict[str, PipelineSchedule] = {s.name: s for s in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, PIPEDREAM)}


def schedule(name: str, stages: int, microbatches: int, stage: int, virtual: int = 1) -> list[Action]:
    """What stage `stage` of `stages` does for one minibatch of `microbatches`, in order.

    `virtual`: chunks of the model on each stage, of "interleaved" alone. Of "pipedream", `microbatches` is the number
    of minibatches until the pipeline is drained. Any number of microbatches will do: it may be smaller than the number
    of stages, and need not be a multiple of it.
    """
    if name not in SCHEDULES:
        raise UnknownName("schedule", name, SCHEDULES)
    for what, value in (("stages", stages), ("microbatches", microbatches), ("virtual", virtual)):
        if value < 1:
            raise BadInput(f"{what} must be at least 1 (got {value})")
    if not 0 <= stage < stages:
        raise BadInput(f"there is no stage {stage} (stages: {stages}); stages are numbered from 0 to {stages - 1}")
    found = SCHEDULES[name]
    if virtual > 1 and not found.chunked:
        raise BadInput(
            f"schedule {name!r} has one chunk of the model on each stage (virtual: {virtual}); use virtual=1, or the "
            "schedule 'interleaved'"
        )
    return with_messages(found.work(stages, microbatches, stage, virtual), stages, stage, virtual)


def all_stages(name: str, stages: int, microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """What every stage does, as `schedule` gives it for one."""
    return [schedule(name, stages, microbatches, stage, virtual) for stage in range(max(1, stages))]
