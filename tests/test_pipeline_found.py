"""Pipelines: what kills at random moments have found (benchmarks/pipeline_faults.py, torrential/testing)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torrential as tt
from tests.test_pipeline import TOLERANCE, crashing, difference, normed, task, train
from torrential.trainer.state import NamedStates

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("worker", range(4))
def test_a_replacement_has_the_statistics_of_its_own_pipeline(tmp_path: Path, worker: int) -> None:
    """It took those of batch norm from whoever had them, the other pipeline too, whose samples are others."""
    undisturbed = train(tmp_path / "undisturbed", task(normed), 4, stages=2, microbatches=2)
    fault = {"worker": worker, "at": 0.02, "lasts": 0.005}
    result = train(tmp_path / "run", task(normed), 4, stages=2, microbatches=2, cluster=crashing(fault))
    assert result.summary.samples == undisturbed.summary.samples
    assert difference(result.model, undisturbed.model) < TOLERANCE


def test_a_resumed_worker_has_the_statistics_of_its_own_pipeline(tmp_path: Path) -> None:
    """Worker 2 died and was not replaced: what it needs is in worker 3's copy, and worker 0 has something alike."""
    whole = train(tmp_path / "whole", task(normed, epochs=4), 4, stages=2, microbatches=2)
    faults = crashing({"worker": 2, "at": 0.02}, {"worker": 0, "at": 0.04})
    train(tmp_path / "cut", task(normed, epochs=2), 4, stages=2, microbatches=2, cluster=faults)
    resumed = tt.train(task(normed), resume=tmp_path / "cut", epochs=4, progress=False)
    assert difference(resumed.model, whole.model) < TOLERANCE


def test_a_worker_that_saved_nothing_goes_on_with_what_its_fellows_saved() -> None:
    saved = {f"{rank}/buffers/mean": torch.tensor(float(rank)) for rank in (0, 1, 3)}
    for fellows, expected in ((range(2, 4), 3.0), (range(0, 2), 0.0), (range(2, 3), 0.0)):
        found: dict[str, torch.Tensor] = {}
        NamedStates(saved, "2", fellows).own("buffers", lambda: {"mean": torch.zeros(())}, found.update)
        assert float(found["mean"]) == expected
