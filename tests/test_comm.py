"""Collectives against numpy, on every carrier; what they do when somebody is late, gone or no friend of ours.

Members are threads of this process. The shared carrier meets over plain tensors, the direct one over real sockets.
"""

import contextlib
import os
import secrets
import socket
import struct
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

from torrential.comm import messenger as messaging
from torrential.comm import wire
from torrential.comm.admission import MOST_STRANGERS
from torrential.comm.carrier import Carrier
from torrential.comm.messenger import Messenger, PeerGreeting, TensorMessage, exchange_markers
from torrential.comm.protocol import ALIGNMENT, Meter, Part, slices
from torrential.comm.scheduled import ScheduledCarrier
from torrential.comm.shared import MAIL_BYTES, SMALL_BYTES, WORDS, SharedCarrier
from torrential.errors import PeerLost, Regrouped, UnequalSizes, WaitedTooLong

KINDS = ("shared", "unix", "tcp")
RANKS = (0, 2, 3, 6, 7)  # not contiguous: those in between have died
TOKEN = secrets.token_bytes(wire.TOKEN_BYTES)


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
        self.messengers: dict[int, Messenger] = {}
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
                self.messengers[rank] = Messenger(rank, 0, address, TOKEN)
                self.carriers[rank] = ScheduledCarrier(rank, Meter(), check, timeout, self.messengers[rank])
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
            if self.messengers:
                mine = self.messengers[carrier.rank]
                mine.regroup(generation, {r: (self.messengers[r].address, 0) for r in ranks if r != carrier.rank})
                exchange_markers(mine, ranks, carrier.check, 5.0)
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
        for messenger in self.messengers.values():
            messenger.close()


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
@contextlib.contextmanager
def two_messengers(kind: str = "unix") -> Iterator[tuple[Messenger, Messenger]]:
    with group(kind, (0, 2)) as g:
        yield g.messengers[0], g.messengers[2]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(1e-3)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_payload_lands_in_the_tensor_that_was_named_for_it(kind: str) -> None:
    with two_messengers(kind) as (low, high):
        target = torch.zeros(300_000)
        place = target.data_ptr()
        low.expect(2, "gradient", [target])
        values = torch.randn(300_000)
        sent = high.send(0, "gradient", [values])
        until(lambda: low.arrived(2, "gradient"))
        assert torch.equal(target, values)  # before anybody takes it: it was received right there
        (taken,) = low.take(2, "gradient")
        assert taken.data_ptr() == place and torch.equal(taken, values)
        assert not low.arrived(2, "gradient")
        until(sent.done)


def test_a_message_that_came_too_early_lies_in_fresh_memory() -> None:
    with two_messengers() as (low, high):
        high.send(0, "early", [torch.arange(5), torch.ones(2, 3)])
        until(lambda: low.arrived(2, "early"))
        first, second = torch.zeros(5, dtype=torch.int64), torch.zeros(6)
        low.expect(2, "early", [first, second])
        taken = low.take(2, "early")
        assert taken[0].tolist() == [0, 1, 2, 3, 4] and taken[1].flatten().tolist() == [1] * 6
        assert not low._expected and first.tolist() == [0] * 5


def test_two_large_messages_may_cross_each_other() -> None:
    with two_messengers("tcp") as (low, high):
        numel = 4_000_000  # more than the buffers of both sockets together
        targets = [torch.zeros(numel), torch.zeros(numel)]
        low.expect(2, "large", [targets[0]])
        high.expect(0, "large", [targets[1]])
        for me, other in ((low, 2), (high, 0)):
            me.send(other, "large", [torch.full((numel,), float(me.rank + 1))])
        until(lambda: low.arrived(2, "large") and high.arrived(0, "large"))
        assert targets[0].unique().tolist() == [3.0] and targets[1].unique().tolist() == [1.0]


def test_messages_of_an_earlier_generation_are_thrown_away() -> None:
    with group("unix", (0, 2)) as g:
        low, high = g.messengers[0], g.messengers[2]
        target = torch.zeros(3)
        high.send(0, "old", [torch.ones(3)])
        until(lambda: low.arrived(2, "old"))
        low.expect(2, "older", [target])
        g.regroup(2, (0, 2))
        assert not low.arrived(2, "old")
        connection = high._peers[0].connection
        connection.send(TensorMessage(1, "older"), [torch.ones(3)])
        connection.send(TensorMessage(2, "new"), [torch.ones(3)])
        until(lambda: low.arrived(2, "new"))
        assert not low.arrived(2, "older")
        assert target.tolist() == [0, 0, 0]


def test_a_message_for_a_lost_peer_is_dropped() -> None:
    with two_messengers() as (low, high):
        high.close()
        until(lambda: low._peers[2].lost)
        assert not low.send(2, "anything", [torch.ones(3)]).done()
        with pytest.raises(PeerLost, match="worker 2"):
            exchange_markers(low, (0, 2), lambda: None, 0.05)


def header(envelope: Any) -> bytes:
    encoded = msgspec.msgpack.encode(envelope)
    return struct.pack("<I", len(encoded)) + encoded


GREETING = header([{"type": "PeerGreeting", "rank": 9, "life": 0}, []])
STRANGERS = {
    "wrong token": bytes(wire.TOKEN_BYTES) + GREETING,
    "almost the token": TOKEN[:-1] + bytes([TOKEN[-1] ^ 1]) + GREETING,
    "short token": TOKEN[:10],
    "garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + secrets.token_bytes(500),
    "garbage after the token": TOKEN + struct.pack("<I", 100) + secrets.token_bytes(100),
    "oversized header": TOKEN + struct.pack("<I", wire.MAX_HEADER + 1) + b"x" * 1000,
    "empty header": TOKEN + struct.pack("<I", 0),
    "header cut short": TOKEN + GREETING[:-3],
    "not a greeting": TOKEN + header([{"type": "TensorMessage", "generation": 1, "tag": "x"}, []]),
    "unknown message": TOKEN + header([{"type": "Exec", "rank": 9, "life": 0}, []]),
    "wrong types": TOKEN + header([{"type": "PeerGreeting", "rank": "nine", "life": 0}, []]),
    "impossible tensor": TOKEN + header([{"type": "PeerGreeting", "rank": 9, "life": 0}, [["float32", [1 << 41]]]]),
    "negative tensor": TOKEN + header([{"type": "PeerGreeting", "rank": 9, "life": 0}, [["float32", [-1]]]]),
    "unknown dtype": TOKEN + header([{"type": "PeerGreeting", "rank": 9, "life": 0}, [["object", [1]]]]),
    "payload missing": TOKEN
    + header([{"type": "PeerGreeting", "rank": 9, "life": 0}, [["float32", [1000]]]])
    + b"1234",
}


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_strangers_are_dropped_and_counted_and_nobody_else_notices(kind: str) -> None:
    with two_messengers(kind) as (low, high):
        for number, (name, sent) in enumerate(STRANGERS.items(), start=1):
            with call(low.address) as sock:
                with contextlib.suppress(OSError):  # it may be gone before all is said
                    sock.sendall(sent)
                    sock.shutdown(socket.SHUT_WR)
                assert answer(sock) == b"", name
            until(lambda number=number: low.strangers == number)
            assert set(low._peers) == {2}, name
        target = torch.zeros(4)
        low.expect(2, "after all that", [target])
        high.send(0, "after all that", [torch.ones(4)])
        until(lambda: low.arrived(2, "after all that"))
        assert target.tolist() == [1, 1, 1, 1]


def test_a_silent_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.1)
    with two_messengers() as (low, _), call(low.address) as silent, call(low.address) as slow:
        slow.sendall(TOKEN)
        assert answer(silent) == b"" and answer(slow) == b""
        until(lambda: low.strangers == 2)


def test_a_stranger_does_not_stay_by_saying_a_byte_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.2)
    with two_messengers() as (low, _), call(low.address) as slow:
        said = 0
        with contextlib.suppress(OSError):
            while low.strangers == 0 and said < wire.TOKEN_BYTES - 1:
                slow.sendall(TOKEN[said : said + 1])
                said += 1
                time.sleep(0.05)
        until(lambda: low.strangers == 1)
        assert said < wire.TOKEN_BYTES - 1


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_many_strangers_take_few_descriptors_and_no_thread_and_peers_get_in(kind: str) -> None:
    with two_messengers(kind) as (low, high), contextlib.ExitStack() as stack:
        descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        with call(low.address) as early:
            early.sendall(TOKEN + GREETING[:5])  # it knows the token: no stranger takes its place
            strangers = [stack.enter_context(call(low.address)) for _ in range(300)]
            until(lambda: low.strangers == 300 - MOST_STRANGERS)
            most = descriptors + 2 + len(strangers) + MOST_STRANGERS
            until(lambda: len(os.listdir("/proc/self/fd")) == most)  # the last is counted before it is closed
            assert threading.active_count() == threads
            early.sendall(GREETING[5:])
            until(lambda: 9 in low._peers)
            first = low._peers[9]
            with call(low.address) as late:
                late.sendall(TOKEN + GREETING)
                until(lambda: low._peers[9] is not first)
        high.send(0, "after all that", [torch.ones(4)])
        until(lambda: low.arrived(2, "after all that"))


def call(address: str) -> socket.socket:
    family, where = wire.parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(where)
    return sock


def answer(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except ConnectionError:
        return b""


NONSENSE = {
    "garbage": struct.pack("<I", 50) + b"\xff" * 50,
    "oversized header": struct.pack("<I", wire.MAX_HEADER + 1),
    "second greeting": GREETING,
    "wrong dtype": header([{"type": "TensorMessage", "generation": 1, "tag": "wanted"}, [["int32", [4]]]]) + bytes(16),
    "wrong count": header([{"type": "TensorMessage", "generation": 1, "tag": "wanted"}, [["float32", [4]]] * 2])
    + bytes(32),
    "cut short": header([{"type": "TensorMessage", "generation": 1, "tag": "wanted"}, [["float32", [4]]]]) + bytes(7),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_peer_that_talks_nonsense_is_lost_and_the_others_are_not(name: str) -> None:
    with two_messengers() as (low, high), call(low.address) as sock:
        sock.sendall(TOKEN + GREETING)
        until(lambda: 9 in low._peers)
        target = torch.full((4,), 7.0)
        low.expect(9, "wanted", [target])
        sock.sendall(NONSENSE[name])
        sock.shutdown(socket.SHUT_WR)
        until(lambda: low._peers[9].lost)
        assert not low.arrived(9, "wanted")
        high.send(0, "fine", [torch.ones(4)])
        until(lambda: low.arrived(2, "fine"))


def test_a_tensor_of_another_size_than_expected_lands_in_memory_of_its_own() -> None:
    with two_messengers() as (low, high):
        target = torch.full((4,), 7.0)
        low.expect(2, "wanted", [target])
        high.send(0, "wanted", [torch.ones(5)])
        until(lambda: low.arrived(2, "wanted"))
        assert low.take(2, "wanted")[0].tolist() == [1.0] * 5 and target.tolist() == [7.0] * 4


def test_a_worker_that_cannot_be_reached_is_named() -> None:
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # and never listens
    messenger = Messenger(3, 0, "tcp:127.0.0.1:0", TOKEN)
    try:
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            messenger.regroup(1, {1: (f"tcp:127.0.0.1:{nobody.getsockname()[1]}", 0)})
    finally:
        messenger.close()
        nobody.close()


def test_a_closed_messenger_frees_its_address() -> None:
    address = f"unix:@torrential-{secrets.token_hex(8)}"
    for _ in range(2):
        messenger = Messenger(0, 0, address, TOKEN)
        assert messenger.address == address
        messenger.close()


def test_frames_carry_every_dtype_and_shape() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        a: wire.Connection[Any] = wire.Connection(ours, messaging.TensorMessage | PeerGreeting)
        b: wire.Connection[Any] = wire.Connection(theirs, messaging.TensorMessage | PeerGreeting)
        tensors = [torch.ones(2, 3).to(d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
        tensors += [torch.tensor(3.5), torch.empty(0, 4), torch.arange(6).view(2, 3).t().contiguous()]
        assert a.send(TensorMessage(4, "all sorts"), tensors) == sum(t.nbytes for t in tensors)
        message, received = b.receive()
        assert message == TensorMessage(4, "all sorts")
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
