"""The all-reduce family as data: sums, counts and shapes, without a socket.

Messages are delivered lazily: the bytes are read when a message is delivered, in a random order among what may be, and
what replaces lands at once, as it does on a real wire. A plan that overwrites a part still on its way sums wrongly.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from torrential.comm.protocol import slices
from torrential.comm.schedules import ALGORITHMS, blocks, bruck, direct, halving, naive, ring, tree
from torrential.comm.schedules.base import Costs, Plan, Receive, Send, cut

Make = Callable[..., Plan]


@dataclass
class Outcome:
    vectors: list[np.ndarray]
    sent: Counter[int] = field(default_factory=Counter)  # elements, by member
    received: Counter[int] = field(default_factory=Counter)
    rounds: int = 0  # the longest chain of messages of which each waits for the one before


def execute(plans: list[Plan], vectors: list[np.ndarray], seed: int = 0) -> Outcome:
    """Carry out everybody's plan on `vectors`."""
    chance = random.Random(seed)
    out = Outcome(vectors)
    expected = {
        (r.source, me, r.key): r for me, plan in enumerate(plans) for stream in plan for s in stream for r in s.receives
    }
    receives = sum(len(s.receives) for plan in plans for stream in plan for s in stream)
    assert len(expected) == receives, "two messages of a pair with the same key"
    flying: list[tuple[int, Send, int]] = []  # sender, message, round
    came: dict[tuple[int, int, int], tuple[np.ndarray, int]] = {}  # what was added or has landed, and its round
    cursors = [[me, stream, 0, False, 0] for me, plan in enumerate(plans) for stream in plan]  # .. step, entered, round

    def follow(cursor: list) -> bool:
        me, stream, at, entered, time = cursor
        if at == len(stream):
            return False
        step = stream[at]
        if not entered:
            for s in step.sends:
                assert s.start < s.stop and s.to != me
                flying.append((me, s, time + 1))
            cursor[3] = True
        if any((r.source, me, r.key) not in came for r in step.receives):
            return not entered
        sums: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = defaultdict(list)
        for r in step.receives:
            data, when = came.pop((r.source, me, r.key))
            time = max(time, when)
            if r.add:
                sums[r.start, r.stop].append((r.source, data))
        for (a, b), terms in sums.items():
            ordered = sorted([*terms, (me, vectors[me][a:b].copy())], key=lambda term: term[0])
            total = ordered[0][1]
            for _, term in ordered[1:]:
                total = total + term
            vectors[me][a:b] = total
        cursor[2:] = at + 1, False, time
        return True

    while True:
        busy = True
        while busy:
            busy = any([follow(cursor) for cursor in cursors])
        if not flying:
            break
        sender, s, when = flying.pop(chance.randrange(len(flying)))
        r = expected.pop((sender, s.to, s.key))
        assert (r.start, r.stop) == (s.start, s.stop) or not r.add
        data = vectors[sender][s.start : s.stop].copy()
        if not r.add:
            vectors[s.to][r.start : r.stop] = data
        came[sender, s.to, s.key] = data, when
        out.sent[sender] += len(data)
        out.received[s.to] += len(data)
        out.rounds = max(out.rounds, when)
    assert not expected and not came, "a message was never sent, or never taken"
    assert all(cursor[2] == len(cursor[1]) for cursor in cursors)
    return out


def plans(make: Make, members: int, numel: int, *more: int) -> list[Plan]:
    return [make(member, members, numel, *more) for member in range(members)]


def whole(members: int, numel: int, dtype: str = "int64") -> list[np.ndarray]:
    chance = np.random.default_rng([members, numel])
    if dtype == "int64":
        return [chance.integers(-(2**40), 2**40, numel) for _ in range(members)]
    return [chance.standard_normal(numel).astype(dtype) for _ in range(members)]


def sizes(members: int) -> list[int]:
    return sorted({0, 1, members - 1, members, members + 1, 1000})


def all_reduced(name: str, members: int, numel: int, seed: int = 0) -> Outcome:
    vectors = whole(members, numel)
    expected = np.sum(vectors, axis=0)
    out = execute(plans(ALGORITHMS[name].plan, members, numel), vectors, seed)
    assert all(np.array_equal(v, expected) for v in out.vectors), (name, members, numel, seed)
    return out


every = pytest.mark.parametrize("name", ALGORITHMS)


# -- T7.1: sums ---------------------------------------------------------------------------------------------------
@every
@pytest.mark.parametrize("members", range(1, 18))
def test_every_algorithm_sums_exactly(name: str, members: int) -> None:
    for seed, numel in enumerate(sizes(members)):
        all_reduced(name, members, numel, seed)


@every
def test_chunks_may_arrive_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "CHUNK", 10)
    for members in (2, 3, 6, 9):
        for seed in range(10):
            all_reduced(name, members, 200, seed)


@every
@pytest.mark.parametrize("members", [2, 3, 5, 8, 13])
def test_floats_are_the_same_bytes_on_every_member_and_in_every_run(name: str, members: int) -> None:
    results = set()
    for seed in range(3):
        out = execute(plans(ALGORITHMS[name].plan, members, 1000), whole(members, 1000, "float32"), seed)
        results |= {v.tobytes() for v in out.vectors}
    assert len(results) == 1
    assert np.allclose(out.vectors[0], np.sum(whole(members, 1000, "float32"), axis=0), atol=1e-4)


@pytest.mark.parametrize("name", ["naive", "direct"])
def test_two_of_them_add_in_order_of_rank(name: str) -> None:
    vectors = whole(7, 1000, "float32")
    expected = vectors[0].copy()
    for vector in vectors[1:]:
        expected += vector
    out = execute(plans(ALGORITHMS[name].plan, 7, 1000), vectors)
    assert out.vectors[3].tobytes() == expected.tobytes()


def test_an_overwritten_message_would_be_noticed() -> None:
    """The executor itself: member 0 sends a part, then lets it be replaced before it has arrived."""
    bad: list[Plan] = [
        [[naive.step([Send(1, 0, 4, 0)]), naive.step((), [Receive(1, 0, 4, 1, False)])]],
        [[naive.step([Send(0, 4, 8, 1)], [Receive(0, 0, 4, 0, True)])]],
    ]
    sums = {tuple(execute(bad, [np.zeros(8), np.arange(8.0)], seed).vectors[1][:4]) for seed in range(20)}
    assert len(sums) == 2


# -- T7.2: bytes and rounds ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("members", range(2, 18))
def test_a_ring_sends_the_least_in_twice_p_minus_one_rounds(members: int) -> None:
    out = all_reduced("ring", members, 60 * members)
    assert set(out.sent.values()) == {2 * (members - 1) * 60}
    assert out.rounds == 2 * (members - 1)


@pytest.mark.parametrize("members", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["halving", "blocks"])
def test_halving_sends_the_least_in_twice_log_p_rounds(name: str, members: int) -> None:
    out = all_reduced(name, members, 60 * members)
    assert set(out.sent.values()) == {2 * (members - 1) * 60}
    assert out.rounds == 2 * math.log2(members)


@pytest.mark.parametrize("members", [3, 5, 6, 7, 9, 15])
def test_surplus_members_cost_halving_two_rounds(members: int) -> None:
    assert all_reduced("halving", members, 960).rounds == 2 * (members.bit_length() - 1) + 2


@pytest.mark.parametrize("members", [2, 5, 16])
def test_the_naive_root_receives_everything(members: int) -> None:
    out = all_reduced("naive", members, 1000)
    assert out.received[0] == out.sent[0] == (members - 1) * 1000
    assert {out.sent[m] for m in range(1, members)} == {1000}
    assert out.rounds == 2


@pytest.mark.parametrize("members", [2, 5, 16])
def test_direct_sends_the_least_in_two_rounds(members: int) -> None:
    out = all_reduced("direct", members, 160 * members)
    assert set(out.sent.values()) == {2 * (members - 1) * 160}
    assert out.rounds == 2


# -- T7.3: fan-in -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("members", [4, 8, 16])
def test_fan_in(members: int) -> None:
    def fan_in(name: str) -> int:
        made = plans(ALGORITHMS[name].plan, members, 1000)
        return max(len(step.receives) for plan in made for stream in plan for step in stream)

    found = {name: fan_in(name) for name in ALGORITHMS}
    most = members - 1
    assert found == {"naive": most, "direct": most, "ring": 1, "halving": 1, "blocks": 1, "tree": 2}


# -- T7.5: binary blocks ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("members", range(1, 34))
def test_binary_blocks(members: int) -> None:
    made = blocks.sizes(members)
    assert sum(made) == members and made == sorted(made, reverse=True)
    for numel in (0, 1, members, 1000):
        out = all_reduced("blocks", members, numel, seed=members)
        assert out.rounds <= 2 * math.log2(made[0]) + 2 * (len(made) - 1)


def test_blocks_by_hand() -> None:
    assert blocks.sizes(6) == [4, 2] and blocks.sizes(13) == [8, 4, 1]
    between = blocks.all_reduce(4, 6, 8)[0][2]  # member 4 owns the first half, which lies in the quarters of 0 and 2
    assert between.sends == (Send(0, 0, 2, 0), Send(2, 2, 4, 0))


# -- T7.6: the double tree ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [tree.first, tree.second])
def test_both_trees_are_trees_and_shallow(make: Callable[[int, int], tree.Node]) -> None:
    for members in range(2, 301):
        nodes = [make(member, members) for member in range(members)]
        parents = {member: node.parent[0] for member, node in enumerate(nodes) if node.parent}
        children = {(child, member) for member, node in enumerate(nodes) for child in node.children}
        assert children == set(parents.items()) and len(parents) == members - 1
        assert all(len(node.children) <= 2 for node in nodes)
        depth = dict.fromkeys(set(range(members)) - set(parents), 0)
        while len(depth) < members:  # ends only if every member hangs on the root
            found = {m: depth[p] + 1 for m, p in parents.items() if p in depth and m not in depth}
            assert found
            depth |= found
        assert max(depth.values()) <= math.ceil(math.log2(members))


def test_whoever_is_inside_one_tree_is_a_leaf_of_the_other() -> None:
    for members in range(2, 301):
        inside = [{m for m in range(members) if make(m, members).children} for make in (tree.first, tree.second)]
        if members % 2:
            assert inside[0] & inside[1] == {0}
        else:
            assert not inside[0] & inside[1] and inside[0] | inside[1] == set(range(members))


def test_nobody_sends_more_than_twice_the_vector() -> None:
    for members in range(2, 301):
        sent = [
            sum(s.stop - s.start for stream in plan for step in stream for s in step.sends)
            for plan in plans(tree.all_reduce, members, 1000)
        ]
        assert max(sent) <= 2000 and sum(sent) == 2 * (members - 1) * 1000


def test_the_tree_of_eight_as_drawn() -> None:
    nodes = {member: tree.first(member, 8) for member in range(8)}
    assert {m: n.children for m, n in nodes.items() if n.children} == {0: (4,), 4: (2, 6), 2: (1, 3), 6: (5, 7)}


def test_large_vectors_travel_in_chunks() -> None:
    lengths = {numel: max(len(s) for s in tree.all_reduce(3, 8, numel)) - 1 for numel in (0, 1000, 10**6, 10**8)}
    assert lengths == {0: 1, 1000: 1, 10**6: 8, 10**8: 16}


# -- the others of the family -------------------------------------------------------------------------------------
members_of_family = pytest.mark.parametrize("members", [1, 2, 3, 4, 7, 8])


@members_of_family
@pytest.mark.parametrize("numel", [0, 1, 5, 100])
def test_reduce_scatter_and_all_gather(members: int, numel: int) -> None:
    owners: dict[str, tuple[Make, Make, Callable[[int], tuple[int, int]]]] = {
        "ring": (ring.reduce_scatter, ring.all_gather, lambda r: cut(0, numel, members)[(r + 1) % members]),
        "direct": (direct.reduce_scatter, direct.all_gather, lambda r: slices(numel, members)[r]),
    }
    if members & (members - 1) == 0:
        chunks = cut(0, numel, members)
        owner_of = lambda r: chunks[halving.place(r, members)]  # noqa: E731
        owners["halving"] = halving.reduce_scatter, halving.all_gather, owner_of
    for name, (scatter, gather, owner) in owners.items():
        vectors = whole(members, numel)
        expected = np.sum(vectors, axis=0)
        execute(plans(scatter, members, numel), vectors)
        for member, vector in enumerate(vectors):
            a, b = owner(member)
            assert np.array_equal(vector[a:b], expected[a:b]), name
            vector[:a], vector[b:] = 0, 0
        execute(plans(gather, members, numel), vectors)
        assert all(np.array_equal(v, expected) for v in vectors), name


@members_of_family
def test_reduce_and_broadcast_for_every_root(members: int) -> None:
    for root in range(members):
        vectors = whole(members, 100)
        expected = np.sum(vectors, axis=0)
        execute(plans(tree.reduce, members, 100, root), vectors)
        assert np.array_equal(vectors[root], expected)
        execute(plans(tree.broadcast, members, 100, root), vectors, seed=root)
        assert all(np.array_equal(v, expected) for v in vectors)


@members_of_family
def test_gather_share_and_all_to_all(members: int) -> None:
    rows = whole(members, 10 * members)
    for root in range(members):
        vectors = [v.copy() for v in rows]
        execute(plans(naive.gather, members, 10, root), vectors)
        parts = [rows[i][10 * i : 10 * i + 10] for i in range(members)]
        assert np.array_equal(vectors[root], np.concatenate(parts))
    for share in (direct.share, bruck.all_gather):
        vectors = [v.copy() for v in rows]
        execute(plans(share, members, 10), vectors)
        assert all(np.array_equal(v, np.concatenate(parts)) for v in vectors)
    rounds = [len(plan[0]) for plan in plans(bruck.all_gather, members, 10)]
    assert rounds == [math.ceil(math.log2(members))] * members
    vectors = [np.concatenate([v, v]) for v in rows]
    execute(plans(direct.all_to_all, members, 10), vectors)
    for me, vector in enumerate(vectors):
        came = [rows[i][10 * me : 10 * me + 10] for i in range(members)]
        assert np.array_equal(vector[10 * members :], np.concatenate(came))


# -- costs --------------------------------------------------------------------------------------------------------
def test_seconds_are_those_of_the_table() -> None:
    costs = Costs(latency=1e-4, byte=1e-9, reduce=1e-10)
    for members, nbytes in ((16, 1 << 20), (16, 1 << 26), (2, 100)):
        share, log = (members - 1) / members * nbytes, math.log2(members)
        least = share * (2e-9 + 1e-10)
        expected = {
            "naive": 2e-4 + (members - 1) * nbytes * (2e-9 + 1e-10),
            "direct": 2 * (members - 1) * 1e-4 + least,
            "ring": 2 * (members - 1) * 1e-4 + least,
            "halving": 2 * log * 1e-4 + least,
            "blocks": 2 * log * 1e-4 + least,
            "tree": 2 * log * 1e-4 + nbytes * (2e-9 + 1e-10),
        }
        assert {name: a.seconds(members, nbytes, costs) for name, a in ALGORITHMS.items()} == pytest.approx(expected)


@every
def test_one_member_costs_nothing(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert algorithm.seconds(1, 10**6, Costs(1, 1, 1)) == 0
    assert not [s for stream in algorithm.plan(0, 1, 100) for s in stream if s.sends or s.receives]


def test_surplus_members_are_costed() -> None:
    costs = Costs(latency=1.0, byte=1.0, reduce=0.0)
    assert ALGORITHMS["halving"].seconds(6, 100, costs) == 2 * 3 + 2 * (75 + 100)
    assert ALGORITHMS["blocks"].seconds(6, 100, costs) == (4 + 2 * 75) + (2 + 2 * 50)
