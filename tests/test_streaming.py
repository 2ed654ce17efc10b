"""Streaming DiLoCo: the loop by hand, bytes, what is on its way while workers compute, resumption, deaths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torrential as tt
from tests.killing import Killing
from tests.test_averaging import ADAM, BATCH, SAMPLES, data, model, task, train
from tests.test_equivalence import assert_equal_models, fresh
from torrential.data.deal import Deal
from torrential.params.layout import plan
from torrential.records import Event, Step
from torrential.strategies.streaming import in_fragments


def by_hand(of: tt.Task, workers: int, rounds: int, strategy: tt.StreamingDiLoCo) -> nn.Module:
    """A plain loop on one process: models of their own, whose fragments come back one round after they were sent."""
    replicas = [fresh(of) for _ in range(workers)]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
    outer = {name: p.detach().clone() for name, p in replicas[0].named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in outer.items()}
    names = [entry.name for entry in plan(fresh(of), 1).entries]
    fragments = in_fragments({name: outer[name].numel() for name in names}, strategy.fragments)
    deal, steps = Deal(len(of.train), seed=0), strategy.period // strategy.fragments
    for number in range(rounds):
        sent = fragments[(number - 1) % len(fragments)] if number else []
        ways = {n: sum(outer[n] - dict(r.named_parameters())[n].detach() for r in replicas) / workers for n in sent}
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            for batch in deal.share(rank, workers, BATCH, steps).batches:
                x, y = of.train[batch.indices]
                optimizer.zero_grad()
                F.cross_entropy(replica(x), y).backward()
                optimizer.step()
        deal.advance(workers * BATCH * steps)
        with torch.no_grad():
            for name, way in ways.items():
                velocity[name] = strategy.outer_momentum * velocity[name] + way
                outer[name] -= strategy.outer_rate * (way + strategy.outer_momentum * velocity[name])
                for replica in replicas:
                    mine = dict(replica.named_parameters())[name]
                    mine.copy_((1 - strategy.own) * outer[name] + strategy.own * mine)
    with torch.no_grad():
        for together in zip(*(replica.parameters() for replica in replicas), strict=True):
            together[0].copy_(sum(together) / workers)
    return replicas[0]


@pytest.mark.parametrize("world", ["local", "sim"])
def test_streaming_is_a_loop_over_fragments_that_come_back_later(world: str, tmp_path: Path) -> None:
    strategy = tt.StreamingDiLoCo(period=6, fragments=3, own=0.25)
    made = train(strategy, tmp_path / "run", steps=6, world=world)
    assert_equal_models(made.model, by_hand(task(), 2, 6, strategy), 1e-6)
    assert made.summary.samples == 6 * 2 * 2 * BATCH


def test_fragments_are_of_about_equal_size_and_none_is_empty() -> None:
    assert in_fragments({"a": 4, "b": 4, "c": 4, "d": 4}, 2) == [["a", "b"], ["c", "d"]]
    assert in_fragments({"a": 100, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert in_fragments({"a": 1, "b": 1, "c": 100}, 2) == [["a", "b"], ["c"]]
    assert in_fragments({"a": 1, "b": 2, "c": 3}, 1) == [["a", "b", "c"]]


def test_bytes_are_those_of_one_model_in_a_period(tmp_path: Path) -> None:
    """Both of two workers send half of the sums and half of the totals; in the first round nothing."""
    numel, votes = sum(p.numel() for p in model().parameters()), 2 * 3 * 8
    sent = {}
    for rounds in (3, 9):
        strategy = tt.StreamingDiLoCo(period=2, fragments=2)
        sent[rounds] = train(strategy, tmp_path / f"{rounds}", steps=rounds, evaluate_every=10**6).summary.bytes_sent
    assert sent[9] - sent[3] == 3 * 2 * 4 * numel + 6 * votes


def test_nobody_waits_for_what_comes_within_a_round(tmp_path: Path) -> None:
    """Sending the larger fragment takes three quarters of a round's computing: it is on its way meanwhile, where
    `diloco` waits for the whole model at the end of a period."""
    wide = task(train=data(10 * SAMPLES), model=lambda: nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 3)))
    larger, compute = 6 * 600, 4 * BATCH * 1e-3
    network = {"latency": 0.0, "handling": 0.0, "bandwidth": 4 * larger / (0.75 * compute)}
    cluster = {"compute": {"seconds_per_sample": 1e-3}, "network": network}
    took = {}
    for strategy in (tt.StreamingDiLoCo(period=8, fragments=2), tt.DiLoCo(period=8)):
        made = train(strategy, tmp_path / type(strategy).name, wide, cluster=cluster, epochs=1, algorithm="ring")
        took[type(strategy).name] = max(step.time for step in made.history if isinstance(step, Step))
    whole = 10 * SAMPLES / 2 * 1e-3  # of computing alone
    assert took["streaming"] == pytest.approx(whole, rel=0.1)
    assert took["diloco"] > 1.5 * whole


@pytest.mark.parametrize("restart", [True, False])
def test_a_worker_that_is_killed(restart: bool, tmp_path: Path) -> None:
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Step) and record.step >= 3)
    how = {"world": "local", "restart": restart, "listeners": [killing]}
    made = train(tt.StreamingDiLoCo(period=4, fragments=2), tmp_path / "run", task(ADAM, epochs=40), **how)
    assert killing.killed.is_set() and made.summary.samples == 40 * SAMPLES
    assert "worker_lost" in {record.event for record in made.history if isinstance(record, Event)}


def test_more_fragments_than_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tt.TorrentialError, match=r"\(fragments: 4, period: 3\); use fragments=3 at most"):
        train("streaming", tmp_path / "run", period=3)  # type: ignore[arg-type]
