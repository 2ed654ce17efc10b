"""Local SGD, AdaComm and DiLoCo: golden equivalences, counted rounds and bytes, resumption, deaths.

T12.1  test_a_period_of_one_is_allreduce, test_local_is_a_loop_over_models_that_are_averaged
T12.2  test_rounds_and_bytes_are_counted, test_rounds_of_a_period_that_changes_are_counted
T12.3  test_on_a_quadratic_the_average_does_not_depend_on_the_period,
       test_workers_drift_apart_with_the_square_root_of_the_period,
       test_with_data_of_their_own_a_longer_period_ends_with_a_higher_loss
T12.4  test_periods_over_intervals, test_the_chosen_periods_are_on_record
T12.5  test_adacomm_is_sooner_than_a_fixed_period; experiments/local_updates.py
T12.6  test_the_time_of_a_step_is_that_of_computing_and_a_share_of_sending
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from tests.killing import Killing
from tests.test_equivalence import assert_equal_models, fresh
from torrential.data.deal import Deal
from torrential.records import Evaluation, Event, Step
from torrential.strategies.adacomm import PeriodChoice, next_period

SAMPLES, BATCH = 96, 4


def data(samples: int = SAMPLES) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, generator=draw)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def task(optimizer: Any = None, **options: Any) -> tt.Task:
    given: dict[str, Any] = {"model": model, "loss": F.cross_entropy, "train": data(), "test": data(32)}
    given["validation"] = data(16)
    made = optimizer or tt.optimizer(torch.optim.SGD, lr=0.1)
    return tt.Task(**given | {"optimizer": made, "batch_size": BATCH, "epochs": 2, "name": "small"} | options)


def train(strategy: Any, out: Path, of: tt.Task | None = None, **options: Any) -> tt.TrainResult:
    given = {"workers": 2, "world": "sim", "out": out, "progress": False}
    return tt.train(of or task(), strategy, **given | options)


# -- equivalences -----------------------------------------------------------------------------------------------------
def averaged_by_hand(of: tt.Task, workers: int, period: int, steps: int, **sgd: float) -> nn.Module:
    """Local SGD as a plain loop on one process: models of their own, averaged every so many steps."""
    replicas = [fresh(of) for _ in range(workers)]
    optimizers = [torch.optim.SGD(replica.parameters(), **sgd) for replica in replicas]
    deal = Deal(len(of.train), seed=0)
    for _ in range(steps // period):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            for batch in deal.share(rank, workers, BATCH, period).batches:
                x, y = of.train[batch.indices]
                optimizer.zero_grad()
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
        deal.advance(workers * BATCH * period)
        with torch.no_grad():
            for together in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = torch.stack([p.data for p in together]).mean(0)
                for parameter in together:
                    parameter.copy_(mean)
    return replicas[0]


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize("period", [1, 3])
def test_local_is_a_loop_over_models_that_are_averaged(world: str, period: int, tmp_path: Path) -> None:
    made = train(tt.Local(period=period, inner="keep"), tmp_path / "run", steps=12 // period, world=world)
    assert_equal_models(made.model, averaged_by_hand(task(), 2, period, 12, lr=0.1), 1e-6)


@pytest.mark.parametrize(
    "strategy",
    [tt.Local(period=1), tt.AdaComm(period=1), tt.DiLoCo(period=1, outer_rate=1.0, outer_momentum=0.0)],
    ids=lambda strategy: type(strategy).__name__,
)
@pytest.mark.parametrize("world", ["local", "sim"])
def test_a_period_of_one_is_allreduce(world: str, strategy: tt.Strategy, tmp_path: Path) -> None:
    """To rounding, epochs that end with an uneven batch included."""
    uneven, how = task(train=data(91)), {"workers": 3, "world": world}
    made, other = (train(s, tmp_path / type(s).name, uneven, **how) for s in (strategy, tt.AllReduce()))
    assert_equal_models(made.model, other.model, 1e-6)
    assert made.summary.samples == other.summary.samples == 2 * 91


def test_momentum_is_kept_averaged_or_reset(tmp_path: Path) -> None:
    with_momentum = task(tt.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))
    found = {
        inner: train(tt.Local(period=3, inner=inner), tmp_path / inner, with_momentum, steps=4).model
        for inner in ("keep", "average", "reset")
    }
    by_hand = averaged_by_hand(with_momentum, 2, 3, 12, lr=0.1, momentum=0.9)
    assert_equal_models(found["keep"], by_hand, 1e-6)
    weights = [next(found[inner].parameters()) for inner in found]
    assert not torch.allclose(weights[0], weights[1], atol=1e-4) and not torch.allclose(weights[0], weights[2])


def test_an_average_of_averages_is_what_block_momentum_begins_with(tmp_path: Path) -> None:
    """The first round of an outer momentum goes to the average; the second goes on by some of the first's way."""
    plain, heavy = (
        [train(tt.Local(period=3, outer_momentum=m), tmp_path / f"{m}-{n}", steps=n).model for n in (1, 2)]
        for m in (0.0, 0.5)
    )
    start = fresh(task())
    assert_equal_models(plain[0], heavy[0], 1e-6)
    for begun, first, second, other in zip(*(m.parameters() for m in (start, *plain, heavy[1])), strict=True):
        torch.testing.assert_close(other, second - 0.5 * (begun - first), atol=1e-6, rtol=0)


def test_diloco_takes_nesterov_steps(tmp_path: Path) -> None:
    averages = [train(tt.Local(period=3), tmp_path / "average", steps=1).model]
    made = train(tt.DiLoCo(period=3, outer_rate=0.7, outer_momentum=0.9), tmp_path / "diloco", steps=1).model
    start = fresh(task())
    for begun, mean, other in zip(*(m.parameters() for m in (start, averages[0], made)), strict=True):
        way = begun - mean
        torch.testing.assert_close(other, begun - 0.7 * (way + 0.9 * way), atol=1e-6, rtol=0)


class Bowl(nn.Module):
    """A quadratic in float64 whose gradient is x and the sample's noise."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.x**2).sum() + (noise * self.x).sum(1)


def bowl(noise: torch.Tensor, **options: Any) -> tt.Task:
    given = {"model": Bowl, "loss": lambda out, _: out.mean(), "metric": lambda out, _: float(out.mean())}
    train_data, few = TensorDataset(noise, torch.zeros(len(noise))), TensorDataset(noise[:8], torch.zeros(8))
    return task(**given, train=train_data, test=few, validation=few, maximize=False, **options)


def test_on_a_quadratic_the_average_does_not_depend_on_the_period(tmp_path: Path) -> None:
    """The same Hessian everywhere makes gradients linear: averaging before or after a step is the same (a trap)."""
    noise = torch.randn(96, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for period in (1, 2, 6):
        made = train(tt.Local(period=period), tmp_path / f"{period}", bowl(noise), workers=4, epochs=1)
        (found,) = made.model.parameters()
        deal, x = Deal(96, seed=0), torch.full((3,), 2.0, dtype=torch.float64)
        for _ in range(96 // (4 * BATCH * period)):
            shares = [deal.share(rank, 4, BATCH, period).batches for rank in range(4)]
            for step in range(period):  # of one model, on what all workers have in this step
                x = x - 0.1 * (x + torch.cat([noise[share[step].indices] for share in shares]).mean(0))
            deal.advance(4 * BATCH * period)
        torch.testing.assert_close(found.detach(), x, atol=1e-10, rtol=0)


class Watched(tt.Local, frozen=True, kw_only=True):
    """Keeps what every worker brings to an average."""

    brought: ClassVar[list[torch.Tensor]] = []

    def worker(self, ctx: tt.Context) -> None:
        whole = ctx.comm.all_reduce

        def all_reduce(tensor: torch.Tensor) -> Any:
            self.brought.append(tensor.clone() * len(ctx.comm.members))
            return whole(tensor)

        ctx.comm.all_reduce = all_reduce  # type: ignore[method-assign]
        super().worker(ctx)


def test_workers_drift_apart_with_the_square_root_of_the_period(tmp_path: Path) -> None:
    """Before an average E|x_i - mean|^2 = (1 - 1/m) rate^2 sigma^2 (1 + a^2 + ... + a^(2 period - 2)), a = 1 - rate."""
    draw, rate, workers = torch.Generator().manual_seed(1), 0.01, 4
    noise = torch.randn(6400, 3, generator=draw, dtype=torch.float64)
    found = {}
    for period in (1, 4, 16):
        Watched.brought.clear()
        of = bowl(noise, optimizer=tt.optimizer(torch.optim.SGD, lr=rate))
        train(Watched(period=period), tmp_path / f"{period}", of, workers=workers, epochs=1)
        rounds = torch.stack(Watched.brought).view(-1, workers, 3)
        found[period] = float((rounds - rounds.mean(1, keepdim=True)).square().sum(2).mean())
        steps = sum((1 - rate) ** (2 * step) for step in range(period))
        assert found[period] == pytest.approx((1 - 1 / workers) * rate**2 * 3 / BATCH * steps, rel=0.25)
    assert found[16] > 3 * found[4] > 9 * found[1]


def keep_kinds_apart(ctx: tt.Context) -> None:
    """From now on a worker has the samples of one kind alone: those with even, or with odd numbers."""
    whole = ctx.data.share

    def share(batches: int = 1, **how: Any) -> Any:
        found = whole(batches, **how)
        return replace(found, batches=[replace(b, indices=b.indices // 2 * 2 + ctx.comm.rank) for b in found.batches])

    ctx.data.share = share  # type: ignore[method-assign]


class Apart(tt.Local, frozen=True, kw_only=True):
    def worker(self, ctx: tt.Context) -> None:
        keep_kinds_apart(ctx)
        super().worker(ctx)


class ApartAdaComm(tt.AdaComm, frozen=True, kw_only=True):
    def worker(self, ctx: tt.Context) -> None:
        keep_kinds_apart(ctx)
        super().worker(ctx)


def two_kinds() -> tt.Task:
    """Logistic regression on two kinds of samples, for which different weights are right."""
    x, kind = torch.randn(1024, 6, generator=torch.Generator().manual_seed(0)), torch.arange(1024) % 2
    x[:, 0] *= 1 + 3 * kind
    both = TensorDataset(x, torch.where(kind == 1, x[:, 0] + x[:, 1] > 0, x[:, 1] - x[:, 0] + 1 > 0).long())
    return task(train=both, test=both, validation=both, model=lambda: nn.Linear(6, 2), batch_size=16)


def test_with_data_of_their_own_a_longer_period_ends_with_a_higher_loss(tmp_path: Path) -> None:
    of = two_kinds()
    for seed in range(5):
        floors = []
        for period in (1, 32):
            made = train(Apart(period=period), tmp_path / f"{period}-{seed}", of, seed=seed, epochs=4)
            floors.append([e.loss for e in made.history if isinstance(e, Evaluation)][-1])
        assert floors[1] > 1.02 * floors[0]


def test_adacomm_is_sooner_than_a_fixed_period(tmp_path: Path) -> None:
    """With sending four times as long as computing: at a training loss sooner than with an average after every step,
    where a long period never comes to; and in the end with the loss of the former."""
    network = {"bandwidth": 2 * 4 * 14 / (4 * 16e-3), "latency": 0.0}  # a worker sends 14 parameters, twice a half
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "network": network}
    seconds, last = {}, {}
    for strategy in (Apart(period=1), Apart(period=16), ApartAdaComm(period=16)):
        name = f"{type(strategy).__name__} {strategy.period}"
        made = train(strategy, tmp_path / name, two_kinds(), epochs=8, cluster=cluster, evaluate_every=4)
        losses = [e for e in made.history if isinstance(e, Evaluation) and e.split == "validation"]
        seconds[name] = next((e.time for e in losses if e.loss is not None and e.loss <= 0.435), math.inf)
        last[name] = losses[-1].loss or math.nan
    assert seconds["ApartAdaComm 16"] < seconds["Apart 1"] / 1.3 and seconds["Apart 16"] == math.inf
    assert last["ApartAdaComm 16"] < 1.05 * last["Apart 1"]


# -- what is averaged, sent and saved ---------------------------------------------------------------------------------
def test_statistics_of_batch_norm_are_averaged(tmp_path: Path) -> None:
    normed = task(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
    both = train(tt.Local(period=2), tmp_path / "both", normed, steps=1)
    norm = both.model[1]
    replicas = [fresh(normed) for _ in range(2)]
    means = []
    for rank, replica in enumerate(replicas):
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for batch in Deal(SAMPLES, seed=0).share(rank, 2, BATCH, 2).batches:
            x, y = normed.train[batch.indices]
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
        means.append(replica[1].running_mean)
    torch.testing.assert_close(norm.running_mean, sum(means) / 2, atol=1e-6, rtol=0)


def test_rounds_and_bytes_are_counted(tmp_path: Path) -> None:
    """An epoch of 12 joined batches has ceil(12 / period) rounds, each an all-reduce of the parameters."""
    numel = sum(p.numel() for p in model().parameters())
    rounds, sent = dict[int, int](), dict[int, int]()
    for period in (1, 4, 5, 12, 100):
        made = train(tt.Local(period=period, inner="keep"), tmp_path / f"{period}")
        rounds[period], sent[period] = made.summary.steps, made.summary.bytes_sent
        assert made.summary.samples == 2 * SAMPLES
    assert rounds == {period: 2 * math.ceil(12 / min(period, 12)) for period in rounds}
    each = {(sent[1] - sent[period]) / (rounds[1] - rounds[period]) for period in (4, 5, 12, 100)}
    assert len(each) == 1  # the rest is the same for all: snapshots
    votes = 2 * 3 * 8  # numbers, of 8 bytes
    assert each.pop() == 2 * 4 * numel + votes  # both send half of the sums, and half of the totals


def test_half_of_the_bytes_and_what_rounding_leaves_out_comes_later(tmp_path: Path) -> None:
    """Gradients that never change: after any number of rounds in bfloat16 a parameter is off by what one leaves out."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(160))

        def forward(self, ignored: torch.Tensor) -> torch.Tensor:
            return (torch.linspace(0.1, 1.7, 160) * self.x).sum().expand(len(ignored))

    nothing = TensorDataset(torch.zeros(SAMPLES, 1), torch.zeros(SAMPLES))
    slope = task(train=nothing, test=nothing, validation=nothing, model=Slope, loss=lambda out, _: out.mean(),
                 metric=lambda out, _: float(out.detach().mean()), maximize=False)  # fmt: skip
    sent = {}
    for half in (False, True):
        strategy, offs = tt.DiLoCo(period=1, outer_rate=1.0, outer_momentum=0.0, half=half), list[float]()
        total = dict[int, int]()
        for epochs in (1, 10):
            made = train(strategy, tmp_path / f"{half}-{epochs}", slope, epochs=epochs, evaluate_every=10**6)
            (x,) = made.model.parameters()
            offs.append(float((x.detach() + 0.1 * 12 * epochs * torch.linspace(0.1, 1.7, 160)).abs().max()))
            total[epochs] = made.summary.bytes_sent
        sent[half] = (total[10] - total[1]) // (9 * 12)
        assert max(offs) < (4e-3 * 0.17 if half else 1e-4)
    votes = 2 * 3 * 8
    assert sent == {False: 2 * 4 * 160 + votes, True: 2 * 2 * 160 + votes}


def test_rounds_of_a_period_that_changes_are_counted(tmp_path: Path) -> None:
    """Rounds are the sum over intervals of their steps over their period, rounded up; each sends the same."""
    numel = sum(p.numel() for p in model().parameters())
    made = train(tt.AdaComm(period=5, inner="keep"), tmp_path / "ada", epochs=4)
    changes = [e for e in made.history if isinstance(e, Event) and e.event == "period"]
    changed = {e.step: int(str(e.detail).split()[2]) for e in changes}
    period, rounds = 5, 0
    for _ in range(4):  # an interval is an epoch of 12 steps
        rounds += math.ceil(12 / period)
        period = changed.get(rounds, changed.get(rounds - 1, period))
    assert made.summary.steps == rounds > 4 * math.ceil(12 / 5) and len(changed) > 1
    fixed = train(tt.AdaComm(period=1, inner="keep"), tmp_path / "always", epochs=4)
    more = made.summary.steps - fixed.summary.steps
    assert made.summary.bytes_sent - fixed.summary.bytes_sent == more * (2 * 4 * numel + 2 * 3 * 8)


def test_the_time_of_a_step_is_that_of_computing_and_a_share_of_sending(tmp_path: Path) -> None:
    """With a as the ratio of sending to computing, steps are (1 + a) / (1 + a / period) times as quick."""
    compute = BATCH * 1e-3
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "network": {"bandwidth": 2.5e4, "latency": 0.0}}
    times = {}
    for period in (1, 2, 4, 12):
        made = train(
            tt.Local(period=period, inner="keep"),
            tmp_path / f"{period}",
            task(train=data(10 * SAMPLES)),
            cluster=cluster,
            epochs=1,
        )
        steps = [step for step in made.history if isinstance(step, Step) and step.worker == 0]
        times[period] = (steps[-1].time - steps[0].time) / (steps[-1].step - steps[0].step) / period
    ratio = times[1] / compute - 1
    assert ratio > 2
    for period, time in times.items():
        assert times[1] / time == pytest.approx((1 + ratio) / (1 + ratio / period), rel=0.1)


ADAM = tt.optimizer(torch.optim.AdamW, lr=0.01)


@pytest.mark.parametrize("restart", [True, False])
def test_a_worker_that_is_killed(restart: bool, tmp_path: Path) -> None:
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Step) and record.step >= 3)
    made = train(
        tt.DiLoCo(period=2),
        tmp_path / "run",
        task(ADAM, epochs=40),
        world="local",
        restart=restart,
        listeners=[killing],
    )
    assert made.summary.samples == 40 * SAMPLES
    assert killing.killed.is_set() and "worker_lost" in {
        record.event for record in made.history if isinstance(record, Event)
    }


# -- AdaComm's rule ---------------------------------------------------------------------------------------------------
def test_the_period_follows_the_loss_and_never_grows() -> None:
    assert next_period(20, 20, loss=0.25, rate=1.0) == 10
    assert next_period(10, 20, loss=0.25, rate=1.0) == 5  # not less than now: half
    assert next_period(10, 20, loss=0.01, rate=1.0) == 2
    assert next_period(10, 20, loss=0.01, rate=0.1) == 7  # a rate that falls asks for more,
    assert next_period(6, 20, loss=0.01, rate=0.1) == 3  # and never gets more than there was
    assert next_period(1, 20, loss=0.5, rate=1.0) == 1


def test_periods_over_intervals() -> None:
    choice, found = PeriodChoice(16, interval=100), []
    for loss in [4.0, 2.0, 1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.01, 0.005]:
        choice.add(loss, 60, rate=0.1)
        found.append(choice.period)
    assert found[0] == 16 and found[-1] == 1 and found == sorted(found, reverse=True)


def test_the_chosen_periods_are_on_record(tmp_path: Path) -> None:
    made = train(tt.AdaComm(period=6), tmp_path / "run", epochs=5)
    said = [record.detail for record in made.history if isinstance(record, Event) and record.event == "period"]
    periods = [6, *(int(line.split()[2]) for line in said)]
    assert said[0].startswith("6 to ") and periods == sorted(set(periods), reverse=True) and periods[-1] == 1
    assert made.summary.steps > 5 * 2 and made.summary.samples == 5 * SAMPLES


@pytest.mark.parametrize("strategy", ["local", "adacomm", "diloco", "streaming", "easgd", "hogwild"])
def test_a_period_of_nothing_is_refused(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(tt.TorrentialError, match="period"):
        train(strategy, tmp_path / "run", period=0)


@pytest.mark.parametrize("sign", [0, -1])
def test_adacomm_needs_a_loss_to_adapt_to(sign: int, tmp_path: Path) -> None:
    without = task(loss=lambda out, target: sign * F.cross_entropy(out, target))
    with pytest.raises(tt.TorrentialError, match=r"has to be positive \(first round: .*\); add a constant to the loss"):
        train(tt.AdaComm(), tmp_path / "run", without)


def test_a_rate_that_begins_at_zero(tmp_path: Path) -> None:
    """A warm-up whose first round has no rate: outer momentum divided by it, and AdaComm's rule compared with it."""
    warm = task(schedule=lambda done: min(1.0, 4 * done))
    for strategy in (tt.Local(period=1, outer_momentum=0.4), tt.AdaComm(period=2, interval=0.2)):
        made = train(strategy, tmp_path / type(strategy).name, warm)
        assert all(bool(p.isfinite().all()) for p in made.model.parameters())
        assert made.summary.samples == 2 * SAMPLES


def test_workers_without_samples_in_a_round_stay_alike(tmp_path: Path) -> None:
    """97 samples leave one for the last round of an epoch: whoever had none had another rate, and counted its Adam's
    steps differently, so that a resumed run was another one."""
    uneven = task(ADAM, train=data(97))
    for strategy in (tt.AdaComm(period=4, interval=0.3), tt.Local(period=3, outer_momentum=0.4)):
        name = type(strategy).name
        whole = train(strategy, tmp_path / f"{name}-whole", uneven, workers=3, epochs=3)
        train(strategy, tmp_path / f"{name}-half", uneven, workers=3, epochs=1)
        rest = tt.train(uneven, strategy, resume=tmp_path / f"{name}-half", epochs=3, progress=False)
        assert_equal_models(rest.model, whole.model, 0.0)
