"""Plans over real sockets, and in two levels; members are threads."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_comm import RANKS, Group, data, group, same, sizes, total
from torch import Tensor

from torrential.comm.hierarchical import HierarchicalCarrier
from torrential.comm.order import InOrder
from torrential.comm.protocol import Meter
from torrential.comm.scheduled import ScheduledCarrier
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.shared import WORDS, SharedCarrier
from torrential.config import LocalSettings
from torrential.errors import BadInput, WaitedTooLong
from torrential.resolve import RunRequest, split_options
from torrential.strategies.registry import resolve_strategy
from torrential.tasks import load_task

every = pytest.mark.parametrize("algorithm", ALGORITHMS)


# -- one level ----------------------------------------------------------------------------------------------------
@every
@pytest.mark.parametrize(("kind", "members"), [("unix", 1), ("tcp", 2), ("unix", 3), ("tcp", 4), ("unix", 5)])
def test_sums_are_exact_and_the_same_bytes_everywhere(algorithm: str, kind: str, members: int) -> None:
    with group(kind, RANKS[:members]) as g:

        def program(carrier: ScheduledCarrier) -> list[tuple[Tensor, Tensor]]:
            results = []
            for numel in sizes(members):
                whole, real = (torch.from_numpy(data(d, carrier.rank, numel)) for d in ("int64", "float32"))
                handles = [carrier.all_reduce(tensor, algorithm) for tensor in (whole, real)]
                for handle in reversed(handles):  # two in flight
                    assert handle.wait() is None
                results.append((whole, real))
            return results

        by_rank = g.run(program)
        for number, numel in enumerate(sizes(members)):
            results = [by_rank[rank][number] for rank in g.ranks]
            expected = total([data("int64", rank, numel) for rank in g.ranks])
            assert all(same(whole, expected) for whole, _ in results)
            assert len({real.numpy().tobytes() for _, real in results}) == 1
            assert np.allclose(results[0][1], total([data("float32", r, numel) for r in g.ranks]), atol=1e-4)


def test_bytes_sent_are_counted() -> None:
    with group("unix", RANKS[:4]) as g:

        def program(carrier: ScheduledCarrier, algorithm: str) -> int:
            before = carrier.meter.bytes_sent
            carrier.all_reduce(torch.ones(6400), algorithm).wait()
            return carrier.meter.bytes_sent - before

        for algorithm in ("direct", "ring", "halving", "blocks"):
            sent = g.run(lambda carrier, a=algorithm: program(carrier, a))
            assert set(sent.values()) == {2 * 3 * 6400}
        assert list(g.run(lambda c: program(c, "naive")).values()) == [3 * 25_600, 25_600, 25_600, 25_600]


def test_later_operations_may_finish_first() -> None:
    """Only the second operation has everybody: it does not wait for the first."""
    with group("unix", RANKS[:2]) as g:

        def program(carrier: ScheduledCarrier) -> None:
            first = second = None
            if carrier.index == 0:
                first = carrier.broadcast(torch.zeros(5), carrier.members[1])
            else:
                carrier.issue()  # it will take part later
            second = carrier.all_reduce(torch.ones(5), "ring")
            second.wait()
            assert first is None or not first.done()

        g.run(program)


def test_the_rest_of_the_family() -> None:
    members = 3
    with group("unix", RANKS[:members]) as g:

        def program(carrier: ScheduledCarrier) -> None:
            mine = torch.from_numpy(data("int64", carrier.rank, 1000))
            for root in g.ranks:
                gathered = carrier.gather(mine, root).wait()
                assert (gathered is None) == (carrier.rank != root)
                if gathered is not None:
                    assert same(gathered, np.stack([data("int64", r, 1000) for r in g.ranks]))
                reduced = mine.clone()
                carrier.reduce(reduced, root).wait()
                if carrier.rank == root:
                    assert same(reduced, total([data("int64", r, 1000) for r in g.ranks]))
            rows = torch.tensor([[10 * carrier.rank + to, 7] for to in g.ranks])
            came = carrier.all_to_all(rows).wait()
            assert came.tolist() == [[10 * source + carrier.rank, 7] for source in g.ranks]

        g.run(program)


@every
def test_a_wait_for_a_member_that_never_comes_ends_and_names_a_worker(algorithm: str) -> None:
    with group("unix", RANKS[:3], timeout=0.1) as g:

        def program(carrier: ScheduledCarrier) -> str:
            with pytest.raises(WaitedTooLong, match=r"waited \d+\.\d s for worker \d \(all-reduce") as caught:
                carrier.all_reduce(torch.ones(100), algorithm).wait()
            return caught.value.who

        named = g.run(program, ranks=(0, 2))  # worker 3 never comes
        assert "worker 3" in named.values()


@every
def test_a_plan_is_forgotten_when_the_group_changes(algorithm: str) -> None:
    with group("unix", RANKS[:3]) as g:
        abandoned = [g.carriers[rank].all_reduce(torch.ones(1000), algorithm) for rank in (0, 2)]
        g.regroup(2, (0, 2))

        def program(carrier: ScheduledCarrier) -> Tensor:
            tensor = torch.full((1000,), float(carrier.rank + 1))
            carrier.all_reduce(tensor, algorithm).wait()
            return tensor

        assert all(t.unique().tolist() == [4.0] for t in g.run(program).values())
        assert not any(handle.finished for handle in abandoned)


# -- T7.7: one order for all ----------------------------------------------------------------------------------------
def two_sums(carriers: dict[str, ScheduledCarrier], in_order: bool) -> list[float]:
    """Two blocking all-reduces, each on a channel of its own; they become ready in opposite orders."""
    tensors = [torch.tensor([1.0]), torch.tensor([10.0])]
    names = ["a", "b"]

    def launch(place: int) -> None:
        carriers[names[place]].all_reduce(tensors[place], "ring").wait()

    ready: Callable[[int], None] = InOrder(launch).ready if in_order else launch
    for place in (0, 1) if carriers["a"].index == 0 else (1, 0):
        ready(place)
    return [float(t) for t in tensors]


@contextlib.contextmanager
def channels(timeout: float) -> Iterator[tuple[Group, dict[int, dict[str, ScheduledCarrier]]]]:
    with group("unix", RANKS[:2]) as g:
        made: dict[int, dict[str, ScheduledCarrier]] = {rank: {} for rank in g.ranks}
        for rank in g.ranks:
            for name in ("a", "b"):
                carrier = ScheduledCarrier(rank, Meter(), lambda: None, timeout, g.channels[rank], f"{name}/")
                carrier.regroup(1, g.ranks)
                made[rank][name] = carrier
        yield g, made


def test_sums_begun_in_opposite_orders_wait_for_one_another() -> None:
    with channels(timeout=0.2) as (g, made):

        def program(carrier: Any) -> str:
            with pytest.raises(WaitedTooLong) as caught:
                two_sums(made[carrier.rank], in_order=False)
            return caught.value.who

        assert g.run(program) == {0: "worker 2", 2: "worker 0"}


def test_with_one_order_for_all_they_finish() -> None:
    with channels(timeout=20) as (g, made):
        results = g.run(lambda carrier: two_sums(made[carrier.rank], in_order=True))
        assert results == {0: [2.0, 20.0], 2: [2.0, 20.0]}


def test_things_are_launched_in_order_once_those_before_them_are_ready() -> None:
    launched: list[int] = []
    order = InOrder(launched.append)
    seen = []
    for place in (1, 2, 0, 4):
        order.ready(place)
        seen.append(list(launched))
    assert seen == [[], [], [0, 1, 2], [0, 1, 2]]
    order.finish(6)
    assert launched == [0, 1, 2, 3, 4, 5]


# -- two levels ---------------------------------------------------------------------------------------------------
class Hosts(Group):
    """Members of emulated hosts: rank // 2 is where one lives."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.counters = {name: torch.zeros(16 * 2 * WORDS, dtype=torch.int64) for name in ("up", "down")}
        super().__init__("unix", ranks)

    def regroup(self, generation: int, ranks: tuple[int, ...]) -> None:
        if generation == 1:
            self.carriers = {rank: self._levels(rank) for rank in ranks}
        super().regroup(generation, ranks)

    def _levels(self, rank: int) -> HierarchicalCarrier:
        check = self._check(rank)

        def shared(name: str, meter: Meter) -> SharedCarrier:
            return SharedCarrier(
                rank, meter, check, 20.0, self.counters[name], self.memory.mail,
                lambda tensor: self.memory.find(rank, tensor), spin=False,
            )  # fmt: skip

        return HierarchicalCarrier(rank, Meter(), check, 20.0, self.channels[rank], shared, lambda r: r // 2)


@contextlib.contextmanager
def hosts(*ranks: int) -> Iterator[Hosts]:
    made = Hosts(ranks)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 2, 3, 5), (4,), (0, 1), (0, 2, 4)])
def test_two_levels_sum_exactly_with_several_in_flight(ranks: tuple[int, ...]) -> None:
    numels = [0, 1, 5, 1000, 100_003]
    with hosts(*ranks) as g:

        def program(carrier: HierarchicalCarrier) -> list[Tensor]:
            tensors = [g.buffer(f"a{n}", carrier.rank, data("float32", carrier.rank, n)) for n in numels]
            handles = [carrier.all_reduce(tensor, "tree") for tensor in tensors]
            votes = carrier.all_gather(torch.tensor([carrier.rank]))
            for handle in reversed(handles):
                handle.wait()
            assert votes.wait().flatten().tolist() == list(ranks)
            assert all(h.finished for h in handles) and not carrier._not_down
            return [t.clone() for t in tensors]

        for _ in range(3):
            by_rank = g.run(program)
            for number, numel in enumerate(numels):
                results = [by_rank[rank][number] for rank in ranks]
                assert len({r.numpy().tobytes() for r in results}) == 1
                assert np.allclose(results[0], total([data("float32", r, numel) for r in ranks]), atol=1e-4)


def test_only_the_first_of_each_host_speaks_on_the_wire() -> None:
    with hosts(0, 1, 2, 3) as g:
        spoken: dict[int, list[int]] = {}
        for rank in g.ranks:
            send = g.channels[rank].send
            spoken[rank] = []

            def listen(to: int, tag: str, tensors: Any, rank: int = rank, send: Any = send) -> Any:
                spoken[rank].append(to)
                return send(to, tag, tensors)

            g.channels[rank].send = listen  # type: ignore[method-assign]

        def program(carrier: HierarchicalCarrier) -> int:
            carrier.all_reduce(g.buffer("a", carrier.rank, np.ones(6400, np.float32)), "ring").wait()
            return carrier.meter.bytes_sent

        sent = g.run(program)
        assert spoken == {0: [2, 2], 1: [], 2: [0, 0], 3: []}  # halving: one message each way and one back
        # up: everybody but the first writes its half to it; wire: half each way, twice; down: one copy from the first
        assert sent == {0: 25_600 + 25_600, 1: 12_800, 2: 25_600 + 25_600, 3: 12_800}


def test_a_host_whose_first_member_dies_goes_on_with_the_next() -> None:
    with hosts(0, 1, 2, 3) as g:
        for generation, ranks in enumerate([(0, 1, 3), (1, 3), (0, 1, 2, 3), (2, 3)], start=2):
            g.regroup(generation, ranks)

            def program(carrier: HierarchicalCarrier) -> Tensor:
                tensor = g.buffer("a", carrier.rank, data("int64", carrier.rank, 50_000))
                carrier.all_reduce(tensor, "ring").wait()
                return tensor.clone()

            results = g.run(program)
            assert all(same(t, total([data("int64", r, 50_000) for r in ranks])) for t in results.values())


def settings_of(options: dict[str, str]) -> LocalSettings:
    _, settings, *_ = split_options(
        RunRequest(task=load_task("digits-mlp"), options=options), resolve_strategy("allreduce")
    )
    assert isinstance(settings, LocalSettings)
    return settings


# -- what a person asks for ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "transport"),
    [
        ({}, "shared"),
        ({"algorithm": "native"}, "shared"),
        ({"algorithm": "ring"}, "unix"),
        ({"algorithm": "ring", "transport": "tcp"}, "tcp"),
        ({"algorithm": "hierarchical", "hosts": "2", "transport": "shared"}, "unix"),
    ],
)
def test_what_sends_messages_needs_a_transport_that_can(asked: dict[str, str], transport: str) -> None:
    assert settings_of(asked).transport == transport


@pytest.mark.parametrize("asked", [{"hosts": "2"}, {"algorithm": "hierarchical", "hosts": "0"}, {"algorithm": "rign"}])
def test_what_cannot_be_is_refused(asked: dict[str, str]) -> None:
    with pytest.raises(BadInput):
        settings_of(asked)
