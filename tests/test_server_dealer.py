"""Samples are used exactly once per epoch whatever happens, and checkpoints are the same moment on all shards."""

import random

import msgspec
import pytest
import torch
from network import Cluster, Hub

from torrential.comm.protocol import SERVERS
from torrential.data.deal import Deal
from torrential.errors import RunFailed
from torrential.optimizers import OptimizerSpec
from torrential.server.consistency import Consistency
from torrential.server.copies import join_copies
from torrential.server.dealer import Dealer
from torrential.server.optimizer import Store
from torrential.server.shard import Shard


def test_a_lease_is_given_back_and_dealt_again_first():
    dealer = Dealer(10, 2)
    one, first = dealer.deal(0, 4)
    two, second = dealer.deal(1, 4)
    assert (first.first, first.last, second.first, second.last) == (0, 4, 4, 8)
    dealer.forget([0])
    _, again = dealer.deal(1, 3)
    assert (again.first, again.last, again.epoch) == (0, 3, 0)
    _, rest = dealer.deal(1, 3)
    assert (rest.first, rest.last) == (3, 4)
    dealer.complete(one)  # of the dead: nothing happens
    dealer.complete(two)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(dealer), type=Dealer) == dealer


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_in_step_it_deals_as_deal_does(workers):
    dealer, deal = Dealer(23, 2, together=True), Deal(23, seed=1)
    while dealer.ready():
        epoch, cursor = deal.epoch, deal.cursor
        shares = [deal.share(member, workers, 4) for member in range(workers)]
        dealt = dealer.deal_together(range(workers), 4)
        for share, (lease, hand) in zip(shares, dealt, strict=True):
            assert hand.last - hand.first == len(share.indices) and hand.epoch == epoch
            assert bool(lease) == bool(len(share.indices)) and (not lease or hand.first >= cursor)
            dealer.complete(lease)
        deal.advance(shares[0].total)
    assert deal.epoch == 2 and dealer.finished()


def test_whatever_is_given_back_no_sample_is_dealt_to_two_or_forgotten():
    for seed in range(100):
        rng = random.Random(seed)
        dealer, used = Dealer(30, 2), []
        while not dealer.finished():
            if dealer.ready() and rng.random() < 0.5:
                dealer.deal(rng.randrange(4), rng.randint(1, 7))
            elif dealer.leases:
                lease = rng.choice(list(dealer.leases))
                if rng.random() < 0.5:
                    hand = dealer.leases[lease]
                    used += [(hand.epoch, sample) for sample in range(hand.first, hand.last)]
                    dealer.complete(lease)
                elif rng.random() < 0.5:
                    dealer.give_back(lease)
                else:
                    dealer.forget([dealer.leases[lease].worker])
        assert sorted(used) == [(epoch, sample) for epoch in range(2) for sample in range(30)]
        assert dealer.used == {0: 30, 1: 30}


def run_epochs(seed, *, consistency, together, samples=37, deaths=8):
    """Two epochs; the dealer's own count, which is replicated with it, and how many gradients were dropped."""
    hub = Hub(seed)
    rng = random.Random(seed)
    cluster = Cluster(
        hub, 64, servers=3, replicas=1, workers=(0, 1, 2), consistency=consistency,
        dealer=Dealer(samples, 2, together=together),
    )  # fmt: skip
    drops, left = [0], [deaths]

    def program(client, comm):
        clock = client.enter()
        gradient = comm.buffer("gradient", 64, torch.float32)
        while not (taken := client.take(4, clock=clock).wait()).finished:
            if rng.random() < 0.2:
                comm.sleep(0.02)
            some = gradient.fill_(1.0) if taken.lease else None
            answer = client.push(some, clock=clock, lr=1.0, lease=taken.lease).wait()
            drops[0] += answer.dropped
            clock = max(clock + 1, answer.clock if consistency.first else 0)

    def each():
        if not left[0] or rng.random() > 0.02 or any(hub.comms[rank].over for rank in cluster.workers):
            return
        left[0] -= 1
        victim = rng.choice(hub.view.servers())
        if rng.random() < 0.4:
            rank = rng.choice(sorted(cluster.workers))
            cluster.remove_worker(rank)
            cluster.add_worker(rank if rng.random() < 0.5 else rank + 3, program)
        elif cluster.safe_to_kill(victim) and len(hub.view.servers()) > 2:
            cluster.kill_server(victim)
        elif len(hub.view.servers()) < 4:
            cluster.add_server()

    for rank in range(3):
        cluster.work(rank, program)
    hub.each = each
    hub.run()
    dealer = cluster.shards()[0].dealer
    assert dealer.finished()
    return dealer.used, drops[0]


@pytest.mark.parametrize("kind", ["asynchronous", "stale", "synchronous"])
def test_every_sample_is_used_once_per_epoch_under_deaths_of_workers_and_servers(kind):
    consistency = {"asynchronous": Consistency(None), "stale": Consistency(2), "synchronous": Consistency(0)}[kind]
    for seed in range(10):
        used, _ = run_epochs(seed, consistency=consistency, together=kind == "synchronous")
        assert used == {0: 37, 1: 37}, seed


def test_every_sample_is_used_once_per_epoch_when_late_gradients_are_dropped():
    dropped = 0
    for seed in range(4):
        used, drops = run_epochs(seed, consistency=Consistency(0, first=2), together=False, deaths=0, samples=60)
        assert used == {0: 60, 1: 60}
        dropped += drops
    assert dropped > 0


def test_no_samples_are_refused_and_a_take_can_wait_for_updates():
    hub = Hub(0)
    cluster = Cluster(hub, 16)

    def program(client, comm):
        with pytest.raises(RunFailed, match="worker 0 asked for samples where there are none"):
            client.take(3).wait()

    cluster.work(0, program)
    hub.run()
    hub = Hub(0)
    cluster = Cluster(hub, 16, workers=(0, 1), dealer=Dealer(10, 1))

    def program(client, comm):
        if comm.rank == 1:
            return client.take(2, after=3).wait().version
        for clock in range(5):
            client.push(torch.ones(16), clock=clock, lr=1.0).wait()
            comm.sleep(0.1)

    for rank in range(2):
        cluster.work(rank, program)
    hub.run()
    assert hub.comms[1].result == 3


# -- checkpoints ------------------------------------------------------------------------------------------------------
KINDS = {
    "asynchronous": Consistency(None),
    "stale": Consistency(2),
    "synchronous": Consistency(0),
    "backup": Consistency(0, first=2),
}


def saving(seed, kind, *, deaths=0, samples=90, numel=96):
    """Every push adds to each parameter how many samples it was made of. Worker by worker asks for checkpoints, without
    a word to the others; here they come as (the vector, what else was saved)."""
    hub, rng, found, tries, left = Hub(seed), random.Random(seed), [], [0], [deaths]
    cluster = Cluster(
        hub, numel, servers=3, replicas=1, workers=(0, 1, 2), consistency=KINDS[kind],
        spec=OptimizerSpec(torch.optim.SGD, 1.0, {"momentum": 0.0}),
        dealer=Dealer(samples, 2, together=kind == "synchronous"),
    )  # fmt: skip

    def program(client, comm):
        clock, pending, into = client.enter(), None, torch.empty(numel)
        gradient = comm.buffer("gradient", numel, torch.float32)
        while not (taken := client.take(4, clock=clock).wait()).finished:
            if rng.random() < 0.3:
                comm.sleep(0.05)
            first, last = taken.indices
            some = gradient.fill_(last - first) if taken.lease else None
            answer = client.push(some, clock=clock, lr=-1.0, lease=taken.lease).wait()
            clock = max(clock + 1, answer.clock if kind == "backup" else 0)
            if pending is not None and pending.done():
                tries[0] += 1
                whole = join_copies(pending.wait().metadata, numel)
                if whole is not None:
                    found.append((into.clone(), whole))
                pending = None
            if comm.rank == comm.view.workers[0] and pending is None and rng.random() < 0.5:
                pending = client.save([into])
        if pending is not None:
            client.forget(pending)

    def each():
        if not left[0] or rng.random() > 0.02 or any(hub.comms[rank].over for rank in cluster.workers):
            return
        left[0] -= 1
        victim = rng.choice(hub.view.servers())
        if rng.random() < 0.5:
            rank = rng.choice(sorted(cluster.workers))
            cluster.remove_worker(rank)
            cluster.add_worker(rank if rng.random() < 0.5 else rank + 3, program)
        elif cluster.safe_to_kill(victim) and len(hub.view.servers()) > 2:
            cluster.kill_server(victim)
        elif len(hub.view.servers()) < 4:
            cluster.add_server()

    for rank in range(3):
        cluster.work(rank, program)
    hub.each = each
    hub.run()
    return found, tries[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_all_of_a_push_or_nothing_of_it_and_deals_the_rest(kind):
    for seed in range(3):
        found, tries = saving(seed, kind)
        assert len(found) == tries > 3
        for vector, whole in found:
            used = sum(whole.dealer.used.values())
            mine = vector[:32] if kind == "backup" else vector  # other ranges may choose other gradients
            assert mine.tolist() == [float(used)] * len(mine), seed
            check_what_is_dealt_again(whole.dealer)


@pytest.mark.parametrize("kind", ["asynchronous", "stale", "synchronous"])
def test_a_checkpoint_is_whole_or_lost_when_workers_and_servers_die(kind):
    """What a dead worker had sent to some ranges only may be on those only; its own range tells what was used."""
    good = 0
    for seed in range(4):
        found, _ = saving(seed, kind, deaths=8)
        good += len(found)
        for vector, whole in found:
            used = sum(whole.dealer.used.values())
            assert float(vector[0]) == used, seed
            assert float((vector - used).abs().max()) <= 4 * 8, seed  # a batch for each of the dead
            check_what_is_dealt_again(whole.dealer)
    assert good > 10


def check_what_is_dealt_again(dealer):
    """Whoever goes on from here uses all the other samples, once."""
    assert not dealer.leases and dealer.dealt == 0
    while not dealer.finished():
        lease, _ = dealer.deal(0, 5)
        dealer.complete(lease)
    assert dealer.used == {0: dealer.samples, 1: dealer.samples}


def test_in_step_a_checkpoint_takes_back_what_was_dealt_last():
    dealer = Dealer(10, 2, together=True)
    for _ in range(2):
        for lease, _ in dealer.deal_together((0, 1), 2):
            dealer.complete(lease)
    dealt = dealer.deal_together((0, 1), 2)
    assert (dealer.epoch, dealer.cursor) == (1, 0)
    saved = dealer.saved()
    assert (saved.epoch, saved.cursor, saved.returned, saved.used) == (0, 8, [], {0: 8})
    dealer.complete(dealt[0][0])
    saved = dealer.saved([dealt[0][1]])
    assert (saved.epoch, saved.cursor, saved.returned, saved.used) == (0, 8, [], {0: 8})
    assert dealer.used == {0: 9} and len(dealer.leases) == 1


def test_a_checkpoint_does_not_wait_for_the_dead():
    hub = Hub(4)
    cluster = Cluster(hub, 32, servers=2, replicas=1, workers=(0, 1))

    def program(client, comm):
        if comm.rank:
            return comm.sleep(1e5)
        client.push(torch.ones(32), clock=0, lr=1.0).wait()
        into = torch.empty(32)
        client.save([into]).wait()
        return into

    for rank in range(2):
        cluster.work(rank, program)
    hub.run(until=lambda: hub.now > 2.0)
    assert not hub.comms[0].over
    cluster.remove_worker(1)
    hub.run()
    assert hub.comms[0].result.tolist() == [-1.0] * 32


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_checkpoint_is_asked_for_by_a_worker_that_has_left(kind):
    """It may ask before the servers have heard that it has."""
    for seed in range(10):
        hub = Hub(seed)
        cluster = Cluster(hub, 32, servers=2, replicas=1, workers=(0,), consistency=KINDS[kind])

        def program(client, comm, cluster=cluster):
            client.push(torch.ones(32), clock=client.enter(), lr=1.0).wait()
            cluster.workers.clear()
            cluster.announce()
            into = torch.empty(32)
            whole = join_copies(client.save([into]).wait().metadata, 32)
            return into.tolist(), whole.version

        cluster.work(0, program)
        hub.run()
        assert hub.comms[0].result == ([-1.0] * 32, 1), seed


def test_the_last_checkpoint_is_none_that_others_asked_for_before():
    """A worker that had left did not hear of those, and would use their numbers again."""
    hub = Hub(0)
    cluster = Cluster(hub, 32, servers=2, replicas=1, workers=(0, 1))

    def leave(rank):
        cluster.workers.discard(rank)
        cluster.announce()

    def first(client, comm):
        client.enter()
        leave(0)
        comm.sleep(1e3)
        into = torch.empty(32)
        client.save([into]).wait()
        return into

    def second(client, comm):
        clock = client.enter()
        comm.sleep(1.0)
        client.push(torch.ones(32), clock=clock, lr=1.0).wait()
        client.save([torch.empty(32)]).wait()
        client.push(torch.ones(32), clock=clock + 1, lr=1.0).wait()
        leave(1)

    cluster.work(0, first)
    cluster.work(1, second)
    hub.run()
    assert hub.comms[0].result.tolist() == [-2.0] * 32


def test_a_shard_and_its_copy_go_on_alike():
    hub = Hub(0)
    cluster = Cluster(hub, 40, spec=OptimizerSpec(torch.optim.Adam, 0.1), sizes=[25, 15], dealer=Dealer(9, 1))

    def program(client, comm):
        client.take(4).wait()
        for clock in range(3):
            client.push(torch.arange(40.0) - 20, clock=clock, lr=0.1).wait()

    cluster.work(0, program)
    hub.run()
    (shard,) = cluster.shards()
    state, tensors = shard.state(0)
    other = Store(hub.start(SERVERS + 9, lambda comm: None), cluster.layout, cluster.spec)
    copy = Shard.restored(other, {}, state, tensors)
    assert msgspec.msgpack.encode(copy.metadata()) == msgspec.msgpack.encode(shard.metadata())
    halves = [shard.part(0, 16), shard.part(16, 40)]
    assert halves[0].dealer == shard.dealer and halves[1].dealer is None
    for one in (copy, *halves):
        one.optimizer.step(torch.ones(one.stop - one.start), 0.1)
    assert torch.equal(copy.parameters, shard.parameters)  # the halves are views of the same memory as the whole
