"""How long `torrential bench allreduce` takes, from what each all-reduce takes on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from torrential.bench.allreduce import Benchmark
from torrential.bench.member import SINGLE_CALLS, contenders, repetitions
from torrential.comm import costs
from torrential.comm.costs import Fitted
from torrential.comm.schedules import ALGORITHMS


@dataclass(frozen=True)
class Plan:
    """The seconds that everything is to take."""

    checks: dict[int, float]  # by size: every algorithm once to check its sum, and a few times to see how long it takes
    blocks: dict[tuple[int, str], float]  # by size and algorithm: one measurement
    rounds: int

    @property
    def total(self) -> float:
        return sum(self.checks.values()) + self.rounds * sum(self.blocks.values())


def known_costs(asked: Benchmark) -> Fitted | None:
    """The costs that an earlier run has measured on this machine and that are used again; None: they are measured
    first."""
    table = None if asked.fresh else costs.load(costs.cache_path(asked.messages, asked.workers))
    names = contenders(asked.transport == "shared")
    return table if table is not None and set(names) <= set(table.measured) else None


def plan(asked: Benchmark, table: Fitted) -> Plan:
    once = {
        (size, name): table.predict(_called(asked, table, size, name), asked.workers, size)
        for size in asked.sizes
        for name in asked.algorithms
    }
    return Plan(
        checks={size: SINGLE_CALLS * sum(once[size, name] for name in asked.algorithms) for size in asked.sizes},
        blocks={which: seconds * (1 + repetitions(seconds)) for which, seconds in once.items()},
        rounds=asked.rounds,
    )


def _called(asked: Benchmark, table: Fitted, size: int, name: str) -> str:
    """The algorithm that `auto` stands for."""
    if name != "auto":
        return name
    return "shared" if asked.transport == "shared" else table.choose(size, asked.workers, ALGORITHMS).name
