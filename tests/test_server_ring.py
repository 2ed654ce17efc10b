"""Tables of ranges: who answers for which keys."""

import itertools
import random

import pytest

from torrential.comm.protocol import ALIGNMENT, SERVERS
from torrential.errors import BadInput, RunFailed
from torrential.server import ring
from torrential.server.clocks import RangeClock


def covers(table, numel):
    assert table[0].start == 0 and table[-1].stop == numel
    assert all(a.stop == b.start and a.start < a.stop for a, b in itertools.pairwise(table))
    assert all(len(set(r.chain)) == len(r.chain) >= 1 for r in table)


def heads(table, numel):
    owner = [0] * numel
    for r in table:
        owner[r.start : r.stop] = [r.chain[0]] * (r.stop - r.start)
    return owner


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_the_first_table_is_near_equal_and_aligned(servers):
    numel = 10_000
    table = ring.begin([SERVERS + j for j in range(servers)], numel, min(1, servers - 1))
    covers(table, numel)
    assert all(r.start % ALIGNMENT == 0 for r in table)
    assert max(abs(r.stop - r.start - numel / servers) for r in table) <= ALIGNMENT
    assert all(len(r.chain) == min(2, servers) for r in table)


def test_small_vectors_are_cut_too():
    for numel in range(1, 70):
        for servers in range(1, min(numel, 6) + 1):
            covers(ring.begin([SERVERS + j for j in range(servers)], numel), numel)


def test_more_servers_than_parameters_or_than_whole_tensors_are_refused():
    with pytest.raises(BadInput, match="3 servers do not fit 2 parameters"):
        ring.begin([SERVERS, SERVERS + 1, SERVERS + 2], 2)
    with pytest.raises(BadInput, match="3 servers do not fit 2 tensors"):
        ring.begin([SERVERS, SERVERS + 1, SERVERS + 2], 100, bounds=[0, 50])
    with pytest.raises(BadInput, match="1 replicas do not fit 1 servers"):
        ring.begin([SERVERS], 100, replicas=1)


def test_with_bounds_every_cut_is_on_one():
    bounds = [0, 3, 50, 51, 90, 97]
    table = ring.begin([SERVERS + j for j in range(4)], 100, bounds=bounds)
    covers(table, 100)
    for j in range(4, 7):
        table = ring.promote(ring.join(table, SERVERS + j, bounds=bounds), SERVERS + j)
        covers(table, 100)
        assert {r.start for r in table} <= set(bounds)


@pytest.mark.parametrize("servers", [1, 2, 5, 9])
@pytest.mark.parametrize("replicas", [0, 1])
def test_t5_8_a_newcomer_takes_its_share_and_nothing_moves_between_the_others(servers, replicas):
    numel = 100_000
    replicas = min(replicas, servers - 1)
    table = ring.begin([SERVERS + j for j in range(servers)], numel, replicas)
    for new in range(SERVERS + servers, SERVERS + servers + 3):
        count = len({r.chain[0] for r in table})
        joined = ring.join(table, new, replicas)
        covers(joined, numel)
        assert heads(joined, numel) == heads(table, numel)  # it is filled first
        after = ring.promote(joined, new, replicas)
        covers(after, numel)
        moved = [(a, b) for a, b in zip(heads(table, numel), heads(after, numel), strict=True) if a != b]
        assert all(b == new for _, b in moved)
        assert abs(len(moved) / numel - 1 / (count + 1)) < 0.01
        assert all(len(r.chain) == replicas + 1 and r.heir is None for r in after)
        table = after


def test_the_first_replica_succeeds_a_dead_head_and_chains_are_lengthened():
    table = ring.begin([SERVERS + j for j in range(4)], 1000, 1)
    after = ring.leave(table, SERVERS + 1, 1)
    covers(after, 1000)
    for old, new in zip(table, after, strict=True):
        assert SERVERS + 1 not in new.chain and len(new.chain) == 2
        assert new.chain[0] == (old.chain[1] if old.chain[0] == SERVERS + 1 else old.chain[0])


def test_a_range_without_a_copy_is_lost():
    table = ring.begin([SERVERS, SERVERS + 1], 1000)
    with pytest.raises(RunFailed, match="parameters 512 to 1000 are lost: server 1 held the only copy"):
        ring.leave(table, SERVERS + 1)


def test_random_comings_and_goings_leave_a_whole_table():
    for seed in range(50):
        rng = random.Random(seed)
        alive = [SERVERS, SERVERS + 1, SERVERS + 2]
        table, created = ring.begin(alive, 5000, 1), 3
        for _ in range(15):
            if rng.random() < 0.5 or len(alive) < 3:
                alive.append(SERVERS + created)
                table = ring.join(table, SERVERS + created, 1)
                if rng.random() < 0.7:
                    table = ring.promote(table, SERVERS + created, 1)
                created += 1
            else:
                table = ring.leave(table, alive.pop(rng.randrange(len(alive))), 1)
            covers(table, 5000)
            assert {a for r in table for a in r.chain} <= set(alive)
            assert all(len(r.chain) >= 2 for r in table)


def test_t5_3_a_range_clock_is_a_clock_for_every_key():
    for seed in range(200):
        rng = random.Random(seed)
        start, stop = 5, 5 + rng.randint(1, 40)
        clock, keys = RangeClock(start, stop), [0] * (stop - start)
        for sets in range(1, 20):
            first = rng.randint(0, 50)
            last = rng.randint(first, 50)
            clock.set(first, last, sets)
            for key in range(max(first, start), min(last, stop)):
                keys[key - start] = sets
            assert [clock.at(key) for key in range(start, stop)] == keys
            assert clock.least() == min(keys)
            assert len(clock.pieces()) <= 1 + 2 * sets
            low = rng.randint(start, stop - 1)
            high = rng.randint(low + 1, stop)
            part = clock.part(low, high)
            assert [part.at(key) for key in range(low, high)] == keys[low - start : high - start]
