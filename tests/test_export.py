"""The model of a run alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import torrential as tt
from tests.test_equivalence import assert_equal_models
from tests.test_listeners import WORLDS, a_task
from torrential.errors import BadInput
from torrential.records import RECORDS, Evaluation


class Tied(nn.Module):
    """Two names for one tensor, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normal = self.norm(inputs)
        return self.first(normal) + self.second(normal)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tt.TrainResult:
    """A run whose best model is not its newest: outputs grow as it learns, and here the smallest are the best."""
    task = a_task(model=Tied, metric=lambda outputs, targets: outputs.abs().mean(), maximize=False, epochs=5)
    out = tmp_path_factory.mktemp("runs") / "run"
    return tt.train(task, out=out, progress=False, keep_best=1, **WORLDS["sim"])


def best_step(run: tt.TrainResult) -> int:
    found = [r for r in run.history if isinstance(r, Evaluation) and r.split == "validation"]
    return min(found, key=lambda evaluation: evaluation.value).step


@pytest.mark.parametrize("name", ["model.safetensors", "deep/model.pt"])
def test_plain_pytorch_loads_what_is_exported(name: str, run: tt.TrainResult, tmp_path: Path) -> None:
    path = tt.export(run.out, tmp_path / name)
    assert path == tmp_path / name
    state = safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    model = Tied()
    model.load_state_dict(state)
    assert_equal_models(model, run.model)


def test_the_best_and_the_newest(run: tt.TrainResult, tmp_path: Path) -> None:
    assert best_step(run) != run.summary.steps
    newest, best = tt.export(run.out), tt.export(run.out, tmp_path / "best.safetensors", best=True)
    assert newest == run.out / "model.safetensors"
    for path, step in ((newest, run.summary.steps), (best, best_step(run))):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "task": "sums", "step": str(step)}
        expected = safetensors.torch.load_file(run.out / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
        found = safetensors.torch.load_file(path)
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


def test_what_cannot_be_exported(run: tt.TrainResult, tmp_path: Path) -> None:
    def refused(said: str, *args: object, **options: bool) -> None:
        with pytest.raises(BadInput, match=said):
            tt.export(*args, **options)  # type: ignore[arg-type]

    refused(r"is no run \(manifest.json is missing\)", tmp_path)
    refused(r"a model is written as .safetensors or .pt \(given: .*model.onnx\)", run.out, tmp_path / "model.onnx")
    copy = shutil.copytree(run.out, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / f"step-{best_step(run):08d}")
    refused(rf"the best checkpoint of .* was not kept \(step {best_step(run)}, .* --keep-best 1", copy, best=True)
    (copy / RECORDS).unlink()
    refused("has no evaluation on record that gave a number; leave out --best", copy, best=True)
    shutil.rmtree(copy / "checkpoints")
    refused("has no checkpoint yet; train it for longer, or wait", copy)
