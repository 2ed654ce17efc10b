"""What the trace of a pipeline says about one of its steps: who did what when, how long it was idle, and how long that
is to be expected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

import msgspec

from torrential.files import decode_json, read_regular
from torrential.stages.rehearse import Rehearsal, StageCosts, rehearse_schedule
from torrential.stages.schedules import SCHEDULES
from torrential.stages.spans import STEP

LARGEST = 256 << 20  # bytes of a trace that is read
COMPUTE = ("forward", "backward", "weight gradient")


class _Event(msgspec.Struct):
    """An event of a trace, as chrome://tracing has them."""

    ph: str
    name: str
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _Events(msgspec.Struct):
    traceEvents: list[_Event]


@dataclass(frozen=True)
class Doing:
    """Something that a worker did with a microbatch, in seconds since the run began."""

    worker: int
    what: str  # forward, backward, send activation, ...
    microbatch: int
    chunk: int
    begin: float
    end: float
    waited: float

    @property
    def computes(self) -> bool:
        return self.what.startswith(COMPUTE)


@dataclass(frozen=True)
class PipelineStep:
    """One step of one pipeline."""

    number: int
    doings: list[Doing]

    @property
    def workers(self) -> list[int]:
        return sorted({doing.worker for doing in self.doings})

    @property
    def begin(self) -> float:
        return min(doing.begin for doing in self.doings)

    @property
    def seconds(self) -> float:
        return max(doing.end for doing in self.doings) - self.begin

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they do not compute, from the first forward to the last backward."""
        busy = sum(doing.end - doing.begin for doing in self.doings if doing.computes)
        return 1 - busy / (len(self.workers) * self.seconds)


@dataclass(frozen=True)
class PipelineTrace:
    """The steps of a run's first pipeline, and the memory of each worker."""

    steps: list[PipelineStep]
    memory: dict[int, dict[str, float]]  # by worker: megabytes now and at its peak

    @property
    def typical(self) -> PipelineStep:
        """The step of median length, of those that most workers took part in."""
        most = max(len(step.workers) for step in self.steps)
        usual = [step for step in self.steps if len(step.workers) == most]
        usual = usual[1:] or usual  # the first one also makes buffers
        length = median_low(step.seconds for step in usual)
        return next(step for step in usual if step.seconds == length)


def read_trace(path: Path, stages: int) -> PipelineTrace | None:
    """What a trace says of the first pipeline; None where there is no pipeline in it. Raises OSError and
    msgspec.MsgspecError."""
    events = decode_json(read_regular(path, LARGEST), _Events).traceEvents
    numbers, found, memory = defaultdict[int, list[tuple[float, float, int]]](list), list[Doing](), {}
    for event in events:
        if event.ph == "C" and event.name.startswith("memory"):
            memory[event.tid] = {name: float(size) for name, size in event.args.items()}
        elif event.ph == "X" and event.tid in range(stages):
            begin, end = event.ts / 1e6, (event.ts + event.dur) / 1e6
            if event.name == STEP:
                numbers[event.tid].append((begin, end, int(event.args["number"])))
            elif "microbatch" in event.args:
                found.append(_doing(event, begin, end))
    steps = _by_step(found, numbers)
    return PipelineTrace(steps, memory) if steps else None


def _doing(event: _Event, begin: float, end: float) -> Doing:
    about = event.args
    what = event.name.rpartition(" ")[0]
    microbatch, chunk, waited = int(about["microbatch"]), int(about.get("chunk", 0)), float(about.get("waited", 0.0))
    return Doing(event.tid, what, microbatch, chunk, begin, end, waited)


def _by_step(doings: Iterable[Doing], numbers: dict[int, list[tuple[float, float, int]]]) -> list[PipelineStep]:
    """The doings of each step that was taken; what was given up belongs to none."""
    steps = defaultdict[int, list[Doing]](list)
    places = dict.fromkeys(numbers, 0)
    for spans in numbers.values():
        spans.sort()
    for doing in sorted(doings, key=lambda doing: doing.begin):
        spans = numbers.get(doing.worker, [])
        place = places.get(doing.worker, 0)
        middle = (doing.begin + doing.end) / 2  # ends may be the same, but for rounding
        while place < len(spans) and spans[place][1] < middle:
            place += 1
        places[doing.worker] = place
        if place < len(spans) and spans[place][0] <= middle:
            steps[spans[place][2]].append(doing)
    return [PipelineStep(number, found) for number, found in sorted(steps.items())]


# -- what is to be expected -------------------------------------------------------------------------------------------
def message_seconds(step: PipelineStep) -> float:
    """The seconds that a message is on its way, in the median: from when it was sent, where it was waited for."""
    workers = step.workers
    sent = {}
    for doing in step.doings:
        verb, _, kind = doing.what.partition(" ")
        if verb == "send":
            step_to = 1 if kind == "activation" else -1
            receiver = workers[(workers.index(doing.worker) + step_to) % len(workers)]
            sent[receiver, kind, doing.microbatch, _round(doing, kind, workers)] = doing.begin
    taken = []
    for doing in step.doings:
        verb, _, kind = doing.what.partition(" ")
        began = sent.get((doing.worker, kind, doing.microbatch, doing.chunk))
        if verb == "receive" and began is not None and doing.begin < began < doing.end:
            taken.append(doing.end - began)
    return median(taken) if taken else 0.0


def _round(doing: Doing, kind: str, workers: list[int]) -> int:
    """The receiver's chunk: the next one behind the last worker, the one before in front of the first."""
    if kind == "activation":
        return doing.chunk + (doing.worker == workers[-1])
    return doing.chunk - (doing.worker == workers[0])


def predicted(step: PipelineStep, order: str) -> Rehearsal | None:
    """A rehearsal of the step with the median times of forwards, backwards and messages in it; None where the order is
    not one of a step with several workers."""
    if order not in SCHEDULES or len(step.workers) < 2:
        return None
    chunks = 1 + max(doing.chunk for doing in step.doings)
    microbatches = len({doing.microbatch for doing in step.doings})
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for worker in step.workers:
        for what, found in times.items():
            mine = [
                d
                for d in step.doings
                if d.worker == worker and d.computes and (d.what == "forward") == (what == "forward")
            ]
            found.append(sum(d.end - d.begin for d in mine) / microbatches)
    costs = StageCosts(times["forward"], times["backward"], message_seconds(step))
    return rehearse_schedule(order, costs, microbatches, chunks if SCHEDULES[order].chunked else 1)
