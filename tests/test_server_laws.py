"""Laws that papers state for parameter servers, met by the shipped strategies, client and servers on the network in
memory. Its clock is its own, so what is said about time here is counted, not measured."""

import math

import pytest
import torch
from network import Cluster, Hub

from torrential.comm.protocol import SERVERS
from torrential.data.deal import Batch
from torrential.optimizers import OptimizerSpec
from torrential.server.dealer import Dealer
from torrential.strategies.backup import Backup
from torrential.strategies.base import servers_of
from torrential.strategies.downpour import Downpour
from torrential.strategies.ssp import Ssp
from torrential.trainer.slow import Slow

BATCH_SECONDS = 10.0  # of the network's clock, on which an event takes a thousandth
RATE = 0.1


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A small step on two of them mostly waits for the other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Config:
    batch_size = 1

    def __init__(self, workers):
        self.workers = workers


class Descent:
    """strategies.context.Context and its parts, for the loss sum(curvatures * x ** 2) / 2 and batches of one sample."""

    def __init__(self, client, comm, workers, curvatures, factor):
        self.params, self.comm, self.config = client, comm, Config(workers)
        self.data = self.replica = self.progress = self
        self.at = comm.buffer("vector", client.numel, client.dtype)
        self.slope = comm.buffer("gradient", client.numel, client.dtype)
        self.curvatures, self.factor, self.batches = curvatures, factor, 0

    def vector(self):
        return self.at

    def gradient(self):
        return self.slope

    def push_scale(self):
        return 1.0

    def reached(self):
        return None

    def take(self, clock, minibatches=1, after=0):
        answer = self.params.take(minibatches, clock=clock, after=after).wait()
        if answer.finished:
            return None
        first, last = answer.indices
        return Batch(answer.epoch, first, torch.arange(first, last), answer.total or last - first, lease=answer.lease)

    def backward(self, batches, after=None):
        (batch,) = batches
        if len(batch):
            gradient = self.at * self.curvatures * batch.weight
            self.hold()
            self.batches += 1
            if after is not None:
                after.wait()
            self.slope.copy_(gradient)
        return 0.0

    def hold(self):
        """The time that it takes."""
        self.comm.sleep(BATCH_SECONDS * self.factor(self.comm.rank, self.batches))

    def rate(self, joined, batch=None):
        return RATE

    def advance(self, batch, loss, answer=None):
        pass

    def leave(self):
        self.params.wait()


def start(strategy, workers, samples, *, curvatures=(0.0,) * 16, factor=lambda rank, batch: 1.0, ctx=Descent):
    hub, curvatures = Hub(0), torch.tensor(curvatures, dtype=torch.float64)
    cluster = Cluster(
        hub, len(curvatures), workers=range(workers), consistency=servers_of(strategy, workers).consistency,
        spec=OptimizerSpec(torch.optim.SGD, RATE), dtype=torch.float64, initial=torch.ones_like(curvatures),
        dealer=Dealer(samples, 1, servers_of(strategy, workers).joined),
    )  # fmt: skip
    for rank in range(workers):
        cluster.work(rank, lambda client, comm: strategy.worker(ctx(client, comm, workers, curvatures, factor)))
    return hub, cluster


# -- downpour ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("push_every", "fetch_every"), [(1, 1), (4, 6), (3, 2)])
def test_t3_2_downpour_moves_what_its_periods_say(push_every, fetch_every):
    """8 bytes for each of 16 parameters; the first fetch is before the first of 43 minibatches, the last after it."""
    hub, _ = start(Downpour(push_every=push_every, fetch_every=fetch_every), 1, 43)
    hub.run()
    assert hub.bytes[0, SERVERS] == 8 * 16 * math.ceil(43 / push_every)
    assert hub.bytes[SERVERS, 0] == 8 * 16 * (1 + 43 // fetch_every)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_t3_8_gradients_of_equal_replicas_are_late_by_one_update_of_each_other(replicas):
    hub, cluster = start(Downpour(), replicas, 50 * replicas)
    hub.run()
    late = cluster.roles[SERVERS].report().staleness
    assert sum(late.values()) == 50 * replicas
    assert sum(updates * times for updates, times in late.items()) / (50 * replicas) == pytest.approx(
        replicas - 1, rel=0.05
    )


class InTurn(Descent):
    """Pushes when all others have pushed since it did: every gradient is late by the same number of updates."""

    rounds, turn, seen = 0, [0], []

    def take(self, clock, minibatches=1, after=0):
        batch = super().take(clock, minibatches, after)  # the server has answered what this worker asked before it, too
        if self.batches:
            self.turn[0] += 1
            self.comm.hub.comms[self.turn[0] % self.config.workers].waiting = False
        return batch if self.batches < self.rounds else None

    def hold(self):
        while self.turn[0] % self.config.workers != self.comm.rank:
            self.comm.waiting = True
            self.comm.hub_switch()
        self.seen.append(self.at.abs())


@pytest.mark.parametrize("delay", [0, 1, 2, 4, 16])
def test_t4_4_with_a_constant_delay_the_largest_rate_is_the_one_of_the_law(delay):
    """x[t + 1] = x[t] - rate * curvature * x[t - delay] is stable if rate * curvature < 2 sin(pi / (4 delay + 2)).
    One run tries 41 curvatures at a time, from 10 % below that to 10 % above."""
    law, workers = 2 * math.sin(math.pi / (4 * delay + 2)), delay + 1
    parts = [0.9 + 0.005 * i for i in range(41)]
    rounds = (300 + 160 * delay) // workers
    ctx = type("Ordered", (InTurn,), {"rounds": rounds, "turn": [0], "seen": []})
    hub, cluster = start(Downpour(), workers, 10**9, curvatures=[part * law / RATE for part in parts], ctx=ctx)
    hub.run()
    late = cluster.roles[SERVERS].report().staleness
    assert max(late) == delay and late[delay] >= rounds * workers - 2 * delay  # less at first, as they come in
    sizes = torch.stack(ctx.seen)
    third, last = sizes[len(sizes) // 2 :].chunk(2)
    grows = (last.amax(0) > third.amax(0)).tolist()
    first = parts[grows.index(True)]
    assert abs(first - 1) < 0.02
    assert grows == [part >= first for part in parts]


# -- stragglers -------------------------------------------------------------------------------------------------------
def test_t6_5_with_random_slow_downs_more_staleness_is_more_throughput_and_less_waiting():
    """Each of four workers takes five times as long for one batch in ten."""
    slow = Slow.parse("random:5:10", 4)
    seconds, waiting = [], []
    for staleness in (0, 1, 3, 10):
        busy = []

        def factor(rank, batch, busy=busy):
            busy.append(slow.factor(0, rank, batch))
            return busy[-1]

        hub, _ = start(Ssp(staleness=staleness), 4, 800, factor=factor)
        hub.run()
        assert len(busy) == 800
        seconds.append(hub.now)
        waiting.append(1 - BATCH_SECONDS * sum(busy) / (4 * hub.now))
    assert seconds == sorted(seconds, reverse=True) and waiting == sorted(waiting, reverse=True), (seconds, waiting)
    assert seconds[0] / seconds[2] > 1.4


def seconds_per_step(strategy, workers, factor, steps=50):
    hub, cluster = start(strategy, workers, 10**9, factor=factor)
    hub.run(until=lambda: cluster.roles and cluster.shards()[0].closed >= steps)
    return hub.now / steps


def test_t11_4_one_backup_hides_a_worker_that_is_ten_times_slow_for_good():
    def slow(rank, batch):
        return 10.0 if rank == 3 else 1.0

    usual = seconds_per_step(Backup(backups=1), 5, lambda rank, batch: 1.0)
    assert usual == pytest.approx(BATCH_SECONDS, rel=0.02)
    assert seconds_per_step(Backup(backups=1), 5, slow) == pytest.approx(usual, rel=0.1)
    assert seconds_per_step(Backup(backups=0), 5, slow) == pytest.approx(10 * usual, rel=0.02)
