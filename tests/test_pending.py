"""Snapshots wait for every worker's part, and never for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from torrential.trainer.pending import PendingSnapshots
from torrential.trainer.snapshot import Snapshot

PART = {"mean": torch.zeros(1)}


def snapshot(step: int, members: list[int], parts: bool = True) -> Snapshot:
    return Snapshot(
        step=step, epoch=0, cursor=0, samples=0, time=0.0, members=members, counts={}, final=False, parts=parts
    )


def given_out(pending: PendingSnapshots[str]) -> Iterator[tuple[str, list[int], bool]]:
    while (item := pending.next()) is not None:
        _, name, parts, news = item
        yield name, sorted(parts), news


def test_a_snapshot_waits_for_the_parts_of_those_that_are_there() -> None:
    pending: PendingSnapshots[str] = PendingSnapshots()
    pending.part(0, 15, PART)
    pending.add(snapshot(15, [0, 1, 2]), "first")
    pending.part(1, 15, PART)
    assert list(given_out(pending)) == []
    pending.gone(2)
    assert list(given_out(pending)) == [("first", [0, 1], True)]


def test_a_step_that_is_given_again_does_not_wait_for_parts_that_came_with_the_first() -> None:
    """Worker 0 dies after its snapshot; worker 1 gives the same step again, and only then comes worker 2's part."""
    pending: PendingSnapshots[str] = PendingSnapshots()
    pending.part(0, 15, PART)
    pending.add(snapshot(15, [0, 1, 2]), "first")
    pending.part(1, 15, PART)
    pending.gone(0)
    pending.part(1, 15, PART)  # again, for the second
    pending.part(2, 15, PART)
    assert list(given_out(pending)) == [("first", [0, 1, 2], True)]
    pending.add(snapshot(15, [1, 2]), "again")
    assert [(name, news) for name, _, news in given_out(pending)] == [("again", False)]


def test_a_new_observer_that_is_told_the_second_one_alone_has_its_parts() -> None:
    pending: PendingSnapshots[str] = PendingSnapshots()
    for rank in (1, 2):
        pending.part(rank, 15, PART)
    pending.add(snapshot(15, [1, 2]), "first")
    pending.add(snapshot(15, [1, 2]), "again")
    assert list(given_out(pending)) == [("first", [1, 2], True), ("again", [1, 2], False)]


def test_a_worker_that_was_replaced_before_its_part_came_is_not_waited_for() -> None:
    pending: PendingSnapshots[str] = PendingSnapshots()
    pending.gone(1)
    pending.back(1)
    pending.part(0, 15, PART)
    pending.add(snapshot(15, [0, 1]), "first")
    assert list(given_out(pending)) == []
    pending.part(1, 30, PART)  # of another life: nothing of step 15 will follow
    assert list(given_out(pending)) == [("first", [0], True)]


@pytest.mark.parametrize("needs_parts", [True, False])
def test_without_parts_to_wait_for_all_are_given_in_order(needs_parts: bool) -> None:
    pending: PendingSnapshots[str] = PendingSnapshots()
    for step in (5, 10, 10, 7):
        pending.part(0, step, PART)
        pending.add(snapshot(step, [0], needs_parts), str(step))
    assert [(name, news) for name, _, news in given_out(pending)] == [
        ("5", True), ("10", True), ("10", False), ("7", False),
    ]  # fmt: skip


@pytest.mark.parametrize("first", range(0, 1000, 200))
def test_whatever_the_order_every_snapshot_is_given_out(first: int) -> None:
    for seed in range(first, first + 200):
        interleave(random.Random(seed))


def interleave(rng: random.Random) -> None:
    """Three workers send their parts and snapshots in order; the streams interleave at random; any two may die."""
    alive = [0, 1, 2]
    streams: dict[int, list[tuple[str, int]]] = {rank: [] for rank in alive}
    dead = rng.sample(alive, rng.randrange(3))
    members, names = list(alive), 0
    for step in range(1, 4):
        for rank in members:
            streams[rank].append(("part", step))
        streams[members[0]].append((",".join(map(str, members)), step))
        if dead:  # after the step: all that are left give it again
            members = [rank for rank in members if rank != dead[0]]
            streams[dead.pop(0)].append(("gone", step))
            for rank in members:
                streams[rank].append(("part", step))
            streams[members[0]].append((",".join(map(str, members)), step))
    pending: PendingSnapshots[str] = PendingSnapshots()
    seen = 0
    while any(streams.values()):
        rank = rng.choice([rank for rank, stream in streams.items() if stream])
        what, step = streams[rank].pop(0)
        if what == "part":
            pending.part(rank, step, PART)
        elif what == "gone":
            pending.gone(rank)
        else:
            names += 1
            pending.add(snapshot(step, [int(r) for r in what.split(",")]), what)
        seen += len(list(given_out(pending)))
    assert seen == names
