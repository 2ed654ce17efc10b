"""What must hold of pipelines: copies of parameters are alike; and a model with buffers, which plain training on whole
batches is no measure of, ends as it does in the same run without faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from torrential.params.local import LocalParameters
from torrential.stages.pipelines import PipelineCrew, crews
from torrential.strategies.pipeline import Pipeline
from torrential.testing.plain import TOLERANCE
from torrential.trainer.context import RoleContext
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.base import Job

SavedModels = dict[int, dict[str, Tensor]]  # parameters and buffers by name, by step


class PipelineAudit:
    """The parameters and checkpoints of one run of a pipeline."""

    def __init__(self, job: Job, normed: bool, run: Callable[[], SavedModels]) -> None:
        """`normed`: the model has batch norm, which sees microbatches; `run` makes the run without faults."""
        assert isinstance(job.strategy, Pipeline)
        self._job, self._strategy, self.normed, self._run = job, job.strategy, normed, run
        self._models: SavedModels = {}
        self._parameters: dict[tuple[int, str], tuple[int, bytes]] = {}  # by step and name: whose, and the value
        self._dealt_otherwise = False

    def saved(self, snapshot: Snapshot, model: dict[str, Tensor]) -> None:
        """Keep what a checkpoint holds."""
        self._models[snapshot.step] = model

    def lost(self, there: Mapping[int, RoleContext]) -> str:
        """What is gone that the run cannot go on without, given the workers that are there."""
        if not all(crew.complete for crew in self._crews(there)):
            self._dealt_otherwise = True  # steps are of fewer samples then
        have = [rank for rank, worker in there.items() if worker.applied >= 0]
        if not have and not self._parameters:  # nothing was agreed on or done yet: all have what the seed gives
            have = list(there)
        return "" if any(crew.complete for crew in self._crews(have)) else "all copies of a stage"

    def _crews(self, ranks: Iterable[int]) -> list[PipelineCrew]:
        strategy = self._strategy
        return crews(list(ranks), strategy.stages, self._job.config.workers, strategy.copies)

    def stepped(self, rank: int, worker: RoleContext) -> Iterator[str]:
        """What is wrong with the parameters of a worker that has taken a step: all that have one of them, as their own
        or as a copy, must have the same bits."""
        parameters = worker.replica.parameters
        assert isinstance(parameters, LocalParameters)
        for name, value in parameters.values().items():
            mine = value.numpy().tobytes()
            other, theirs = self._parameters.setdefault((worker.step, name), (rank, mine))
            if theirs != mine:
                yield f"after step {worker.step} workers {rank} and {other} have different values of {name}"

    def objections(self) -> list[str]:
        """What is wrong with the checkpoints at the end, where the same samples were dealt."""
        if self._dealt_otherwise:
            return []
        expected, found = self._run(), list[str]()
        for step, model in sorted(self._models.items()):
            if step not in expected:
                found.append(f"the run without faults makes no checkpoint at {step}")
            else:
                found += _differences(f"the checkpoint at {step}", model, expected[step])
        return found


def _differences(what: str, model: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    if model.keys() != expected.keys():
        return [f"{what} lacks {', '.join(expected.keys() - model.keys())}"]
    off = {name: float((model[name] - tensor).abs().max()) for name, tensor in expected.items()}
    return [f"{what}: {name} is off the run without faults by {by}" for name, by in off.items() if not by <= TOLERANCE]
