"""Pipelines: plain training whatever the stages, microbatches and order, in both worlds; what is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from tests.killing import Killing
from tests.test_equivalence import fresh, plain_loop
from torrential.errors import BadInput, RunFailed
from torrential.records import Step
from torrential.stages.cut import balanced_cuts, layer_costs
from torrential.strategies.pipeline import Pipeline

pytestmark = pytest.mark.timeout(120)
DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(70, 12, dtype=torch.float64, generator=DRAW)
LABELS = torch.randint(4, (70,), generator=DRAW)
DATA = TensorDataset(INPUTS, LABELS)
TOLERANCE = 1e-12  # in float64
ORDERS = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def layered() -> nn.Sequential:
    widths = [12, 20, 16, 16, 4]
    layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers))[:-1].double()


def task(model: Any = layered, **more: Any) -> tt.Task:
    given: dict[str, Any] = {
        "model": model,
        "loss": F.cross_entropy,
        "train": DATA,
        "validation": DATA,
        "test": DATA,
        "optimizer": tt.optimizer("sgd", lr=0.2, momentum=0.9, weight_decay=1e-3),
        "batch_size": 20,
        "epochs": 2,
        "name": "layered",
    }
    return tt.Task(**given | more)


def train(out: Path, given: tt.Task, workers: int, strategy: str = "pipeline", world: str = "sim", **more: Any) -> Any:
    cluster = {"cluster": {"compute": {"seconds_per_sample": 1e-3}}} if world == "sim" else {}
    options = cluster | {"device": "cpu", "progress": False} | more
    return tt.train(given, strategy, workers=workers, world=world, out=out, **options)


def difference(one: nn.Module, other: nn.Module) -> float:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    """What a plain loop makes of the task."""
    model = fresh(task())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    return plain_loop(task(), optimizer, model, 20, steps=8)


# -- plain training ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_any_stages_and_microbatches_are_plain_training(
    plain: nn.Module, tmp_path: Path, order: str, stages: int
) -> None:
    chunks = 2 if order == "interleaved" and 1 < stages < 4 else 1
    for microbatches in (1, 2, 5, 8):
        how = {"order": order, "microbatches": microbatches, "chunks": chunks}
        result = train(tmp_path / str(microbatches), task(), stages, **how)
        assert result.summary.samples == 140 and result.summary.steps == 8
        assert difference(result.model, plain) < TOLERANCE, how


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_processes_are_plain_training(plain: nn.Module, tmp_path: Path, order: str, stages: int) -> None:
    """A Latin square of orders, stages and microbatches: the same code runs all of them in simulated time above."""
    microbatches = (1, 2, 5, 8)[(stages + ORDERS.index(order)) % 4]
    chunks = 2 if order == "interleaved" and 1 < stages < 4 else 1
    how = {"order": order, "microbatches": microbatches, "chunks": chunks}
    result = train(tmp_path / "run", task(), stages, world="local", **how)
    assert difference(result.model, plain) < TOLERANCE, how


@pytest.mark.parametrize(
    "how",
    [
        {"workers": 2},
        {"workers": 3, "order": "gpipe"},
        {"workers": 4, "stages": 2},
        {"workers": 3, "order": "zero-bubble", "microbatches": 5},
        {"workers": 2, "order": "zero-bubble", "recompute": "stage"},
    ],
)
def test_processes_compute_what_the_simulation_does(tmp_path: Path, how: dict[str, Any]) -> None:
    here = train(tmp_path / "local", task(), world="local", **how)
    there = train(tmp_path / "sim", task(), **how)
    assert difference(here.model, there.model) < TOLERANCE


@pytest.mark.parametrize("clip", [None, 0.05])
def test_several_pipelines_are_one_large_batch(tmp_path: Path, clip: float | None) -> None:
    given = task(clip_norm=clip)
    together = train(tmp_path / "pipelines", given, 6, stages=3, microbatches=4)
    reference = train(tmp_path / "plain", given, 2, "allreduce")
    assert difference(together.model, reference.model) < 1e-9  # the norm is summed in another order
    assert together.summary.samples == 140


def test_an_optimizer_with_state_and_groups_is_each_stages_own(tmp_path: Path) -> None:
    given = task(optimizer=tt.optimizer("adamw", lr=0.01, weight_decay=0.1))
    result = train(tmp_path / "run", given, 3)
    reference = train(tmp_path / "plain", given, 1, "allreduce")
    assert difference(result.model, reference.model) < TOLERANCE


class Half(nn.Module):
    """A layer with a parameter that is never used, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(12, 12), nn.Linear(12, 12)
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.frozen


def test_parameters_without_a_gradient_stay_as_they_are(tmp_path: Path) -> None:
    given = task(lambda: nn.Sequential(Half(), nn.ReLU(inplace=True), Half(), nn.ReLU(inplace=True)).double())
    for cuts in ("1", "2"):
        result = train(tmp_path / cuts, given, 2, cuts=cuts)
        reference = train(tmp_path / f"plain{cuts}", given, 1, "allreduce")
        assert difference(result.model, reference.model) < TOLERANCE


def test_batches_that_loaders_read_are_the_same(plain: nn.Module, tmp_path: Path) -> None:
    result = train(tmp_path / "run", task(train=list(DATA)), 3, world="local", loaders=1)
    assert difference(result.model, plain) < TOLERANCE


class Shared(nn.Module):
    """A layer that passes two tensors on, one of which jumps over the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"short": x, "long": self.inner(x).tanh(), "count": torch.tensor(len(x))}


class Over(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert int(given["count"]) == len(given["long"])
        return given["short"], self.inner(given["long"])


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(12, 4)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return self.out(given[0] + given[1])


def test_what_jumps_a_stage_travels_with_the_activations(tmp_path: Path) -> None:
    given = task(lambda: nn.Sequential(Shared(), Over(), Joined()).double())
    result = train(tmp_path / "run", given, 3, cuts="1,2")
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)).double()
    model[2].weight = model[0].weight
    model[4].weight = model[0].weight
    return model


@pytest.mark.parametrize("workers", [3, 6])
def test_parameters_that_stages_share_have_their_gradients_summed(tmp_path: Path, workers: int) -> None:
    given = task(tied, clip_norm=0.3)
    result = train(tmp_path / "run", given, workers, stages=3)
    reference = train(tmp_path / "plain", given, workers // 3, "allreduce")
    assert difference(result.model, reference.model) < 1e-9
    assert result.model[4].weight is result.model[0].weight


def test_batch_norm_keeps_statistics_of_microbatches(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()

    result = train(tmp_path / "run", task(model, epochs=1), 2, microbatches=2)
    seen = int(result.model[1].num_batches_tracked)
    assert seen == 2 * result.summary.steps


def random_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 4)
    ).double()


def test_recomputing_draws_the_same_numbers_again(tmp_path: Path) -> None:
    kept = train(tmp_path / "kept", task(random_model), 2)
    again = train(tmp_path / "again", task(random_model), 2, recompute="stage")
    assert difference(kept.model, again.model) == 0.0
    other = train(tmp_path / "other", task(random_model), 2, seed=1)
    assert difference(kept.model, other.model) > 0


def test_a_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    given = task(random_model, optimizer=tt.optimizer("adam", lr=0.01))
    whole = train(tmp_path / "whole", given, 2, world="local", threads=1, epochs=4)
    train(tmp_path / "cut", given, 2, world="local", threads=1, epochs=2)
    resumed = tt.train(given, resume=tmp_path / "cut", epochs=4, progress=False)
    assert resumed.summary.steps == whole.summary.steps
    assert difference(resumed.model, whole.model) == 0.0


# -- cutting ----------------------------------------------------------------------------------------------------------
def test_parts_cost_about_the_same() -> None:
    model = nn.Sequential(nn.Linear(12, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 4)).double()
    costs = layer_costs(task(), model)
    assert costs[2] > costs[0] > costs[1] and len(costs) == 5
    for parts in range(1, 6):
        cuts = balanced_cuts(costs, parts)
        largest = max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, 5]))
        every = itertools.combinations(range(1, 5), parts - 1)
        assert largest == min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *c, 5])) for c in every)


def test_a_worker_has_the_parameters_of_its_stage_alone() -> None:
    model = layered()
    pipeline = Pipeline(stages=2, copies=False).fitted(task(), model, 2)
    parts = [pipeline.part(copy.deepcopy(model), rank, 2) for rank in (0, 1)]
    assert sum(p.numel() for part in parts for p in part.parameters()) == sum(p.numel() for p in model.parameters())
    assert pipeline.cuts == "3" and sum(map(float, pipeline.costs.split(","))) == pytest.approx(1, abs=1e-3)


def test_stages_record_where_their_time_went(tmp_path: Path) -> None:
    """With M microbatches of equal cost, K - 1 of M + K - 1 slots are idle on each of K stages."""
    given = task(batch_size=64, train=TensorDataset(INPUTS[:64], LABELS[:64]))
    slow = {"compute": {"seconds_per_sample": 0.1}}  # so that messages cost little beside it
    history = train(tmp_path / "run", given, 4, costs="1,1,1,1", copies=False, cluster=slow).history
    steps = [r for r in history if isinstance(r, Step)]
    whole = 2 * 64 * 0.1  # seconds of compute of all stages, two steps
    for worker in range(4):
        mine = [r for r in steps if r.worker == worker]
        assert sum(r.compute for r in mine) == pytest.approx(whole / 4, rel=1e-3)
        assert mine[-1].time == pytest.approx(whole / 4 * (8 + 3) / 8, rel=1e-2)


@pytest.mark.parametrize(("microbatches", "idle"), [(1, 75), (4, 43), (16, 16)])
def test_the_bubble_is_that_of_gpipe(tmp_path: Path, microbatches: int, idle: int) -> None:
    """T16.2: (K-1)/(M+K-1) of the time of four equal stages."""
    given = task(batch_size=64, train=TensorDataset(INPUTS[:64], LABELS[:64]))
    slow = {"compute": {"seconds_per_sample": 0.1}}
    how = {"order": "gpipe", "microbatches": microbatches, "costs": "1,1,1,1", "copies": False}
    history = train(tmp_path / "run", given, 4, cluster=slow, **how).history
    steps = [r for r in history if isinstance(r, Step)]
    busy, end = sum(r.compute for r in steps), max(r.time for r in steps)
    assert 100 * (1 - busy / (4 * end)) == pytest.approx(idle, abs=1)


class KeptSamples:
    """The samples whose activations are kept at one time, on each stage."""

    now: ClassVar[Counter[int]] = Counter()
    most: ClassVar[Counter[int]] = Counter()

    def __init__(self, stage: int, samples: int) -> None:
        self._stage, self._samples = stage, samples
        KeptSamples.now[stage] += samples
        KeptSamples.most[stage] = max(KeptSamples.most[stage], KeptSamples.now[stage])

    def __del__(self) -> None:
        KeptSamples.now[self._stage] -= self._samples


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: KeptSamples | None) -> Tensor:
        ctx.kept = kept
        return x * weight

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        return slopes[0], slopes[0].sum(), None


class Counted(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight, self._stage = nn.Parameter(torch.ones((), dtype=torch.float64)), stage

    def forward(self, x: Tensor) -> Tensor:
        return _Counted.apply(x, self.weight, KeptSamples(self._stage, len(x)) if torch.is_grad_enabled() else None)


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_recomputing_keeps_the_activations_of_one_microbatch(
    tmp_path: Path, microbatches: int, recompute: bool
) -> None:
    """T16.3: (L/K)(N/M) beside the stage's inputs, and (L/K) N without recomputation; L layers, K stages."""
    KeptSamples.now.clear()
    KeptSamples.most.clear()
    given = task(lambda: nn.Sequential(*(Counted(n // 4) for n in range(8))), batch_size=16, epochs=1)
    given = dataclasses.replace(given, train=TensorDataset(INPUTS[:16], LABELS[:16]))
    how = {
        "order": "gpipe",
        "microbatches": microbatches,
        "recompute": "stage" if recompute else "none",
        "cuts": "4",
        "copies": False,
    }
    train(tmp_path / "run", given, 2, **how)
    assert KeptSamples.most == dict.fromkeys((0, 1), 4 * (16 // microbatches if recompute else 16))


# -- what cannot be done ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "options", "why"),
    [
        (8, {}, "7 layers cannot be cut into 8 parts"),
        (3, {"stages": 2}, r"stages=2 does not divide the workers \(3\)"),
        (2, {"cuts": "2,3"}, "give 1 of 1, 2, 3, 4, 5, 6, in rising order"),
        (2, {"cuts": "x"}, "cuts names 'x', which is no module of the model"),
        (2, {"costs": "1"}, "must be 2 numbers above 0"),
        (2, {"chunks": 2}, "chunks=2 is for order=interleaved"),
        (1, {"chunks": 2, "order": "interleaved"}, "needs several stages"),
        (2, {"order": "zigzag"}, "order"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, workers: int, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", task(), workers, **options)


def test_models_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    own = task(loss=None, step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(BadInput, match="pipeline needs outputs and targets apart"):
        train(tmp_path / "run", own, 2)
    normed = task(lambda: nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4)).double())
    with pytest.raises(BadInput, match="recompute would count every batch twice in the running statistics of 1"):
        train(tmp_path / "run", normed, 2, recompute="stage")


class Odd(nn.Module):
    """A layer whose output depends on the number of times that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x[:, :5] if self.calls == 6 and self.training else x


def test_a_stage_that_fails_or_changes_its_shape_is_named(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(12, 8), Odd(), nn.Linear(8, 4)).double()

    with pytest.raises(
        RunFailed, match=r"output of worker 0's stage changes its shape between microbatches of 2 samples"
    ):
        train(tmp_path / "run", task(model), 2, cuts="2", world="local", batch_size=16)


# -- deaths -----------------------------------------------------------------------------------------------------------
def crashing(*faults: dict[str, Any]) -> dict[str, Any]:
    crashes = [{"kind": "crash", **fault} for fault in faults]
    return {"faults": crashes, "compute": {"seconds_per_sample": 1e-3}, "detection": 1e-3}


def test_without_copies_a_dead_stage_ends_the_run_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no worker has stage 1 of the model any more; resume the run"):
        train(tmp_path / "run", task(), 2, cluster=crashing({"worker": 1, "at": 0.05}), copies=False)


def test_two_neighbours_that_die_end_the_run_with_a_line(tmp_path: Path) -> None:
    both = crashing({"worker": 2, "at": 0.05}, {"worker": 3, "at": 0.05})
    with pytest.raises(RunFailed, match=r"no worker has stage 2 .*, and neither has the one that kept its copy"):
        train(tmp_path / "run", task(), 4, cluster=both)
    assert train(tmp_path / "two", task(), 8, stages=4, cluster=both).summary.samples == 140


@pytest.mark.parametrize("seed", range(40))
def test_dead_stages_change_nothing_beyond_rounding(plain: nn.Module, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    stages = chance.choice([2, 3, 4])
    victims = chance.sample(range(stages), chance.choice([1, 1, 2]))
    lasts = {} if chance.random() < 0.5 else {"lasts": chance.choice([0.005, 0.05])}
    faults = [{"worker": victim, "at": chance.uniform(0.0, 0.16)} | lasts for victim in victims]
    lost = not lasts and len(victims) == 2 and abs(victims[0] - victims[1]) == 1
    how = {"order": chance.choice(["gpipe", "1f1b", "zero-bubble"]), "microbatches": chance.choice([2, 5])}
    if lost or (lasts and len(victims) == 2):
        return  # both that have a stage may be gone
    result = train(tmp_path / "run", task(), stages, cluster=crashing(*faults), **how)
    assert result.summary.samples == 140
    assert difference(result.model, plain) < TOLERANCE


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_stage_that_is_killed_changes_nothing_beyond_rounding(tmp_path: Path, worker: int, restart: bool) -> None:
    given = task(epochs=100)
    undisturbed = train(tmp_path / "undisturbed", given, 3)
    killing = Killing(f"tt-worker-{worker}", lambda record: isinstance(record, Step) and record.step >= 40)
    result = train(tmp_path / "run", given, 3, world="local", restart=restart, listeners=[killing])
    assert killing.killed.is_set() and result.summary.samples == 7000
    assert difference(result.model, undisturbed.model) < 1e-9


@pytest.mark.parametrize("how", [{"workers": 2}, {"workers": 3}, {"workers": 4, "stages": 2}])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_copies_of_processes_have_the_bits_of_what_they_copy(
    tmp_path: Path, clip: float | None, how: dict[str, int]
) -> None:
    """They read gradients where their owners have them, and take their steps later."""
    given = task(clip_norm=clip, optimizer=tt.optimizer("adam", lr=0.01))
    result = train(tmp_path / "run", given, world="local", threads=1, **how)
    found = load_file(max((result.out / "checkpoints").glob("step-*")) / "workers.safetensors")
    by_name: dict[str, list[Tensor]] = {}
    for name, tensor in found.items():
        by_name.setdefault(name.partition("/")[2], []).append(tensor)
    trained = {name: tensors for name, tensors in by_name.items() if name.startswith(("parameters/", "optimizer/"))}
    assert len(trained) == 8 * 5  # with two moments, and steps as torch and as we count them
    workers = how["workers"]
    assert sum(map(len, trained.values())) == len(trained) * 2 * workers // how.get("stages", workers)
    for name, tensors in trained.items():
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), name


def test_a_run_whose_worker_died_is_resumed_with_all_stages(tmp_path: Path) -> None:
    """The one that is gone has saved nothing of its own; what it needs is in the neighbour's copy."""
    given = task(optimizer=tt.optimizer("adam", lr=0.01), epochs=4)
    whole = train(tmp_path / "whole", given, 3)
    train(tmp_path / "cut", given, 3, cluster=crashing({"worker": 0, "at": 0.05}), epochs=2)
    resumed = tt.train(given, resume=tmp_path / "cut", epochs=4, progress=False)
    assert resumed.summary.samples == 280
    assert difference(resumed.model, whole.model) < TOLERANCE


def test_the_last_snapshot_counts_though_a_worker_died_that_had_a_part_of_it(tmp_path: Path) -> None:
    faults = crashing({"worker": 6, "at": 0.0486}) | {"detection": 0.02}
    result = train(tmp_path / "run", task(), 8, stages=4, microbatches=2, order="gpipe", cluster=faults)
    assert result.summary.samples == 140


# -- what an attacker found -------------------------------------------------------------------------------------------
def twice() -> nn.Sequential:
    act, same = nn.Tanh(), nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(12, 8), act, same, act, same, nn.Linear(8, 4)).double()


def test_a_layer_may_be_there_twice(tmp_path: Path) -> None:
    for cuts in ("2", "3", "4"):
        result = train(tmp_path / cuts, task(twice), 2, cuts=cuts)
        reference = train(tmp_path / f"plain{cuts}", task(twice), 1, "allreduce")
        assert difference(result.model, reference.model) < TOLERANCE


class Averages(nn.Module):
    """A layer that gives its buffer another tensor in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


def test_buffers_may_be_replaced_by_others(tmp_path: Path) -> None:
    given = task(lambda: nn.Sequential(Averages(), Averages()).double())
    result = train(tmp_path / "run", given, 2, microbatches=1)
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE


def normed() -> nn.Sequential:
    layers = [[nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()] for _ in range(3)]
    return nn.Sequential(*itertools.chain(*layers)).double()


@pytest.mark.parametrize("seed", range(12))
def test_a_replacement_takes_over_nothing_of_a_round_that_was_given_up(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    fault = {"worker": chance.randrange(3), "at": chance.uniform(0.01, 0.12), "lasts": chance.choice([0.002, 0.05])}
    undisturbed = train(tmp_path / "undisturbed", task(normed), 3, microbatches=5)
    result = train(tmp_path / "run", task(normed), 3, microbatches=5, cluster=crashing(fault))
    assert difference(result.model, undisturbed.model) < TOLERANCE


def test_a_crash_while_something_is_recomputed_leaves_gradients_on(plain: nn.Module, tmp_path: Path) -> None:
    for seed in range(6):
        fault = {"worker": seed % 2, "at": 0.004 + 0.011 * seed, "lasts": 0.001}
        how = {"recompute": "stage", "order": "gpipe", "microbatches": 2}
        result = train(tmp_path / str(seed), task(), 2, cluster=crashing(fault), **how)
        assert torch.is_grad_enabled() and difference(result.model, plain) < TOLERANCE


def test_what_stages_would_leave_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="pipeline does not know grow; leave it out"):
        train(tmp_path / "run", task(), 2, grow=True, schedule="step")
    with pytest.raises(BadInput, match=r"the worker of stage 1 has nothing to train \(cuts=1,2\)"):
        train(tmp_path / "run", task(), 3, cuts="1,2", copies=False)
    with pytest.raises(RunFailed, match=r"a tensor of the batch has 3 rows where the batch has 20 samples"):
        labels = task(collate=lambda items: (torch.stack([x for x, _ in items]), {"rare": torch.zeros(3)}))
        train(tmp_path / "run", dataclasses.replace(labels, loss=lambda out, target: out.mean()), 2, steps=1)
