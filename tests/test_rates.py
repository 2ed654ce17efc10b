"""A learning rate that an optimizer sets by itself is honoured or refused, and never undone without a word."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torrential as tt
from tests.test_contract import WORLDS
from tests.test_equivalence import assert_equal_models, fresh, plain_loop, small_task
from torrential.errors import BadInput, RunFailed
from torrential.optim.rates import Rates
from torrential.optimizers import OptimizerSpec
from torrential.params.layout import plan
from torrential.params.whole import form_of
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers

STRATEGIES_TRIED = ["allreduce", "ssp"]


class Cosine(torch.optim.SGD):
    """A schedule of its own, before the step."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.base, self.taken = lr, 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = self.base * (1 + math.cos(self.taken / 10)) / 2
        return super().step(closure)


class Scheduled(torch.optim.SGD):
    """One of torch's schedules, after the step."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self, 0.9)

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.schedule.step()
        return found


class Late(torch.optim.SGD):
    """Its rate falls at the tenth step, long after it was tried."""

    per_parameter = True

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            taken = self.state[group["params"][0]]
            taken["taken"] = taken.get("taken", 0) + 1
            if taken["taken"] == 10:
                group["lr"] /= 2
        return found


class Biases(torch.optim.SGD):
    """Biases learn three times as fast."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        given = list(params)
        kinds = {lr: [p for p in given if p.ndim > 1], 3 * lr: [p for p in given if p.ndim < 2]}
        super().__init__([{"params": some, "lr": rate} for rate, some in kinds.items() if some], lr=lr)


class Deaf(torch.optim.SGD):
    """Its step does not look at the rate of its groups."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.rate = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=self.rate)


def train(kind: type[torch.optim.Optimizer], out: Path, strategy: str, world: str = "local", **options: Any) -> Any:
    task = small_task(160, optimizer=tt.optimizer(kind, lr=0.1))
    served = {"servers": 2} if needs_servers(STRATEGIES[strategy]) else {}
    given = {"device": "cpu", "progress": False, "steps": 20} | WORLDS[world] | served | options
    return tt.train(task, strategy, out=out, world=world, **given)


def test_groups_keep_their_ratio_to_the_base_rate() -> None:
    one, two = torch.ones(2), torch.ones(2)
    built = torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 0.3}], lr=0.1)
    rates = Rates(built, OptimizerSpec(torch.optim.SGD, 0.1))
    rates.set(0.05)
    assert [group["lr"] for group in built.param_groups] == [0.05, pytest.approx(0.15)]
    built.step()
    rates.check()
    built.param_groups[1]["lr"] = 0.2
    with pytest.raises(
        RunFailed, match=r"SGD changes its learning rate by itself \(set: 0.05, 0.15, after .* 0.05, 0.2\)"
    ):
        rates.check()


@pytest.mark.parametrize("strategy", STRATEGIES_TRIED)
@pytest.mark.parametrize("kind", [Cosine, Scheduled])
def test_a_schedule_of_ones_own_is_refused_before_the_run(
    kind: type[torch.optim.Optimizer], strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=f"{kind.__name__} changes its learning rate by itself .*--set schedule=cosine"):
        train(kind, tmp_path / "run", strategy)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES_TRIED)
def test_a_rate_that_changes_later_ends_the_run(strategy: str, world: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"Late changes its learning rate by itself \(set: 0.1, after the step: 0.05\)"):
        train(Late, tmp_path / "run", strategy, world)


@pytest.mark.parametrize("strategy", STRATEGIES_TRIED)
def test_rates_of_groups_are_honoured(strategy: str, tmp_path: Path) -> None:
    task = small_task(160)
    model = fresh(task)
    plain_loop(task, Biases(model.parameters(), lr=0.1), model, 8, steps=20)
    assert_equal_models(train(Biases, tmp_path / "run", strategy, "sim").model, model)


def test_an_optimizer_that_is_deaf_to_schedules_is_refused_with_one(tmp_path: Path) -> None:
    task = small_task(160)
    model = fresh(task)
    plain_loop(task, Deaf(model.parameters(), lr=0.1), model, 8, steps=20)
    assert_equal_models(train(Deaf, tmp_path / "run", "allreduce", "sim").model, model)
    for options in ({"schedule": "cosine"}, {"warmup": 1}, {"scaling": "linear", "base_batch": 4}):
        with pytest.raises(BadInput, match="Deaf takes no notice of a learning rate that changes"):
            train(Deaf, tmp_path / "refused", "allreduce", **options)


def test_what_is_tried_leaves_random_numbers_as_they_were() -> None:
    layout, before = plan(nn.Linear(3, 2), 1 << 20), torch.get_rng_state()
    form = form_of(tt.optimizer(Biases, lr=0.1), layout)
    assert torch.equal(torch.get_rng_state(), before)
    assert form.divisible and form.obeys and form.unsaved is None and not form.draws
