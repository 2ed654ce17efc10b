"""Who runs which stage of which pipeline, given the workers that are there.

    worker    0   1   2   3  |  4   5   6   7        two pipelines of four stages
    stage     0   1   2   3  |  0   1   2   3
    copy of   1   0   3   2  |  1   0   3   2        neighbours keep each other's parameters, and step them alike

When a worker is gone, its neighbour runs both stages, as one. When both are gone, their pipeline rests, and its other
workers only keep up with the steps of those pipelines that are complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torrential.errors import RunFailed


def neighbour(stage: int, stages: int) -> int:
    """The stage whose worker keeps a copy of this one: the other of a pair; of a last one without, the one before."""
    other = stage ^ 1
    return other if other < stages else stage - 1


def copied(stage: int, stages: int) -> list[int]:
    """The stages of which this stage's worker keeps a copy."""
    return [other for other in range(stages) if other != stage and neighbour(other, stages) == stage]


@dataclass(frozen=True)
class PipelineCrew:
    """The workers of one pipeline."""

    number: int
    sources: tuple[int | None, ...]  # by stage: the worker whose parameters count; None: they are lost
    keepers: tuple[tuple[int, ...], ...]  # by stage: all workers that have its parameters

    @property
    def complete(self) -> bool:
        return None not in self.sources

    @property
    def runners(self) -> list[tuple[int, list[int]]]:
        """The workers of a complete pipeline from its beginning to its end, each with the stages that it runs."""
        rows = itertools.groupby(range(len(self.sources)), key=lambda stage: self.sources[stage])
        return [(worker, list(stages)) for worker, stages in rows if worker is not None]


def crews(members: Collection[int], stages: int, workers: int, copies: bool) -> list[PipelineCrew]:
    """All pipelines of so many stages, each with those of its workers that are there."""
    return [_crew(number, set(members), stages, copies) for number in range(workers // stages)]


def complete_crews(found: Sequence[PipelineCrew], copies: bool) -> list[PipelineCrew]:
    """The pipelines that can go on. Raises RunFailed where there is none, with a stage that is lost."""
    complete = [crew for crew in found if crew.complete]
    if not complete:
        lost = next(stage for crew in found for stage, source in enumerate(crew.sources) if source is None)
        kept = ", and neither has the one that kept its copy" if copies else ""
        raise RunFailed(f"no worker has stage {lost} of the model any more{kept}; resume the run")
    return complete


def _crew(number: int, members: set[int], stages: int, copies: bool) -> PipelineCrew:
    first = number * stages
    keepers = []
    for stage in range(stages):
        have = [stage, *([neighbour(stage, stages)] if copies and stages > 1 else [])]
        keepers.append(tuple(first + each for each in have if first + each in members))
    return PipelineCrew(number, tuple(have[0] if have else None for have in keepers), tuple(keepers))
