"""Parameter groups and schedules of one's own: whatever is cut, sent or simulated, it is what a plain loop computes."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
)

import torrential as tt
from tests.test_contract import JOINED, PLAIN, pairs, train
from tests.test_equivalence import assert_equal_models, fresh, plain_loop, small_task
from tests.test_own_optimizers import interrupted
from torrential.errors import BadInput, TaskFailed
from torrential.optim.built import over_model, spec_of
from torrential.optim.rates import Rate, Rates, rate_of
from torrential.optimizers import NUMBER, OptimizerSpec, ParameterGroup

SAMPLES, BATCH, WORKERS, STEPS = 100, 8, 2, 20  # epochs of seven joined batches, the last of which is short


class Normed(Optimizer):
    """Moves each tensor by its gradient over the gradient's norm, so it needs whole tensors."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].mul_(group["momentum"]).add_(parameter.grad / (1.0 + parameter.grad.norm()))
                parameter.sub_(state["mean"], alpha=group["lr"])


def bias(name: str) -> bool:
    return name.endswith("bias")


def named(model: nn.Module, like: Callable[[str], bool]) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if like(name)]


# -- golden: what every synchronous strategy computes -----------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer with groups and a schedule, as a task has them and as a plain loop has them."""

    given: Any
    schedule: Any
    plain: Callable[[nn.Module], Optimizer]
    scheduled: Callable[[Optimizer], Any]  # a schedule of torch's, stepped after every joined batch; or by `factor`


def halved(share: float) -> float:
    return 1.0 if share < 0.3 else 0.5 - 0.4 * share


def one_cycle(optimizer: Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=[0.01, 0.002, 0.03], total_steps=STEPS)


def adamw(model: nn.Module) -> AdamW:
    biases, head = named(model, bias), named(model, lambda n: n == "2.weight")
    rest = named(model, lambda n: n == "0.weight")
    return AdamW(
        [
            {"params": biases, "weight_decay": 0.0},
            {"params": head, "lr": 0.03, "eps": 1e-4},
            {"params": rest, "betas": (0.8, 0.99)},
        ],
        lr=0.01,
        weight_decay=0.1,
    )


CASES = {
    "sgd": Case(
        tt.optimizer(
            "sgd",
            lr=0.1,
            weight_decay=0.01,
            groups=[
                (lambda name, parameter: parameter.ndim < 2, {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.02}),
                ("2.*", {"nesterov": True, "momentum": 0.5}),
            ],
        ),
        halved,
        lambda model: SGD(
            [
                {
                    "params": named(model, lambda n: n.endswith("bias")),
                    "weight_decay": 0.0,
                    "momentum": 0.9,
                    "lr": 0.02,
                },
                {"params": named(model, lambda n: n == "2.weight"), "nesterov": True, "momentum": 0.5},
                {"params": named(model, lambda n: n == "0.weight")},
            ],
            lr=0.1,
            weight_decay=0.01,
        ),
        lambda optimizer: None,
    ),
    "adamw": Case(adamw, tt.scheduler(one_cycle, every=BATCH * WORKERS), adamw, one_cycle),
    "normed": Case(
        tt.optimizer(Normed, lr=0.1, groups=[("0.*", {"lr": 0.01}), ("*.bias", {"momentum": 0.5})]),
        tt.scheduler(lambda optimizer: MultiStepLR(optimizer, [3, 9], 0.3), every=BATCH * WORKERS),
        lambda model: Normed(
            [
                {"params": list(model[0].parameters()), "lr": 0.01},
                {"params": [model[2].bias], "momentum": 0.5},
                {"params": [model[2].weight]},
            ],
            lr=0.1,
        ),
        lambda optimizer: MultiStepLR(optimizer, [3, 9], 0.3),
    ),
}


def plain_of(case: Case, task: tt.Task, total: int) -> nn.Module:
    model = fresh(task)
    optimizer = case.plain(model)
    own = [group["lr"] for group in optimizer.param_groups]
    scheduler = case.scheduled(optimizer)

    def before(seen: int) -> None:
        for group, lr in zip(optimizer.param_groups, own, strict=True) if scheduler is None else ():
            group["lr"] = lr * halved(seen / total)

    return plain_loop(
        task,
        optimizer,
        model,
        BATCH * WORKERS,
        steps=STEPS,
        before=before,
        after=lambda: None if scheduler is None else scheduler.step(),
    )


def task_of(case: Case, samples: int) -> tt.Task:
    return small_task(samples, batch_size=BATCH, optimizer=case.given, schedule=case.schedule)


AVERAGED = ("local", "adacomm", "diloco")  # an average of steps is one of gradients where steps are linear in these


def golden() -> list[tuple[str, str, str]]:
    """Every case with every strategy in the simulated world; among processes, each strategy, and each way to keep
    parameters."""

    def cases(strategy: str, world: str) -> Iterable[str]:
        if strategy in AVERAGED:
            return ["sgd"]
        return CASES if world == "sim" or strategy == "allreduce" else ["adamw"]

    return [(case, strategy, world) for strategy, world in pairs(JOINED) for case in cases(strategy, world)]


@pytest.mark.parametrize(("name", "strategy", "world"), golden())
def test_groups_and_schedules_are_those_of_a_plain_loop(name: str, strategy: str, world: str, tmp_path: Path) -> None:
    even = {"backup": 7 * BATCH * WORKERS}  # which weighs a short batch as if it were a whole one
    task = task_of(CASES[name], even.get(strategy, SAMPLES))
    run = train(tmp_path / "run", world, strategy, WORKERS, task, steps=STEPS, **JOINED[strategy])
    assert run.summary.steps == STEPS
    assert_equal_models(run.model, plain_of(CASES[name], task, run.summary.samples))


@pytest.mark.parametrize("name", CASES)
def test_they_are_with_one_worker_of_an_asynchronous_strategy_too(name: str, tmp_path: Path) -> None:
    task = task_of(CASES[name], SAMPLES)
    options = {"steps": STEPS, "batch_size": BATCH * WORKERS} | PLAIN["downpour"]
    run = train(tmp_path / "run", "sim", "downpour", 1, task, **options)
    assert_equal_models(run.model, plain_of(CASES[name], task, run.summary.samples))


@pytest.mark.parametrize(
    ("name", "strategy", "world"),
    [("sgd", "allreduce", "local"), ("adamw", "allreduce", "sim"), ("adamw", "bsp", "sim"), ("normed", "bsp", "sim")],
)
def test_a_run_that_goes_on_ends_in_the_same_bytes(name: str, strategy: str, world: str, tmp_path: Path) -> None:
    task = task_of(CASES[name], SAMPLES)
    whole = train(tmp_path / "whole", world, strategy, WORKERS, task, steps=STEPS, evaluate_every=10)
    resumed = tt.train(task, resume=interrupted(whole, tmp_path / "again"), progress=False)
    assert resumed.summary.steps == STEPS
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = ((run.out / "checkpoints" / f"step-{STEPS:08d}" / file).read_bytes() for run in (resumed, whole))
        assert ours == theirs


# -- schedules --------------------------------------------------------------------------------------------------------
def test_a_scheduler_by_epochs_steps_when_an_epoch_ends(tmp_path: Path) -> None:
    task = small_task(
        SAMPLES,
        batch_size=BATCH,
        epochs=3,
        optimizer=tt.optimizer("adam", lr=0.01),
        schedule=tt.scheduler(lambda optimizer: CosineAnnealingLR(optimizer, T_max=3), every="epoch"),
    )
    model = fresh(task)
    optimizer = Adam(model.parameters(), lr=0.01)
    scheduler = CosineAnnealingLR(optimizer, T_max=3)
    steps = iter(range(1, 1000))
    plain_loop(task, optimizer, model, 16, steps=21, after=lambda: scheduler.step() if next(steps) % 7 == 0 else None)
    run = train(tmp_path / "run", "sim", "allreduce", 2, task)
    assert run.summary.steps == 21
    assert_equal_models(run.model, model)
    manifest = json.loads((run.out / "manifest.json").read_text())
    rates = [0.01, 0.0075, 0.0025]
    assert manifest["config"]["schedule"] == {
        "scheduler": "CosineAnnealingLR",
        "every": SAMPLES,
        "rates": [[pytest.approx(rates[place * 3 // 8 if place < 8 else 2])] for place in range(9)],
    }


def test_a_scheduler_by_batches_counts_those_of_the_task_however_many_workers_there_are(tmp_path: Path) -> None:
    schedule = tt.scheduler(lambda optimizer: ExponentialLR(optimizer, 0.9), every="batch")
    task = small_task(SAMPLES, batch_size=BATCH, epochs=2, schedule=schedule)
    alone = train(tmp_path / "alone", "sim", "allreduce", 1, task)
    model = fresh(task)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = ExponentialLR(optimizer, 0.9)
    plain_loop(task, optimizer, model, BATCH, steps=26, after=scheduler.step)
    assert_equal_models(alone.model, model)
    four = train(tmp_path / "four", "sim", "allreduce", 4, task)
    last = [json.loads((run.out / "manifest.json").read_text())["config"]["schedule"] for run in (alone, four)]
    assert last[0] == last[1] and last[0]["rates"][-1][0] == pytest.approx(0.1 * 0.9**25)


def test_another_base_rate_scaling_and_warmup_multiply_what_the_schedule_gives(tmp_path: Path) -> None:
    schedule = tt.scheduler(lambda optimizer: LambdaLR(optimizer, lambda step: 0.8**step), every=16)
    task = small_task(160, schedule=schedule, epochs=1, optimizer=tt.optimizer("sgd", lr=0.1))
    model = fresh(task)
    optimizer = SGD(model.parameters(), lr=0.05)

    def before(seen: int) -> None:
        warm = 1 + seen / 80 if seen < 80 else 2  # to twice the rate in half an epoch
        optimizer.param_groups[0]["lr"] = 0.05 * 0.8 ** (seen // 16) * warm

    plain_loop(task, optimizer, model, 16, steps=10, before=before)
    run = train(tmp_path / "run", "sim", "allreduce", 2, task, lr=0.05, scaling="linear", warmup=0.5)
    assert_equal_models(run.model, model)


@pytest.mark.parametrize(
    ("schedule", "options", "said"),
    [
        (lambda share: -1.0, {}, "the factor of the rate, a number that is not negative .after 0 of the run: -1.0"),
        (lambda share: "much", {}, "the factor of the rate, .* 'much'.; for one of torch's give tt.scheduler"),
        (lambda share: 1 / 0, {}, r"the task's schedule \(0 of the run done; .* raised ZeroDivisionError"),
        (lambda optimizer: ExponentialLR(optimizer, 0.9), {}, r"one of torch's is given by tt.scheduler\) raised Type"),
        (lambda share: float(torch.rand(())), {}, "the task's schedule gives other rates when it is asked again"),
        (halved, {"schedule": "cosine"}, "the task has a schedule of its own, and schedule=cosine would be another"),
        (halved, {"recipe": "goyal"}, "schedule=step would be another; use --set schedule=constant"),
        (
            tt.scheduler(ReduceLROnPlateau, every="epoch"),
            {},
            "ReduceLROnPlateau lowers the rate by evaluations, which are made beside training",
        ),
        (tt.scheduler(lambda optimizer: 3, every=1), {}, "scheduler must be one of torch.optim.lr_scheduler .got 3"),
        (
            tt.scheduler(lambda optimizer: ExponentialLR(SGD([torch.zeros(1)], lr=1.0), 0.9), every=1),
            {},
            "the task's scheduler is built over another optimizer",
        ),
        (
            tt.scheduler(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=3), every=BATCH),
            {},
            "schedule, at step 4 of every 8 samples, raised ValueError: Tried to step 4 times",
        ),
        (
            tt.scheduler(lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 - step), every=BATCH),
            {},
            "LambdaLR makes the learning rate -0.1 at its step 2",
        ),
        (
            tt.scheduler(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=50), every=BATCH),
            {"strategy": "downpour"},
            "the task's schedule moves momentum, which Adagrad has not, the optimizer of downpour",
        ),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(
    schedule: Any, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    task = small_task(SAMPLES, batch_size=BATCH, schedule=schedule)
    given = {"strategy": "allreduce", "workers": 1, "steps": 10, "device": "cpu", "progress": False} | options
    with pytest.raises(BadInput, match=said):
        tt.train(task, out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_momentum_that_a_schedule_would_begin_is_refused(tmp_path: Path) -> None:
    schedule = tt.scheduler(lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=50), every=BATCH)
    task = small_task(SAMPLES, batch_size=BATCH, schedule=schedule, optimizer=tt.optimizer("sgd", lr=0.1))
    with pytest.raises(BadInput, match=r"OneCycleLR moves momentum from 0 to 0.95, with which the optimizer"):
        train(tmp_path / "run", "local", "allreduce", 1, task, steps=10)


@pytest.mark.parametrize(("schedule", "said"), [(3, "got 3"), (CosineAnnealingLR, "got <class .*CosineAnnealingLR")])
def test_a_schedule_is_a_function_or_comes_from_scheduler(schedule: Any, said: str) -> None:
    with pytest.raises(BadInput, match=f"schedule must be a function of the share of the run .*{said}"):
        small_task(SAMPLES, schedule=schedule)


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "step"])
def test_a_scheduler_steps_by_epochs_batches_or_samples(every: Any) -> None:
    with pytest.raises(BadInput, match=r'steps every "epoch", every "batch" or after a number of samples'):
        tt.scheduler(CosineAnnealingLR, every=every)


def test_a_run_goes_on_with_the_schedule_and_the_groups_it_began_with_only(tmp_path: Path) -> None:
    task = small_task(SAMPLES, batch_size=BATCH, schedule=halved, epochs=1)
    train(tmp_path / "run", "sim", "allreduce", 1, task)
    (tmp_path / "run" / "records.jsonl").unlink()
    for changed in (lambda share: 1.0, None):
        with pytest.raises(BadInput, match=r"the task's schedule has changed \(\{'factors': \[1.0, "):
            tt.train(dataclasses.replace(task, schedule=changed), resume=tmp_path / "run", progress=False)
    grouped = tt.optimizer("sgd", lr=0.1, momentum=0.9, groups=[("*.bias", {"lr": 0.01})])
    with pytest.raises(BadInput, match=r"the task's optimizer has changed .*'groups': \[\{'parameters': \['0.bias'"):
        tt.train(dataclasses.replace(task, optimizer=grouped), resume=tmp_path / "run", progress=False)


# -- groups -----------------------------------------------------------------------------------------------------------
def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_the_first_rule_that_matches_counts() -> None:
    rules = [("0.*", {"lr": 0.0}), ("*.bias", {"weight_decay": 0.0}), (lambda name, p: p.ndim == 2, {"eps": 1e-3})]
    spec = tt.optimizer("adamw", lr=1e-3, weight_decay=0.1, groups=rules).over(linear())
    assert [(sorted(group.names), group.options, group.number) for group in spec.groups] == [
        (["0.bias", "0.weight"], {"lr": 0.0}, 0),
        (["2.bias"], {"weight_decay": 0.0}, 1),
        (["2.weight"], {"eps": 1e-3}, 2),
    ]
    built = spec.build([torch.zeros(2), torch.zeros(3)], names=["2.weight", "0.weight"])
    assert [(group[NUMBER], group["lr"], group["eps"]) for group in built.param_groups] == [
        (0, 0.0, 1e-8),
        (2, 1e-3, 1e-3),
    ]
    assert spec.describe()["groups"][1] == {"parameters": ["2.bias"], "weight_decay": 0.0}


def test_another_rate_keeps_the_ratios_of_groups() -> None:
    spec = tt.optimizer("sgd", lr=0.1, groups=[("0.*", {"lr": 0.01})])
    assert spec.with_lr(0.2).over(linear()).groups[0].options == {"lr": pytest.approx(0.02)}
    assert spec.over(linear()).with_lr(0.2).groups[0].options == {"lr": pytest.approx(0.02)}
    adagrad = spec.over(linear()).replaced(torch.optim.Adagrad, 0.01, ("weight_decay",))
    assert adagrad.kind is torch.optim.Adagrad and adagrad.groups[0].options == {"lr": pytest.approx(0.001)}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (["*.bias"], "a group is a pair of pattern and options"),
        ([("*.bias", 3)], "a group is a pair of pattern and options"),
        ([(3, {})], "a group is chosen by a pattern or a function of name and parameter .got 3"),
        ([("*.bias", {"weigth_decay": 0})], "no option of SGD named 'weigth_decay'; did you mean 'weight_decay'"),
        ([("*.bias", {"lr": -1})], "the learning rate of a group must not be negative .lr: -1"),
        ([("*.bias", {"momentum": -1})], r"torch.optim refuses SGD\(lr=0.1, momentum=-1\): Invalid momentum"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        tt.optimizer("sgd", lr=0.1, groups=groups)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [("heads.*", {})],
            r"no trained parameter is named like 'heads.\*' .there are: 0.weight, 0.bias, 2.weight",
        ),
        ([("*", {}), ("2.*", {})], r"all parameters of the group '2.\*' are in groups before it"),
        ([(lambda name, p: False, {})], "a function for a group .<lambda>. leaves it without a parameter"),
        ([(lambda name, p: 1 / 0, {})], "rule for a group, given '0.weight', raised ZeroDivisionError"),
    ],
)
def test_groups_without_members_are_refused(groups: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        tt.optimizer("sgd", lr=0.1, groups=groups).over(linear())


def test_frozen_parameters_are_in_no_group() -> None:
    model = linear()
    model[0].requires_grad_(False)
    spec = tt.optimizer("sgd", lr=0.1, groups=[("*.bias", {"lr": 0.01})]).over(model)
    assert [group.names for group in spec.groups] == [frozenset({"2.bias"}), frozenset({"2.weight"})]
    with pytest.raises(BadInput, match=r"no trained parameter is named like '0.\*'"):
        tt.optimizer("sgd", lr=0.1, groups=[("0.*", {})]).over(model)


# -- optimizers that are built over the model -------------------------------------------------------------------------
class Keeping(SGD):
    """Keeps an option where no other can be built from it."""

    def __init__(self, params: Any, lr: float, power: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.power = power


class Needy(SGD):
    """Cannot be built without what it does not keep."""

    def __init__(self, params: Any, lr: float, steps: int) -> None:
        super().__init__(params, lr=lr)


def test_what_a_factory_builds_is_known_by_its_options_and_groups() -> None:
    model = linear()
    spec = over_model(adamw, model)
    assert (spec.kind, spec.lr, spec.options) == (AdamW, 0.01, {"weight_decay": 0.1})
    assert [(len(group.names), group.options) for group in spec.groups] == [
        (2, {"weight_decay": 0.0}),
        (1, {"lr": 0.03, "eps": 1e-4}),
        (1, {"betas": (0.8, 0.99)}),
    ]
    assert over_model(lambda model: Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9)), model) == OptimizerSpec(
        Adam, 0.1, {"betas": (0.8, 0.9)}
    )
    assert over_model(lambda model: Keeping(model.parameters(), 0.1), model) == OptimizerSpec(Keeping, 0.1)


def test_an_optimizer_that_has_a_scheduler_already_is_known_by_its_initial_rates() -> None:
    model = linear()
    built = SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}], lr=0.1)
    OneCycleLR(built, max_lr=[1.0, 0.2], total_steps=10, cycle_momentum=False)
    spec = spec_of(built, {id(parameter): name for name, parameter in model.named_parameters()})
    assert [group.options.get("lr") for group in spec.groups] == [0.04, 0.008]
    moved = rate_of(built.param_groups)
    assert moved == pytest.approx(0.04) and moved == built.param_groups[0]["lr"]
    assert moved.groups == tuple({"lr": group["lr"]} for group in built.param_groups)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda model: 3, "must return a torch.optim.Optimizer .it returned 3"),
        (lambda model: 1 / 0, "the task's optimizer factory raised ZeroDivisionError"),
        (lambda model: SGD(model[0].parameters(), lr=0.1), "leaves out 2.weight .2 of the model's trained parameters"),
        (lambda model: SGD(linear().parameters(), lr=0.1), "has a parameter that is not the model's"),
        (lambda model: Keeping(model.parameters(), 0.1, 2.0), "Keeping was given power = 2.0 and does not keep it"),
        (lambda model: Needy(model.parameters(), 0.1, 3), "Needy cannot be built again from its defaults .TypeError"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS needs a closure that computes loss and gradients"),
    ],
)
def test_factories_that_workers_cannot_follow_are_refused(factory: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        over_model(factory, linear())


def test_hooks_of_a_built_optimizer_are_refused() -> None:
    def hooked(model: nn.Module) -> Optimizer:
        built = SGD(model.parameters(), lr=0.1)
        built.register_step_post_hook(lambda *_: None)
        return built

    with pytest.raises(BadInput, match="SGD has hooks, which are lost when it is built again for a run"):
        over_model(hooked, linear())


@pytest.mark.parametrize("given", [SGD, 3, SGD([torch.zeros(1)], lr=0.1)])
def test_a_tasks_optimizer_is_a_spec_or_a_function(given: Any) -> None:
    with pytest.raises(BadInput, match=r"optimizer must come from optimizer\(\) or be a function of the model"):
        small_task(SAMPLES, optimizer=given)


def test_a_factory_that_raises_is_the_tasks_failure(tmp_path: Path) -> None:
    task = small_task(SAMPLES, optimizer=lambda model: model.nothing)
    with pytest.raises(TaskFailed, match="the task's optimizer factory raised AttributeError"):
        train(tmp_path / "run", "local", "allreduce", 1, task)


# -- rates ------------------------------------------------------------------------------------------------------------
def test_a_rate_is_a_number_that_carries_what_groups_are_to_have() -> None:
    rate = Rate(0.1, ({"lr": 0.1, "betas": (0.8, 0.9)}, {"lr": 0.3, "betas": (0.7, 0.9)}))
    assert rate == 0.1 and rate * 2 == 0.2 and pickle.loads(pickle.dumps(rate)).groups == rate.groups
    spec = OptimizerSpec(
        Adam, 0.1, {}, (ParameterGroup(frozenset("a"), {}, 0), ParameterGroup(frozenset("b"), {"lr": 0.2}, 1))
    )
    built = spec.build([torch.ones(1), torch.ones(1)], names=["b", "a"])
    rates = Rates(built, spec)
    rates.set(0.1)
    assert [group["lr"] for group in built.param_groups] == [0.1, 0.2]
    rates.set(rate)
    assert [(group["lr"], group["betas"]) for group in built.param_groups] == [(0.1, (0.8, 0.9)), (0.3, (0.7, 0.9))]
    rates.set(Rate(0.1, ({"lr": 0.1, "betas": (0.8, 0.9)}, {"lr": 0.4, "betas": (0.7, 0.9)})))
    assert [group["lr"] for group in built.param_groups] == [0.1, 0.4]
    alone = spec.build([torch.ones(1)], names=["b"])
    Rates(alone, spec).set(rate)
    assert [group["lr"] for group in alone.param_groups] == [0.3]


def test_a_class_that_makes_groups_of_its_own_is_refused_with_groups_of_the_task() -> None:
    class Regrouping(SGD):
        def __init__(self, params: Any, lr: float) -> None:
            given = [p for group in params for p in (group["params"] if isinstance(group, dict) else [group])]
            super().__init__([{"params": [p]} for p in given], lr=lr)

    spec = tt.optimizer(Regrouping, lr=0.1, groups=[("*.bias", {"lr": 0.2})]).over(linear())
    built = spec.build(linear().parameters(), names=["0.weight", "0.bias", "2.weight", "2.bias"])
    with pytest.raises(BadInput, match="Regrouping makes parameter groups of its own"):
        Rates(built, spec)
