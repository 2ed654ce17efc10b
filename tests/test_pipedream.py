"""PipeDream: the updates of its paper, whatever the stages and windows, in both worlds; deaths; what is refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from tests.killing import Killing
from tests.test_equivalence import fresh
from tests.test_pipeline import INPUTS, LABELS, TOLERANCE, crashing, difference, random_model, task, train
from torrential.data.deal import Deal
from torrential.errors import BadInput, RunFailed
from torrential.records import Evaluation, Step
from torrential.stages.stashing import StashedPasses

pytestmark = pytest.mark.timeout(120)
CUTS = {1: "", 2: "4", 3: "2,4", 4: "2,4,6"}


def dream(out: Path, given: tt.Task, workers: int, **more: Any) -> Any:
    stages = more.get("stages", workers)
    return train(out, given, workers, "pipedream", **{"cuts": CUTS[stages]} | more)


def batches_of(epochs: int, size: int, samples: int = 70) -> Iterable[list[Tensor]]:
    """The minibatches of each epoch."""
    for epoch in range(epochs):
        yield list(Deal(samples, 0).order.whole(epoch).split(size))


def delayed_training(
    model: nn.Sequential, epochs: int, stages: int, window: int, vertical: bool, size: int = 20
) -> nn.Sequential:
    """One process that does what the paper says: the gradient of minibatch t is taken at w_1(t-n+1), ..., w_n(t), or
    with vertical sync at w(t-n+1), and applied to w(t)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    first = [0, *(int(cut) for cut in CUTS[stages].split(",") if cut)]
    stage_of = {n: sum(int(n.split(".")[0]) >= f for f in first) - 1 for n, _ in model.named_parameters()}
    for epoch in batches_of(epochs, size):
        for start in range(0, len(epoch), window):
            versions = list[dict[str, Tensor]]()
            for number, indices in enumerate(epoch[start : start + window]):
                versions.append({n: p.detach().clone() for n, p in model.named_parameters()})
                delay = {n: stages - 1 - (0 if vertical else s) for n, s in stage_of.items()}
                used = {n: versions[max(0, number - d)][n].clone().requires_grad_() for n, d in delay.items()}
                F.cross_entropy(functional_call(model, used, (INPUTS[indices],)), LABELS[indices]).backward()
                for name, parameter in model.named_parameters():
                    parameter.grad = used[name].grad
                optimizer.step()
    return model


# -- the updates of the paper -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_updates_are_those_of_one_process_with_old_weights(tmp_path: Path, stages: int, vertical: bool) -> None:
    """T15.5 and T15.6: gradients are those of the stashed weights; with vertical sync all are n-1 versions old."""
    for window in (1, 2, 5, 8):
        result = dream(tmp_path / str(window), task(epochs=3), stages, window=window, vertical=vertical)
        reference = delayed_training(fresh(task()), 3, stages, window, vertical)
        assert result.summary.samples == 210 and result.summary.steps == 12
        assert difference(result.model, reference) < TOLERANCE, window


def test_one_stage_is_plain_training(tmp_path: Path) -> None:
    """T15.6."""
    plain = train(tmp_path / "plain", task(), 1, "allreduce").model
    assert difference(dream(tmp_path / "run", task(), 1).model, plain) < TOLERANCE


@pytest.mark.parametrize(
    "how", [{"workers": 3}, {"workers": 2, "vertical": True, "recompute": "stage"}, {"workers": 4, "stages": 2}]
)
def test_processes_compute_what_the_simulation_does(tmp_path: Path, how: dict[str, Any]) -> None:
    here = dream(tmp_path / "local", task(random_model), world="local", window=3, **how | {"cuts": ""})
    there = dream(tmp_path / "sim", task(random_model), window=3, **how | {"cuts": ""})
    assert difference(here.model, there.model) < TOLERANCE


def test_the_delay_of_each_stage_is_on_record(tmp_path: Path) -> None:
    """T15.4: n-k steps on stage k = 1 .. n, once the pipeline is full; with vertical sync n-1 on all of them."""
    for vertical in (False, True):
        run = dream(tmp_path / str(vertical), task(batch_size=7, epochs=1), 4, vertical=vertical)
        for worker in range(4):
            newest = [r for r in run.history if isinstance(r, Step) and r.worker == worker][-1]
            most = 3 if vertical else 3 - worker
            assert newest.staleness == Counter(min(number, most) for number in range(10))
        assert run.summary.staleness_max == 3


def test_stages_keep_as_many_versions_as_minibatches_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[StashedPasses]()

    class Noted(StashedPasses):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr("torrential.strategies.pipedream.StashedPasses", Noted)
    for vertical in (False, True):
        made.clear()
        dream(tmp_path / str(vertical), task(batch_size=7, epochs=1), 4, vertical=vertical)
        made.sort(key=lambda passes: passes._place)
        assert [passes.most_versions for passes in made] == ([4, 4, 4, 4] if vertical else [4, 3, 2, 1])
        assert not any(passes._versions or passes._in_flight for passes in made)  # drained


@pytest.mark.parametrize("how", [{}, {"vertical": True}])
def test_several_pipelines_sum_their_gradients(tmp_path: Path, how: dict[str, Any]) -> None:
    together = dream(tmp_path / "two", task(batch_size=10), 4, stages=2, **how)
    alone = dream(tmp_path / "one", task(batch_size=20), 2, **how)
    assert together.summary.samples == 140 and together.summary.steps == alone.summary.steps == 8
    assert difference(together.model, alone.model) < TOLERANCE


def test_rates_belong_to_minibatches(tmp_path: Path) -> None:
    given = task(epochs=3)
    plain = train(tmp_path / "plain", given, 1, "allreduce", schedule="cosine")
    assert difference(dream(tmp_path / "run", given, 1, schedule="cosine").model, plain.model) < TOLERANCE


# -- what stashing is for ----------------------------------------------------------------------------------------------
def by_hand(weights: list[Tensor], newest: list[Tensor], x: Tensor, labels: Tensor) -> list[Tensor]:
    """The gradients of tanh layers; forward with some weights, backward with the newest."""
    outputs = [x]
    for number, weight in enumerate(weights):
        made = outputs[-1] @ weight.t()
        outputs.append(made.tanh() if number < len(weights) - 1 else made)
    slope = (outputs[-1].softmax(1) - F.one_hot(labels, outputs[-1].shape[1])) / len(x)
    gradients = list[Tensor]()
    for number in reversed(range(len(weights))):
        if number < len(weights) - 1:
            slope = slope * (1 - outputs[number + 1] ** 2)
        gradients.insert(0, slope.t() @ outputs[number])
        slope = slope @ newest[number]
    return gradients


def test_without_stashing_a_gradient_would_be_of_nothing() -> None:
    """T15.5, its second half: backward with newer weights than forward's is not the gradient at either."""
    draw = torch.Generator().manual_seed(0)
    old = [torch.randn(b, a, dtype=torch.float64, generator=draw) for a, b in itertools.pairwise([12, 16, 16, 4])]
    at_old = by_hand(old, old, INPUTS, LABELS)
    newest = [weight - 1.0 * slope for weight, slope in zip(old, at_old, strict=True)]
    leaves = [weight.clone().requires_grad_() for weight in old]
    outputs = (INPUTS @ leaves[0].t()).tanh()
    F.cross_entropy((outputs @ leaves[1].t()).tanh() @ leaves[2].t(), LABELS).backward()
    for leaf, gradient in zip(leaves, at_old, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)
    mixed, at_newest = by_hand(old, newest, INPUTS, LABELS), by_hand(newest, newest, INPUTS, LABELS)
    for known in (at_old, at_newest):
        assert 1 - float(F.cosine_similarity(mixed[0].flatten(), known[0].flatten(), dim=0)) > 1e-3


def blobs(samples: int, seed: int) -> TensorDataset:
    centres = torch.randn(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(6, (samples,), generator=draw)
    return TensorDataset(centres[labels] + 0.9 * torch.randn(samples, 12, dtype=torch.float64, generator=draw), labels)


def test_four_stages_learn_as_much_as_one_process(tmp_path: Path) -> None:
    """T15.7: within half a point of plain training after as many epochs."""

    def model() -> nn.Sequential:
        widths = [12, 24, 24, 24, 6]
        return nn.Sequential(*itertools.chain(*([nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(widths))))[
            :-1
        ].double()

    data = {"train": blobs(800, 1), "validation": blobs(100, 3), "test": blobs(2000, 2)}
    given = task(model, optimizer=tt.optimizer("sgd", lr=0.1), epochs=6, **data)
    plain = train(tmp_path / "plain", given, 1, "allreduce").summary.value
    delayed = dream(tmp_path / "run", given, 4).summary.value
    assert plain > 0.94 and abs(plain - delayed) < 0.005


# -- evaluations, checkpoints ------------------------------------------------------------------------------------------
def test_the_pipeline_is_drained_for_evaluations_and_at_the_last_step(tmp_path: Path) -> None:
    run = dream(tmp_path / "run", task(batch_size=7), 3, evaluate_every=4, steps=14)
    assert [e.step for e in run.history if isinstance(e, Evaluation)] == [4, 8, 12, 14, 14]
    assert run.summary.samples == 14 * 7


@pytest.mark.parametrize("vertical", [False, True])
def test_a_run_goes_on_to_the_same_bytes(tmp_path: Path, vertical: bool) -> None:
    given = task(random_model, optimizer=tt.optimizer("adam", lr=0.01))
    how = {"world": "local", "threads": 1, "vertical": vertical, "cuts": "", "batch_size": 7}
    whole = dream(tmp_path / "whole", given, 3, epochs=4, **how)
    dream(tmp_path / "cut", given, 3, epochs=2, **how)
    resumed = tt.train(given, resume=tmp_path / "cut", epochs=4, progress=False)
    assert resumed.summary.steps == whole.summary.steps == 40
    assert difference(resumed.model, whole.model) == 0.0


def test_a_traced_run_takes_the_same_steps(tmp_path: Path) -> None:
    plain = dream(tmp_path / "plain", task(), 3)
    traced = dream(tmp_path / "traced", task(), 3, trace=True)
    assert difference(plain.model, traced.model) == 0.0
    assert '"backward 2"' in (tmp_path / "traced" / "trace.json").read_text()


class Named(nn.Module):
    """A model that is no nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()).tanh() + 1)


def test_a_model_that_is_cut_by_names(tmp_path: Path) -> None:
    given = task(lambda: Named().double())
    cut = dream(tmp_path / "cut", given, 3, cuts="middle,last")
    layers = task(lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), Plus()).double())
    row = dream(tmp_path / "row", layers, 3, cuts="2,4")
    for mine, theirs in zip(cut.model.parameters(), row.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Plus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + 1)


# -- deaths ------------------------------------------------------------------------------------------------------------
def normed() -> nn.Sequential:
    layers = [[nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()] for _ in range(4)]
    return nn.Sequential(*itertools.chain(*layers)).double()


@pytest.mark.parametrize("seed", range(16))
def test_with_a_replacement_at_once_deaths_change_nothing(tmp_path: Path, seed: int) -> None:
    """One that comes later finds that a neighbour has run both stages, with less delay."""
    chance = random.Random(seed)
    stages = chance.choice([2, 3, 4])
    how = {"window": chance.choice([2, 5]), "vertical": chance.random() < 0.5, "batch_size": 10, "cuts": ""}
    pipelines = chance.choice([1, 1, 2])
    fault = {"worker": chance.randrange(stages * pipelines), "at": chance.uniform(0, 0.16), "lasts": 0.0005}
    given = task(normed, optimizer=tt.optimizer("adam", lr=0.01))
    if pipelines > 1:
        how["stages"] = stages
    undisturbed = dream(tmp_path / "undisturbed", given, stages * pipelines, **how)
    result = dream(tmp_path / "run", given, stages * pipelines, cluster=crashing(fault), **how)
    assert result.summary.samples == 140
    if pipelines == 1:  # else one pipeline goes on alone for a while
        assert difference(result.model, undisturbed.model) == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_without_one_a_neighbour_runs_both_stages(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    workers = chance.choice([2, 3, 4])
    fault = {"worker": chance.randrange(workers), "at": chance.uniform(0.0, 0.12)}
    how = {"window": chance.choice([2, 5]), "vertical": chance.random() < 0.5}
    result = dream(tmp_path / "run", task(batch_size=7), workers, cluster=crashing(fault), **how)
    assert result.summary.samples == 140 and result.summary.steps == 20
    newest = {r.worker: r for r in result.history if isinstance(r, Step)}
    assert len(newest) >= workers - 1
    resumed = tt.train(task(batch_size=7), resume=tmp_path / "run", epochs=3, progress=False)
    assert resumed.summary.samples == 210


def test_a_pipeline_that_rests_keeps_up(tmp_path: Path) -> None:
    """Two neighbours of one pipeline die; their replacements find what the other pipeline has."""
    faults = [{"worker": worker, "at": 0.05, "lasts": 0.02} for worker in (0, 1)]
    result = dream(tmp_path / "run", task(batch_size=5), 6, stages=3, window=2, cluster=crashing(*faults))
    assert result.summary.samples == 140
    with pytest.raises(RunFailed, match=r"no worker has stage 0 .*, and neither has the one that kept its copy"):
        dream(tmp_path / "one", task(batch_size=5), 3, window=2, cluster=crashing(*faults))


@pytest.mark.parametrize("restart", [False, True])
def test_a_stage_that_is_killed(tmp_path: Path, restart: bool) -> None:
    given = task(epochs=100)
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Step) and record.step >= 40)
    result = dream(tmp_path / "run", given, 3, world="local", restart=restart, listeners=[killing], window=2)
    assert killing.killed.is_set() and result.summary.samples == 7000
    if restart:
        undisturbed = dream(tmp_path / "undisturbed", given, 3, window=2)
        assert difference(result.model, undisturbed.model) < 1e-9


# -- what cannot be done -----------------------------------------------------------------------------------------------
def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)).double()
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("given", "workers", "options", "why"),
    [
        (task(clip_norm=1.0), 2, {}, r"pipedream cannot clip gradients \(clip_norm: 1\): .*use --strategy pipeline"),
        (task(tied), 2, {"cuts": "1"}, "stages 0 and 1 share a parameter .*, which pipedream would step apart"),
        (task(), 8, {"cuts": ""}, "7 layers cannot be cut into 8 parts"),
        (task(), 3, {"stages": 2}, r"stages=2 does not divide the workers \(3\)"),
        (task(), 2, {"window": 0}, "window"),
        (task(loss=None, step=lambda m, b: m(b[0]).mean()), 2, {}, "a pipeline needs outputs and targets apart"),
        (task(), 2, {"grow": True, "schedule": "step"}, "pipedream does not know grow; leave it out"),
    ],
)
def test_what_it_cannot_do_is_refused(
    tmp_path: Path, given: tt.Task, workers: int, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", given, workers, "pipedream", **options)


def test_parameters_may_be_shared_inside_a_stage(tmp_path: Path) -> None:
    given = task(lambda: nn.Sequential(*tied(), nn.Linear(12, 4).double()))
    result = dream(tmp_path / "run", given, 2, cuts="3")
    assert result.model[2].weight is result.model[0].weight
