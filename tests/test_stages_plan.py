"""Profiles of layers, memory from shapes, and the planner against every plan there is."""

from __future__ import annotations

import itertools
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
        forward_seconds=seconds / 2,
        backward_seconds=seconds / 2,
        recompute_seconds=0,
        activation_bytes=activation,
        parameter_bytes=weights,
    )


# -- every plan, one by one --------------------------------------------------------------------------------------------
Cut = tuple[int, int, int]  # first layer, past the last, replicas


def cuts(first: int, stop: int, components: int) -> Iterator[list[Cut]]:
    """Every way to cut layers into stages on all components."""
    yield [(first, stop, components)]
    for split in range(first + 1, stop):
        for here in range(1, components):
            for onward in cuts(split, stop, components - here):
                yield [(first, split, here), *onward]


def seconds_of(layers: list[LayerProfile], pipe: list[Cut], compute: list[float], bandwidth: float) -> float:
    """The slowest stage or link, given what each stage takes without its replicas."""
    slowest = 0.0
    for (first, stop, replicas), alone in zip(pipe, compute, strict=True):
        sync = 2 * (replicas - 1) * sum(one.parameter_bytes for one in layers[first:stop]) / bandwidth
        slowest = max(slowest, max(alone, sync) / replicas)
    links = [2 * layers[stop - 1].activation_bytes / bandwidth for _, stop, _ in pipe[:-1]]
    return max(slowest, *links, 0.0)


def every_plan(layers: list[LayerProfile], network: TwoLevelNetwork) -> Iterator[tuple[float, list[Cut]]]:
    """Every plan there is: its seconds, and its stages with all their replicas."""
    for outer in cuts(0, len(layers), network.hosts):
        inside = [[*cuts(first, stop, network.workers_per_host)] for first, stop, _ in outer]
        for inner in itertools.product(*inside):
            compute = []
            for pipe in inner:
                alone = [sum(one.seconds for one in layers[first:stop]) for first, stop, _ in pipe]
                compute.append(seconds_of(layers, pipe, alone, network.inside_bytes_per_second))
            flat = [
                (first, stop, replicas * hosts)
                for pipe, (_, _, hosts) in zip(inner, outer, strict=True)
                for first, stop, replicas in pipe
            ]
            yield seconds_of(layers, outer, compute, network.between_bytes_per_second), flat


def memory(layers: list[LayerProfile], pipe: list[Cut], microbatches: int | None = None) -> int:
    """What the worker with the most to keep keeps: under PipeDream, or under 1F1B with so many microbatches."""
    most = 0
    for place, (first, stop, replicas) in enumerate(pipe):
        in_flight = math.ceil(sum(count for _, _, count in pipe[place:]) / replicas)
        weights = sum(one.parameter_bytes for one in layers[first:stop])
        activations = sum(one.activation_bytes for one in layers[first:stop])
        if microbatches is None:
            kept = in_flight * (weights + activations)
        else:
            kept = weights + math.ceil(min(in_flight, microbatches) * activations / microbatches)
        most = max(most, kept)
    return most


def draw(chance: random.Random, most: int = 7) -> list[LayerProfile]:
    """Layers with seconds in eighths, whose sums are exact."""
    count = chance.randint(1, most)
    return [layer(chance.randint(1, 24) / 8, chance.randint(0, 400), chance.randint(0, 400)) for _ in range(count)]


def draw_network(chance: random.Random, hosts: int, each: int) -> TwoLevelNetwork:
    return TwoLevelNetwork(
        workers_per_host=chance.randint(1, each),
        hosts=chance.randint(1, hosts),
        inside_bytes_per_second=chance.choice([50, 200, 1000, math.inf]),
        between_bytes_per_second=chance.choice([50, 200, 1000]),
    )


def cut_of(plan: PipelinePlan) -> list[Cut]:
    return [(stage.first, stage.stop, stage.replicas) for stage in plan.stages]


@pytest.mark.parametrize(("profiles", "most", "hosts", "each"), [(200, 7, 1, 4), (60, 5, 3, 3)])
def test_the_planner_equals_exhaustive_search(profiles: int, most: int, hosts: int, each: int) -> None:
    """T15.1: 200 random profiles of at most 7 layers on at most 4 workers; and others on up to 3 hosts of 3 workers."""
    for seed in range(profiles):
        chance = random.Random(seed)
        layers, network = draw(chance, most), draw_network(chance, hosts, each)
        plan = plan_pipeline(layers, network)
        every = [*every_plan(layers, network)]
        assert plan.seconds == min(seconds for seconds, _ in every)
        assert (plan.seconds, cut_of(plan)) in every
        assert max(stage.memory_bytes for stage in plan.stages) == memory(layers, cut_of(plan))
        assert max(stage.seconds for stage in plan.stages) <= plan.seconds


@pytest.mark.parametrize(("profiles", "most", "hosts", "each"), [(150, 7, 1, 4), (60, 5, 3, 2)])
def test_memory_limits_equal_exhaustive_search(profiles: int, most: int, hosts: int, each: int) -> None:
    refused = 0
    for seed in range(profiles):
        chance = random.Random(seed)
        layers, network = draw(chance, most), draw_network(chance, hosts, each)
        limit = chance.choice([500, 1000, 2000])
        fitting = [seconds for seconds, pipe in every_plan(layers, network) if memory(layers, pipe) <= limit]
        if not fitting:
            refused += 1
            with pytest.raises(BadInput, match=r"no plan for \d workers keeps within"):
                plan_pipeline(layers, network, memory_limit=limit)
            continue
        plan = plan_pipeline(layers, network, memory_limit=limit)
        assert plan.seconds == min(fitting)
        assert memory(layers, cut_of(plan)) <= limit
    assert profiles / 10 < refused < profiles * 0.9


def test_memory_limits_of_1f1b_equal_exhaustive_search() -> None:
    planned = 0
    for seed in range(100):
        chance = random.Random(seed)
        layers, network, microbatches = draw(chance), draw_network(chance, 2, 2), chance.randint(1, 6)
        given = {"memory_limit": 700, "schedule": "1f1b", "microbatches": microbatches}
        fitting = [s for s, pipe in every_plan(layers, network) if memory(layers, pipe, microbatches) <= 700]
        if fitting:
            planned += 1
            plan = plan_pipeline(layers, network, **given)
            assert plan.seconds == min(fitting)
            assert max(stage.memory_bytes for stage in plan.stages) == memory(layers, cut_of(plan), microbatches)
        else:
            with pytest.raises(BadInput):
                plan_pipeline(layers, network, **given)
    assert 20 < planned < 90


@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "pipedream"])
def test_what_is_planned_to_be_kept_is_what_a_rehearsal_keeps(schedule: str, microbatches: int) -> None:
    plan = plan_pipeline(
        [layer(1, 10, 10)] * 4,
        TwoLevelNetwork(workers_per_host=4),
        replicate=False,
        schedule=schedule,
        microbatches=microbatches,
    )
    count = 8 if schedule == "pipedream" else microbatches  # which are minibatches, as many as come
    done = rehearse_schedule(schedule, StageCosts([1] * 4, [2] * 4), count)
    assert [stage.live for stage in plan.stages] == done.live


def test_straight_pipelines_are_the_best_of_theirs() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        layers = draw(chance)
        stages = chance.randint(1, min(4, len(layers)))
        network = TwoLevelNetwork(workers_per_host=stages, inside_bytes_per_second=200)
        plan = plan_pipeline(layers, network, replicate=False)
        every = every_plan(layers, network)
        assert plan.seconds == min(seconds for seconds, pipe in every if all(count == 1 for _, _, count in pipe))
        assert [stage.replicas for stage in plan.stages] == [1] * stages
        assert [stage.live for stage in plan.stages] == [*range(stages, 0, -1)]


def slowest(layers: list[LayerProfile], ends: list[int], speed: float) -> float:
    """The seconds of the slowest stage or cut."""
    computed = [sum(each.seconds for each in layers[a:b]) for a, b in itertools.pairwise(ends)]
    return max(computed + [2 * layers[end - 1].activation_bytes / speed for end in ends[1:-1]])


def sent(layers: list[LayerProfile], ends: list[int]) -> int:
    """The bytes that cross all cuts."""
    return sum(layers[end - 1].activation_bytes for end in ends[1:-1])


def test_of_equally_fast_cuts_the_one_that_sends_the_least_is_chosen() -> None:
    """The last layer is the bottleneck wherever the others are cut."""
    layers = [layer(1.0, activation, 0) for activation in (900, 50, 700)] + [layer(9.0, 10, 0)]
    plan = plan_pipeline(layers, TwoLevelNetwork(workers_per_host=3), replicate=False)
    assert [stage.first for stage in plan.stages] == [0, 2, 3] and plan.seconds == 9.0
    chance = random.Random(7)
    for _ in range(100):
        drawn = draw(chance)
        stages = chance.randint(1, len(drawn))
        network = TwoLevelNetwork(workers_per_host=stages, inside_bytes_per_second=chance.choice((1.0, 1e3, 1e9)))
        plan = plan_pipeline(drawn, network, replicate=False)
        ends = [[0, *cuts, len(drawn)] for cuts in itertools.combinations(range(1, len(drawn)), stages - 1)]

        times = [slowest(drawn, each, network.inside_bytes_per_second) for each in ends]
        quick = [each for each, took in zip(ends, times, strict=True) if took <= min(times) * (1 + 1e-12)]
        chosen = [*(stage.first for stage in plan.stages), len(drawn)]
        assert plan.seconds == pytest.approx(min(times))
        assert sent(drawn, chosen) == min(sent(drawn, each) for each in quick)


def test_extreme_profiles() -> None:
    """T15.2: huge weights give a straight pipeline, huge activations plain data parallelism."""
    network = TwoLevelNetwork(workers_per_host=4, inside_bytes_per_second=1e6)
    heavy = plan_pipeline([layer(1, 10, 10**9) for _ in range(4)], network)
    assert cut_of(heavy) == [(i, i + 1, 1) for i in range(4)]
    assert heavy.minibatches_in_flight == 4
    wide = plan_pipeline([layer(1, 10**9, 10) for _ in range(4)], network)
    assert cut_of(wide) == [(0, 4, 4)]
    assert wide.seconds == pytest.approx(1) and wide.minibatches_in_flight == 1


def test_convolutions_are_replicated_and_large_layers_are_not() -> None:
    """The shape of PipeDream's plan for VGG-16, 15-1: a dense layer with most of the weights on a worker of its own."""
    layers = [*(layer(1, 1000, 1000) for _ in range(15)), layer(1, 10, 10**7)]
    plan = plan_pipeline(layers, TwoLevelNetwork(workers_per_host=16, inside_bytes_per_second=1e5))
    assert [stage.replicas for stage in plan.stages] == [15, 1]
    assert [stage.live for stage in plan.stages] == [2, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": []}, "there is no layer"),
        ({"workers_per_host": 0}, "workers_per_host must be at least 1 (got 0)"),
        ({"inside_bytes_per_second": 0.0}, "inside_bytes_per_second must be positive (got 0.0)"),
        ({"memory_limit": -1}, "the memory limit must be positive (got -1)"),
        ({"microbatches": 0}, "microbatches must be at least 1 (got 0)"),
        ({"schedule": "interleaved"}, "memory cannot be planned under schedule 'interleaved'; use one of pipedream"),
        ({"workers_per_host": 3, "replicate": False}, "2 layers cannot be cut into 3 stages; use at most 2"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, object], said: str) -> None:
    given = {"layers": [layer(1, 1, 1)] * 2, "workers_per_host": 2, "inside_bytes_per_second": 1.0} | change
    network = TwoLevelNetwork(
        workers_per_host=given["workers_per_host"], inside_bytes_per_second=given["inside_bytes_per_second"]
    )
    more = {key: given[key] for key in ("memory_limit", "replicate", "schedule", "microbatches") if key in given}
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

    with pytest.raises(BadInput, match=r"does not run on shapes alone: .*a forward pass that looks at values"):
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
    assert told == [(done, 3) for done in range(4)]  # one that warms up, and two
    for one in found:
        assert one.forward_seconds > 0 and one.recompute_seconds > 0
        assert one.activation_bytes % (16 * 4) == 0
    assert found[-1].activation_bytes == 16 * 4 * 10
    assert found[0].kind == "Standard" and found[0].backward_seconds == 0  # no gradient flows into the data
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
