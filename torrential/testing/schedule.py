"""A schedule: a strategy with its options on a cluster where things go wrong, all drawn from one seed."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers

SECONDS_PER_SAMPLE = 1e-3
WHOLE = ("allreduce", "backup", "bsp", "downpour", "ssp")  # of which testing/audit.py knows what their steps come to
AVERAGED = ("local", "diloco")  # in the place of allreduce, now and then
APART = ("adacomm", "easgd", "fedavg", "hogwild", "streaming")  # in turn
DRAWN = [*WHOLE, "pipeline", *AVERAGED, *APART]
EVERY, PIPELINE, LOCAL = 7, 5, 3  # of as many seeds one is of a pipeline, and one of local updates, by their places
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
    normed: bool = False  # whether a pipeline's model has batch norm and dropout
    falling: bool = False  # whether every gradient is one, so that it is known where parameters are

    def __str__(self) -> str:
        def words(table: dict[str, Any]) -> str:
            return "".join(f" {name}={value}" for name, value in table.items())

        about = f"{self.strategy}{words(self.options)}, {self.workers} workers, {self.servers} servers"
        about += f",{words(self.settings)}" if self.settings else ""
        about += f", {self.samples} samples × {self.epochs} epochs in batches of {self.batch_size}"
        about += f", {self.steps} steps at most" if self.steps is not None else ""
        about += ", momentum" if self.momentum else ""
        about += ", batch norm and dropout" if self.normed else ""
        about += ", all gradients are one" if self.falling else ""
        lines = [about, f" {words({n: v for n, v in self.cluster.items() if not isinstance(v, dict | list)})}"]
        for name, value in self.cluster.items():
            tables = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
            lines += [f"  {name}:{words(table)}" for table in tables]
        return "\n".join(lines)


def draw(seed: int) -> FaultSchedule:
    chance = Random(f"schedule {seed}")
    if seed % EVERY == PIPELINE:
        return _draw_pipeline(seed, chance)
    if seed % EVERY == LOCAL:
        return _draw_apart(seed, chance)
    strategy = chance.choice(WHOLE)
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
    options = _options(strategy, workers, chance) | (_stages(seed, strategy, workers) if served else {})
    if strategy == "allreduce":
        strategy, options = _averaged(seed, options)
    return FaultSchedule(
        seed=seed,
        strategy=strategy,
        options=options,
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


def _draw_pipeline(seed: int, chance: Random) -> FaultSchedule:
    """One to three pipelines of one to four stages."""
    pipelines, stages = chance.choice((1, 1, 2, 3)), chance.randint(1, 4)
    workers, batch_size, epochs = pipelines * stages, chance.randint(2, 6), chance.choice((1, 1, 2))
    samples = chance.randint(1, 10) + 2 * max(workers, pipelines * batch_size)
    order, normed = chance.choice(("gpipe", "1f1b", "interleaved")), chance.random() < 0.5
    options = {
        "stages": stages,
        "microbatches": chance.randint(1, 5),
        "order": order,
        "chunks": chance.randint(1, 2) if order == "interleaved" and stages > 1 else 1,
        "copies": chance.random() < 0.85,
    }
    settings: dict[str, Any] = {"recompute": "stage" if not normed and chance.random() < 0.3 else "none"}
    settings["algorithm"] = chance.choice(ALGORITHMS)
    if chance.random() < 0.3:
        settings["evaluate_every"] = chance.randint(1, 5)
    lasts = epochs * samples * SECONDS_PER_SAMPLE / pipelines * chance.choice((1, 3, 10))  # messages take most of it
    return FaultSchedule(
        seed=seed,
        strategy="pipeline",
        options=options,
        settings=settings,
        workers=workers,
        servers=0,
        samples=samples,
        batch_size=batch_size,
        epochs=epochs,
        steps=chance.randint(1, 12) if chance.random() < 0.1 else None,
        momentum=chance.random() < 0.5,
        cluster=_cluster(workers, 0, lasts, chance),
        normed=normed,
    )


def _draw_apart(seed: int, chance: Random) -> FaultSchedule:
    """Workers that take steps apart from one another."""
    strategy = APART[seed // EVERY % len(APART)]
    workers, batch_size, epochs = chance.randint(1, 5), chance.randint(1, 4), chance.choice((1, 2, 3))
    servers = chance.randint(1, 4) if strategy == "easgd" else 0
    samples = chance.randint(1, 10) + 3 * workers * batch_size
    settings: dict[str, Any] = {}
    if servers and chance.random() < 0.5:
        settings["replicas"] = chance.randint(0, servers - 1)
    if strategy in ("adacomm", "fedavg", "streaming"):
        settings["algorithm"] = chance.choice(ALGORITHMS)
    if chance.random() < 0.3:
        settings["evaluate_every"] = chance.randint(1, 5)
    lasts = epochs * samples * SECONDS_PER_SAMPLE / workers
    falling = strategy in ("easgd", "hogwild")
    return FaultSchedule(
        seed=seed,
        strategy=strategy,
        options=_apart_options(strategy, workers, chance),
        settings=settings,
        workers=workers,
        servers=servers,
        samples=samples,
        batch_size=batch_size,
        epochs=epochs,
        steps=chance.randint(1, 12) if chance.random() < 0.1 else None,
        momentum=not falling and chance.random() < 0.25,
        cluster=_cluster(workers, servers, lasts, chance, together=strategy == "hogwild"),
        falling=falling,
    )


def _apart_options(strategy: str, workers: int, chance: Random) -> dict[str, Any]:
    period = {"period": chance.randint(1, 4)}
    match strategy:
        case "adacomm":
            inner = chance.choice(("keep", "average", "reset"))
            return period | {"interval": chance.choice((0.3, 1.0)), "inner": inner}
        case "easgd":
            how = chance.choice(({}, {"waits": True}, {"in_turn": True}))
            return period | {"beta": chance.uniform(0.1, 0.9), "momentum": chance.choice((0.0, 0.5))} | how
        case "fedavg":
            clients = chance.randint(workers, 2 * workers + 2)
            return {
                "clients": clients,
                "sampled": chance.randint(1, clients),
                "local_steps": chance.choice((0, 0, 2)),
                "local_epochs": chance.choice((1, 1, 2)),
            }
        case "streaming":
            fragments = chance.randint(1, period["period"])
            return period | {"fragments": fragments, "own": chance.choice((0.0, 0.5, 1.0))}
    return period | {"turns": chance.choice(("none", "none", "write", "step"))}


def without_faults(schedule: FaultSchedule) -> FaultSchedule:
    """The same run, to which nothing happens, with a checkpoint after every step."""
    quiet = {"compute": {"seconds_per_sample": SECONDS_PER_SAMPLE}}
    return msgspec.structs.replace(schedule, cluster=quiet, settings=schedule.settings | {"evaluate_every": 1})


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


def _averaged(seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Local steps in the place of `allreduce`, sometimes; drawn apart, so that all else is as it is without them."""
    chance = Random(f"averaged {seed}")
    period = chance.randint(1, 3)
    match chance.randrange(4):
        case 0:
            return "local", {"period": period}
        case 1:
            return "diloco", {"period": period + 1, "half": chance.random() < 0.5}
    return "allreduce", options


def _stages(seed: int, strategy: str, workers: int) -> dict[str, Any]:
    """Replicas of two workers, sometimes; drawn apart, so that all else is as it is without them."""
    chance = Random(f"stages {seed}")
    if workers % 2 or chance.random() < 0.5:
        return {}
    found = {"stages": 2, "cuts": chance.choice("12"), "costs": "1,1", "microbatches": chance.randint(1, 3)}
    return found | ({"backups": chance.randrange(workers // 2)} if strategy == "backup" else {})


def _cluster(workers: int, servers: int, lasts: float, chance: Random, together: bool = False) -> dict[str, Any]:
    """`lasts`: about how long the run takes; `together`: all workers are on one host."""

    def maybe(share: float, value: Any, otherwise: Any = 0.0) -> Any:
        return value if chance.random() < share else otherwise

    per_host, apart = workers if together else chance.choice((1, 1, 2)), chance.random() < 0.5
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
