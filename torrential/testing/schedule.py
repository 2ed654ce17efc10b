"""A schedule: a strategy with its options on a cluster where things go wrong, all drawn from one seed."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from torrential.strategies import STRATEGIES
from torrential.strategies.base import Strategy, needs_servers

SECONDS_PER_SAMPLE = 1e-3
DRAWN = sorted(  # all whose steps follow from their gradients, and whose workers have the whole model
    name for name, kind in STRATEGIES.items() if "sim" in kind.worlds and kind.uses_rate and kind.part is Strategy.part
)
ALGORITHMS = ("auto", "naive", "direct", "ring", "halving", "blocks", "tree")


class FaultSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A random run: a strategy, a cluster, and what goes wrong there; all drawn from a seed."""

    seed: int
    strategy: str
    options: dict[str, Any]
    settings: dict[str, Any]
    workers: int
    servers: int
    samples: int
    batch_size: int
    epochs: int
    steps: int | None
    momentum: bool  # else plain SGD, where parameters are the sum of what was applied
    cluster: dict[str, Any]

    def __str__(self) -> str:
        def words(table: dict[str, Any]) -> str:
            return "".join(f" {name}={value}" for name, value in table.items())

        about = f"{self.strategy}{words(self.options)}, {self.workers} workers, {self.servers} servers"
        about += f",{words(self.settings)}" if self.settings else ""
        about += f", {self.samples} samples × {self.epochs} epochs in batches of {self.batch_size}"
        about += f", {self.steps} steps at most" if self.steps is not None else ""
        about += ", momentum" if self.momentum else ""
        lines = [about, f" {words({n: v for n, v in self.cluster.items() if not isinstance(v, dict | list)})}"]
        for name, value in self.cluster.items():
            tables = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
            lines += [f"  {name}:{words(table)}" for table in tables]
        return "\n".join(lines)


def draw(seed: int) -> FaultSchedule:
    chance = Random(f"schedule {seed}")
    strategy = chance.choice(DRAWN)
    served = needs_servers(STRATEGIES[strategy])
    workers = chance.randint(1, 5)
    servers = chance.randint(1, 4) if served else 0
    batch_size, epochs = chance.randint(1, 4), chance.choice((1, 1, 2))
    samples = chance.randint(1, 10) + 2 * workers * batch_size  # at least two joined batches, and a part of one
    settings: dict[str, Any] = {}
    if served and chance.random() < 0.5:
        settings["replicas"] = chance.randint(0, servers - 1)
    if not served:
        settings["algorithm"] = chance.choice(ALGORITHMS)
    if chance.random() < 0.3:
        settings["evaluate_every"] = chance.randint(1, 5)
    return FaultSchedule(
        seed=seed,
        strategy=strategy,
        options=_options(strategy, workers, chance),
        settings=settings,
        workers=workers,
        servers=servers,
        samples=samples,
        batch_size=batch_size,
        epochs=epochs,
        steps=chance.randint(1, 12) if chance.random() < 0.1 else None,
        momentum=chance.random() < 0.25,
        cluster=_cluster(workers, servers, epochs * samples * SECONDS_PER_SAMPLE / workers, chance),
    )


def _options(strategy: str, workers: int, chance: Random) -> dict[str, Any]:
    match strategy:
        case "allreduce":
            return {"overlap": chance.random() < 0.5, "accumulate": chance.randint(1, 2)}
        case "ssp":
            return {"staleness": chance.randint(0, 3)}
        case "backup":
            return {"backups": chance.randrange(workers)}
        case "downpour":
            return {
                "push_every": chance.choice((1, 1, 2, 3)),
                "fetch_every": chance.choice((1, 1, 2, 3)),
                "overlap": chance.random() < 0.5,
                "warm": chance.choice((0, 0, 3)),
                "server": "task" if chance.random() < 0.75 else "adagrad",
            }
    return {}


def _cluster(workers: int, servers: int, lasts: float, chance: Random) -> dict[str, Any]:
    """`lasts`: about how long the run takes."""

    def maybe(share: float, value: Any, otherwise: Any = 0.0) -> Any:
        return value if chance.random() < share else otherwise

    per_host, apart = chance.choice((1, 1, 2)), chance.random() < 0.5
    hosts = -(-workers // per_host) + (servers if apart else 0)
    return {
        "workers_per_host": per_host,
        "servers_apart": apart,
        "detection": chance.choice((0.0, 0.001, 0.01, 0.05)),
        "compute": {
            "seconds_per_sample": SECONDS_PER_SAMPLE,
            "spread": chance.choice(("none", "lognormal", "exponential")),
        },
        "network": {
            "latency": chance.choice((1e-6, 1e-4, 1e-3, 5e-3)),
            "bandwidth": chance.choice((1e5, 1e6, 1e9)),
            "handling": chance.choice((0.0, 1e-7, 1e-6)),
        },
        "stragglers": [
            {"worker": chance.randrange(workers), "factor": chance.uniform(1, 10), "every": maybe(0.5, 4, None)}
            for _ in range(chance.randint(0, 2))
        ],
        "faults": _faults(workers, servers, hosts, lasts, chance),
        "accidents": {
            "loss": maybe(0.25, chance.uniform(0, 0.1)),
            "duplication": maybe(0.25, chance.uniform(0, 0.1)),
            "delay": maybe(0.4, chance.choice((1e-3, 1e-2, 1e-1))),
        },
    }


def _faults(workers: int, servers: int, hosts: int, lasts: float, chance: Random) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for kind, count, most in (("worker", workers, 3), ("server", servers, 2)):
        for _ in range(chance.randint(0, most) if count > 1 else 0):
            back = chance.choice((0.001, 0.1, 0.5)) * lasts if chance.random() < 0.7 else None
            who, at = chance.randrange(count), chance.uniform(0, lasts)
            found.append({"kind": "crash", kind: who, "at": at, "lasts": back})
    for kind in ("partition", "slow-link"):
        if hosts > 1 and chance.random() < 0.25:
            side = sorted(chance.sample(range(hosts), chance.randint(1, hosts - 1)))
            more = {"delay": chance.uniform(0.001, 0.05)} if kind == "slow-link" else {}
            about = {"at": chance.uniform(0, lasts), "lasts": chance.uniform(0.01, 0.5)}
            found.append({"kind": kind, "hosts": side} | about | more)
    found.sort(key=lambda fault: fault["at"])
    if hosts > 1 and chance.random() < 0.25:
        begins = chance.uniform(0, lasts) if chance.random() < 0.5 else f"{chance.randrange(100)} %"
        back = chance.choice((0.001, 0.1, 0.5)) * lasts if chance.random() < 0.7 else None
        found.append({"kind": "crash", "host": chance.randrange(hosts), "at": begins, "lasts": back})
    return found
