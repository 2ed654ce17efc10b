"""The server role and its client on the network in memory: exactly once, whatever is lost, sent twice or killed."""

import random
import re

import msgspec
import pytest
import torch
from network import Cluster, Deadlock, Hub

from torrential.comm.protocol import SERVERS
from torrential.errors import BadInput, RunFailed, WaitedTooLong
from torrential.optim.rates import Rate
from torrential.optimizers import OptimizerSpec, ParameterGroup
from torrential.server.consistency import Consistency
from torrential.server.messages import Add, Done, Push, Refused, Replicate, Replicated

SGD = OptimizerSpec(torch.optim.SGD, 1.0)


def whole(values):
    return torch.tensor(values, dtype=torch.float32)


def test_put_add_get_and_keys_over_several_servers():
    hub = Hub(1)
    cluster = Cluster(hub, 100, servers=3)

    def program(client, comm):
        client.put(torch.arange(100.0)).wait()
        client.add([(10, torch.ones(50)), (90, torch.ones(10))]).wait()
        client.add(whole([5, 7, 1]), keys=torch.tensor([99, 0, 99])).wait()
        into = torch.empty(60)
        answer = client.get(into, start=40).wait()
        assert answer.version >= 2
        return into

    cluster.work(0, program)
    hub.run()
    expected = torch.arange(100.0)
    expected[10:60] += 1
    expected[90:] += 1
    expected[99] += 6
    expected[0] += 7
    assert torch.equal(hub.comms[0].result, expected[40:])
    assert torch.equal(cluster.values(), expected)


def test_pushes_of_parts_and_of_keys_go_through_the_optimizer():
    spec = OptimizerSpec(torch.optim.Adagrad, 0.5, {"initial_accumulator_value": 0.1})
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        hub = Hub(seed)
        cluster = Cluster(hub, 64, servers=2, spec=spec, sizes=[10, 30, 24])
        plain = torch.zeros(64)
        reference = spec.build([plain])

        def program(client, comm, rng=rng, plain=plain, reference=reference):
            for clock in range(6):
                gradient = torch.randn(64, generator=rng)
                if clock % 3 == 0:
                    client.push(gradient, clock=clock, lr=0.5).wait()
                elif clock % 3 == 1:
                    keys = torch.tensor([3, 11, 12, 40, 63])
                    values = gradient[keys]
                    gradient = torch.zeros(64).index_add_(0, keys, values)
                    client.push(values, clock=clock, lr=0.5, keys=keys).wait()
                else:
                    gradient[:5] = 0
                    gradient[50:] = 0
                    client.push([(5, gradient[5:20]), (20, gradient[20:50])], clock=clock, lr=0.5).wait()
                plain.grad = gradient
                reference.step()

        cluster.work(0, program)
        hub.run()
        assert torch.equal(cluster.values(), plain)


def test_groups_have_the_options_that_a_push_brings_along():
    groups = (ParameterGroup(frozenset({"p0"}), {}, 0), ParameterGroup(frozenset({"p1"}), {"lr": 10.0}, 1))
    for seed in range(3):
        hub = Hub(seed, duplicate=0.3, drop=0.2)
        spec = OptimizerSpec(torch.optim.SGD, 1.0, {"momentum": 0.5}, groups)
        cluster = Cluster(hub, 4, servers=2, replicas=1, spec=spec, sizes=[2, 2], resend=5.0)

        def program(client, comm):
            client.push(torch.ones(4), clock=0, lr=1.0).wait()
            moved = Rate(1.0, ({"lr": 2.0, "momentum": 0.5}, {"lr": 3.0, "momentum": 0.25}))
            client.push(torch.ones(4), clock=1, lr=moved).wait()

        cluster.work(0, program)
        hub.run()
        assert cluster.values().tolist() == [-4.0, -4.0, -13.75, -13.75]


def test_momentum_of_keys_that_are_not_named_rests():
    spec = OptimizerSpec(torch.optim.SGD, 1.0, {"momentum": 0.5})
    hub = Hub(0)
    cluster = Cluster(hub, 4, spec=spec)

    def program(client, comm):
        client.push(torch.ones(4), clock=0, lr=1.0).wait()
        client.push(whole([1, 1]), clock=1, lr=1.0, keys=torch.tensor([2, 0])).wait()

    cluster.work(0, program)
    hub.run()
    assert cluster.values().tolist() == [-2.5, -1.0, -2.5, -1.0]


def test_handlers_run_once_on_every_shard_and_their_results_come_back_in_order():
    def double(shard, options, tensors):
        shard.parameters.mul_(options["by"])
        return [shard.parameters[:1], torch.tensor([shard.start])]

    for seed in range(10):
        hub = Hub(seed, duplicate=0.3, drop=0.2)
        cluster = Cluster(
            hub, 90, servers=3, replicas=1, initial=torch.arange(90.0), handlers={"double": double}, resend=1.0
        )

        def program(client, comm):
            found = client.call("double", {"by": 2.0}).wait().tensors
            assert [int(t) for t in found[1::2]] == [0, 32, 64] and [float(t) for t in found[::2]] == [0.0, 64.0, 128.0]
            with pytest.raises(RunFailed, match="worker 0 called 'nothing'"):
                client.call("nothing").wait()

        cluster.work(0, program)
        hub.run()
        assert torch.equal(cluster.values(), torch.arange(90.0) * 2)


@pytest.mark.parametrize("seed", range(12))
def test_t5_4_letters_sent_twice_or_lost_change_nothing(seed):
    hub = Hub(seed, duplicate=0.3, drop=0.2)
    cluster = Cluster(hub, 48, servers=2, replicas=1, workers=(0, 1, 2), dtype=torch.int64, resend=0.5)

    def program(client, comm):
        handles = []
        mine = comm.buffer("values", 48, torch.int64)
        for number in range(12):
            if number % 4 == 0:
                while handles:
                    handles.pop(0).wait()
                mine.fill_(1 + comm.rank)
            handles.append(client.add(mine))
        client.wait()

    for rank in range(3):
        cluster.work(rank, program)
    hub.run()
    assert set(cluster.values().tolist()) == {12 * (1 + 2 + 3)}


def run_with_deaths(seed, *, servers, replicas, kills, consistency=None, rounds=8):
    """Tagged adds: digit r of every value, in base 1000, counts what worker r has added. Servers and workers die."""
    hub = Hub(seed)
    rng = random.Random(seed)
    cluster = Cluster(hub, 40, servers=servers, replicas=replicas, workers=(0, 1, 2), dtype=torch.int64)
    acknowledged, sent = [0] * 3, [0] * 3

    def program(client, comm):
        mine = comm.buffer("values", 40, torch.int64)
        mine.fill_(1000**comm.rank)
        handles = []
        for _ in range(rounds):
            sent[comm.rank] += 1
            handles.append(client.add(mine))
            while len(handles) > 2:
                handles.pop(0).wait()
                acknowledged[comm.rank] += 1
        for handle in handles:
            handle.wait()
            acknowledged[comm.rank] += 1

    for rank in range(3):
        cluster.work(rank, program)
    moments = sorted(rng.randrange(5, 260) for _ in range(kills))
    events, happened = 0, [0]

    def each():
        nonlocal events
        events += 1
        while moments and events >= moments[0]:
            moments.pop(0)
            choice = rng.random()
            victim = rng.choice(hub.view.servers())
            if choice < 0.15 and len(cluster.workers) > 1:
                cluster.remove_worker(rng.choice(sorted(cluster.workers)))
            elif choice < 0.45 or len(hub.view.servers()) <= 2:
                cluster.add_server()
            elif cluster.safe_to_kill(victim):
                cluster.kill_server(victim)
                happened[0] += 1

    hub.each = each
    hub.run()
    hub.each = lambda: None
    hub.run(until=lambda: cluster.settled() and not hub.under_way())
    for value in cluster.values().tolist():
        for rank in range(3):
            applied = value // 1000**rank % 1000
            assert acknowledged[rank] <= applied <= sent[rank], (seed, rank, applied, acknowledged[rank], sent[rank])
            if rank in cluster.workers:
                assert applied == acknowledged[rank] == rounds, (seed, rank, applied)
    for r in cluster.table:  # replicas are the same, bit for bit
        head, *replicas = [cluster.roles[a]._links[r.start].shard for a in r.chain]
        for shard in replicas:
            assert shard.number == head.number and torch.equal(shard.parameters, head.parameters), seed
            assert msgspec.msgpack.encode(shard.metadata()) == msgspec.msgpack.encode(head.metadata()), seed
    return happened[0]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("block", range(4))
def test_exactly_once_under_random_deaths_and_joins(replicas, block):
    deaths = [
        run_with_deaths(seed, servers=3, replicas=replicas, kills=6) for seed in range(block * 25, block * 25 + 25)
    ]
    assert sum(deaths) >= 35


@pytest.mark.parametrize("moment", ["before the replica has it", "before the answer", "after the answer"])
@pytest.mark.parametrize("seed", range(8))
def test_t5_5_a_head_is_killed_before_or_after_it_answered(moment, seed):
    hub = Hub(seed)
    cluster = Cluster(hub, 32, servers=2, replicas=1, dtype=torch.int64)
    killed = []

    def watch(source, to, message):
        kind = {
            "before the replica has it": Replicate,
            "before the answer": Replicated,
            "after the answer": Done,
        }[moment]
        if isinstance(message, kind) and not killed and (kind is not Replicated or message.number == 2):
            killed.append({Replicate: source, Replicated: to, Done: source}[kind])

    armed = []

    def program(client, comm):
        client.get(torch.empty(32, dtype=torch.int64)).wait()
        hub.watch = watch
        armed.append(True)
        for _ in range(3):
            client.add(torch.ones(32, dtype=torch.int64)).wait()

    cluster.work(0, program)
    dead = []

    def each():
        if killed and not dead:
            dead.append(killed[0])
            cluster.kill_server(killed[0])

    hub.each = each
    hub.run()
    assert dead
    hub.run(until=cluster.settled)
    assert cluster.values().tolist() == [3] * 32


def test_a_newcomer_is_filled_takes_its_share_and_serves():
    for seed in range(10):
        hub = Hub(seed)
        cluster = Cluster(hub, 320, servers=2, replicas=1, initial=torch.arange(320.0))
        reads = []

        def program(client, comm, cluster=cluster, reads=reads):
            for number in range(30):
                client.add(torch.ones(320)).wait()
                if number == 5:
                    cluster.add_server()
                into = torch.empty(320)
                client.get(into).wait()
                reads.append(bool((into == torch.arange(320.0) + number + 1).all()))

        cluster.work(0, program)
        hub.run()
        hub.run(until=cluster.settled)
        assert all(reads) and len(reads) == 30
        shares = {a: sum(r.stop - r.start for r in cluster.table if r.chain[0] == a) for a in hub.view.servers()}
        assert set(shares) == {SERVERS, SERVERS + 1, SERVERS + 2} and max(shares.values()) - min(shares.values()) <= 32
        assert torch.equal(cluster.values(), torch.arange(320.0) + 30)


def test_a_range_whose_only_copy_was_not_filled_yet_is_lost_and_said_so():
    hub = Hub(3)
    cluster = Cluster(hub, 64, servers=2, replicas=1)
    cluster.work(0, lambda client, comm: client.pull(torch.empty(64), clock=0).wait() and comm.receive())
    hub.run(until=cluster.settled)
    address = cluster.add_server()
    cluster.kill_server(SERVERS)
    cluster.kill_server(SERVERS + 1)
    with pytest.raises(AssertionError, match=f"role {address} failed.*are lost"):
        hub.run()


@pytest.mark.parametrize("workers", [2, 4])
def test_t5_9_the_sum_is_replicated_instead_of_every_push(workers):
    def bytes_between_servers(consistency):
        hub = Hub(0)
        cluster = Cluster(hub, 160, servers=2, replicas=1, workers=range(workers), consistency=consistency)

        def program(client, comm):
            gradient = comm.buffer("gradient", 160, torch.float32)
            for clock in range(5):
                client.push(gradient.fill_(comm.rank), clock=clock, lr=0.1).wait()

        for rank in range(workers):
            cluster.work(rank, program)
        hub.run()
        return sum(size for (a, b), size in hub.bytes.items() if a >= SERVERS and b >= SERVERS)

    summed, each = bytes_between_servers(Consistency(0)), bytes_between_servers(Consistency(None))
    assert summed == 5 * 160 * 4 and each == workers * summed


BAD = {
    "NaN": (lambda: [torch.full((16,), float("nan"))], {}, "NaN or infinite"),
    "infinity": (lambda: [torch.tensor([1.0] * 15 + [float("inf")])], {}, "NaN or infinite"),
    "shape": (lambda: [torch.ones(15)], {}, r"shapes \[\(15,\)\]"),
    "dtype": (lambda: [torch.ones(16, dtype=torch.float64)], {}, "float64"),
    "range": (lambda: [torch.ones(16)], {"spans": ((8, 24),)}, "8 to 24"),
    "start": (lambda: [torch.ones(16)], {"spans": ((-8, 8),)}, "-8 to 8"),
    "tensors": (lambda: [torch.ones(16), torch.ones(16)], {}, "shapes"),
    "key": (lambda: [torch.ones(2), torch.tensor([0, 16])], {"keys": True}, "keys outside"),
    "keys": (lambda: [torch.ones(2), torch.tensor([0.0, 1.0])], {"keys": True}, "do not fit"),
    "rate": (lambda: [torch.ones(16)], {"lr": float("nan")}, "not finite"),
    "rates": (
        lambda: [torch.ones(16)],
        {"rates": ({"lr": 1.0},) * 2},
        "of 2 parameter groups, where there are 1",
    ),
    "options": (lambda: [torch.ones(16)], {"rates": ({"lr": 1.0, "betas": (0.9, float("inf"))},)}, "not finite"),
    "no rate": (lambda: [torch.ones(16)], {"rates": ({"momentum": 0.9},)}, "have no lr"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("kind", [Push, Add])
def test_what_is_wrong_is_refused_by_name_and_changes_nothing(what, kind):
    make, options, words = BAD[what]
    if kind is Add and (what == "rate" or "rates" in options):
        return
    hub = Hub(0)
    cluster = Cluster(hub, 16, workers=(3,))

    def program(client, comm):
        full = {"seq": 1, "clock": 0, "view": comm.view.version, "spans": ((0, 16),)}
        full |= {"lr": 1.0} if kind is Push else {}
        comm.post(SERVERS, kind(**full | options), make())
        letter = comm.receive()
        client.push(torch.ones(16), clock=0, lr=1.0).wait()  # it is served as before
        return letter

    cluster.work(3, program)
    hub.run()
    letter = hub.comms[3].result
    assert isinstance(letter.message, Refused) and letter.message.reason.startswith("worker 3 ")
    assert re.search(words, letter.message.reason), letter.message.reason
    assert cluster.values().tolist() == [-1.0] * 16


def test_large_sums_of_finite_values_are_no_reason_to_refuse():
    hub = Hub(0)
    cluster = Cluster(hub, 4)
    cluster.work(0, lambda client, comm: client.add(torch.full((4,), 3e38)).wait())
    hub.run()
    assert cluster.values().tolist() == torch.full((4,), 3e38).tolist()


def test_the_client_refuses_what_cannot_be_split():
    hub = Hub(0)
    cluster = Cluster(hub, 16)

    def program(client, comm):
        with pytest.raises(BadInput, match="8 to 24"):
            client.put([(8, torch.ones(16))])
        with pytest.raises(BadInput, match="3 values do not fit 2 keys"):
            client.add(torch.ones(3), keys=torch.tensor([1, 2]))
        with pytest.raises(BadInput, match="no such keys"):
            client.add(torch.ones(2), keys=torch.tensor([1, 16]))

    cluster.work(0, program)
    hub.run()


def test_a_wait_that_takes_too_long_names_the_server():
    hub = Hub(0)
    cluster = Cluster(hub, 64, servers=2, workers=(0, 1), consistency=Consistency(0))

    def program(client, comm):
        with pytest.raises(WaitedTooLong, match=r"server 0 .*answer a Pull"):
            client.pull(torch.empty(64), clock=1).wait(timeout=5.0)
        assert comm.now() >= 5.0

    cluster.work(0, program)
    hub.run()


def test_the_network_says_who_waits_when_nobody_can_go_on():
    hub = Hub(11)
    hub.start(0, lambda comm: comm.receive())
    with pytest.raises(Deadlock, match="seed 11"):
        hub.run()


def test_a_handle_makes_progress_when_it_is_asked():
    hub = Hub(0)
    cluster = Cluster(hub, 16)

    def program(client, comm):
        handle = client.add(torch.ones(16))
        while not handle.done():
            comm.sleep(0.01)
        return handle.wait().version

    cluster.work(0, program)
    hub.run()
    assert hub.comms[0].result == 1


def test_numbers_of_a_workers_next_life_are_new():
    hub = Hub(0)
    cluster = Cluster(hub, 16, workers=(0, 1), dtype=torch.int64)

    def program(client, comm):
        client.add(torch.ones(16, dtype=torch.int64)).wait()

    cluster.work(0, program)
    cluster.work(1, lambda client, comm: comm.sleep(3.0))
    hub.run(until=lambda: hub.comms[0].over)
    cluster.remove_worker(0)
    cluster.add_worker(0, program)
    hub.run()
    assert cluster.values().tolist() == [2] * 16


def test_messages_only_workers_are_told_are_ignored_by_servers():
    hub = Hub(0)
    cluster = Cluster(hub, 16)

    def program(client, comm):
        comm.post(SERVERS, Done(seq=1))
        comm.post(SERVERS, Refused(seq=1, reason=""))
        client.add(torch.ones(16)).wait()

    cluster.work(0, program)
    hub.run()
    assert cluster.values().tolist() == [1.0] * 16


def test_pieces_of_a_vector_are_cut_once_and_let_go_of_with_it():
    hub = Hub(1)
    cluster = Cluster(hub, 64, servers=2)

    def program(client, comm):
        vector, other = torch.zeros(64), torch.ones(64)
        pieces = [[part.tensors[0] for part in client._cutter.split(vector)] for _ in range(2)]
        assert all(a is b for a, b in zip(*pieces, strict=True)) and len(pieces[0]) == 2
        vector.data = other
        assert all(part.tensors[0].min() == 1 for part in client._cutter.split(vector))
        assert len(client._cutter._pieces) == 1
        del vector
        return len(client._cutter._pieces)

    cluster.work(0, program)
    hub.run()
    assert hub.comms[0].result == 0
