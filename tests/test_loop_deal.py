"""Members keep what they were dealt: whatever dies and joins, every sample of an epoch is trained on once."""

import random
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from torrential.data.deal import Batch, Order
from torrential.loop.dealing import KeptDeal
from torrential.loop.loader import DealtLoader

ORDER = Order(1000, 0, stream=True)


def deal(samples: int, roster: tuple[int, ...], batch: int = 4, pieces: int = 1) -> KeptDeal:
    made = KeptDeal(samples, 0, 0, 0, ORDER)
    made.roster = roster
    made.begin_round(batch, pieces)
    return made


def test_what_a_dead_member_had_is_dealt_next_and_to_all():
    made = deal(24, (0, 1, 2))
    held = {rank: made.pieces(0, rank, (0, 2)) for rank in (0, 1, 2)}
    assert [b.indices.tolist() for b in held[2]] == [[8, 9, 10, 11]]
    assert [b.weight for b in held[0] + held[2]] == [0.5, 0.5]
    made.agree(1, (0, 2))
    made.advance(8)
    assert (made.epoch, made.cursor, made.owed, made.roster) == (0, 12, [(0, 4, 8)], (0, 2))
    made.begin_round(4, 1)
    assert [b.indices.tolist() for rank in (0, 2) for b in made.pieces(0, rank, (0, 2))] == [[4, 5], [6, 7]]
    made.agree(1, (0, 2))
    made.advance(4)
    assert (made.cursor, made.owed) == (12, [])


def test_what_is_owed_belongs_to_its_epoch_though_the_next_has_begun():
    made = deal(12, (0, 1, 2))
    made.agree(1, (0, 1))
    made.advance(8)
    assert (made.epoch, made.cursor, made.next_epoch()) == (1, 0, 0)
    made.begin_round(4, 1)
    assert made.span(0) == (0, 8, 12) and made.span(1) == (1, 0, 8)


def test_a_newcomer_has_nothing_of_the_round_that_it_comes_into():
    made = deal(16, (0, 1))
    assert made.pieces(0, 5, (0, 1, 5)) == []
    made.agree(1, (0, 1, 5))
    made.advance(8)
    made.begin_round(4, 1)
    assert [len(made.pieces(0, rank, (0, 1, 5))[0]) for rank in (0, 1, 5)] == [2, 3, 3]


def test_a_worker_that_is_slow_to_begin_has_no_epochs_of_its_own():
    """Found in a run of two epochs: the others had done both, and a late script did two more."""
    dealt = DealtLoader(DataLoader(TensorDataset(torch.arange(8)), batch_size=4), workers=2, samples=8)
    left = [Batch(1, 0, torch.tensor([2, 3]), 2)]  # of the first epoch nothing
    dealt.ask = lambda epoch: left.pop() if left and left[-1].epoch <= epoch else None
    assert [[batch[0].tolist() for batch in dealt] for _ in range(2)] == [[], [[2, 3]]]


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_trained_on_once_in_each_epoch(seed):
    draw = random.Random(seed)
    samples, batch, pieces = draw.randrange(5, 60), draw.choice([1, 2, 3, 8]), draw.choice([1, 1, 2])
    members = tuple(range(draw.randrange(1, 5)))
    made, seen = deal(samples, members, batch, pieces), Counter()
    while made.next_epoch() < 3:
        made.begin_round(batch, pieces)
        count = 1 if made.span(1)[0] > made.next_epoch() else draw.choice([1, 2])
        present = tuple(rank for rank in members if draw.random() > 0.15) or members[:1]
        if not set(present) & set(made.roster):
            present = made.roster
        parts = [b for n in range(count) for rank in present for b in made.pieces(n, rank, present)]
        for n in range(count):
            weights = [b.weight for rank in present for b in made.pieces(n, rank, present)]
            assert not weights or sum(weights) == pytest.approx(1)
        for part in parts:
            seen.update((part.epoch, index) for index in part.indices.tolist())
        made.agree(count, present)
        made.advance(sum(map(len, parts)))
        saved = KeptDeal(samples, 0, made.epoch, made.cursor, ORDER)
        saved.load(made.state())
        assert (saved.owed, saved.roster) == (made.owed, made.roster)
        made = saved
        members = tuple(sorted({*present, *(rank for rank in range(5) if draw.random() < 0.2)}))
    assert {seen[(epoch, index)] for epoch in range(3) for index in range(samples)} == {1}
