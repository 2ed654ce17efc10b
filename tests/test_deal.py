"""Every sample of an epoch is dealt exactly once, whatever happens to the membership."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torrential.data.deal import Deal, grouped_order, order
from torrential.errors import BadInput
from torrential.task import Lengths, Task, with_validation


def test_an_epoch_by_hand() -> None:
    deal = Deal(10, seed=1)
    order = deal.share(0, 1, 10).indices.tolist()
    first, second = deal.share(0, 2, 2), deal.share(1, 2, 2)
    assert (first.indices.tolist(), second.indices.tolist(), first.total) == (order[0:2], order[2:4], 4)
    deal.advance(4)
    deal.advance(deal.share(0, 1, 3).total)
    assert (deal.epoch, deal.cursor) == (0, 7)
    assert [deal.share(m, 4, 1).indices.tolist() for m in range(4)] == [[], order[7:8], order[8:9], order[9:10]]
    assert deal.share(0, 4, 1).batches == []
    deal.advance(3)
    assert (deal.epoch, deal.cursor) == (1, 0)


def test_changing_membership_loses_and_repeats_nothing() -> None:
    rng = random.Random(0)
    for _ in range(300):
        samples = rng.randint(1, 300)
        deal = Deal(samples, seed=rng.randrange(100))
        for epoch in range(2):
            seen: list[int] = []
            while deal.epoch == epoch:
                members, batch, accumulate = rng.randint(1, 9), rng.randint(1, 16), rng.randint(1, 3)
                shares = [deal.share(m, members, batch, accumulate) for m in range(members)]
                sizes = [len(s.indices) for s in shares]
                assert sum(sizes) == shares[0].total
                if shares[0].total >= 2 * members * accumulate:
                    assert max(sizes) - min(sizes) <= 1
                if batch >= 3 and shares[0].total > 1:  # the last few go to fewer members: batch norm needs two
                    assert 1 not in [len(piece) for share in shares for piece in share.batches]
                for share in shares:
                    assert len(share.batches) <= accumulate
                    assert all(0 < len(piece) <= batch for piece in share.batches)
                    pieces = [i for piece in share.batches for i in piece.indices.tolist()]
                    assert pieces == share.indices.tolist()
                    seen += pieces
                deal.advance(shares[0].total)
            assert sorted(seen) == list(range(samples))


def test_members_together_take_what_one_would() -> None:
    one = Deal(100, seed=5).share(0, 1, 64).indices
    assert torch.equal(torch.cat([Deal(100, seed=5).share(m, 4, 16).indices for m in range(4)]), one)


@pytest.mark.parametrize("samples", [100, 67, 33, 9, 2, 1])  # less than 64: a short last batch
@pytest.mark.parametrize("batch", [16, 32, 2])
def test_accumulation_cuts_a_batch_as_more_members_would(samples: int, batch: int) -> None:
    k = 64 // batch
    cursor = samples // 3
    deal = Deal(samples, seed=5, epoch=1, cursor=cursor)
    alone = [deal.share(n, k, batch).indices.tolist() for n in range(k)]
    places = list(itertools.accumulate(map(len, alone), initial=cursor))  # in the epoch's order
    for members in (1, 2):
        shares = [deal.share(m, members, batch, k // members) for m in range(members)]
        found = {batch.first: batch.indices.tolist() for share in shares for batch in share.batches}
        assert found == {first: piece for first, piece in zip(places, alone, strict=False) if piece}
        assert [i for share in shares for i in share.indices.tolist()] == [i for p in alone for i in p]


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return Deal(50, seed, epoch).share(0, 1, 50).indices.tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25
    assert order(0, 0)[:5] == [43, 47, 19, 36, 18], "a changed order breaks resumed runs"


def test_resumes_in_the_middle() -> None:
    deal = Deal(30, seed=2)
    for _ in range(5):
        deal.advance(deal.share(0, 2, 4).total)
    again = Deal(30, 2, deal.epoch, deal.cursor)
    assert torch.equal(again.share(1, 2, 4).indices, deal.share(1, 2, 4).indices)


@pytest.mark.parametrize("args", [(0, 1), (5, 1, -1), (5, 1, 0, 5), (5, 1, 0, -1)])
def test_refuses(args: tuple[int, ...]) -> None:
    with pytest.raises(BadInput):
        Deal(*args)


# -- grouped by length ------------------------------------------------------------------------------------------------
def test_groups_have_like_lengths_and_every_sample_is_there_once() -> None:
    made = torch.Generator().manual_seed(3)
    lengths = Lengths(torch.randint(1, 100, (1003,), generator=made).tolist())
    places = grouped_order(1003, 0, 0, lengths, 16)
    assert sorted(places.tolist()) == list(range(1003))
    plain = order(1003, 0, 0)

    def spread(of: Tensor) -> float:
        groups = lengths.values[of].split(16)[:-1]
        return sum(int(group.max() - group.min()) for group in groups) / len(groups)

    assert spread(places) < spread(plain) / 5
    firsts = lengths.values[places][::16].float()
    assert 0.3 < float((firsts.diff() > 0).float().mean()) < 0.7, "long ones and short ones follow one another"
    assert len(places[-(1003 % 16) :]) == 1003 % 16


def test_a_grouped_order_is_a_function_of_seed_and_epoch() -> None:
    lengths = Lengths([n % 7 for n in range(100)])
    orders = [tuple(grouped_order(100, seed, epoch, lengths, 4).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    again = Lengths([n % 7 for n in range(100)])
    assert tuple(grouped_order(100, 0, 0, again, 4).tolist()) == orders[0]


def test_lengths_follow_the_samples_that_validation_leaves() -> None:
    data = [(torch.zeros(n), 0) for n in range(1, 31)]
    task = Task(model=lambda: torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss, train=data, test=data,
                length=lambda item: len(item[0]))  # fmt: skip
    split = with_validation(task, seed=0)
    assert list(split.length) == [len(item[0]) for item in split.train]  # type: ignore[arg-type]
    given = with_validation(replace(task, length=[n for n in range(1, 31)]), seed=0)
    assert list(given.length) == list(split.length)  # type: ignore[arg-type]
