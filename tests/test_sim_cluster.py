"""A cluster is read from TOML and checked before anything runs on it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from torrential.errors import BadInput
from torrential.worlds.sim.cluster import Cluster, Compute, Straggler, make_cluster, read_cluster

EXAMPLE = """
[compute]
seconds_per_sample = 0.001
spread = "pareto"
shape = 2.5
[network]
latency = 50e-6
[[stragglers]]
worker = 3
factor = 4.0
[[faults]]
kind = "crash"
worker = 2
at = 12.5
"""


@pytest.mark.parametrize("workers", range(2, 12))
@pytest.mark.parametrize("servers", range(2, 12))
def test_replicas_are_on_other_hosts(workers: int, servers: int) -> None:
    """A server's replica is the next one in the ring. An odd ring on two hosts has one pair of neighbours on one."""
    cluster = Cluster(workers_per_host=2)
    hosts = [cluster.host_of_server(number, workers, servers) for number in range(servers)]
    alike = sum(a == b for a, b in itertools.pairwise([*hosts, hosts[0]]))
    count = cluster.hosts_of(workers, servers)
    assert set(hosts) <= set(range(count)) and len(set(hosts)) == min(count, servers)
    assert alike == (servers if count == 1 else servers % 2 if count == 2 else 0)


@pytest.mark.parametrize(("at", "share"), [(3.0, None), ("50 %", 0.5), ("12.5%", 0.125), ("0 %", 0.0)])
def test_a_fault_begins_at_a_second_or_a_share_of_the_run(at: float | str, share: float | None) -> None:
    (fault,) = make_cluster({"faults": [{"kind": "crash", "host": 0, "at": at}]}).faults
    assert fault.share == share


def load(path: Path) -> Cluster:
    return make_cluster(read_cluster(str(path)))


def test_a_file_is_read_and_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "rack.toml"
    path.write_text(EXAMPLE)
    cluster = load(path)
    assert cluster.name == "rack" and cluster.compute.spread == "pareto" and cluster.network.latency == 50e-6
    assert cluster.stragglers[0].worker == 3 and cluster.faults[0].at == 12.5 and cluster.faults[0].lasts is None
    assert cluster.network.bandwidth == Cluster().network.bandwidth


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"host": 3}, "it has no key 'host'; known: name, hosts, workers_per_host"),
        ({"a.b": 3}, "it has no key 'a.b'; known: name"),
        ({"faults": {"kind": "crash"}}, r"faults must be a list of tables, each below .*: \[\[faults\]\]"),
        ({"faults": [3]}, r"faults\[0\] must be one table, as below \[\[faults\]\] \(given: 3\)"),
        ({"compute": [{}]}, r"compute must be one table, as below \[compute\] \(given: \[\{\}\]\)"),
        ({"network": {"latency_seconds": 1.0}}, "network has no key 'latency_seconds'; known: latency, bandwidth"),
        ({"servers_apart": "yes"}, r"servers_apart must be true or false \(given: 'yes'\)"),
        ({"faults": [{"kind": "partition", "at": 1.0, "hosts": 3}]}, r"faults\[0\].hosts must be a list, in brackets"),
        ({"faults": [{"kind": "crash", "at": [1], "host": 3}]}, r'at must be a number .* or text as in "50 %" \(given'),
        (
            {"faults": [{"kind": "crash", "at": 1.0, "worker": 0, "when": 2}]},
            r"faults\[0\] has no key 'when'; known: kind, at",
        ),
        ({"network": {"latency": -1e-6}}, r"network.latency must be a number of at least 0 .* \(given: -1e-06\)"),
        ({"network": {"bandwidth": 0}}, "bandwidth"),
        ({"network": {"bandwidth": math.inf}}, "inf is no number that can be used"),
        ({"compute": {"seconds_per_sample": math.nan}}, "nan is no number"),
        ({"compute": {"seconds_per_sample": 0.0}}, "seconds_per_sample"),
        (
            {"compute": {"seconds_per_sample": "fast"}},
            r"^the cluster: compute.seconds_per_sample must be a number above 0 up to 1e\+06 or \"measure\" "
            r"\(given: 'fast'\)$",
        ),
        ({"compute": {"spread": "normal"}}, 'spread must be "exponential" or "lognormal" or "none" or "pareto"'),
        ({"compute": {"spread": "lognormal", "shape": 1e200}}, "shape"),
        ({"compute": {"spread": "lognormal", "shape": 11}}, "no spread of times"),
        ({"compute": {"seconds_per_sample": 1e308}}, "seconds_per_sample"),
        ({"stragglers": [{"factor": 1e308}]}, "factor"),
        ({"compute": {"spread": "pareto", "shape": 1.0}}, "exponents above 1"),
        ({"hosts": 0}, "hosts"),
        ({"hosts": 2.5}, "hosts"),
        ({"workers_per_host": -1}, "workers_per_host"),
        ({"stragglers": [{"factor": 0.5}]}, "factor"),
        ({"stragglers": [{"every": 0}]}, "every"),
        ({"accidents": {"loss": 1.0}}, "loss"),
        ({"accidents": {"mean_time_between_crashes": 0}}, "mean_time_between_crashes"),
        ({"faults": [{"kind": "fire", "at": 1.0}]}, 'kind must be "crash" or "partition" or "slow-link"'),
        ({"faults": [{"kind": "crash", "worker": 1}]}, r"faults\[0\] has no at; give one"),
        (
            {"faults": [{"kind": "crash", "at": 1.0}]},
            "a crash is of one worker, server, coordinator or host; give one of them",
        ),
        ({"faults": [{"kind": "crash", "at": 1.0, "worker": 0, "server": 0}]}, r"\(given: worker = 0 and server = 0\)"),
        ({"faults": [{"kind": "crash", "at": 1.0, "worker": 0, "host": 1}]}, r"\(given: worker = 0 and host = 1\)"),
        ({"faults": [{"kind": "crash", "at": 1.0, "host": 0, "hosts": [1]}]}, r"hosts = \[1\]\); give host = N"),
        ({"faults": [{"kind": "partition", "at": 1.0, "host": 0}]}, r"given: host = 0\); give hosts = \[0, 1\]"),
        ({"faults": [{"kind": "crash", "at": "100 %", "host": 0}]}, r"at: '100 %'\); give a share below 100 %"),
        ({"faults": [{"kind": "crash", "at": "-5 %", "host": 0}]}, r'share of the run \(at: .-5 %.\); try at = "50 %"'),
        ({"faults": [{"kind": "crash", "at": "half", "host": 0}]}, r'at: .half.\); try at = "50 %"'),
        ({"faults": [{"kind": "crash", "at": "50", "host": 0}]}, r'at: .50.\); try at = "50 %"'),
        ({"faults": [{"kind": "partition", "at": 1.0}]}, "hosts on one side"),
        ({"faults": [{"kind": "slow-link", "at": 1.0, "hosts": [0]}]}, "needs a delay"),
        ({"faults": [{"kind": "crash", "at": 1.0, "worker": 0, "lasts": 0}]}, "lasts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(table: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        make_cluster(table)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*No such file"):
        load(tmp_path / "nowhere.toml")
    for text in (b"hosts = ", b"\xff\xfe"):
        (tmp_path / "odd.toml").write_bytes(text)
        with pytest.raises(BadInput, match="is no TOML"):
            load(tmp_path / "odd.toml")


@pytest.mark.parametrize(
    ("table", "workers", "servers", "says"),
    [
        ({"hosts": 2}, 3, 0, r"too small \(hosts: 2; 3 workers at 1 per host need 3\)"),
        ({"hosts": 2, "workers_per_host": 2}, 4, 0, None),
        ({"hosts": 2, "workers_per_host": 2}, 4, 3, None),  # servers go where workers are
        ({"hosts": 3, "workers_per_host": 2, "servers_apart": True}, 4, 2, "and 2 servers apart need 4"),
        ({"stragglers": [{"worker": 4}]}, 4, 0, r"names worker 4, but there are 4 \(numbered from 0\)"),
        (
            {"stragglers": [{"worker": n} for n in (4, 5, 7)], "faults": [{"kind": "crash", "server": 3, "at": 1.0}]},
            2,
            1,
            "names workers 4, 5, 7, but there are 2 .*; use --workers 8 or more; and server 3, .*; use --servers 4 or",
        ),
        (
            {"faults": [{"kind": "partition", "at": 1.0, "hosts": [0, 1]}]},
            2,
            1,
            r"has a partition with all roles on one side of it \(hosts = \[0, 1\]; hosts with roles: 2\)",
        ),
        ({"faults": [{"kind": "partition", "at": 1.0, "hosts": [0, 1]}], "servers_apart": True}, 2, 1, None),
        ({"faults": [{"kind": "crash", "at": 1.0, "server": 1}]}, 4, 1, "names server 1, but there are 1"),
        ({"faults": [{"kind": "partition", "at": 1.0, "hosts": [2]}], "workers_per_host": 2}, 4, 0, "names host 2"),
        ({"faults": [{"kind": "partition", "at": 1.0, "hosts": [2]}], "hosts": 3}, 2, 0, None),
        ({"faults": [{"kind": "crash", "at": 1.0, "host": 3}]}, 3, 0, "names host 3, but there are 3"),
        ({"faults": [{"kind": "crash", "at": "50 %", "host": 3}], "servers_apart": True}, 3, 1, None),
    ],
)
def test_whether_roles_fit(table: dict[str, Any], workers: int, servers: int, says: str | None) -> None:
    cluster = make_cluster(table)
    if says is None:
        return cluster.check(workers, servers)
    with pytest.raises(BadInput, match=says):
        cluster.check(workers, servers)


def test_where_roles_live() -> None:
    together = Cluster(workers_per_host=2)
    assert [together.host_of_worker(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert [together.host_of_server(n, 5, 3) for n in range(3)] == [0, 1, 2]
    apart = Cluster(workers_per_host=2, servers_apart=True)
    assert [together.host_of_server(n, 9, 2) for n in range(2)] == [0, 2]  # of five hosts
    assert [together.host_of_server(n, 5, 4) for n in range(4)] == [0, 1, 2, 1]
    assert [apart.host_of_server(n, 5, 3) for n in range(3)] == [3, 4, 5] and apart.hosts_of(5, 3) == 6


@pytest.mark.parametrize("spread", ["none", "lognormal", "exponential", "pareto"])
def test_spreads_keep_the_mean(spread: str) -> None:
    cluster = Cluster(compute=Compute(spread=spread, shape=2.5 if spread == "pareto" else 0.5))  # type: ignore[arg-type]
    factors = [cluster.factor(0, 1, batch) for batch in range(20_000)]
    assert sum(factors) / len(factors) == pytest.approx(1.0, rel=0.05)
    assert (len(set(factors)) == 1) == (spread == "none")
    assert factors[:5] == [cluster.factor(0, 1, batch) for batch in range(5)]


def test_unlike_workers_differ_for_the_whole_run_and_by_the_seed() -> None:
    cluster = Cluster(compute=Compute(unlike=0.2))
    factors = [cluster.factor(0, worker, 0) for worker in range(2000)]
    assert factors == [cluster.factor(0, worker, 77) for worker in range(2000)]
    assert statistics.pstdev(map(math.log, factors)) == pytest.approx(0.2, rel=0.05)
    assert statistics.median(factors) == pytest.approx(1.0, rel=0.02)
    assert cluster.factor(1, 0, 0) != factors[0]


def test_a_straggler_is_slow_for_good_or_once_in_so_many_steps() -> None:
    cluster = Cluster(stragglers=(Straggler(worker=1, factor=3.0), Straggler(factor=10.0, every=5)))
    factors = Counter(cluster.factor(0, 0, batch) for batch in range(100))
    assert factors == {1.0: 80, 10.0: 20}
    assert Counter(cluster.factor(0, 1, batch) for batch in range(100)) == {3.0: 80, 30.0: 20}
    for block in range(20):
        assert Counter(cluster.factor(0, 0, 5 * block + i) for i in range(5))[10.0] == 1
