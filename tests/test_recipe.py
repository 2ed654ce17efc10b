"""The large-minibatch recipe: rates by samples seen, and that its pieces do to training what the paper says."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.config import Recipe
from torrential.data.deal import Deal
from torrential.errors import BadInput
from torrential.opening import open_run
from torrential.optim.recipe import describe, make_recipe, without_effect
from torrential.optim.schedule import Schedule
from torrential.records import Event
from torrential.resolve import RunRequest
from torrential.worlds.base import Job

SAMPLES = 1000


def schedule(epochs: int = 90, base_batch: int = 10, **options: object) -> Schedule:
    return Schedule(make_recipe(options), 0.1, base_batch, SAMPLES, epochs * SAMPLES)


# -- rates --------------------------------------------------------------------------------------------------------
def test_the_recipe_of_the_paper_gives_its_rates() -> None:
    goyal = schedule(recipe="goyal")
    joined = 320  # 32 times the base batch
    assert goyal.rate(0, joined) == 0.1
    assert goyal.rate(5 * SAMPLES // 2, joined) == pytest.approx((0.1 + 3.2) / 2)
    steps = [goyal.rate(s, joined) for s in range(0, 5 * SAMPLES, joined)]
    assert all(b - a == pytest.approx(steps[1] - steps[0]) for a, b in itertools.pairwise(steps))
    assert goyal.rate(5 * SAMPLES, joined) == pytest.approx(3.2)
    for epoch, rate in ((29.9, 3.2), (30.1, 0.32), (59.9, 0.32), (60.1, 0.032), (80.1, 0.0032)):
        assert goyal.rate(int(epoch * SAMPLES), joined) == pytest.approx(rate)


@pytest.mark.parametrize(("scaling", "times"), [("none", 1), ("linear", 16), ("sqrt", 4), ("loss", 1)])
def test_scaling(scaling: str, times: float) -> None:
    one = schedule(scaling=scaling)
    assert one.rate(0, 160) == pytest.approx(0.1 * times)
    assert one.loss_scale(160) == (16 if scaling == "loss" else 1)


def test_constant_warmup_stays_at_the_base_rate() -> None:
    one = schedule(recipe="goyal", warmup_kind="constant")
    assert {one.rate(s, 320) for s in range(0, 5 * SAMPLES, 320)} == {0.1}
    assert one.rate(5 * SAMPLES, 320) == pytest.approx(3.2)


def test_cosine_and_poly_end_at_zero_and_begin_after_warmup() -> None:
    for kind, halfway in (("cosine", 0.5), ("poly", 0.25)):
        one = schedule(epochs=10, schedule=kind, warmup=2.0)
        assert one.rate(2 * SAMPLES, 10) == pytest.approx(0.1)
        assert one.rate(6 * SAMPLES, 10) == pytest.approx(0.1 * halfway)
        assert one.rate(10 * SAMPLES, 10) == pytest.approx(0.0)


def test_a_batch_grows_where_the_rate_would_fall_until_a_tenth_of_the_data() -> None:
    grown = schedule(epochs=10, schedule="step", factor=0.2, milestones=[0.2, 0.4, 0.6], grow=True)
    decayed = schedule(epochs=10, schedule="step", factor=0.2, milestones=[0.2, 0.4, 0.6])
    sizes = [grown.growth(e * SAMPLES, 4) for e in (0, 3, 5, 7)]
    assert sizes == [1, 5, 25, 25]  # 4 x 125 would be half of the data
    for epoch in (0, 3, 5, 7):
        seen = epoch * SAMPLES
        noise = grown.rate(seen, 4) / grown.growth(seen, 4)  # eta / B is the same
        assert noise == pytest.approx(decayed.rate(seen, 4))


@pytest.mark.parametrize(
    ("joined", "says"),
    [
        (4, ["batch × 5 at epochs 2, 4", "rate × 0.2 at epochs 6 (batch grows no more: it would pass a tenth"]),
        (40, ["rate × 0.2 at epochs 2, 4, 6 (batch grows nowhere: it would pass a tenth of the data, 100 samples)"]),
    ],
)
def test_what_is_said_of_growth_is_what_happens(joined: int, says: list[str]) -> None:
    one = schedule(epochs=10, schedule="step", factor=0.2, milestones=[0.2, 0.4, 0.6], grow=True)
    said = describe(one.recipe, one, joined, nn.Linear(1, 1)).split("; ")
    assert len(said) == len(says) and all(part.startswith(start) for part, start in zip(said, says, strict=True))


def test_options_are_exceptions_to_a_recipe() -> None:
    assert make_recipe({"recipe": "goyal", "scaling": "sqrt", "milestones": "0.5,0.75"}) == Recipe(
        recipe="goyal",
        scaling="sqrt",
        schedule="step",
        milestones=(0.5, 0.75),
        decay_norms=False,
        zero_gamma=True,
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"warmup": 100.0}, "warm-up is longer than the run"),
        ({"warmup": 31.0, "schedule": "step"}, "before warm-up is over"),
        ({"milestones": [0.5, 0.2]}, "rising fractions"),
        ({"recipe": "goyal", "milestones": [0.05, 0.5]}, r"first milestone at 4\.5\); use --set warmup=2$"),
        ({"recipe": "goyal", "milestones": [-0.5, 0.5]}, "rising fractions"),
        ({"factor": 2.0}, "between 1e-9 and 1"),
        ({"grow": True, "schedule": "step", "factor": 5e-324}, "between 1e-9 and 1"),
        ({"grow": True}, "schedule=step"),
        ({"grow": True, "schedule": "step", "factor": 0.3}, "whole number"),
        ({"ghost": 0}, "ghost must be above zero"),
        ({"scaling": "cubic"}, "scaling must be none, linear, sqrt or loss .given: 'cubic'"),
        ({"warmup": math.nan}, "warmup must be a number, and finite"),
        ({"milestones": "soon"}, "milestones must be a list of numbers"),
    ],
)
def test_bad_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        schedule(**options)


def test_an_unknown_recipe_is_told_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"none or goyal .*did you mean 'goyal'"):
        make_recipe({"recipe": "goyel"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"milestones": "0.5"}, ["milestones has no effect without schedule=step"]),
        (
            {"schedule": "cosine", "factor": 0.2, "power": 1},
            ["factor has", "power has no effect without schedule=poly"],
        ),
        ({"layerwise": "lamb", "trust": 0.01}, ["trust has no effect without layerwise=lars"]),
        ({"warmup_kind": "constant", "base_batch": 8}, ["warmup_kind has", "base_batch has"]),
        ({"ghost": 16}, ["ghost=16 has no effect: batches are of 12 samples per worker"]),
        ({"recipe": "goyal", "milestones": "0.5", "base_batch": 8, "warmup_kind": "constant", "ghost": 12}, []),
    ],
)
def test_options_without_effect_are_named(options: dict[str, object], says: list[str]) -> None:
    one = schedule(**options)
    said = without_effect(one.recipe, options, one, 12, small_net())
    assert len(said) == len(says) and all(line.startswith(start) for line, start in zip(said, says, strict=True))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ghost": 4}, "is for batch norm, which the model has none of"),
        ({"zero_gamma": True}, "finds no residual block"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused(options: dict[str, object], says: str) -> None:
    one = schedule(**options)
    with pytest.raises(BadInput, match=says):
        without_effect(one.recipe, options, one, 12, nn.Linear(1, 1))


def prepared(out: Path, **asked: Any) -> Job:
    return open_run(RunRequest(**{"task": a_task(), "options": {}, "device": "cpu"} | asked), out)


def test_lars_at_the_rate_of_sgd_is_warned_of(tmp_path: Path) -> None:
    (said,) = prepared(tmp_path / "a", options={"layerwise": "lars"}).warnings
    assert said.startswith("LARS wants a much larger rate than SGD") and said.endswith("try --lr 2")
    assert not prepared(tmp_path / "b", options={"layerwise": "lars"}, lr=2.0).warnings


def test_which_optimizer_and_rate_the_servers_have_is_said(tmp_path: Path) -> None:
    by_default, asked, own = (
        prepared(tmp_path / name, strategy="downpour", **more)
        for name, more in (("a", {}), ("b", {"lr": 0.02}), ("c", {"options": {"server": "task"}}))
    )
    assert [job.config.lr for job in (by_default, asked, own)] == [0.01, 0.02, 0.05]
    assert by_default.warnings == [
        "the servers of downpour use Adagrad at 0.01 in the place of the task's SGD at 0.05; --lr gives another rate, "
        "--set server=task keeps the task's optimizer"
    ]
    assert "use Adagrad at 0.02 in the place of the task's SGD at 0.05" in asked.warnings[0] and not own.warnings


class DecayInside(torch.optim.AdamW):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": list(params), "weight_decay": 0.1}], lr=lr)


@pytest.mark.parametrize(
    ("spec", "kept", "lost"),
    [
        (tt.optimizer("sgd", lr=0.1, weight_decay=0.1), {"weight_decay": 0.1}, None),
        (tt.optimizer("adam", lr=0.1, weight_decay=0.1), {"weight_decay": 0.1}, None),
        (tt.optimizer("adam", lr=0.1, weight_decay=0.1, decoupled_weight_decay=True), {}, 0.1),
        (tt.optimizer("adamw", lr=0.1, weight_decay=0.1), {}, 0.1),
        (tt.optimizer("adamw", lr=0.1), {}, 0.01),
        (tt.optimizer("adamw", lr=0.1, weight_decay=0.0), {}, None),
        (tt.optimizer("adamw", lr=0.1, weight_decay=0.0, groups=[("*.weight", {"weight_decay": 0.3})]), {}, 0.3),
        (tt.optimizer(DecayInside, lr=0.1), {}, 0.1),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2), {}, 0.2),
    ],
)
def test_adagrad_takes_the_decay_of_gradients_and_says_that_any_other_is_left_out(
    spec: Any, kept: dict[str, float], lost: float | None, tmp_path: Path
) -> None:
    job = prepared(tmp_path / "run", strategy="downpour", task=dataclasses.replace(a_task(), optimizer=spec))
    used = job.strategy.optimizer(job.task.optimizer_spec)
    assert [used.options, *(group.options for group in used.groups)] == [kept] + [{}] * len(used.groups)
    said = "" if lost is None else f", without its weight decay of {lost}"
    assert f" at 0.1{said}; --lr gives another rate" in job.warnings[0]


def test_servers_do_not_know_grow_whatever_else_it_needs(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="bsp does not know grow; leave it out, or use --strategy allreduce"):
        prepared(tmp_path / "run", strategy="bsp", options={"grow": True})


def test_more_hosts_than_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"more hosts than workers \(hosts: 3, workers: 2\)"):
        prepared(tmp_path / "run", workers=2, options={"algorithm": "hierarchical", "hosts": 3})


# -- training -----------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.1)

    @property
    def last_norm(self) -> nn.Module:
        return self.norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(self.conv(self.drop(x)))
        return out


def small_net() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3, padding=1), Block(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def a_task(weight_decay: float = 0.0, momentum: float = 0.0, samples: int = 240, **other: object) -> tt.Task:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(4, (samples,), generator=generator)
    )
    options = {"momentum": momentum, "weight_decay": weight_decay}
    task = tt.Task(
        name="small",
        model=small_net,
        loss=F.cross_entropy,
        train=data,
        validation=data,
        test=data,
        optimizer=tt.optimizer("sgd", lr=0.05, **options),
        batch_size=12,
        epochs=1,
    )
    return dataclasses.replace(task, **other)


def weights(task: tt.Task, out: Path, **options: object) -> dict[str, Tensor]:
    result = tt.train(task, out=out, progress=False, **options)  # type: ignore[arg-type]
    return {n: p.detach() for n, p in result.model.named_parameters()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def test_accumulation_emulates_workers_exactly(tmp_path: Path) -> None:
    """T8.1, with batch norm per worker and dropout: ten steps of 2 x 12 and of 1 x (12 + 12), and a last one of 2 + 3.
    Of batch norm's running statistics too: what is evaluated is the same."""
    task = a_task(momentum=0.9, weight_decay=1e-3, samples=245)
    two, one = (
        tt.train(task, out=tmp_path / str(workers), progress=False, workers=workers, accumulate=2 // workers)
        for workers in (2, 1)
    )
    assert one.summary.steps == two.summary.steps == 11
    states = [{n: t.double() for n, t in run.model.state_dict().items()} for run in (two, one)]
    assert "1.norm.running_mean" in states[0] and largest_difference(*states) < 1e-6
    assert one.summary.value == two.summary.value


def test_ghost_batch_norm_is_accumulation_in_one_go(tmp_path: Path) -> None:
    task = a_task(momentum=0.9, model=_without_dropout)
    accumulated = weights(task, tmp_path / "a", accumulate=4)
    at_once = weights(task, tmp_path / "b", batch_size=48, ghost=12)
    assert largest_difference(accumulated, at_once) < 1e-5


def _without_dropout() -> nn.Module:
    net = small_net()
    net[1].drop = nn.Identity()
    return net


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_scaling_the_loss_is_not_scaling_the_rate_once_there_is_weight_decay(tmp_path: Path, decay: float) -> None:
    """T8.4, without momentum."""
    task = a_task(weight_decay=decay)
    rate = weights(task, tmp_path / "rate", batch_size=48, scaling="linear")
    loss = weights(task, tmp_path / "loss", batch_size=48, scaling="loss")
    difference = largest_difference(rate, loss)
    assert difference > 1e-3 if decay else difference < 1e-6


def test_shards_of_an_epoch_are_a_permutation_of_the_data() -> None:
    """T8.5, for awkward numbers, growing batches included."""
    for members, batch, samples in ((1, 7, 50), (3, 8, 100), (5, 2, 33)):
        deal, seen = Deal(samples, seed=3), list[int]()
        for number in range(samples):
            shares = [deal.share(m, members, batch, 1 + number) for m in range(members)]
            seen += [int(i) for share in shares for i in share.indices]
            deal.advance(shares[0].total)
            if deal.epoch:
                break
        assert sorted(seen) == list(range(samples))


def test_a_grown_batch_takes_fewer_steps(tmp_path: Path) -> None:
    options = {"schedule": "step", "milestones": "0.5", "factor": "0.5", "epochs": 2, "batch_size": 6}
    result = tt.train(a_task(), out=tmp_path / "run", progress=False, grow=True, **options)  # type: ignore[arg-type]
    assert result.summary.steps == 40 + 20
    assert result.summary.samples == 480


def test_norms_and_biases_are_spared_by_weight_decay(tmp_path: Path) -> None:
    """With a rate of nearly zero gradients do nothing, and decay (rate x decay) does all."""
    task = a_task(weight_decay=1e5, optimizer=tt.optimizer("sgd", lr=1e-6, weight_decay=1e5))
    start = {n: p.detach() for n, p in _fresh(task).named_parameters()}
    after = weights(task, tmp_path / "run", steps=3, decay_norms=False)
    for name, value in after.items():
        spared = name.endswith("bias") or ".norm." in name
        assert torch.allclose(value, start[name], atol=1e-5) == spared, name


def _fresh(task: tt.Task) -> nn.Module:
    from torrential.randomness import seed_all

    seed_all(torch.device("cpu"), 0, 0)
    return task.model()


def test_a_zero_gamma_is_where_training_starts(tmp_path: Path) -> None:
    task = a_task(optimizer=tt.optimizer("sgd", lr=1e-9))
    assert weights(task, tmp_path / "zero", steps=1, zero_gamma=True)["1.norm.weight"].abs().max() < 1e-6


def test_lars_with_two_workers_is_lars_with_one(tmp_path: Path) -> None:
    task = a_task(momentum=0.9, weight_decay=1e-4, model=_without_dropout)
    small = weights(task, tmp_path / "a", workers=2, batch_size=6, layerwise="lars", lr=1.0, ghost=6)
    whole = weights(task, tmp_path / "b", layerwise="lars", lr=1.0, ghost=6)
    assert largest_difference(small, whole) < 1e-5


def test_lars_wants_sgd(tmp_path: Path) -> None:
    task = a_task(optimizer=tt.optimizer("adam", lr=0.1))
    with pytest.raises(BadInput, match="goes with SGD"):
        tt.train(task, out=tmp_path / "run", progress=False, layerwise="lars")


def test_resizing_trains_on_small_images_first(tmp_path: Path) -> None:
    shapes_file = tmp_path / "shapes"

    def noting_net() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module.training:
                with open(shapes_file, "a") as file:
                    file.write(f"{inputs[0].shape[-1]} ")

        net.register_forward_pre_hook(note)
        return net

    tt.train(a_task(model=noting_net), out=tmp_path / "run", progress=False, resize="0:0.5,0.5:1", steps=10)
    sizes = shapes_file.read_text().split()[2:]  # the first two are the check before the run
    assert sizes == ["4"] * 5 + ["8"] * 5


def test_the_run_says_what_the_recipe_changed(tmp_path: Path) -> None:
    options = {"recipe": "goyal", "warmup": 0.25}
    result = tt.train(a_task(), workers=2, out=tmp_path / "run", progress=False, **options)  # type: ignore[arg-type]
    (said,) = [r.detail for r in result.history if isinstance(r, Event) and r.event == "recipe"]
    for part in (
        "rate 0.05 → 0.1 (linear, batch 12 → 24)",
        "gradual warm-up over 0.25 epochs",
        "rate × 0.1 at epochs 0.333, 0.667, 0.889",
        "no weight decay on 5 norm and bias tensors",
        "last gamma zero in 1 block",
    ):
        assert part in said
    config = msgspec.json.decode((tmp_path / "run" / "manifest.json").read_bytes())["config"]
    assert msgspec.convert(config["recipe"], Recipe) == make_recipe(options)  # and so it survives a resume
    assert config["base_batch"] == 12


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="larger than the training set"):
        tt.train(a_task(), workers=4, batch_size=100, out=tmp_path / "run", progress=False)


def test_a_rate_that_explodes_in_warmup_names_rate_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(tt.TorrentialError, match=r"rate had come to .* in warm-up; lengthen warmup"):
        tt.train(
            a_task(),
            lr=1e30,
            out=tmp_path / "run",
            progress=False,
            epochs=4,
            warmup=2.0,
            scaling="linear",
            batch_size=24,
        )


def test_rates_are_finite() -> None:
    one = schedule(recipe="goyal", schedule="poly")
    assert all(math.isfinite(one.rate(s, 320)) for s in range(0, 90 * SAMPLES, 7 * 320))
