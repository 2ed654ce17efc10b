"""PipeDream's planner (Narayanan et al., SOSP 2019): where to cut a model, and how often to replicate each stage.

Layers are in a row; a stage is a range of them on one worker, or on several that take minibatches in turns and sum
their gradients. The network has two levels: workers of a host (level 1), and hosts (level 2). With T, a and w the
seconds, the bytes of the output and the bytes of the weights of a layer, and B the bytes per second of a level,

    stage of layers i..j on m components    T_k(i..j, m) = max(A_{k-1}(i..j), 2 (m-1) sum of w / B_k) / m
    pipeline of layers i..j on m            A_k(i..j, m) = min over the first stage i..s on m' components:
                                                           max(T_k(i..s, m'), 2 a_s / B_k, A_k(s+1..j, m - m'))

where a component of level 1 is a worker (A_0 is the sum of T) and one of level 2 a host with all its workers. All
workers are used. The answer, A_2, is the seconds between two minibatches of the slowest stage or link.

A PipeDream worker keeps a version of its weights, and the activations of its layers, for each minibatch in flight: as
many as there are workers from its stage on, divided by the replicas of its stage (rounded up). Under a synchronous
schedule it keeps its weights once, and activations of microbatches (memory.py). `memory_limit` is on their sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import msgspec

from torrential.errors import BadInput
from torrential.stages.memory import live_microbatches, worker_bytes
from torrential.stages.profile import LayerProfile
from torrential.stages.refine import refined_cuts, rehearsed_seconds
from torrential.stages.schedules import SCHEDULES


class TwoLevelNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts with equally many workers each, and how quickly bytes travel inside a host and between hosts."""

    workers_per_host: int
    hosts: int = 1
    inside_bytes_per_second: float = math.inf
    between_bytes_per_second: float = math.inf

    @property
    def workers(self) -> int:
        return self.workers_per_host * self.hosts


class PlannedStage(msgspec.Struct, frozen=True, kw_only=True):
    """A range of layers on some workers."""

    first: int
    """The number of its first layer."""
    stop: int
    """The number after its last layer."""
    replicas: int
    seconds: float
    """The seconds between two minibatches that this stage can take."""
    live: int
    """The microbatches (of PipeDream: minibatches) whose activations each of its workers keeps at one time."""
    memory_bytes: int
    """The weights and activations that each of its workers keeps."""


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model cut into stages."""

    stages: list[PlannedStage]
    seconds: float
    """The predicted seconds for each minibatch, once the pipeline is full."""

    @property
    def workers(self) -> int:
        return sum(stage.replicas for stage in self.stages)

    @property
    def minibatches_in_flight(self) -> int:
        """The minibatches that each worker of the first stage admits at one time (the paper's NOAM)."""
        return math.ceil(self.workers / self.stages[0].replicas)


class _Stage(NamedTuple):
    first: int
    stop: int
    replicas: int
    seconds: float


class _Best(NamedTuple):
    seconds: float
    stages: tuple[_Stage, ...]


_NONE = _Best(math.inf, ())


def plan_pipeline(
    layers: Sequence[LayerProfile],
    network: TwoLevelNetwork,
    *,
    memory_limit: float | None = None,
    replicate: bool = True,
    schedule: str = "pipedream",
    microbatches: int = 1,
) -> PipelinePlan:
    """The plan with the least seconds for each minibatch.

    `memory_limit`: bytes for each worker. Without `replicate` every stage is on one worker, so there are as many stages
    as workers; of several such plans on one host, it is the one whose cuts are crossed by the fewest bytes, which are
    waited for while a pipeline fills and empties. `schedule` and `microbatches` decide how much memory is needed;
    under a synchronous schedule such a plan is improved by rehearsals (refine.py), and its slowest part may be slower
    for it.
    """
    _check(layers, network, memory_limit, replicate, microbatches)
    planner = _Planner(layers, network, memory_limit, replicate, schedule, microbatches)
    best = planner.pipeline(2 if network.hosts > 1 else 1, 0, len(layers), planner.components, Fraction(0))
    if math.isinf(best.seconds):
        need = max(layer.parameter_bytes + layer.activation_bytes for layer in layers)
        raise BadInput(
            f"no plan for {network.workers} workers keeps within {memory_limit:,.0f} bytes for each (the largest layer "
            f"and its output have {need:,}); give more memory or workers, or a smaller batch"
        )
    stages, seconds = best.stages, best.seconds
    if not replicate and network.hosts == 1:
        stages = planner.lightest(0, len(layers), network.workers, best.seconds)[1]
        if schedule in SCHEDULES and not SCHEDULES[schedule].asynchronous:
            stages, seconds = planner.refined(stages)
    return PipelinePlan(stages=planner.described(stages), seconds=seconds)


def _check(
    layers: Sequence[LayerProfile],
    network: TwoLevelNetwork,
    memory_limit: float | None,
    replicate: bool,
    microbatches: int,
) -> None:
    if not layers:
        raise BadInput("there is no layer to plan for; give a profile of at least one")
    for name in ("workers_per_host", "hosts"):
        if getattr(network, name) < 1:
            raise BadInput(f"{name} must be at least 1 (got {getattr(network, name)})")
    for name in ("inside_bytes_per_second", "between_bytes_per_second"):
        if not getattr(network, name) > 0:
            raise BadInput(f"{name} must be positive (got {getattr(network, name)})")
    if microbatches < 1:
        raise BadInput(f"microbatches must be at least 1 (got {microbatches})")
    if memory_limit is not None and not memory_limit > 0:
        raise BadInput(f"the memory limit must be positive (got {memory_limit})")
    if not replicate and network.workers > len(layers):
        raise BadInput(
            f"{len(layers)} layers cannot be cut into {network.workers} stages; use at most {len(layers)} stages"
        )


class _Planner:
    """The dynamic programme, over a range of layers, the components left, and how many workers come after them."""

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        network: TwoLevelNetwork,
        memory_limit: float | None,
        replicate: bool,
        schedule: str,
        microbatches: int,
    ) -> None:
        self._layers, self._network, self._limit, self._replicate = layers, network, memory_limit, replicate
        self._schedule, self._microbatches = schedule, microbatches
        self._seconds = [0.0, *accumulate(layer.seconds for layer in layers)]
        self._weights = [0, *accumulate(layer.parameter_bytes for layer in layers)]
        self._activations = [0, *accumulate(layer.activation_bytes for layer in layers)]
        self._crossing = [2 * layer.activation_bytes for layer in layers]
        self.components = network.hosts if network.hosts > 1 else network.workers_per_host
        self.pipeline = cache(self._pipeline)
        self.lightest = cache(self._lightest)

    def _pipeline(self, level: int, first: int, stop: int, components: int, behind: Fraction) -> _Best:
        """The best pipeline of layers first..stop-1 on all of some components. `behind`: the workers that come after
        it, for each replica of it."""
        best = _NONE
        bandwidth = self._bandwidth(level)
        for here in range(components, 0, -1):
            rest = components - here
            after = self._behind(level, rest, here, behind)
            for split in [stop] if rest == 0 else range(first + 1, stop):
                stage = self._stage(level, first, split, here, after)
                if split < stop and level == 1 and stage.seconds >= best.seconds:
                    break  # more layers on one stage are slower still
                if split < stop and max(stage.seconds, self._crossing[split - 1] / bandwidth) >= best.seconds:
                    continue
                found = stage
                if split < stop:
                    onward = self.pipeline(level, split, stop, rest, behind)
                    slowest = max(stage.seconds, self._crossing[split - 1] / bandwidth, onward.seconds)
                    found = _Best(slowest, stage.stages + onward.stages)
                if found.seconds < best.seconds:
                    best = found
        return best

    def _lightest(self, first: int, stop: int, workers: int, ceiling: float) -> tuple[float, tuple[_Stage, ...]]:
        """The pipeline of layers first..stop-1, a stage on each worker, whose cuts are crossed by the fewest bytes, of
        those in which no stage or cut takes more than `ceiling` seconds; with these bytes."""
        best: tuple[float, tuple[_Stage, ...]] = (math.inf, ())
        for split in [stop] if workers == 1 else range(first + 1, stop - workers + 2):
            stage = self._stage(1, first, split, 1, Fraction(workers - 1))
            if stage.seconds > ceiling:
                break  # more layers take longer still, and more memory
            if workers == 1:
                return 0.0, stage.stages
            if self._crossing[split - 1] / self._bandwidth(1) <= ceiling:
                crossing, onward = self.lightest(split, stop, workers - 1, ceiling)
                crossing += self._crossing[split - 1]
                if crossing < best[0]:
                    best = crossing, stage.stages + onward
        return best

    def refined(self, stages: Sequence[_Stage]) -> tuple[tuple[_Stage, ...], float]:
        """A pipeline on one host with a stage on each worker, its cuts moved as rehearsals say; and the seconds of its
        slowest stage or cut."""
        bandwidth, count = self._bandwidth(1), len(self._layers)

        def made(firsts: tuple[int, ...]) -> list[_Best]:
            ends = itertools.pairwise([*firsts, count])
            return [self._stage(1, a, b, 1, Fraction(len(firsts) - 1 - n)) for n, (a, b) in enumerate(ends)]

        firsts = refined_cuts(
            [stage.first for stage in stages],
            count,
            lambda cuts: rehearsed_seconds(self._layers, cuts, bandwidth, self._schedule, self._microbatches),
            lambda cuts: all(math.isfinite(stage.seconds) for stage in made(cuts)),
        )
        found = made(firsts)
        slowest = max(
            [stage.seconds for stage in found] + [self._crossing[first - 1] / bandwidth for first in firsts[1:]]
        )
        return tuple(stage.stages[0] for stage in found), slowest

    def _stage(self, level: int, first: int, stop: int, replicas: int, behind: Fraction) -> _Best:
        """Layers first..stop-1 as one stage on so many components."""
        if replicas > 1 and not self._replicate:
            return _NONE
        sync = 2 * (replicas - 1) * (self._weights[stop] - self._weights[first]) / self._bandwidth(level)
        if level == 1:
            if self._limit is not None and self._memory(first, stop, behind) > self._limit:
                return _NONE
            alone = self._seconds[stop] - self._seconds[first]
            inner = _Best(alone, (_Stage(first, stop, 1, alone),))
        else:
            inner = self.pipeline(1, first, stop, self._network.workers_per_host, behind)
        seconds = max(inner.seconds, sync) / replicas
        stages = tuple(
            stage._replace(replicas=stage.replicas * replicas, seconds=max(stage.seconds, sync) / replicas)
            for stage in inner.stages
        )
        return _Best(seconds, stages)

    def _behind(self, level: int, rest: int, here: int, behind: Fraction) -> Fraction:
        """The workers after a stage on `here` components with `rest` components to follow, for each replica of it."""
        if self._limit is None:
            return behind  # nobody asks, so that equal ranges are planned once
        each = 1 if level == 1 else self._network.workers_per_host
        return (behind + rest * each) / here

    def _bandwidth(self, level: int) -> float:
        network = self._network
        return network.inside_bytes_per_second if level == 1 else network.between_bytes_per_second

    def _live(self, behind: Fraction) -> int:
        return live_microbatches(self._schedule, math.ceil(behind + 1), self._network.workers, self._microbatches)

    def _memory(self, first: int, stop: int, behind: Fraction) -> int:
        weights = self._weights[stop] - self._weights[first]
        activations = self._activations[stop] - self._activations[first]
        return worker_bytes(self._schedule, weights, activations, self._live(behind), self._microbatches)

    def described(self, stages: Sequence[_Stage]) -> list[PlannedStage]:
        found = []
        left = sum(stage.replicas for stage in stages)
        for stage in stages:
            behind = Fraction(left - stage.replicas, stage.replicas)
            found.append(
                PlannedStage(
                    first=stage.first,
                    stop=stage.stop,
                    replicas=stage.replicas,
                    seconds=stage.seconds,
                    live=self._live(behind),
                    memory_bytes=self._memory(stage.first, stage.stop, behind),
                )
            )
            left -= stage.replicas
        return found
