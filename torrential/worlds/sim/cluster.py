"""The cluster that is simulated: hosts, how fast they compute, what joins them, and what goes wrong.

    [compute]                               seconds of one worker
    seconds_per_sample = 0.001
    [network]                               every host has one NIC, which its transfers share
    latency = 50e-6
    bandwidth = 1.25e9
    [inside]                                what the roles of one host share; by default nothing
    cores = 8
    memory = 6e-11
    [[stragglers]]
    worker = 3
    factor = 4.0
    [[faults]]
    kind = "crash"
    worker = 2                              a worker, a server, a coordinator or a host, with all roles on it
    at = 12.5                               or a share of the run: "50 %"

Everything has a default; numbers are in seconds, bytes and bytes per second.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from torrential.errors import BadInput, UnknownName
from torrential.worlds.sim.wrong import in_words

Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # decades; much later, virtual time would no longer move by a second
Positive = Annotated[float, Meta(gt=0, le=1e15)]
Number = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, lt=1)]
CRASHES = ("worker", "server", "coordinator", "host")  # what of a cluster can crash


class Compute(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time that workers take to compute a batch."""

    seconds_per_sample: Annotated[float, Meta(gt=0, le=1e6)] | Literal["measure"] = "measure"
    """Seconds of forward and backward per sample; "measure": as on this machine, with one thread."""
    seconds_per_step: Seconds = 0.0
    """Seconds that every step takes in addition, for any batch."""
    spread: Literal["none", "lognormal", "exponential", "pareto"] = "none"
    """The distribution of the time from step to step, around the same mean."""
    shape: Positive = 0.3
    """The parameter of the distribution: sigma of lognormal; the exponent of pareto, above 1."""
    unlike: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """The sigma of a lognormal by which workers differ from one another for the whole run, drawn by the seed."""

    def __post_init__(self) -> None:
        if self.spread == "lognormal" and self.shape > 10:
            raise BadInput(f"a lognormal spread of more than 10 is no spread of times (shape: {self.shape:g}); try 0.3")
        if self.spread == "pareto" and self.shape <= 1:
            raise BadInput(f"a pareto spread has a mean for exponents above 1 only (shape: {self.shape}); try 2.5")


class NetworkCosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latency and bandwidth of messages between hosts, and inside one."""

    latency: Seconds = 50e-6
    """Seconds that a message takes from one host to another, besides its bytes."""
    bandwidth: Positive = 1.25e9
    """Bytes per second of a host's NIC, in each direction."""
    inside_latency: Seconds = 5e-6
    inside_bandwidth: Positive = 5e9
    """Bytes per second that each role can send to others of its host."""
    handling: Seconds = 2e-10
    """Seconds per byte that the receiver takes to deal with it: a server to apply it, a worker to copy it."""


class Inside(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cores and the memory that the roles of one host share; benchmarks/fidelity.py measures a machine's."""

    cores: Count | None = None
    """The cores of a host. When more roles are at work, each has its share of them; None: a core for every role."""
    contention: Seconds = 0.0
    """By how much cores at work slow one another down: 0.1 makes two or more take 1.1 times as long."""
    letter: Seconds = 0.0
    """Seconds that reading a letter takes, for any contents; in shared memory, reading what one other member has put
    there for a sum or a vote."""
    request: Seconds | None = None
    """Seconds that a server takes for a request, besides its work on tensors; None: as long as for any letter."""
    memory: Seconds | None = None
    """Seconds per byte that is read or written, where roles of one host share memory, as with transport=shared: tensors
    stay where they are, and the role that copies, adds up or updates them (in allreduce its own slice) spends its own
    time on it. None: tensors travel inside a host, too, and no update takes any time."""


class Straggler(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that is slow all the time, or now and then."""

    worker: Number | None = None
    """The slow worker; None: every worker."""
    factor: Annotated[float, Meta(ge=1, le=1e6)] = 4.0
    every: Count | None = None
    """It is slow once in so many steps, drawn by the seed; None: always."""


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong once."""

    kind: Literal["crash", "partition", "slow-link"]
    at: Seconds | Annotated[str, Meta(examples=["50 %"])]
    """The time at which it begins: a second, or a share of the run, as in "50 %": when workers have computed the
    gradients of half of the samples that the run plans to train on. Samples that are computed again count again: where
    gradients are dropped, as under backup, it comes earlier in the run, by as much as is dropped."""
    worker: Number | None = None
    """The worker that crashes."""
    server: Number | None = None
    """The server that crashes."""
    coordinator: Number | None = None
    """The coordinator that crashes; it is started again as soon as that is known."""
    host: Number | None = None
    """The host that crashes: all workers and servers on it die at once, and no role starts there until it is over."""
    hosts: tuple[Number, ...] = ()
    """The hosts on one side of a partition or slow link; all others are on the other side."""
    lasts: Positive | None = None
    """Seconds until it is over: crashed roles start again, a partition heals; None: never."""
    delay: Seconds = 0.0
    """Seconds that a slow link adds to every message across it."""

    def __post_init__(self) -> None:
        given = [f"{name} = {number}" for name in CRASHES if (number := getattr(self, name)) is not None]
        if self.kind == "crash":
            if len(given) != 1:
                wrong = f" (given: {' and '.join(given)})" if given else ""
                raise BadInput(f"a crash is of one worker, server, coordinator or host{wrong}; give one of them")
            if self.hosts:
                raise BadInput(f"a crash is of one host (given: hosts = {list(self.hosts)}); give host = N")
        else:
            if given:
                raise BadInput(f"a {self.kind} is between hosts (given: {' and '.join(given)}); give hosts = [0, 1]")
            if not self.hosts:
                raise BadInput(f"a {self.kind} needs the hosts on one side of it; give hosts = [0, 1]")
            if len(set(self.hosts)) < len(self.hosts):
                raise BadInput(f"a {self.kind} names a host twice (hosts = {list(self.hosts)}); name each once")
            if self.kind == "slow-link" and not self.delay:
                raise BadInput("a slow link needs a delay; give delay = 0.01")
        if self.share is not None and self.share >= 1:
            raise BadInput(f"a fault begins before the run is over (at: {self.at!r}); give a share below 100 %")

    @property
    def share(self) -> float | None:
        """The share of the run at which it begins; None where that is given in seconds."""
        if not isinstance(self.at, str):
            return None
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", self.at)
        if found is None:
            raise BadInput(f'a fault begins at a second or a share of the run (at: {self.at!r}); try at = "50 %"')
        return float(found[1]) / 100


class Accidents(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults by chance, drawn by the seed."""

    mean_time_between_crashes: Positive | None = None
    """The mean seconds between two crashes of one worker."""
    server_mean_time_between_crashes: Positive | None = None
    restart_after: Positive | None = 10.0
    """Seconds until a role that crashed by chance starts again; None: it never does."""
    loss: Share = 0.0
    """The share of letters between workers and servers that is lost; they are sent again."""
    duplication: Share = 0.0
    delay: Seconds = 0.0
    """The most seconds that a letter is held up; each is by its own amount."""


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster to simulate: its hosts, network and compute times, and what goes wrong there."""

    name: str = "cluster"
    hosts: Count | None = None
    """The number of hosts; by default as many as the workers need."""
    workers_per_host: Count = 1
    servers_apart: bool = False
    """Whether servers have hosts of their own, after those of the workers; else they are spread over the workers'."""
    compute: Compute = Compute()
    network: NetworkCosts = NetworkCosts()
    inside: Inside = Inside()
    stragglers: tuple[Straggler, ...] = ()
    faults: tuple[Fault, ...] = ()
    accidents: Accidents = Accidents()
    detection: Seconds = 0.5
    """Seconds until a death is noticed."""

    def check(self, workers: int, servers: int, coordinators: int = 0) -> None:
        """Whether these roles fit here."""
        needed = self._worker_hosts(workers) + (servers if self.servers_apart else 0)
        if self.hosts is not None and needed > self.hosts:
            raise BadInput(
                f"{self.name} is too small (hosts: {self.hosts}; {workers} workers at {self.workers_per_host} per host "
                f"{f'and {servers} servers apart ' if self.servers_apart else ''}need {needed}); use fewer workers"
            )
        absent = [
            self._absent(what, sorted({n for n in numbers if n is not None and n >= most}), most)
            for what, numbers, most in (
                ("worker", [s.worker for s in self.stragglers] + [f.worker for f in self.faults], workers),
                ("server", [f.server for f in self.faults], servers),
                ("coordinator", [f.coordinator for f in self.faults], coordinators),
                ("host", [h for f in self.faults for h in (*f.hosts, f.host)], self.hosts_of(workers, servers)),
            )
        ]
        if any(absent):
            raise BadInput(f"{self.name} names {'; and '.join(filter(None, absent))}")
        used = {self.host_of_worker(rank) for rank in range(workers)}
        used |= {self.host_of_server(number, workers, servers) for number in range(servers)}
        for fault in self.faults:
            if fault.hosts and used <= set(fault.hosts):
                raise BadInput(
                    f"{self.name} has a {fault.kind} with all roles on one side of it (hosts = {list(fault.hosts)}; "
                    f"hosts with roles: {len(used)}), so it separates no roles; name only some of these hosts"
                )

    def _absent(self, what: str, numbers: list[int], most: int) -> str:
        """What a cluster names that is not there, and the remedy; empty: nothing."""
        if not numbers:
            return ""
        remedy = f"use --{what}s {numbers[-1] + 1} or more"
        if what == "coordinator":
            remedy = "use a strategy with a coordinator" if not most else "give a smaller number"
        if what == "host":
            enough = numbers[-1] * self.workers_per_host + 1
            remedy = f"use --workers {enough} or more, or fewer workers_per_host ({self.workers_per_host})"
        named = f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        return f"{named}, but there are {most} (numbered from 0); {remedy}"

    def hosts_of(self, workers: int, servers: int) -> int:
        return self.hosts or self._worker_hosts(workers) + (servers if self.servers_apart else 0)

    def _worker_hosts(self, workers: int) -> int:
        return -(-workers // self.workers_per_host)

    def host_of_worker(self, rank: int) -> int:
        return rank // self.workers_per_host

    def host_of_server(self, number: int, workers: int, servers: int) -> int:
        used = self._worker_hosts(workers)
        if self.servers_apart:
            return used + number
        if servers <= used:
            return number * used // servers  # as far from one another as can be
        # One after the other, so that a server's replicas, which are the next servers in the ring, are on other hosts.
        last_meets_first = number == servers - 1 and number % used == 0
        return (number + last_meets_first) % used

    def factor(self, seed: int, worker: int, batch: int) -> float:
        """The factor by which a worker's batch takes longer than seconds_per_sample says."""
        compute, factor = self.compute, 1.0
        if compute.spread != "none":
            factor = _spread(compute, Random(f"spread {seed} {worker} {batch}"))
        if compute.unlike:
            factor *= _unlike(compute.unlike, seed, worker)
        for number, straggler in enumerate(self.stragglers):
            if straggler.worker in (None, worker) and _slow_now(straggler, f"{number} {seed} {worker}", batch):
                factor *= straggler.factor
        return factor


@lru_cache(maxsize=4096)
def _unlike(sigma: float, seed: int, worker: int) -> float:
    return Random(f"unlike {seed} {worker}").lognormvariate(0.0, sigma)


def _spread(compute: Compute, random: Random) -> float:
    match compute.spread:
        case "lognormal":
            return random.lognormvariate(-(compute.shape**2) / 2, compute.shape)
        case "exponential":
            return random.expovariate(1.0)
        case _:
            return random.paretovariate(compute.shape) * (compute.shape - 1) / compute.shape


def _slow_now(straggler: Straggler, key: str, batch: int) -> bool:
    if straggler.every is None:
        return True
    block, place = divmod(batch, straggler.every)
    return Random(f"slow {key} {block}").randrange(straggler.every) == place


# -- reading ----------------------------------------------------------------------------------------------------------
SHIPPED = Path(__file__).parent / "clusters"


def read_cluster(where: str) -> dict[str, Any]:
    """A cluster file, or one of those that come with Torrential; checked, as plain data."""
    path = Path(where)
    if not path.suffix and not path.exists():
        known = sorted(file.stem for file in SHIPPED.glob("*.toml"))
        if where not in known:
            raise UnknownName("cluster", where, known)
        path = SHIPPED / f"{where}.toml"
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; give a TOML file with --cluster") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no TOML: {error}") from error
    whole = {"name": path.stem} | table
    make_cluster(whole, str(path))
    return whole


def make_cluster(table: dict[str, Any], where: str = "the cluster") -> Cluster:
    odd = next(_not_finite(table), None)
    if odd is not None:
        raise BadInput(f"{where}: {odd} is no number that can be used; give a finite one")
    try:
        return msgspec.convert(table, Cluster)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: {in_words(error, table, Cluster)}") from error
    except BadInput as error:  # from one of the structs above
        raise BadInput(f"{where}: {error}") from error


def _not_finite(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _not_finite(item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield value
