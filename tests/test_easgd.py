"""Elastic averaging: what an exchange conserves, the formula of all at once, the bound of stability, bytes, deaths.

T13.1  test_every_exchange_conserves_the_sum, test_an_exchange_conserves_the_sum_and_all_come_together
T13.2  test_a_worker_that_nothing_draws_takes_plain_steps, test_all_at_once_the_centre_goes_to_the_mean
T13.3  test_the_bound_of_stability
T13.4  test_where_exchanges_are_rare_elastic_averaging_is_stable_and_downpour_is_not; experiments/local_updates.py
T13.5  test_bytes_of_an_exchange
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
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
from tests.test_averaging import BATCH, SAMPLES, data, model, task
from tests.test_equivalence import assert_equal_models, fresh
from torrential.data.deal import Deal
from torrential.errors import BadInput
from torrential.params.layout import plan
from torrential.records import Evaluation, Event, Step
from torrential.tasks import load_task


def train(strategy: tt.Strategy, out: Path, of: tt.Task | None = None, **options: Any) -> tt.TrainResult:
    given = {"workers": 2, "servers": 2, "world": "sim", "out": out, "progress": False}
    return tt.train(of or task(), strategy, **given | options)


class Scattered(tt.Easgd, frozen=True, kw_only=True):
    """Workers that begin far from one another, and whose gradients are zero."""

    begun: ClassVar[dict[int, Tensor]] = {}

    def _step(self, ctx: tt.Context, minibatch: tt.Batch, vector: Tensor, *more: Tensor) -> float:
        rank = ctx.comm.rank
        if rank not in self.begun:
            self.begun[rank] = vector.add_(torch.arange(float(vector.numel())) * (rank - 0.5)).clone()
        return 0.0


def test_an_exchange_conserves_the_sum_and_all_come_together(tmp_path: Path) -> None:
    Scattered.begun.clear()
    data = TensorDataset(torch.zeros(24, 6, dtype=torch.float64), torch.zeros(24, dtype=torch.int64))
    of = task(model=lambda: model().double(), epochs=60, train=data, validation=data, test=data)
    made = train(Scattered(period=1, beta=0.9), tmp_path / "run", of, workers=3)
    layout = plan(model().double(), tt.Easgd.bucket_bytes)
    total = sum(Scattered.begun.values())
    places = zip(layout.entries, *(reversed(list(m.parameters())) for m in (fresh(of), made.model)), strict=True)
    for entry, start, found in places:
        torch.testing.assert_close(found, (start + entry.view(total)) / 4, atol=1e-9, rtol=0)


class Conserving(Scattered, frozen=True, kw_only=True):
    """One worker, which looks at the sum of itself, of what it is still to be drawn by, and of the centre."""

    sums: ClassVar[list[Tensor]] = []

    def worker(self, ctx: tt.Context) -> None:
        whole, vector = ctx.params.push, ctx.replica.vector()

        def push(pull: Tensor, **how: Any) -> Any:
            handle, centre = whole(pull, **how), torch.empty_like(vector)
            handle.wait()
            ctx.params.pull(centre, clock=how["clock"]).wait()
            self.sums.append(vector + pull + centre)
            return handle

        ctx.params.push = push  # type: ignore[method-assign]
        super().worker(ctx)


def test_every_exchange_conserves_the_sum(tmp_path: Path) -> None:
    Scattered.begun.clear()
    Conserving.sums.clear()
    data = TensorDataset(torch.zeros(24, 6, dtype=torch.float64), torch.zeros(24, dtype=torch.int64))
    of = task(model=lambda: model().double(), epochs=3, train=data, validation=data, test=data)
    train(Conserving(period=1, beta=0.9), tmp_path / "run", of, workers=1)
    assert len(Conserving.sums) == 3 * 24 // BATCH
    for entry in plan(model().double(), tt.Easgd.bucket_bytes).entries:  # what lies between them is no parameter
        for found in Conserving.sums:
            torch.testing.assert_close(entry.view(found), entry.view(Conserving.sums[0]), atol=1e-12, rtol=0)


class Loose(tt.Easgd, frozen=True, kw_only=True):
    """Keeps where its worker was before its last step."""

    seen: ClassVar[list[Tensor]] = []

    def _step(self, ctx: tt.Context, minibatch: tt.Batch, vector: Tensor, *more: Tensor) -> float:
        loss = super()._step(ctx, minibatch, vector, *more)  # type: ignore[arg-type]
        self.seen.append(vector.clone())
        return loss


def test_a_worker_that_nothing_draws_takes_plain_steps(tmp_path: Path) -> None:
    """p = 1, alpha = 0 (nearly: nothing in float32) is SGD."""
    Loose.seen.clear()
    train(Loose(period=2, beta=1e-30), tmp_path / "run", workers=1, epochs=1)
    plain = fresh(task())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for indices in Deal(SAMPLES, seed=0).order.whole(0).split(BATCH):
        x, y = task().train[indices]
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    layout = plan(model(), tt.Easgd.bucket_bytes)
    for entry, parameter in zip(layout.entries, reversed(list(plain.parameters())), strict=True):
        torch.testing.assert_close(entry.view(Loose.seen[-1]), parameter.detach(), atol=1e-6, rtol=0)


class Ordered(tt.Easgd, frozen=True, kw_only=True):
    """Keeps who pushed when."""

    pushed: ClassVar[list[int]] = []

    def worker(self, ctx: tt.Context) -> None:
        whole = ctx.params.push

        def push(value: Tensor | None, **how: Any) -> Any:
            self.pushed.extend([ctx.comm.rank] * (value is not None))
            return whole(value, **how)

        ctx.params.push = push  # type: ignore[method-assign]
        super().worker(ctx)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_workers_exchange_in_turn(workers: int, tmp_path: Path) -> None:
    """Though the last one is the quickest: from the second round on in the order of their numbers."""
    stragglers = [{"worker": worker, "factor": float(workers - worker)} for worker in range(workers - 1)]
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "stragglers": stragglers}
    orders = {}
    for in_turn in (True, False):
        Ordered.pushed.clear()
        of = task(train=data(SAMPLES * workers))
        how = {"workers": workers, "cluster": cluster}
        made = train(Ordered(period=2, in_turn=in_turn), tmp_path / f"{in_turn}", of, **how)
        orders[in_turn] = Ordered.pushed[:]
        assert made.summary.samples == 2 * SAMPLES * workers
    later = orders[True][workers : -2 * workers]
    assert later == [n % workers for n in range(len(later))] and len(later) > 3 * workers
    assert workers == 1 or orders[False][workers : -2 * workers] != later


def test_workers_go_on_in_turn_after_a_death(tmp_path: Path) -> None:
    faults = [{"kind": "crash", "worker": 1, "at": 0.2, "lasts": 0.1}, {"kind": "crash", "worker": 0, "at": 0.5}]
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "faults": faults}
    made = train(tt.Easgd(period=2, in_turn=True), tmp_path / "run", task(epochs=12), workers=3, cluster=cluster)
    assert made.summary.samples == 12 * SAMPLES
    assert [e.worker for e in made.history if isinstance(e, Event) and e.event == "worker_lost"] == [1, 0]


@pytest.mark.parametrize("when", [0.05, 0.083, 0.121, 0.152])
def test_checkpoints_are_complete_though_workers_come_and_go(when: float, tmp_path: Path) -> None:
    """Where all exchange at once every worker gives its position to a checkpoint, which waits for nobody that is gone
    or has just come."""
    faults = [{"kind": "crash", "worker": 1, "at": when, "lasts": 0.04}, {"kind": "crash", "worker": 0, "at": 0.3}]
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "faults": faults, "detection": 0.02}
    strategy = tt.Easgd(period=2, waits=True, momentum=0.5)
    how = {"workers": 3, "cluster": cluster, "evaluate_every": 3}
    made = train(strategy, tmp_path / "run", task(epochs=12), **how)
    assert made.summary.samples == 12 * SAMPLES
    events = [e.event for e in made.history if isinstance(e, Event)]
    assert events.count("worker_lost") == 2 and events.count("worker_joined") == 1
    evaluated = [e for e in made.history if isinstance(e, Evaluation) and e.split == "validation"]
    gaps = [after.time - before.time for before, after in pairwise(evaluated)]
    assert max(gaps) < 0.1  # three steps take 0.03 s
    newest = max((tmp_path / "run/checkpoints").glob("step-*"))
    owners = {name.partition("/")[0] for name in load_file(newest / "workers.safetensors")}
    assert owners == {"1", "2"}


def test_two_orders_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tt.TorrentialError, match="give waits=true or in_turn=true"):
        train("easgd", tmp_path / "run", waits=True, in_turn=True)  # type: ignore[arg-type]


def test_all_at_once_the_centre_goes_to_the_mean(tmp_path: Path) -> None:
    """One exchange with waits=true: c <- (1 - beta) c + beta * mean of x."""
    beta, period = 0.6, 3
    made = train(tt.Easgd(period=period, beta=beta, waits=True), tmp_path / "run", steps=1)
    deal, start, moved = Deal(SAMPLES, seed=0), fresh(task()), []
    order = deal.order.whole(0)
    for rank in range(2):  # who takes which batch is the same for the mean
        replica = fresh(task())
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for indices in order[rank * period * BATCH : (rank + 1) * period * BATCH].split(BATCH):
            x, y = task().train[indices]
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
        moved.append(replica)
    with torch.no_grad():
        for centre, *mine in zip(start.parameters(), *(m.parameters() for m in moved), strict=True):
            centre.copy_((1 - beta) * centre + beta * sum(mine) / 2)
    assert_equal_models(made.model, start, 1e-6)


class Bowl(nn.Module):
    """A quadratic of curvature 1 in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, ignored: Tensor) -> Tensor:
        return 0.5 * (self.x**2).expand(len(ignored))


class Unchecked(tt.Easgd, frozen=True, kw_only=True):
    """Without a look at the bound."""

    def fitted(self, task: tt.Task, model: nn.Module, workers: int) -> Unchecked:
        return self


@pytest.mark.parametrize(("share", "stable"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_the_bound_of_stability(rate: float, share: float, stable: bool, tmp_path: Path) -> None:
    nothing = TensorDataset(torch.zeros(2000, 1), torch.zeros(2000))
    bowl = task(
        tt.optimizer(torch.optim.SGD, lr=rate),
        model=Bowl,
        loss=lambda out, _: out.mean(),
        train=nothing,
        test=nothing,
        validation=nothing,
        metric=lambda out, _: float(out.detach().mean()),
        maximize=False,
        batch_size=1,
        epochs=1,
    )
    alpha = share * (4 - 2 * rate) / (4 - rate)
    made = train(Unchecked(period=1, beta=alpha), tmp_path / "run", bowl, workers=1, servers=1)
    (centre,) = made.model.parameters()
    assert (abs(float(centre.detach())) < 1.0) is stable
    if not stable:
        with pytest.raises(
            BadInput, match=r"alpha = beta / workers = .*, the bound at a rate of .*; use a smaller beta"
        ):
            train(tt.Easgd(period=1, beta=alpha), tmp_path / "refused", bowl, workers=1, servers=1)


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 10))


@pytest.mark.parametrize("seed", range(5))
def test_where_exchanges_are_rare_elastic_averaging_is_stable_and_downpour_is_not(seed: int, tmp_path: Path) -> None:
    """T13.4: a small CNN on the digits, four workers whose steps take unequally long, 16 steps between exchanges."""
    sgd = tt.optimizer("sgd", lr=0.1)
    of = replace(load_task("digits"), model=small_cnn, optimizer=sgd, batch_size=8, epochs=4)
    cluster = {"compute": {"seconds_per_sample": 1e-3, "spread": "lognormal", "shape": 0.3}}
    errors = {}
    for name, strategy in {
        "downpour 1": tt.Downpour(server="task"),
        "downpour 16": tt.Downpour(server="task", push_every=16, fetch_every=16),
        "easgd 16": tt.Easgd(period=16),
        "eamsgd 16": tt.Easgd(period=16, momentum=0.9),
    }.items():
        how = {"workers": 4, "servers": 1, "seed": seed, "cluster": cluster, "evaluate_every": 10**6}
        value = train(strategy, tmp_path / name, of, **how).summary.value
        assert value is not None
        errors[name] = 1 - value
    assert max(errors["easgd 16"], errors["eamsgd 16"]) <= errors["downpour 16"] > errors["downpour 1"]


def test_bytes_of_an_exchange(tmp_path: Path) -> None:
    """A worker sends one; the other, which a server sends, is not in the workers' sum."""
    layout = plan(model(), tt.Easgd.bucket_bytes)
    (numel,) = layout.sizes.values()
    for period in (1, 2, 4):
        made = train(tt.Easgd(period=period), tmp_path / f"{period}", epochs=4)
        assert made.summary.steps == 4 * SAMPLES // (period * BATCH)
        assert made.summary.bytes_sent == 4 * numel * made.summary.steps


def test_momentum_is_nesterovs(tmp_path: Path) -> None:
    """One worker: its first exchange draws the centre to where plain Nesterov steps have led."""
    made = train(tt.Easgd(period=4, beta=0.5, momentum=0.8), tmp_path / "run", workers=1, steps=1)
    start = fresh(task())
    ours, velocity = fresh(task()), [torch.zeros_like(p) for p in start.parameters()]
    for indices in Deal(SAMPLES, seed=0).order.whole(0)[: 4 * BATCH].split(BATCH):
        x, y = task().train[indices]
        with torch.no_grad():
            for p, v in zip(ours.parameters(), velocity, strict=True):
                p.add_(0.8 * v)
        ours.zero_grad()
        F.cross_entropy(ours(x), y).backward()
        with torch.no_grad():
            for p, v in zip(ours.parameters(), velocity, strict=True):
                p.sub_(0.8 * v)
                v.mul_(0.8).sub_(0.1 * p.grad)
                p.add_(v)
    with torch.no_grad():
        for centre, mine in zip(start.parameters(), ours.parameters(), strict=True):
            centre.add_(0.5 * (mine - centre))
    assert_equal_models(made.model, start, 1e-6)


@pytest.mark.parametrize("how", [{"waits": True}, {"in_turn": True}], ids=str)
def test_a_worker_without_samples_takes_no_part(how: dict[str, bool], tmp_path: Path) -> None:
    """Found by random fault schedules: it exchanged what belongs to no samples, and its momentum moved it on. Of 9
    batches in an epoch, the last of half the size, each of two workers exchanges 5 and 4."""
    Ordered.pushed.clear()
    samples = 8 * BATCH + BATCH // 2
    made = train(Ordered(period=1, momentum=0.5, **how), tmp_path / "run", task(train=data(samples), epochs=3))
    assert made.summary.samples == 3 * samples and len(Ordered.pushed) == 27


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("victim", ["tt-worker-1", "tt-server-0"])
def test_whoever_is_killed(victim: str, waits: bool, tmp_path: Path) -> None:
    killing = Killing(victim, lambda record: isinstance(record, Step) and record.step >= 3)
    made = train(
        tt.Easgd(period=2, momentum=0.5, waits=waits),
        tmp_path / "run",
        task(epochs=60),
        world="local",
        replicas=1,
        restart=True,
        listeners=[killing],
    )
    assert killing.killed.is_set() and made.summary.samples == 60 * SAMPLES
    lost = {"worker_lost", "server_lost"}
    assert lost & {record.event for record in made.history if isinstance(record, Event)}
