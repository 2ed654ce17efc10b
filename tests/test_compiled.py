"""Compiled steps: two graphs for any sizes of batches, plain modules everywhere; and images with channels last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset

from tests.test_lean_table import farthest, smooth
from tests.test_precision import SIM, task, train
from torrential.errors import BadInput
from torrential.records import Event

COMPILING = pytest.mark.timeout(240)  # with nothing in the cache


@COMPILING
def test_last_batches_of_any_size_are_compiled_once(tmp_path: Path) -> None:
    """128 samples in batches of 9 end with one of 2; another run of the process does not count."""
    plain = train(tmp_path / "plain", task(smooth, batch_size=9), workers=1, epochs=2, **SIM).model.state_dict()
    graphs = []
    for epochs in (1, 2):
        before = counters["stats"]["unique_graphs"]
        given = task(smooth, batch_size=9)
        found = train(tmp_path / str(epochs), given, workers=1, epochs=epochs, compile=True, **SIM)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [2, 2]
    assert farthest(found.model.state_dict(), plain) < 1e-5


@COMPILING
def test_every_worker_compiles_before_the_run_and_the_model_stays_plain(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", task(smooth), steps=4, **SIM).model.state_dict()
    result = train(tmp_path / "run", task(smooth), steps=4, compile=True)
    events = [r for r in result.history if isinstance(r, Event) and r.event == "compiled"]
    assert {event.worker for event in events} == {0, 1} and {event.step for event in events} == {0}
    assert farthest(result.model.state_dict(), plain) < 1e-5


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"recompute": "sqrt"}, "a compiled step says by itself what is computed again"),
        (SIM | {"processes": 1}, "helpers compute steps that are not compiled"),
        ({"strategy": "bsp", "stages": 2, "servers": 2}, "bsp computes parts of the model by itself"),
    ],
)
def test_what_cannot_be_compiled_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", task(), compile=True, **options)


def test_without_a_compiler_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BadInput, match=r"needs a C\+\+ compiler, and no-such-compiler is not there; install it"):
        train(tmp_path / "run", task(), compile=True)


class Images(nn.Module):
    """A model that looks at how its images lie."""

    last = True

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            assert x.is_contiguous(memory_format=torch.channels_last) == Images.last
        return self.layers(x)  # type: ignore[no-any-return]


def test_images_with_their_channels_last_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(32, 3, 6, 6, generator=drawn), torch.arange(32) % 2)
    given = task(Images, train=images, test=images, validation=images)
    laid = train(tmp_path / "laid", given, steps=4, channels_last=True, **SIM).model.state_dict()
    monkeypatch.setattr(Images, "last", False)
    plain = train(tmp_path / "plain", given, steps=4, **SIM).model.state_dict()
    assert farthest(laid, plain) < 1e-5
