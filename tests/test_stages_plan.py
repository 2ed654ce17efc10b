"""Profiles of layers, memory from shapes, and the planner against every plan there is."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torrential.errors import BadInput
from torrential.stages.memory import estimate_activations, peak_activation_bytes
from torrential.stages.plan import PipelinePlan, TwoLevelNetwork, plan_pipeline
from torrential.stages.profile import LayerProfile, blocks, load_profile, profile_task, save_profile
from torrential.stages.rehearse import StageCosts, rehearse_schedule
from torrential.tasks import load_task


def layer(seconds: float, activation: int, weights: int) -> LayerProfile:
    return LayerProfile(
        name="",
        kind="",
        forward_seconds=seconds / 3,
        backward_seconds=seconds - seconds / 3,
        recompute_seconds=0,
        activation_bytes=activation,
        parameter_bytes=weights,
    )


# -- every plan, one by one --------------------------------------------------------------------------------------------
Cut = tuple[int, int, int]  # first layer, past the last, components


def cuts(first: int, stop: int, components: int) -> Iterator[list[Cut]]:
    """Every way to cut layers into stages on all components."""
    yield [(first, stop, components)]
    for split in range(first + 1, stop):
        for here in range(1, components):
            for onward in cuts(split, stop, components - here):
                yield [(first, split, here), *onward]


def cost(layers: list[LayerProfile], network: TwoLevelNetwork, limit: float, level: int, pipe: list[Cut]) -> float:
    """The seconds between minibatches of the best plan with these cuts, by trying all plans inside hosts. `limit` is
    looked at by `fits`, at level 1 only where there is one host."""
    bandwidth = network.inside_bytes_per_second if level == 1 else network.between_bytes_per_second
    slowest = 0.0
    for first, stop, replicas in pipe:
        if level == 1:
            inner = sum(one.seconds for one in layers[first:stop])
        else:
            inside = cuts(first, stop, network.workers_per_host)
            inner = min(cost(layers, network, limit, 1, inner_pipe) for inner_pipe in inside)
        sync = 2 * (replicas - 1) * sum(one.parameter_bytes for one in layers[first:stop]) / bandwidth
        slowest = max(slowest, max(inner, sync) / replicas)
        if stop < len(layers) and (first, stop, replicas) != pipe[-1]:
            slowest = max(slowest, 2 * layers[stop - 1].activation_bytes / bandwidth)
    return slowest


def fits(layers: list[LayerProfile], limit: float, pipe: list[Cut]) -> bool:
    for place, (first, stop, replicas) in enumerate(pipe):
        workers = sum(count for _, _, count in pipe[place:])
        kept = sum(one.parameter_bytes + one.activation_bytes for one in layers[first:stop])
        if math.ceil(workers / replicas) * kept > limit:
            return False
    return True


def draw(chance: random.Random, most: int = 7) -> list[LayerProfile]:
    count = chance.randint(1, most)
    return [layer(chance.uniform(0.1, 3), chance.randint(0, 400), chance.randint(0, 400)) for _ in range(count)]


def check_described(plan: PipelinePlan, layers: list[LayerProfile], network: TwoLevelNetwork) -> None:
    assert plan.workers == network.workers
    assert [stage.first for stage in plan.stages] == [0, *(stage.stop for stage in plan.stages[:-1])]
    assert plan.stages[-1].stop == len(layers)
    assert max(stage.seconds for stage in plan.stages) <= plan.seconds


def test_the_planner_equals_exhaustive_search() -> None:
    """T15.1: 200 random profiles, at most 7 layers and 4 workers."""
    for seed in range(200):
        chance = random.Random(seed)
        layers = draw(chance)
        network = TwoLevelNetwork(
            workers_per_host=chance.randint(1, 4), inside_bytes_per_second=chance.choice([50, 200, 1000, math.inf])
        )
        plan = plan_pipeline(layers, network)
        every = [*cuts(0, len(layers), network.workers)]
        assert plan.seconds == pytest.approx(min(cost(layers, network, 0, 1, pipe) for pipe in every), rel=1e-12)
        check_described(plan, layers, network)
        chosen = [(stage.first, stage.stop, stage.replicas) for stage in plan.stages]
        assert cost(layers, network, 0, 1, chosen) == pytest.approx(plan.seconds, rel=1e-12)


def test_two_levels_equal_exhaustive_search() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        layers = draw(chance, most=5)
        network = TwoLevelNetwork(
            workers_per_host=chance.randint(1, 3),
            hosts=chance.randint(2, 3),
            inside_bytes_per_second=chance.choice([200, 1000, math.inf]),
            between_bytes_per_second=chance.choice([50, 200, 1000]),
        )
        plan = plan_pipeline(layers, network)
        every = [*cuts(0, len(layers), network.hosts)]
        assert plan.seconds == pytest.approx(min(cost(layers, network, 0, 2, pipe) for pipe in every), rel=1e-12)
        check_described(plan, layers, network)


def test_memory_limits_equal_exhaustive_search() -> None:
    refused = 0
    for seed in range(150):
        chance = random.Random(seed)
        layers = draw(chance)
        network = TwoLevelNetwork(workers_per_host=chance.randint(1, 4), inside_bytes_per_second=200)
        limit = chance.choice([500, 1000, 2000])
        costs = [
            cost(layers, network, limit, 1, p) for p in cuts(0, len(layers), network.workers) if fits(layers, limit, p)
        ]
        if not costs:
            refused += 1
            with pytest.raises(BadInput, match=r"no plan for \d workers keeps within"):
                plan_pipeline(layers, network, memory_limit=limit)
            continue
        plan = plan_pipeline(layers, network, memory_limit=limit)
        assert plan.seconds == pytest.approx(min(costs), rel=1e-12)
        assert max(stage.memory_bytes for stage in plan.stages) <= limit
    assert 20 < refused < 130


def test_memory_limits_of_two_levels_are_kept() -> None:
    """A host's inner stages keep what is in flight in the whole pipeline, not in their host alone."""
    layers = [layer(1, 10, 10) for _ in range(8)]
    network = TwoLevelNetwork(workers_per_host=2, hosts=2, inside_bytes_per_second=1e9, between_bytes_per_second=1e9)
    for limit in (60, 80, 100, 120, 160, 200):
        try:
            plan = plan_pipeline(layers, network, memory_limit=limit)
        except BadInput:
            assert limit < 80  # four stages keep (2, 2, 2, 2) layers for (4, 3, 2, 1) minibatches, or (1, 2, 2, 3)
            continue
        assert max(stage.memory_bytes for stage in plan.stages) <= limit


def test_straight_pipelines_are_the_best_of_theirs() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        layers = draw(chance)
        stages = chance.randint(1, min(4, len(layers)))
        network = TwoLevelNetwork(workers_per_host=stages, inside_bytes_per_second=200)
        plan = plan_pipeline(layers, network, replicate=False)
        straight = [pipe for pipe in cuts(0, len(layers), stages) if all(count == 1 for _, _, count in pipe)]
        assert plan.seconds == pytest.approx(min(cost(layers, network, 0, 1, pipe) for pipe in straight), rel=1e-12)
        assert [stage.replicas for stage in plan.stages] == [1] * stages
        assert [stage.in_flight for stage in plan.stages] == [*range(stages, 0, -1)]


def test_extreme_profiles() -> None:
    """T15.2: huge weights give a straight pipeline, huge activations plain data parallelism."""
    network = TwoLevelNetwork(workers_per_host=4, inside_bytes_per_second=1e6)
    heavy = plan_pipeline([layer(1, 10, 10**9) for _ in range(4)], network)
    assert [(stage.first, stage.stop, stage.replicas) for stage in heavy.stages] == [(i, i + 1, 1) for i in range(4)]
    assert heavy.minibatches_in_flight == 4
    wide = plan_pipeline([layer(1, 10**9, 10) for _ in range(4)], network)
    assert [(stage.first, stage.stop, stage.replicas) for stage in wide.stages] == [(0, 4, 4)]
    assert wide.seconds == pytest.approx(1) and wide.minibatches_in_flight == 1


def test_convolutions_are_replicated_and_large_layers_are_not() -> None:
    """The shape of PipeDream's plan for VGG-16, 15-1: dense layers with most of the weights on a worker of their own."""
    layers = [*(layer(1, 1000, 1000) for _ in range(15)), layer(1, 10, 10**7)]
    plan = plan_pipeline(layers, TwoLevelNetwork(workers_per_host=16, inside_bytes_per_second=1e5))
    assert [stage.replicas for stage in plan.stages] == [15, 1]
    assert [stage.in_flight for stage in plan.stages] == [2, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": []}, "there is no layer"),
        ({"workers_per_host": 0}, "workers_per_host must be at least 1 (got 0)"),
        ({"inside_bytes_per_second": 0.0}, "inside_bytes_per_second must be positive (got 0.0)"),
        ({"memory_limit": -1}, "the memory limit must be positive (got -1)"),
        ({"workers_per_host": 3, "replicate": False}, "2 layers cannot be cut into 3 stages; use at most 2"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, object], said: str) -> None:
    given = {"layers": [layer(1, 1, 1)] * 2, "workers_per_host": 2, "inside_bytes_per_second": 1.0} | change
    network = TwoLevelNetwork(
        workers_per_host=given["workers_per_host"], inside_bytes_per_second=given["inside_bytes_per_second"]
    )
    more = {key: given[key] for key in ("memory_limit", "replicate") if key in given}
    with pytest.raises(BadInput) as caught:
        plan_pipeline(given["layers"], network, **more)
    assert said in str(caught.value)


# -- memory ------------------------------------------------------------------------------------------------------------
def alexnet() -> nn.Module:
    """AlexNet as the slides count it: in its first two blocks ReLU has memory of its own, elsewhere it is in place."""
    return nn.Sequential(
        *(nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(), nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5)),
        *(nn.Conv2d(96, 256, 5, padding=2, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5)),
        *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 384, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2), nn.Flatten()),
        *(nn.Linear(9216, 4096), nn.ReLU(inplace=True), nn.Dropout(inplace=True)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(inplace=True)),
        nn.Linear(4096, 1000),
    )


def test_alexnet_keeps_781_megabytes_at_batch_128() -> None:
    kept = estimate_activations(alexnet, torch.empty(128, 3, 227, 227, device="meta"))
    assert sum(one.activation_bytes for one in kept) == 128 * 4 * 1_526_595 == 781_616_640
    assert kept[0].activation_bytes == 128 * 4 * 227 * 227 * 3
    convolutions = [one.activation_bytes // 512 for one in kept if one.kind == "Conv2d"]
    assert convolutions == [55 * 55 * 96, 27 * 27 * 256, 13 * 13 * 384, 13 * 13 * 384, 13 * 13 * 256]
    with torch.device("meta"):
        assert sum(p.numel() for p in alexnet().parameters()) == 60_965_224


def test_a_model_that_looks_at_values_cannot_be_estimated() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(BadInput, match="does not run on shapes alone: .*a forward pass that looks at values"):
        estimate_activations(Looks, torch.ones(2))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_peak_activations_scale_as_gpipe_says(stages: int, microbatches: int) -> None:
    """T16.3: N + (L/K)(N/M) with recomputation, from the microbatches that a rehearsal finds alive."""
    samples, count = 16, 8
    live = rehearse_schedule("gpipe", StageCosts([1] * stages, [2] * stages), microbatches).live
    one = samples // microbatches  # a layer's activation of a microbatch, a byte for each sample
    kept = [one] * (1 + count // stages)
    for stage in range(stages):
        peak = peak_activation_bytes(kept, live[stage], recompute=True)
        assert peak == samples + count // stages * samples // microbatches
        assert peak_activation_bytes(kept, live[stage]) == samples * (1 + count // stages)


# -- profiles ----------------------------------------------------------------------------------------------------------
def test_a_profile_of_a_sequential_model(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = profile_task(load_task("digits-mlp"), 16, runs=2, progress=lambda done, all: told.append((done, all)))
    assert [one.kind for one in found if one.parameter_bytes] == ["Linear"] * 3
    assert told == [(done, len(found)) for done in range(len(found) + 1)]
    for one in found:
        assert one.seconds > 0 and one.recompute_seconds > 0
        assert one.activation_bytes % (16 * 4) == 0
    assert found[-1].activation_bytes == 16 * 4 * 10
    save_profile(found, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == found


class Attending(nn.Module):
    """Blocks in a list, one used twice, keyword arguments, an output in a dict, and a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(inplace=True)])
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(24, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for module in self.layers:
                x = module(x)
        x, _ = self.attend(query=x, key=x, value=x, need_weights=False)
        return self.head(x)


def test_a_profile_of_named_blocks() -> None:
    import torrential as tt

    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 8), torch.randint(2, (12,)))
    task = tt.Task(model=Attending, loss=nn.functional.cross_entropy, train=data, test=data, batch_size=4, name="t")
    found = profile_task(task, runs=1)
    assert [one.name for one in found] == ["layers.0", "layers.1", "attend", "head.0", "head.1"]
    assert [*blocks(Attending())] == [one.name for one in found]
    sizes = {one.name: one.activation_bytes for one in found}
    assert sizes["layers.0"] == 2 * 4 * 3 * 8 * 4  # called twice
    assert sizes["attend"] == 4 * 3 * 8 * 4 and sizes["head.1"] == 4 * 2 * 4
    chosen = profile_task(task, 2, layers=["attend", "head"], runs=1)
    assert [(one.name, one.activation_bytes) for one in chosen] == [("attend", 2 * 96), ("head", 2 * 8)]
    with pytest.raises(BadInput, match=r"no module named 'tail'; its blocks are: layers\.0"):
        profile_task(task, layers=["tail"])


def test_a_profile_leaves_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    profile_task(load_task("digits-mlp"), 2, runs=1)
    assert torch.get_num_threads() == before


def test_bad_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="batch_size must be at least 1"):
        profile_task(load_task("digits-mlp"), 0)
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(BadInput, match="is no profile"):
        load_profile(tmp_path / "other.json")
    with pytest.raises(BadInput, match="No such file"):
        load_profile(tmp_path / "none.json")
