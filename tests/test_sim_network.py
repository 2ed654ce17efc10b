"""What messages take on the simulated network, by hand; and what that makes of the all-reduce algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torrential.comm.protocol import Letter
from torrential.comm.schedules import ALGORITHMS
from torrential.config import RunConfig, SimSettings
from torrential.membership.machine import Membership
from torrential.membership.messages import Ready
from torrential.membership.roles import Members, Who
from torrential.membership.roll import Rules
from torrential.worlds.sim.cluster import make_cluster
from torrential.worlds.sim.comm import SimComm
from torrential.worlds.sim.group import SimMembership
from torrential.worlds.sim.kernel import Kernel
from torrential.worlds.sim.mail import Hub, SimMail
from torrential.worlds.sim.network import SMALL, TINY, Network

LATENCY, BANDWIDTH = 1e-3, 1e6
LARGE = 100_000  # bytes: 0.1 s
SECONDS = LARGE / BANDWIDTH


class Wire:
    """A network and what arrived, when."""

    def __init__(self, handling: float = 0.0) -> None:
        costs = {"latency": LATENCY, "bandwidth": BANDWIDTH, "inside_latency": 1e-4, "inside_bandwidth": 1e7}
        costs["handling"] = handling
        self.kernel = Kernel()
        self.network = Network(self.kernel, make_cluster({"network": costs}).network)
        self.arrived: dict[str, float] = {}

    def send(self, word: str, source: int, to: int, nbytes: int = LARGE, hosts: tuple[int, int] | None = None) -> None:
        """Addresses are hosts, unless said otherwise."""
        one, other = hosts or (source, to)
        arrive = lambda: self.arrived.setdefault(word, self.kernel.now)  # noqa: E731
        self.network.send(source, one, to, other, nbytes, arrive)

    def run(self) -> dict[str, float]:
        self.kernel.run()
        return self.arrived


def test_one_message_takes_latency_and_its_bytes_once() -> None:
    wire = Wire()
    wire.send("large", 0, 1)
    wire.send("small", 2, 3, SMALL)
    assert wire.run() == pytest.approx({"large": LATENCY + SECONDS, "small": LATENCY + SMALL / BANDWIDTH})
    assert wire.network.messages == 2 and wire.network.bytes == LARGE + SMALL


def test_receivers_take_turns_on_the_senders_nic() -> None:
    """Many for one do not hold up one for another; what follows them, however small, stays behind them."""
    wire = Wire()
    for number in range(3):
        wire.send(f"many {number}", 0, 1)
    wire.send("small", 0, 1, TINY)
    wire.send("one", 0, 2)
    arrived = wire.run()
    large = {"many 0": 1, "one": 2, "many 1": 3, "many 2": 4}
    assert {k: arrived[k] for k in large} == pytest.approx({k: LATENCY + n * SECONDS for k, n in large.items()})
    assert arrived["many 2"] <= arrived["small"] <= arrived["many 2"] + LATENCY + TINY / BANDWIDTH


def test_messages_queue_at_the_senders_nic_whoever_they_are_for() -> None:
    wire = Wire()
    for number in range(3):
        wire.send(str(number), 0, 1 + number)
    assert wire.run() == pytest.approx({str(n): LATENCY + (n + 1) * SECONDS for n in range(3)})


def test_what_many_send_to_one_queues_there() -> None:
    wire = Wire()
    for number in range(4):
        wire.send(str(number), 1 + number, 0)
    assert wire.run() == pytest.approx({str(n): LATENCY + (n + 1) * SECONDS for n in range(4)})


def test_both_directions_of_a_nic_are_used_at_once() -> None:
    wire = Wire()
    wire.send("there", 0, 1)
    wire.send("back", 1, 0)
    assert wire.run() == pytest.approx(dict.fromkeys(("there", "back"), LATENCY + SECONDS))


def test_small_messages_pass_between_large_ones_but_never_overtake_their_own_pair() -> None:
    wire = Wire()
    wire.send("large", 0, 1)
    wire.send("small to another", 0, 2, 100)
    wire.send("small of the same pair", 0, 1, 100)
    wire.send("small of another role", 7, 1, 100, hosts=(0, 1))
    found = wire.run()
    quick = LATENCY + 100 / BANDWIDTH
    assert found["small to another"] == found["small of another role"] == pytest.approx(quick)
    assert found["small of the same pair"] == found["large"] == pytest.approx(LATENCY + SECONDS)
    assert list(found)[-2:] == ["large", "small of the same pair"]


def test_a_receiver_deals_with_one_message_after_the_other() -> None:
    wire = Wire(handling=1e-5)
    for number in range(3):
        wire.send(str(number), 1 + number, 0)
    wire.send("tiny", 4, 0, TINY)
    expected = {str(n): LATENCY + SECONDS + (n + 1) * LARGE * 1e-5 for n in range(3)}
    assert wire.run() == pytest.approx(expected | {"tiny": LATENCY + TINY / BANDWIDTH})


def test_inside_a_host_every_role_has_a_line_of_its_own() -> None:
    wire = Wire()
    for number, source in enumerate((0, 0, 1)):
        wire.send(str(number), source, 5, hosts=(0, 0))
    one = LARGE / 1e7
    assert wire.run() == pytest.approx({"0": 1e-4 + one, "2": 1e-4 + one, "1": 1e-4 + 2 * one})


def test_what_crosses_a_partition_waits_until_it_heals() -> None:
    wire = Wire()
    wire.network.part(frozenset({0, 1}), 5.0)
    for word, pair in (("across", (0, 2)), ("back", (3, 1)), ("inside", (0, 1)), ("outside", (2, 3))):
        wire.send(word, *pair, 100)
    quick = 100 / BANDWIDTH
    expected = {"inside": LATENCY + quick, "outside": LATENCY + quick, "across": 5.0 + quick, "back": 5.0 + quick}
    assert wire.run() == pytest.approx(expected)
    wire.send("after", 0, 2, 100)
    assert wire.run()["after"] == pytest.approx(5.0 + 2 * quick + LATENCY)


def test_two_partitions_of_the_same_hosts_last_as_long_as_the_longer() -> None:
    wire = Wire()
    wire.network.part(frozenset({0}), 5.0)
    wire.kernel.after(1.0, wire.network.part, frozenset({0}), 1.0)
    wire.kernel.after(1.5, wire.send, "across", 0, 1, 100)
    assert wire.run()["across"] == pytest.approx(5.0 + 100 / BANDWIDTH)


def test_what_crosses_a_partition_for_ever_is_lost() -> None:
    wire = Wire()
    wire.network.part(frozenset({0}), None)
    wire.send("across", 0, 1)
    wire.send("outside", 1, 2)
    assert list(wire.run()) == ["outside"]


def test_slow_links_add_up_as_long_as_they_last() -> None:
    wire = Wire()
    wire.network.slow(frozenset({0}), 0.25)
    for seconds in (10.0, 20.0):  # the same link, twice
        wire.network.slow(frozenset({0, 1}), 0.5, seconds)
    wire.send("both", 0, 2, 100)
    wire.send("one", 1, 2, 100)
    wire.send("none", 2, 3, 100)
    wire.kernel.at(15.0, wire.send, "half", 1, 2, 100)
    wire.kernel.at(25.0, wire.send, "over", 1, 2, 100)
    quick = LATENCY + 100 / BANDWIDTH
    takes = {"both": 1.25, "one": 1.0, "none": 0.0, "half": 15.5, "over": 25.0}
    assert wire.run() == pytest.approx({word: seconds + quick for word, seconds in takes.items()})


# -- letters -----------------------------------------------------------------------------------------------------------
class Inbox(SimMail):
    """Of a role that does nothing but keep what comes."""

    def __init__(self, hub: Hub, address: int) -> None:
        super().__init__(hub, address, host=address)
        self.came: list[int] = []

    def deliver(self, letter: Letter) -> None:
        self.came.append(letter.message)


def test_letters_that_are_held_up_stay_in_order_and_are_lost_with_their_sender() -> None:
    kernel = Kernel()
    hub = Hub(kernel, make_cluster({"accidents": {"delay": 1.0}}), seed=0)
    one, other, third = (Inbox(hub, address) for address in range(3))
    for number in range(20):
        one.post(2, number)
        other.post(2, 100 + number)
    kernel.after(0.5, hub.mails.pop, 1)
    kernel.run()
    assert [number for number in third.came if number < 100] == list(range(20))
    late = [number for number in third.came if number >= 100]
    assert late == list(range(100, 100 + len(late))) and 0 < len(late) < 20


# -- T7.4 --------------------------------------------------------------------------------------------------------------
def all_reduce_seconds(algorithm: str, nbytes: int, members: int = 16) -> float:
    return all_reduce(algorithm, nbytes, members)[0]


class Stage:
    """A world in which nothing happens but collectives."""

    start: Callable[[Who], Ready]

    def observe(self, *_: Any) -> None:
        raise AssertionError("nobody observes")

    def event(self, *_: Any) -> None:
        raise AssertionError("nothing happens")

    def state(self, *_: Any) -> None: ...


def all_reduce(algorithm: str, nbytes: int, members: int = 16) -> tuple[float, float]:
    """Seconds in all, and of the busiest line: the shipped executor, messages that have a size and no contents."""
    network = {"latency": 100e-6, "bandwidth": 1e9, "handling": 0.0}
    kernel = Kernel()
    hub = Hub(kernel, make_cluster({"network": network}), seed=0)
    membership = Membership([Members("worker", members, "regroup")], Rules(timeout=60.0))
    stage = Stage()
    group = SimMembership(hub, membership, stage)
    config = made(SimSettings(algorithm=algorithm))  # type: ignore[arg-type]
    began, ended = list[float](), list[float]()

    def program(comm: SimComm) -> None:
        comm.regroup(lambda: 0)
        began.append(kernel.now)
        comm.all_reduce(torch.empty(nbytes // 4, device="meta")).wait()
        ended.append(kernel.now)

    def start(who: Who) -> Ready:
        comm = SimComm(hub, group, config, who.address, 0.0)
        comm.role = kernel.role(str(who), lambda: program(comm), uses_torch=False)
        return Ready()

    stage.start = start
    group.start()
    kernel.run()
    assert not kernel.failures and len(ended) == members
    lines = (*hub.network._out.values(), *hub.network._in.values())
    return max(ended) - max(began), max(line.busy for line in lines)


def made(settings: SimSettings) -> RunConfig:
    numbers: dict[str, Any] = {"workers": 16, "servers": 0, "epochs": 1, "samples": 1, "batch_size": 1, "seed": 0}
    numbers["samples_per_step"] = 16
    none: dict[str, Any] = {"source": None, "steps": None, "target": None, "options": {}, "optimizer": {}}
    return RunConfig(
        task="", strategy="allreduce", world="sim", lr=1.0, device="cpu", settings=settings, **numbers, **none
    )


@pytest.mark.parametrize("kilobytes", [16, 64, 256, 1000])
def test_t7_4_halving_is_quicker_than_ring_while_latency_counts(kilobytes: int) -> None:
    ring, halving = (all_reduce_seconds(a, 1000 * kilobytes) for a in ("ring", "halving"))
    assert ring >= 1.5 * halving
    assert ring == pytest.approx(30 * 100e-6 + 1.875e-9 * 1000 * kilobytes, rel=0.02)
    assert halving == pytest.approx(8 * 100e-6 + 1.875e-9 * 1000 * kilobytes, rel=0.02)


def test_t7_4_large_vectors_take_their_bytes() -> None:
    (ring, ring_busy), (halving, _), (tree, tree_busy) = (
        all_reduce(a, 64_000_000) for a in ("ring", "halving", "tree")
    )
    assert halving == pytest.approx(ring, rel=0.05)
    assert ring_busy == pytest.approx(1.875 * 0.064, rel=0.01)
    assert tree_busy == pytest.approx(2 * 0.064, rel=0.01)
    assert tree_busy < tree < 1.2 * ring  # what is above 2 n is the filling of the pipeline


def test_t7_4_a_tree_has_few_hops() -> None:
    assert all_reduce_seconds("ring", 16_000) >= 2 * all_reduce_seconds("tree", 16_000)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_algorithm_is_quicker_than_the_bytes_that_one_must_receive(algorithm: str) -> None:
    assert all_reduce_seconds(algorithm, 1_000_000, members=5) >= 2 * 100e-6 + 1_000_000 / 1e9 * 4 / 5


def test_whoever_reads_is_given_every_letter_and_wakes_up_when_it_has_enough() -> None:
    kernel = Kernel()
    hub = Hub(kernel, make_cluster({"network": {"latency": LATENCY}}), seed=0)
    reader, writer = SimMail(hub, 0, 0), SimMail(hub, 1, 1)
    seen: list[tuple[float, Any]] = []
    turns: list[int] = []

    def program() -> None:
        assert reader.read(lambda letter: seen.append((kernel.now, letter.message)) or len(seen) == 3, 0.6)
        turns.append(reader.role.turn)
        assert not reader.read(lambda letter: True, 0.5)
        turns.append(reader.role.turn)
        reader.read(lambda letter: {}[letter.message])  # type: ignore[func-returns-value]

    reader.role = kernel.role("reader", program)
    for when in (0.0, 0.5, 1.0, 2.0):  # none of them comes later than 0.6 s after the one before
        kernel.at(when, writer.post, 0, when)
    kernel.run()
    took = LATENCY + 120 / 1.25e9
    assert seen == [(pytest.approx(when + took), when) for when in (0.0, 0.5, 1.0)]
    assert turns == [1, 2]
    ((whose, error),) = kernel.failures
    assert whose == "reader" and isinstance(error, KeyError)
    assert reader.meter.wait == pytest.approx(2.0 + took)
