"""Who may read when (papers 5.4, 6.4, 11.4), and that a sharded optimizer is the optimizer."""

import pytest
import torch
from network import Cluster, Hub

from torrential.comm.protocol import SERVERS
from torrential.errors import BadInput
from torrential.optim.lars import LARS
from torrential.optimizers import OptimizerSpec
from torrential.server.consistency import Consistency
from torrential.server.messages import Push

SGD = OptimizerSpec(torch.optim.SGD, 1.0)


def plain_training(spec, gradients, lr):
    """One process: the sum of each clock's gradients, in the order of ranks, as one step."""
    parameters = torch.zeros(gradients[0][0].numel())
    optimizer = spec.build([parameters])
    for group in optimizer.param_groups:
        group["lr"] = lr
    for clock in gradients:
        total = clock[0].clone()
        for gradient in clock[1:]:
            total += gradient
        parameters.grad = total
        optimizer.step()
    return parameters


def synchronous_training(seed, spec, gradients, lr, servers, consistency, together=True, replicas=0, sizes=None):
    hub = Hub(seed)
    workers = range(len(gradients[0]))
    cluster = Cluster(
        hub, gradients[0][0].numel(), servers=servers, workers=workers, spec=spec, consistency=consistency,
        replicas=replicas, sizes=sizes,
    )  # fmt: skip
    seen = []

    def program(client, comm):
        mine = comm.buffer("gradient", cluster.numel, torch.float32)
        into = torch.empty(cluster.numel)
        for clock, each in enumerate(gradients):
            mine.copy_(each[comm.rank])
            if together:
                client.push_pull(mine, into, clock=clock, lr=lr).wait()
            else:
                client.push(mine, clock=clock, lr=lr).wait()
                client.pull(into, clock=clock + 1).wait()
            seen.append((clock, into.clone()))

    for rank in workers:
        cluster.work(rank, program)
    hub.run()
    return cluster, seen


def random_gradients(seed, numel, workers, clocks):
    rng = torch.Generator().manual_seed(seed)
    return [[torch.randn(numel, generator=rng) for _ in range(workers)] for _ in range(clocks)]


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("servers", [1, 3])
def test_t5_1_without_staleness_it_is_one_process(name, servers):
    spec = OptimizerSpec(getattr(torch.optim, name), 0.1, {"momentum": 0.9} if name == "SGD" else {})
    for seed in range(3):
        gradients = random_gradients(seed, 96, 3, 5)
        cluster, seen = synchronous_training(seed, spec, gradients, 0.05, servers, Consistency(0), seed % 2 == 0)
        assert torch.equal(cluster.values(), plain_training(spec, gradients, 0.05))
        for clock, read in seen:
            assert torch.equal(read, plain_training(spec, gradients[: clock + 1], 0.05))


def test_t6_3_staleness_zero_is_bsp_bit_for_bit_whatever_the_order():
    gradients = random_gradients(0, 64, 4, 6)
    found = [
        synchronous_training(seed, SGD, gradients, 0.1, servers, Consistency(0), replicas=min(1, servers - 1))[
            0
        ].values()
        for seed, servers in enumerate([1, 2, 3, 4, 2, 2])
    ]
    assert all(torch.equal(found[0], other) for other in found)
    assert torch.equal(found[0], plain_training(SGD, gradients, 0.1))


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
def test_t3_3_sharded_adagrad_is_adagrad(servers):
    spec = OptimizerSpec(torch.optim.Adagrad, 0.1)
    gradients = random_gradients(servers, 1000, 1, 20)
    cluster, _ = synchronous_training(0, spec, gradients, 0.1, servers, Consistency(None), sizes=[300, 1, 699])
    parameters = torch.zeros(1000)
    optimizer = spec.build([parameters])
    for (gradient,) in gradients:
        parameters.grad = gradient
        optimizer.step()
    assert torch.equal(cluster.values(), parameters)


def test_layer_wise_optimizers_see_whole_tensors():
    spec = OptimizerSpec(LARS, 1.0, {"momentum": 0.9, "trust": 0.1})
    gradients = random_gradients(0, 64, 1, 5)
    cluster, _ = synchronous_training(0, spec, gradients, 1.0, 2, Consistency(0), sizes=[32, 20, 12])
    parameters = [torch.zeros(32), torch.zeros(20), torch.zeros(12)]
    optimizer = spec.build(parameters)
    for (gradient,) in gradients:
        for parameter, grad in zip(parameters, gradient.split([32, 20, 12]), strict=True):
            parameter.grad = grad
        optimizer.step()
    assert torch.allclose(cluster.values(), torch.cat(parameters), rtol=1e-6)


def run_ssp(seed, staleness, clocks, workers=3, slow=0.0, servers=1):
    """Worker r's push at clock c adds 1 to element (r, c). Each read is checked as it comes; gaps are measured."""
    hub = Hub(seed)
    cluster = Cluster(
        hub, workers * clocks, servers=servers, workers=range(workers), consistency=Consistency(staleness)
    )
    gaps, counters, reads = [0], [0], [0]
    stamps = torch.arange(clocks)

    def measure():
        """As the servers see it: a push that has been applied is over, though its worker may not know yet."""
        for shard in cluster.shards() if len(cluster.roles) == servers else ():
            completed = [clock.least() for clock in shard.clocks.values()]
            counters[0] = max(counters[0], max(completed, default=0) - min(completed, default=0))

    hub.each = measure

    def program(client, comm):
        rank, rng = comm.rank, hub.random
        into = torch.empty(workers * clocks)
        tag, where = torch.tensor([-1.0]), torch.empty(1, dtype=torch.int64)
        for clock in range(clocks):
            client.pull(into, clock=clock).wait()
            slowest = min(c.least() for shard in cluster.shards() for c in shard.clocks.values())
            gaps[0] = max(gaps[0], clock - slowest)
            table = into.view(workers, clocks)
            if staleness is not None:
                assert bool((table[:, stamps <= clock - staleness - 1] == 1).all()), (seed, rank, clock)
            assert bool((table[rank, :clock] == 1).all()) and bool((table[rank, clock:] == 0).all()), (seed, rank)
            reads[0] += 1
            if rank == 0 and rng.random() < slow:
                comm.sleep(0.3)
            where[0] = rank * clocks + clock
            client.push(tag, clock=clock, lr=1.0, keys=where).wait()

    for rank in range(workers):
        cluster.work(rank, program)
    hub.run()
    assert bool((cluster.values() == 1).all())
    return reads[0], gaps[0], counters[0]


@pytest.mark.parametrize("staleness", [0, 1, 3, 10])
def test_t6_1_t6_2_a_read_sees_what_it_must_and_the_bound_is_reached(staleness):
    reads, gap, counter = 0, 0, 0
    for seed in range(3):
        n, g, c = run_ssp(seed, staleness, clocks=40, workers=3, slow=0.3)
        reads, gap, counter = reads + n, max(gap, g), max(counter, c)
    assert reads == 3 * 3 * 40
    assert gap == staleness
    assert counter == (staleness + 1 if staleness else 0)  # without staleness all complete a clock at once


@pytest.mark.parametrize("staleness", [0, 1, 3, 10])
def test_t6_1_many_reads(staleness):
    """25 000 for each, without a client between: letters to a server, delivered in random order."""
    from direct import many_reads

    assert many_reads(staleness, workers=5, reads=25_000, seed=staleness) == 25_000


def test_t5_2_with_delay_two_the_lead_reaches_two_and_never_three():
    leads = [run_ssp(seed, 2, clocks=12, workers=2, slow=0.5, servers=2)[1] for seed in range(10)]
    assert max(leads) == 2


def test_eventual_consistency_waits_for_nobody():
    hub = Hub(0)
    cluster = Cluster(hub, 8, workers=(0, 1), consistency=Consistency(None))

    def program(client, comm):
        for clock in range(50):
            client.push(torch.ones(8), clock=clock, lr=1.0).wait()
            client.pull(torch.empty(8), clock=clock + 1).wait()

    cluster.work(0, program)  # worker 1 never comes
    hub.run()
    assert cluster.values().tolist() == [-50.0] * 8


def test_t6_4_a_worker_reads_its_own_writes_from_a_server_that_is_one_second_slow():
    hub = Hub(0)
    cluster = Cluster(hub, 16, servers=2, workers=(0, 1), consistency=Consistency(3))

    def program(client, comm):
        if comm.rank == 1:
            return
        into = torch.empty(16)
        for clock in range(3):
            hub.delays[0, SERVERS] = hub.delays[SERVERS + 1, 0] = comm.now() + 1.0
            client.push(torch.ones(16), clock=clock, lr=1.0)
            client.pull(into, clock=clock).wait()
            assert into.tolist() == [-1.0 - clock] * 16

    for rank in range(2):
        cluster.work(rank, program)
    hub.run()


def test_the_dead_are_not_waited_for_and_a_newcomer_is_from_its_first_word():
    for seed in range(10):
        for staleness in (0, 2):
            hub = Hub(seed)
            cluster = Cluster(hub, 32, servers=2, workers=(0, 1, 2), consistency=Consistency(staleness))
            entered = []

            def program(client, comm, hub=hub, entered=entered, cluster=cluster):
                clock = client.enter()
                entered.append((comm.rank, clock))
                gradient = comm.buffer("gradient", 32, torch.float32)
                into = torch.empty(32)
                while clock < 12:
                    client.pull(into, clock=clock).wait()
                    if comm.rank == 1 and clock == 4:
                        return comm.receive(1e5)
                    client.push(gradient.fill_(1.0), clock=clock, lr=1.0).wait()
                    clock += 1

            for rank in range(3):
                cluster.work(rank, program)
            hub.run(until=lambda hub=hub: hub.now > 3.0 or all(hub.comms[r].over for r in (0, 2)))
            assert not hub.comms[0].over and not hub.comms[2].over
            cluster.remove_worker(1)
            cluster.add_worker(3, program)
            hub.run()
            began = dict(entered)[3]
            assert 4 <= began <= 12
            if staleness == 0:  # nobody's gradient was dropped, on any range
                assert set(cluster.values().tolist()) == {-(3 * 4 + 2 * 8 + (12 - began))}
                assert all(shard.dropped == 0 for shard in cluster.shards())


def test_a_worker_that_has_come_back_may_have_several_pushes_under_way():
    """Each of its requests used to make the head forget those before it, which waited for others of their clocks."""
    for seed in range(5):
        hub = Hub(seed)
        cluster = Cluster(hub, 32, servers=2, workers=(0, 1), consistency=Consistency(0))

        def program(client, comm):
            clock = client.enter()
            ones = comm.buffer("gradient", 32, torch.float32).fill_(1.0)
            while clock < 12:
                handles = [client.push(ones, clock=c, lr=-1.0) for c in range(clock, min(12, clock + 3))]
                for handle in handles:
                    handle.wait()
                clock += len(handles)

        for rank in range(2):
            cluster.work(rank, program)
        hub.run(until=lambda cluster=cluster: len(cluster.roles) == 2 and cluster.shards()[0].closed >= 3)
        cluster.remove_worker(1)
        cluster.add_worker(1, program)
        hub.run()
        assert all(shard.closed == 12 for shard in cluster.shards())


def test_t11_2_the_first_n_of_a_clock_make_a_step_and_the_others_are_dropped():
    for seed in range(8):
        hub = Hub(seed)
        cluster = Cluster(hub, 16, workers=range(5), consistency=Consistency(0, first=3))
        answers, posted = [], []
        hub.watch = lambda source, to, message, posted=posted: (
            posted.append(message.clock) if isinstance(message, Push) else None
        )

        def program(client, comm, hub=hub, answers=answers):
            gradient = comm.buffer("gradient", 16, torch.float32)
            into = torch.empty(16)
            clock = client.enter()
            client.pull(into, clock=clock).wait()
            while clock < 20:
                gradient.fill_(float(1 + into[0]))  # a gradient of another version would be another number
                if hub.random.random() < 0.3:
                    comm.sleep(0.05)
                answer = client.push_pull(gradient, into, clock=clock, lr=-1.0, scale=1 / 3).wait()
                answers.append(answer.dropped)
                clock = max(clock + 1, answer.clock)

        for rank in range(5):
            cluster.work(rank, program)
        hub.run()
        (shard,) = cluster.shards()
        expected = torch.zeros(1)
        for _ in range(20):  # each update is the mean of exactly three gradients of the current version
            one = (1 + expected) * torch.tensor(1 / 3)
            expected = expected + (one.clone().add_(1 + expected, alpha=1 / 3).add_(1 + expected, alpha=1 / 3))
        assert shard.closed == shard.version == 20
        assert torch.allclose(cluster.values(), expected.expand(16), rtol=1e-6)
        assert answers.count(False) == 60 and answers.count(True) == shard.dropped == len(posted) - 60 > 0
        assert shard.staleness[0] == sum(shard.staleness.values()) == 60


def test_staleness_counts_the_updates_between_read_and_push():
    hub = Hub(0)
    cluster = Cluster(hub, 16, workers=(0, 1), consistency=Consistency(None))
    turn = [0]

    def program(client, comm):
        into = torch.empty(16)
        if comm.rank == 0:
            client.pull(into, clock=0).wait()
            turn[0] = 1
            while turn[0] != 2:
                comm.sleep(0.01)
            return client.push(torch.ones(16), clock=0, lr=1.0).wait().staleness
        while turn[0] != 1:
            comm.sleep(0.01)
        for clock in range(4):
            client.push_pull(torch.ones(16), into, clock=clock, lr=1.0).wait()
        turn[0] = 2

    for rank in range(2):
        cluster.work(rank, program)
    hub.run()
    assert hub.comms[0].result == 4
    assert cluster.roles[SERVERS].report().staleness == {0: 4, 4: 1} and cluster.roles[SERVERS].report().updates == 5


def test_pushes_in_parts_are_summed_too():
    gradients = random_gradients(0, 64, 3, 4)
    hub = Hub(5)
    cluster = Cluster(hub, 64, servers=2, workers=range(3), consistency=Consistency(0), sizes=[20, 44])

    def program(client, comm):
        mine = comm.buffer("gradient", 64, torch.float32)
        for clock, each in enumerate(gradients):
            mine.copy_(each[comm.rank])
            handles = [client.push([(a, mine[a:b])], clock=clock, lr=0.1) for a, b in ((0, 30), (30, 50), (50, 64))]
            for handle in handles:
                handle.wait()

    for rank in range(3):
        cluster.work(rank, program)
    hub.run()
    assert torch.allclose(cluster.values(), plain_training(SGD, gradients, 0.1), atol=1e-6)


def test_impossible_consistencies_are_refused():
    with pytest.raises(BadInput, match="cannot be negative"):
        Consistency(-1)
    with pytest.raises(BadInput, match="first: 2"):
        Consistency(1, first=2)


def test_t6_2_conventions():
    assert Consistency(3).needs(10) == 7 and Consistency(0).needs(4) == 4
    assert Consistency(3).may_read(10, 7) and not Consistency(3).may_read(10, 6)
    assert Consistency(None).may_read(10**9, 0)
