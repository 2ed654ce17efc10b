"""Collectives against numpy, on every carrier; what they do when somebody is late, gone or no friend of ours.

Members are threads of this process. The shared carrier meets over plain tensors, the direct one over real sockets.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from torrential.comm import handshake, stream, wire
from torrential.comm.admission import MOST_STRANGERS
from torrential.comm.carrier import Carrier
from torrential.comm.channel import PostChannel, TensorLetter
from torrential.comm.post import Contact, Greeting, Post
from torrential.comm.protocol import ALIGNMENT, Meter, Part, slices
from torrential.comm.scheduled import ScheduledCarrier
from torrential.comm.shared import MAIL_BYTES, SMALL_BYTES, WORDS, SharedCarrier
from torrential.errors import Regrouped, UnequalCalls, UnequalSizes, WaitedTooLong
from torrential.worlds.local.comm import LocalComm

KINDS = ("shared", "unix", "tcp")
RANKS = (0, 2, 3, 6, 7)  # not contiguous: those in between have died
SECRET = secrets.token_bytes(handshake.SECRET_BYTES)


@dataclass
class Memory:
    """Registered buffers of all members, in one process."""

    def __post_init__(self) -> None:
        self.counters = torch.zeros(16 * 2 * WORDS, dtype=torch.int64)
        self.held: dict[tuple[str, int], Tensor] = {}
        self.lock = threading.Lock()

    def get(self, name: str, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        with self.lock:
            return self.held.setdefault((name, rank), torch.zeros(numel, dtype=dtype))

    def mail(self, rank: int) -> Tensor:
        return self.get("mail", rank, 2 * MAIL_BYTES, torch.uint8).view(2, MAIL_BYTES)

    def find(self, rank: int, tensor: Tensor) -> Callable[[int], Tensor]:
        if not tensor.numel():
            return lambda other: torch.empty(0, dtype=tensor.dtype)
        for (name, owner), whole in list(self.held.items()):
            start = (tensor.data_ptr() - whole.data_ptr()) // whole.element_size()
            if owner == rank and name != "mail" and 0 <= start < whole.numel():
                return lambda other: self.get(name, other, whole.numel(), whole.dtype)[start : start + tensor.numel()]
        raise ValueError("not registered")


class Group:
    """The carriers of several members, as threads."""

    def __init__(self, kind: str, ranks: tuple[int, ...], timeout: float = 20.0) -> None:
        self.kind, self.ranks = kind, ranks
        self.memory = Memory()
        self.news = 1  # the newest generation
        self.generations = dict.fromkeys(ranks, 0)
        self.posts: dict[int, Post] = {}
        self.channels: dict[int, PostChannel] = {}
        self.carriers: dict[int, Any] = {}
        name = secrets.token_hex(8)
        for rank in ranks:
            check = self._check(rank)
            if kind == "shared":
                self.carriers[rank] = SharedCarrier(
                    rank, Meter(), check, timeout, self.memory.counters, self.memory.mail,
                    lambda tensor, rank=rank: self.memory.find(rank, tensor), spin=rank % 2 == 0,
                )  # fmt: skip
            else:
                address = "tcp:127.0.0.1:0" if kind == "tcp" else f"unix:@torrential-{name}-{rank}"
                self.posts[rank] = Post(rank, 0, address, SECRET, TensorLetter)
                self.channels[rank] = PostChannel(self.posts[rank])
                self.carriers[rank] = ScheduledCarrier(rank, Meter(), check, timeout, self.channels[rank])
        for post in self.posts.values():
            post.know({rank: Contact(other.where, 0) for rank, other in self.posts.items()})
        self.regroup(1, ranks)

    def _check(self, rank: int) -> Callable[[], None]:
        def check() -> None:
            if self.news > self.generations[rank]:
                raise Regrouped(self.news)

        return check

    def regroup(self, generation: int, ranks: tuple[int, ...]) -> None:
        self.news, self.ranks = generation, ranks

        def one(carrier: Carrier) -> None:
            self.generations[carrier.rank] = generation
            if self.channels:
                self.channels[carrier.rank].regroup(generation)
            carrier.regroup(generation, ranks)

        self.run(one)

    def run(self, program: Callable[..., Any], ranks: tuple[int, ...] | None = None) -> dict[int, Any]:
        """`program(carrier)` on every member at once; results by rank."""
        ranks = self.ranks if ranks is None else ranks
        with ThreadPoolExecutor(len(ranks)) as pool:
            futures = {rank: pool.submit(program, self.carriers[rank]) for rank in ranks}
            return {rank: future.result(30) for rank, future in futures.items()}

    def buffer(self, name: str, rank: int, values: np.ndarray) -> Tensor:
        tensor = self.memory.get(name, rank, len(values), torch.from_numpy(values).dtype)
        tensor.copy_(torch.from_numpy(values))
        return tensor

    def close(self) -> None:
        for post in self.posts.values():
            post.close()


@contextlib.contextmanager
def group(kind: str, ranks: tuple[int, ...], timeout: float = 20.0) -> Iterator[Group]:
    made = Group(kind, ranks, timeout)
    try:
        yield made
    finally:
        made.close()


def sizes(members: int) -> list[int]:
    return sorted({0, 1, members - 1, members, members + 1, 1000, 100_003})


def data(dtype: str, rank: int, numel: int) -> np.ndarray:
    random = np.random.default_rng([rank, numel])
    if dtype == "int64":
        return random.integers(-(2**40), 2**40, numel)
    return random.standard_normal(numel).astype(dtype)


def total(terms: list[np.ndarray]) -> np.ndarray:
    """From left to right, as the carriers promise."""
    result = terms[0].copy()
    for term in terms[1:]:
        result += term
    return result


def same(actual: Tensor, expected: np.ndarray) -> bool:
    return actual.numpy().tobytes() == expected.tobytes()


members_and_kinds = pytest.mark.parametrize(
    ("kind", "members"), [(kind, members) for kind in KINDS for members in range(1, 6)]
)


# -- sums ---------------------------------------------------------------------------------------------------------
@members_and_kinds
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_all_reduce_is_the_sum_in_order_of_rank_to_the_last_bit(kind: str, members: int, dtype: str) -> None:
    with group(kind, RANKS[:members]) as g:

        def program(carrier: Any) -> list[Tensor]:
            results = []
            for numel in sizes(members):
                tensor = g.buffer(f"a{numel}", carrier.rank, data(dtype, carrier.rank, numel))
                assert carrier.all_reduce(tensor).wait() is None
                results.append(tensor.clone())
            return results

        for results in g.run(program).values():
            for numel, result in zip(sizes(members), results, strict=True):
                assert same(result, total([data(dtype, r, numel) for r in g.ranks])), numel


@members_and_kinds
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_reduce_scatter_leaves_each_member_its_slice_of_the_sum(kind: str, members: int, dtype: str) -> None:
    def parts_of(rank: int, values: np.ndarray) -> list[Part]:
        """Three parts, one of them absent on some members; the tensors lie in private memory."""
        bounds = [0, len(values) // 3, len(values) // 2, len(values)]
        return [
            Part(a, b, None if (rank + i) % 3 == 0 else torch.from_numpy(values[a:b].copy()))
            for i, (a, b) in enumerate(pairwise(bounds))
        ]

    def flat(rank: int, numel: int) -> np.ndarray:
        values = data(dtype, rank, numel)
        for part in parts_of(rank, values):
            if part.data is None:
                values[part.start : part.stop] = 0
        return values

    with group(kind, RANKS[:members]) as g:

        def program(carrier: Any) -> list[Tensor]:
            results = []
            for numel in sizes(members):
                garbage = np.full(numel, 77, dtype)
                region = g.buffer(f"r{numel}", carrier.rank, garbage)
                carrier.reduce_scatter(region, parts_of(carrier.rank, data(dtype, carrier.rank, numel))).wait()
                low, high = slices(numel, members)[carrier.index]
                results.append(region[low:high].clone())
            return results

        for rank, results in g.run(program).items():
            for numel, result in zip(sizes(members), results, strict=True):
                low, high = slices(numel, members)[g.ranks.index(rank)]
                expected = total([flat(r, numel) for r in g.ranks])[low:high]
                assert np.array_equal(result.numpy(), expected), (rank, numel)


@pytest.mark.parametrize("numel", [999, 100_003])
def test_carriers_agree_to_the_last_bit_on_absent_parts(numel: int) -> None:
    slices_by_kind = []
    for kind in KINDS:
        with group(kind, RANKS[:3]) as g:

            def program(carrier: Any, g: Group = g) -> bytes:
                region = g.buffer("region", carrier.rank, np.zeros(numel, np.float32))
                values = torch.from_numpy(data("float32", carrier.rank, numel))
                half = None if carrier.index == 1 else values[500:]
                carrier.reduce_scatter(region, [Part(0, 500, values[:500]), Part(500, numel, half)]).wait()
                low, high = slices(numel, 3)[carrier.index]
                return region[low:high].numpy().tobytes()

            slices_by_kind.append(g.run(program))
    assert slices_by_kind[0] == slices_by_kind[1] == slices_by_kind[2]


# -- copies -------------------------------------------------------------------------------------------------------
@members_and_kinds
def test_all_gather_gives_everybodys_vector_by_rank(kind: str, members: int) -> None:
    with group(kind, RANKS[:members]) as g:

        def program(carrier: Any) -> list[Tensor]:
            results = []
            for numel in (0, 1, members, 1000, MAIL_BYTES // 8):
                vector = torch.from_numpy(data("int64", carrier.rank, numel))
                handle = carrier.all_gather(vector)
                if numel:
                    vector.zero_()  # it has been copied: the caller may go on
                results.append(handle.wait())
            return results

        for results in g.run(program).values():
            for result in results:
                numel = result.shape[1]
                assert np.array_equal(result.numpy(), np.stack([data("int64", r, numel) for r in g.ranks]))


@members_and_kinds
def test_broadcast_copies_the_roots_tensor_to_all(kind: str, members: int) -> None:
    with group(kind, RANKS[:members]) as g:

        def program(carrier: Any) -> list[Tensor]:
            results = []
            for root in g.ranks:
                for numel in sizes(members):
                    tensor = g.buffer(f"b{numel}", carrier.rank, data("float32", carrier.rank + root, numel))
                    carrier.broadcast(tensor, root).wait()
                    results.append(tensor.clone())
            return results

        expected = [data("float32", 2 * root, numel) for root in g.ranks for numel in sizes(members)]
        for results in g.run(program).values():
            assert all(same(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_leaves_a_barrier_before_the_last_has_come(kind: str) -> None:
    with group(kind, RANKS[:3]) as g:
        come: list[float] = []
        left: list[float] = []

        def program(carrier: Any) -> None:
            for number in range(3):
                time.sleep(0.02 * ((carrier.index + number) % 3))
                come.append(time.monotonic())
                carrier.barrier().wait()
                left.append(time.monotonic())
                carrier.barrier().wait()
                if carrier.index == 0:
                    assert max(come) <= min(left)
                    come.clear()
                    left.clear()
                carrier.barrier().wait()

        g.run(program)


# -- handles ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_operations_in_flight_may_be_waited_for_in_any_order(kind: str) -> None:
    members, numel = 3, 20_011
    with group(kind, RANKS[:members]) as g:

        def program(carrier: Any) -> dict[str, Tensor]:
            rank = carrier.rank
            big = g.buffer("big", rank, data("float32", rank, numel))
            small = g.buffer("small", rank, data("float32", rank, 100))
            region = g.buffer("region", rank, np.zeros(numel, np.float32))
            copied = g.buffer("copied", rank, data("float32", rank, 50))
            whole = Part(0, numel, torch.from_numpy(data("float32", rank, numel)))
            first = carrier.all_reduce(big)
            handles = [
                carrier.reduce_scatter(region, [whole]),
                carrier.all_reduce(small),
                carrier.broadcast(copied, g.ranks[1]),
                carrier.all_gather(torch.tensor([rank])),
                carrier.all_gather(torch.tensor([rank + 100])),
                carrier.all_gather(torch.tensor([rank + 200])),
            ]
            gathered = [h.wait() for h in reversed(handles)][:3]
            assert first.done()
            low, high = slices(numel, members)[carrier.index]
            assert same(region[low:high], total([data("float32", r, numel) for r in g.ranks])[low:high])
            assert same(copied, data("float32", g.ranks[1], 50))
            for offset, result in zip((200, 100, 0), gathered, strict=True):
                assert result.flatten().tolist() == [r + offset for r in g.ranks]
            return {"big": big, "small": small}

        for result in g.run(program).values():
            assert same(result["big"], total([data("float32", r, numel) for r in g.ranks]))
            assert same(result["small"], total([data("float32", r, 100) for r in g.ranks]))


@pytest.mark.parametrize("kind", KINDS)
def test_done_never_blocks(kind: str) -> None:
    with group(kind, RANKS[:2]) as g:
        late = threading.Event()

        def program(carrier: Any) -> None:
            if carrier.index == 1:
                late.wait()
                return carrier.barrier().wait()
            barrier = carrier.barrier()
            assert not barrier.done()
            late.set()
            deadline = time.monotonic() + 10
            while not barrier.done():
                assert time.monotonic() < deadline
                time.sleep(1e-3)

        g.run(program)


@pytest.mark.parametrize("kind", KINDS)
def test_the_meter_tells_waiting_from_communicating(kind: str) -> None:
    numel = 4 * SMALL_BYTES
    with group(kind, RANKS[:2]) as g:

        def program(carrier: Any) -> Meter:
            tensor = g.buffer("a", carrier.rank, data("float32", carrier.rank, numel))
            if carrier.index == 1:
                time.sleep(0.2)
            carrier.all_reduce(tensor).wait()
            return carrier.meter

        waited, worked = g.run(program).values()
        assert 0.1 < waited.wait < 5
        assert worked.wait < waited.wait
        assert waited.communicate > 0
        low = 2 * numel if kind == "shared" else 4 * numel  # half of it, once or in both rounds
        assert waited.bytes_sent == low


# -- late, gone, back again ---------------------------------------------------------------------------------------
OPERATIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "all_reduce": lambda carrier, tensor: carrier.all_reduce(tensor),
    "reduce_scatter": lambda carrier, tensor: carrier.reduce_scatter(tensor, [Part(0, tensor.numel(), tensor.clone())]),
    "all_gather": lambda carrier, tensor: carrier.all_gather(tensor[:10]),
    "barrier": lambda carrier, tensor: carrier.barrier(),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_that_takes_too_long_names_the_worker(kind: str, operation: str) -> None:
    with group(kind, RANKS[:3], timeout=0.1) as g:

        def program(carrier: Any) -> None:
            tensor = g.buffer("a", carrier.rank, data("float32", carrier.rank, 10_000))
            with pytest.raises(WaitedTooLong, match=r"waited 0\.\d s for worker 2 \(") as caught:
                OPERATIONS[operation](carrier, tensor).wait()
            assert caught.value.who == "worker 2"

        g.run(program, ranks=(0, 3))  # worker 2 never comes


@pytest.mark.parametrize("kind", KINDS)
def test_somebody_is_told_again_and_again_instead_of_giving_up(kind: str) -> None:
    with group(kind, RANKS[:2], timeout=0.05) as g:
        told: list[Any] = []

        class Listening:
            def overdue(self, rank: int, what: str, seconds: float) -> None:
                told.append((rank, what))
                if len(told) == 3:
                    raise Regrouped(9)

            def relieved(self) -> None:
                told.append(None)

        g.carriers[0].complaints = Listening()
        with pytest.raises(Regrouped):
            g.carriers[0].barrier().wait()
        assert told == [(2, "in a barrier")] * 3 + [None]
        with pytest.raises(WaitedTooLong, match="for worker 2"):
            g.carriers[0].barrier().wait(0.01)  # as the caller wishes


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_regrouping_ends_every_wait_and_the_survivors_go_on(kind: str, operation: str) -> None:
    with group(kind, RANKS[:3]) as g:

        def interrupted(carrier: Any) -> None:
            tensor = g.buffer("a", carrier.rank, data("float32", carrier.rank, 10_000))
            handle = OPERATIONS[operation](carrier, tensor)
            with pytest.raises(Regrouped) as caught:
                handle.wait()
            assert caught.value.generation == 2

        timer = threading.Timer(0.1, lambda: setattr(g, "news", 2))
        timer.start()
        g.run(interrupted, ranks=(2, 3))  # worker 0 has died
        timer.join()
        g.regroup(2, (2, 3))

        def again(carrier: Any) -> Tensor:
            tensor = g.buffer("a", carrier.rank, data("float32", carrier.rank, 10_000))
            carrier.all_reduce(tensor).wait()
            assert carrier.all_gather(torch.tensor([carrier.rank])).wait().flatten().tolist() == [2, 3]
            return tensor

        for result in g.run(again).values():
            assert same(result, total([data("float32", r, 10_000) for r in (2, 3)]))


@pytest.mark.parametrize("kind", KINDS)
def test_members_may_come_back_in_a_later_generation(kind: str) -> None:
    with group(kind, RANKS[:3]) as g:
        for generation, ranks in enumerate([(0, 3), (0, 2, 3), (2,), (0, 2)], start=2):
            g.regroup(generation, ranks)
            results = g.run(lambda c: c.all_gather(torch.tensor([c.rank * 11])).wait().flatten().tolist())
            assert list(results.values()) == [[r * 11 for r in ranks]] * len(ranks)


# -- messages -----------------------------------------------------------------------------------------------------
READERS = ("owner", "substitute")


class Two:
    """Two members, and how what comes is read: by whoever looks for it, or by a thread meanwhile."""

    def __init__(self, group: Group, reader: str) -> None:
        self.group, self.reader = group, reader
        self.low, self.high = group.channels[0], group.channels[2]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            for post in self.group.posts.values():
                post.read_meanwhile() if self.reader == "substitute" else post.poll()
            time.sleep(1e-3)

    def bring(self, name: str) -> None:
        """Let a message of this name come from the high one to the low one."""
        self.until(lambda: self.low.arrived(2, name))


@contextlib.contextmanager
def two(kind: str = "unix", reader: str = "owner") -> Iterator[Two]:
    with group(kind, (0, 2)) as g:
        yield Two(g, reader)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_payload_lands_in_the_tensor_that_was_named_for_it(kind: str, reader: str) -> None:
    with two(kind, reader) as pair:
        target = torch.zeros(300_000)
        place = target.data_ptr()
        pair.low.expect(2, "gradient", [target])
        values = torch.randn(300_000)
        sent = pair.high.send(0, "gradient", [values])
        pair.bring("gradient")
        assert torch.equal(target, values)  # before anybody takes it: it was received right there
        (taken,) = pair.low.take(2, "gradient")
        assert taken.data_ptr() == place and torch.equal(taken, values)
        assert not pair.low.arrived(2, "gradient") and not pair.low._expected
        pair.until(sent.done)


@pytest.mark.parametrize("reader", READERS)
def test_a_message_that_came_too_early_lies_in_fresh_memory(reader: str) -> None:
    with two(reader=reader) as pair:
        low = pair.low
        pair.high.send(0, "early", [torch.arange(5), torch.ones(2, 3)])
        pair.bring("early")
        first, second = torch.zeros(5, dtype=torch.int64), torch.zeros(6)
        low.expect(2, "early", [first, second])
        taken = low.take(2, "early")
        assert taken[0].tolist() == [0, 1, 2, 3, 4] and taken[1].flatten().tolist() == [1] * 6
        assert not low._expected and first.tolist() == [0] * 5


@pytest.mark.parametrize("reader", READERS)
def test_two_large_messages_may_cross_each_other(reader: str) -> None:
    with two("tcp", reader) as pair:
        numel = 4_000_000  # more than the buffers of both sockets together
        targets = [torch.zeros(numel), torch.zeros(numel)]
        pair.low.expect(2, "large", [targets[0]])
        pair.high.expect(0, "large", [targets[1]])
        for me, other in ((pair.low, 2), (pair.high, 0)):
            me.send(other, "large", [torch.full((numel,), float(other + 1))])
        pair.until(lambda: pair.low.arrived(2, "large") and pair.high.arrived(0, "large"))
        assert targets[0].unique().tolist() == [1.0] and targets[1].unique().tolist() == [3.0]


@pytest.mark.parametrize("size", [3, 3_000_000])
def test_messages_of_an_earlier_generation_are_thrown_away_and_land_nowhere(size: int) -> None:
    with two() as pair:
        low, high, g = pair.low, pair.high, pair.group
        target, values = torch.zeros(size), torch.ones(size)
        high.send(0, "old", [torch.ones(3)])
        pair.bring("old")
        low.expect(2, "older", [target])
        high.send(0, "older", [values])
        if size > 3:
            pair.until(lambda: bool(target[0]))  # it has begun to come
        g.regroup(2, (0, 2))
        before = target.clone()
        assert not low.arrived(2, "old")
        high.send(0, "new", [torch.ones(3)])
        pair.bring("new")
        assert not low.arrived(2, "older") and (2, 1, "older") not in low._arrived
        assert torch.equal(target, before)


def test_a_message_of_the_next_generation_is_kept_until_it_begins() -> None:
    with two() as pair:
        pair.high.regroup(2)
        pair.high.send(0, "soon", [torch.ones(3)])
        pair.until(lambda: (2, 2, "soon") in pair.low._arrived)
        assert not pair.low.arrived(2, "soon")
        pair.low.regroup(2)
        assert pair.low.take(2, "soon")[0].tolist() == [1, 1, 1]


def test_a_message_for_one_that_is_gone_is_dropped() -> None:
    with two() as pair:
        pair.high.send(0, "first", [torch.ones(3)])
        pair.bring("first")
        pair.group.posts.pop(2).close()
        pair.until(lambda: not pair.group.posts[0]._lines)
        assert pair.low.send(2, "anything", [torch.ones(3)]).done()
        assert not pair.group.posts[0]._lines


def test_a_message_that_does_not_fit_lands_nowhere_else() -> None:
    with two() as pair:
        for name, sent in {"size": torch.ones(5), "dtype": torch.ones(4, dtype=torch.int32)}.items():
            target = torch.full((4,), 7.0)
            pair.low.expect(2, name, [target])
            pair.high.send(0, name, [sent])
            pair.bring(name)
            assert target.tolist() == [7.0] * 4
            assert torch.equal(pair.low.take(2, name)[0], sent)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_the_owner_and_its_substitute_take_turns_and_nothing_is_lost(kind: str) -> None:
    """Sums are right although every member is now read for, and now reads itself, at moments of no meaning."""
    with group(kind, RANKS[:3]) as g:

        def program(carrier: ScheduledCarrier) -> list[float]:
            channel, sums = g.channels[carrier.rank], []
            for number in range(60):
                tensor = torch.full((1 << (number % 18),), float(carrier.rank + number))
                operation = carrier.all_reduce(tensor, "direct")
                channel.read_meanwhile()
                if number % 3:
                    time.sleep(1e-4 * (number % 7))
                operation.wait()
                sums.append(float(tensor.min() + tensor.max()) / 2)
            return sums

        expected = [float(sum(RANKS[:3]) + 3 * number) for number in range(60)]
        assert g.run(program) == dict.fromkeys(RANKS[:3], expected)
        assert all(post._substitute is not None for post in g.posts.values())


def test_what_is_expected_comes_while_a_worker_computes() -> None:
    with two() as pair:
        low, numel = pair.low, 500_000  # more than a socket holds
        comm = LocalComm.__new__(LocalComm)
        comm._channel, comm.trace = low, None
        target = torch.zeros(numel)

        def computing() -> None:
            deadline = time.monotonic() + 10
            while not low.arrived(2, "gradient"):  # and nobody reads here
                assert time.monotonic() < deadline, "nothing came"
                time.sleep(1e-3)

        pair.high.send(0, "gradient", [torch.ones(numel)])
        low.expect(2, "gradient", [target])
        comm.compute(1, computing)
        low.take(2, "gradient")
        low.pause(0.0)  # the owner reads again
        comm.compute(1, lambda: None)
        assert not pair.group.posts[0]._away.is_set()  # nothing is expected
        comm.reached(0.5, lambda: low.expect(2, "gradient", [target]))
        pair.high.send(0, "gradient", [torch.full((numel,), 2.0)])
        computing()
        assert target.unique().tolist() == [2.0]


def test_a_stranger_does_not_stay_by_saying_a_byte_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HANDSHAKE_SECONDS", 0.2)
    with two(reader="substitute") as pair:
        post, said = pair.group.posts[0], 0
        post.read_meanwhile()
        with call(post.where) as slow, contextlib.suppress(OSError):
            words = opening(post)
            while post.strangers == 0 and said < len(words) - 1:
                slow.sendall(words[said : said + 1])
                said += 1
                time.sleep(0.05)
        pair.until(lambda: post.strangers == 1)
        assert said < len(words) - 1


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_many_strangers_take_few_descriptors_and_no_thread_and_peers_get_in(kind: str) -> None:
    with two(kind, "substitute") as pair, contextlib.ExitStack() as stack:
        post = pair.group.posts[0]
        pair.high.send(0, "before", [torch.ones(4)])
        pair.bring("before")
        pair.until(lambda: all(p._substitute is not None for p in pair.group.posts.values()))
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        with call(post.where) as early:
            early.sendall(opening(post))  # it knows the secret: no stranger takes its place
            strangers = [stack.enter_context(call(post.where)) for _ in range(300)]
            pair.until(lambda: post.strangers == 300 - MOST_STRANGERS)
            most = descriptors + 2 + len(strangers) + MOST_STRANGERS  # `early` has two ends here
            pair.until(lambda: len(os.listdir("/proc/self/fd")) == most)  # the last is counted before it is closed
            assert threading.active_count() == threads
            assert 9 in post._to
        pair.high.send(0, "after all that", [torch.ones(4)])
        pair.bring("after all that")


def opening(post: Post) -> bytes:
    """What member 9 says first to this post."""
    challenge = bytes.fromhex(post.where.partition("?")[2])
    return handshake.opening(SECRET, challenge, msgspec.msgpack.encode(Greeting(9, 0))).words


def call(address: str) -> socket.socket:
    family, where = stream.parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(where)
    return sock


def test_a_closed_post_frees_its_address_and_ends_its_thread() -> None:
    address, challenges = f"unix:@torrential-{secrets.token_hex(8)}", set()
    for number in range(2):
        post = Post(0, 0, address, SECRET, TensorLetter)
        where, _, challenge = post.where.partition("?")
        challenges.add(challenge)
        assert (where, len(challenges)) == (address, number + 1)  # another one each time
        post.read_meanwhile()
        substitute = post._substitute
        post.close()
        assert substitute is not None and not substitute.is_alive()


def test_frames_carry_every_dtype_and_shape() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        a: wire.Connection[Any] = wire.Connection(ours, TensorLetter)
        b: wire.Connection[Any] = wire.Connection(theirs, TensorLetter)
        tensors = [torch.ones(2, 3).to(d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
        tensors += [torch.tensor(3.5), torch.empty(0, 4), torch.arange(6).view(2, 3).t().contiguous()]
        assert a.send(TensorLetter(4, "all sorts"), tensors) == sum(t.nbytes for t in tensors)
        message, received = b.receive()
        assert message == TensorLetter(4, "all sorts")
        assert all(r.dtype == t.dtype and torch.equal(r, t) for r, t in zip(received, tensors, strict=True))


# -- who owns what ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("members", range(1, 20))
def test_slices_are_near_equal_aligned_and_cover_everything_once(members: int) -> None:
    for numel in (0, 1, members - 1, members, members + 1, 15, 16, 17, 16 * members, 1000, 100_003, 24_000_000):
        cuts = slices(numel, members)
        assert len(cuts) == members
        assert [a for a, _ in cuts] == [0, *(b for _, b in cuts[:-1])] and cuts[-1][1] == numel
        assert all(a <= b for a, b in cuts)
        assert all(a % ALIGNMENT == 0 or a == numel for a, _ in cuts)
        assert all(abs((b - a) - numel / members) <= ALIGNMENT for a, b in cuts)


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_different_sizes_are_refused_by_name(kind: str) -> None:
    with group(kind, RANKS[:3]) as g:

        def program(carrier: Any) -> dict[int, int]:
            carrier.all_gather(torch.ones(4)).wait()
            with pytest.raises(UnequalSizes, match="differ in the number of elements of their all-gather") as caught:
                carrier.all_gather(torch.ones(5 + (carrier.rank == 2))).wait()
            return caught.value.sizes

        for rank, sizes in g.run(program).items():
            assert {rank, 2} <= sizes.keys() and len(sizes) >= 2
            assert all(size == (6 if whose == 2 else 5) for whose, size in sizes.items())


@dataclass
class Mistake:
    first: Callable[[Any, Tensor], Any]  # what the first member starts, on a buffer of 40,000 floats
    others: Callable[[Any, Tensor], Any]
    said: str


MISTAKES = {
    "other collective": Mistake(
        lambda carrier, tensor: carrier.all_reduce(tensor[:20_000]),
        lambda carrier, tensor: carrier.broadcast(tensor[:20_000], 2),
        r"^members have started different collectives at once \(worker 0: an all-reduce of 20000 float32, worker 2: a "
        r"broadcast of 20000 float32 with root 2\); all members must start the same ones in the same order$",
    ),
    "other collective, small": Mistake(
        lambda carrier, tensor: carrier.all_reduce(tensor[:16]),
        lambda carrier, tensor: carrier.barrier(),
        r"worker 0: an all-reduce of 16 float32, worker 2: a barrier\)",
    ),
    "other size": Mistake(
        lambda carrier, tensor: carrier.all_reduce(tensor[:20_000]),
        lambda carrier, tensor: carrier.all_reduce(tensor),
        r"in the number of elements of their all-reduce \(worker 0: 20000, worker 2: 40000\)",
    ),
    "other size, small": Mistake(
        lambda carrier, tensor: carrier.all_reduce(tensor[:16]),
        lambda carrier, tensor: carrier.all_reduce(tensor),
        r"in the number of elements of their all-reduce \(worker 0: 16, worker 2: 40000\)",
    ),
    "other root": Mistake(
        lambda carrier, tensor: carrier.broadcast(tensor, 0),
        lambda carrier, tensor: carrier.broadcast(tensor, 2),
        r"worker 0: a broadcast of 40000 float32 with root 0, worker 2: a broadcast of 40000 float32 with root 2\)",
    ),
    "other type": Mistake(
        lambda carrier, tensor: carrier.all_gather(torch.ones(3)),
        lambda carrier, tensor: carrier.all_gather(torch.ones(3, dtype=torch.int32)),
        r"worker 0: an all-gather of 3 float32, worker 2: an all-gather of 3 int32\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_members_that_start_different_collectives_in_shared_memory_are_told(mistake: str) -> None:
    given = MISTAKES[mistake]
    with group("shared", RANKS[:2]) as g:

        def program(carrier: Any) -> None:
            tensor = g.buffer("b", carrier.rank, np.full(40_000, carrier.rank, np.float32))
            carrier.all_reduce(tensor[:16]).wait()
            carrier.all_reduce(tensor[:16]).wait()
            before = tensor.clone()
            with pytest.raises((UnequalCalls, UnequalSizes), match=given.said):
                (given.first if carrier.index == 0 else given.others)(carrier, tensor).wait()
            assert torch.equal(tensor, before)

        g.run(program)


@pytest.mark.parametrize("ahead", [1, 15, 16, 40])
def test_members_may_be_ahead_by_many_collectives(ahead: int) -> None:
    """What an operation was may not be known any more when a member comes to it."""
    with group("shared", RANKS[:2]) as g:
        started = threading.Event()

        def program(carrier: Any) -> list[float]:
            tensors = [g.buffer(f"b{n}", carrier.rank, np.full(20_000 + n, 1, np.float32)) for n in range(ahead + 1)]
            if carrier.index:
                started.wait(10)
            handles = [carrier.all_reduce(tensor) for tensor in tensors]
            started.set()
            for handle in handles:
                handle.wait()
            return [float(tensor.unique()) for tensor in tensors]

        assert list(g.run(program).values()) == [[2.0] * (ahead + 1)] * 2


@pytest.mark.parametrize("kind", KINDS[1:])
def test_members_that_start_different_collectives_by_messages_do_not_mix_them_up(kind: str) -> None:
    with group(kind, RANKS[:2], timeout=0.5) as g:

        def program(carrier: Any) -> str:
            tensor = torch.full((16,), float(carrier.rank))
            with pytest.raises(WaitedTooLong) as caught:
                (carrier.all_reduce(tensor) if carrier.index == 0 else carrier.all_gather(tensor)).wait()
            assert float(tensor.unique()) == carrier.rank
            return str(caught.value)

        said = list(g.run(program).values())
        assert "all-reduce" in said[0] and "all-gather" in said[1]

        def types(carrier: Any) -> None:
            dtype = torch.float32 if carrier.index == 0 else torch.int32
            with pytest.raises(
                UnequalCalls, match=r"worker 0: an all-gather of float32, worker 2: an all-gather of int32"
            ):
                carrier.all_gather(torch.ones(16, dtype=dtype)).wait()

        g.regroup(2, RANKS[:2])
        g.run(types)
