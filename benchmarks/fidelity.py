"""How well the simulated world predicts the local one: the time of a step, measured and simulated.

python -m benchmarks.fidelity OUT --workers 1,2

    measure   each strategy with each number of workers, in processes; rounds interleaved, medians
    fit       a few numbers about this machine, from runs of one and two workers alone (see `fit`)
    predict   every time by the simulator, with these numbers and gradients=off

Rounds go on as long as another one fits into --seconds; the first is always finished. Written: OUT/fidelity.json with
all that was measured, OUT/fidelity.md and, with matplotlib, OUT/fidelity.png. What OUT/fidelity.json has already is
added to; with `--rounds 0` it is only predicted anew, with `--only-measure` nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from statistics import median, pstdev
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import torrential as tt
from benchmarks.models import WORKLOADS, mlp
from benchmarks.sync import NEVER, describe, machine
from torrential.comm.post import BRISK_SECONDS
from torrential.membership.messages import Dismissed, Go
from torrential.membership.roles import Who
from torrential.records import Step
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers
from torrential.tasks.digits import digits
from torrential.worlds.local.crew import Crew
from torrential.worlds.sim.mail import COPY, LOOK
from torrential.worlds.sim.timed import update

TASKS: dict[str, Callable[[], tt.Task]] = {"digits": digits, "mlp": mlp}
STEPS = {"digits": 1200, "mlp": 36}  # of each worker
SIMULATED = {"digits": 300, "mlp": 200}
WARMUP = 0.2  # of the steps
PARTS = ("compute", "communicate", "wait")
WINDOW = 5  # records of a worker, about a second: what is measured is the median over such windows
UPDATE = update(1)  # SGD with momentum, or Adagrad
PAUSE = 4.0  # times as long as others a batch takes now and then
ALONE, BOTH = [("allreduce", 1)], [("allreduce", 2)]
SERVED = [("downpour", 1), ("ssp", 1), ("backup", 1)]  # which do the same with one worker
SIDE_BY_SIDE = [("downpour", 2), ("ssp", 2)]  # which do not wait for each other
FITTED = ALONE + BOTH + SERVED + SIDE_BY_SIDE
SEEDS = 7  # simulated where workers differ, which the seed says; their median counts

Key = tuple[str, str, int]  # task, strategy, workers


@dataclass(frozen=True)
class Timing:
    seconds: float  # of a step: an update of the parameters
    workers: list[list[float]]  # of a worker's own batch, in the mean: seconds of each of PARTS
    server: float = 0.0  # its processor's seconds, for a batch


Times = dict[Key, list[Timing]]  # by round


def measure(key: Key) -> Timing:
    task, _, workers = key
    steps = STEPS[task] if workers <= 2 else STEPS[task] // 3
    return _time(key, TASKS[task](), steps, WARMUP, WINDOW, threads=1)


def predict(key: Key, cluster: dict[str, Any]) -> float:
    task = TASKS[key[0]]()
    task = replace(task, model=partial(_empty, task.model))
    here = {"hosts": 1, "workers_per_host": key[2]} | cluster
    seeds = range(SEEDS if cluster["compute"]["unlike"] else 1)
    options = {"world": "sim", "cluster": here, "gradients": "off"}
    return median(_time(key, task, SIMULATED[key[0]], 0.0, NEVER, seed=seed, **options).seconds for seed in seeds)


def _empty(build: Callable[[], nn.Module]) -> nn.Module:
    """Nothing is computed, so the parameters need no values."""
    with torch.device("meta"):
        return build().to_empty(device="cpu")


def _time(key: Key, task: tt.Task, steps: int, warmup: float, window: int, **options: Any) -> Timing:
    _, strategy, workers = key
    if strategy == "backup":
        options["backups"] = min(1, workers - 1)
    if strategy in ("downpour", "ssp"):
        steps *= workers  # each update is one worker's
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory, _server_seconds() as served:
        result = tt.train(
            task,
            strategy,
            workers=workers,
            servers=1 if needs_servers(STRATEGIES[strategy]) else None,
            steps=steps,
            epochs=NEVER,
            evaluate_every=NEVER,
            device="cpu",
            out=Path(directory) / "run",
            progress=False,
            **options,
        )
    everything = [r for r in result.history if isinstance(r, Step)]
    by_worker = [[r for r in everything if r.worker == worker] for worker in range(workers)]
    settled = [[r for r in own if r.step >= warmup * steps] for own in by_worker]
    first = settled[0]
    window = min(window, len(first) - 1)
    return Timing(
        median((b.time - a.time) / (b.step - a.step) for a, b in zip(first, first[window:], strict=False)),
        [_parts(own) for own in settled if len(own) > 1],
        sum(served) / sum(_batches(own[-1]) for own in by_worker),
    )


@contextmanager
def _server_seconds() -> Iterator[list[float]]:
    """What the processor did for the server of a run, while workers were training."""
    found: list[float] = []
    send = Crew.send

    def watched(self: Crew, who: Who, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        family = psutil.Process().children(recursive=True)
        servers = [process.pid for process in family if process.name().startswith("tt-server")]
        if isinstance(message, Go) and who.address == 0:  # workers begin; nobody dies here, so this is said once
            found.extend(-_processor(pid) for pid in servers)
        elif isinstance(message, Dismissed) and who.address == 0:
            found.extend(_processor(pid) for pid in servers)
        send(self, who, message, tensors)

    Crew.send = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Crew.send = send  # type: ignore[method-assign]


def _processor(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _parts(own: list[Step]) -> list[float]:
    batches = _batches(own[-1]) - _batches(own[0])
    return [sum(getattr(record, part) for record in own[1:]) / batches for part in PARTS]


def _batches(record: Step) -> int:
    """Of this worker, so far: where each makes its own updates, they are counted by staleness."""
    return sum(record.staleness.values()) + record.dropped or record.step


# -- the machine --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Kind:
    """Of strategies, with one task: what workers do besides forward and backward is not the same."""

    compute: float  # seconds of forward and backward, without pauses
    pause: int  # once in so many steps a worker takes PAUSE times as long
    contention: float
    unlike: float
    latency: float


@dataclass(frozen=True)
class Fit:
    kinds: dict[str, dict[str, Kind]]  # by task, then "allreduce" or "served"
    memory: float
    letter: float
    request: float

    def cluster(self, key: Key, cores: int) -> dict[str, Any]:
        kind = self.kinds[key[0]]["served" if needs_servers(STRATEGIES[key[1]]) else "allreduce"]
        return {
            "compute": {
                "seconds_per_step": kind.compute,  # batches are all of one size
                "seconds_per_sample": 1e-12,
                "unlike": kind.unlike,
            },
            "stragglers": [{"factor": PAUSE, "every": kind.pause}],
            "network": {"inside_latency": kind.latency},
            "inside": {
                "cores": cores,
                "contention": kind.contention,
                "letter": self.letter,
                "request": self.request,
                "memory": self.memory,
            },
        }


def fit(times: Times) -> Fit:
    """From `allreduce` with one and two workers, what has a server with one, and `downpour` and `ssp` with two.

    A step takes, for a model of b bytes at m seconds per byte read or written, and g seconds of gradients, with pauses:

        allreduce, 1 worker    g + 5mb                                              update
        allreduce, 2 workers   compute (g + (6 + 5)/2 mb) (1 + contention)          keep a copy of half, update it
                               communicate 3 latency + 2 letter, of digits          meet three times, read sum and vote
                               wait (PAUSE - 1) / pause of a batch                  for the other's pauses
        served, 1 worker       compute g + (3 + 3) mb                               copy what is pushed and pulled
                               communicate 2 letter, of digits                      ask for samples, push
                               in all besides computing (1 + 5) mb                  look, update
                               + 4 latency + 2 letter + 2 request
        served, 2 workers      compute (1 + contention) times that of one
                               the server's processor 2 request, of digits

    The MLP is large enough for bytes to count and letters not to; with digits it is the other way round. How much
    workers differ is seen in those with a server; others wait for one another, which is in the pauses.
    """

    def parts(task: str, runs: list[tuple[str, int]]) -> list[list[float]]:
        return [worker for run in runs for timing in times[task, *run] for worker in timing.workers]

    def computing(task: str, runs: list[tuple[str, int]]) -> float:
        return median(compute for compute, _, _ in parts(task, runs))

    letter = median(talk for _, talk, _ in parts("digits", SERVED)) / 2
    busy = median(timing.server for run in SIDE_BY_SIDE for timing in times["digits", *run] if timing.server)
    request = max(0.0, busy - BRISK_SECONDS) / 2
    rest = {task: median(talk + wait for _, talk, wait in parts(task, SERVED)) for task in TASKS}
    meeting = median(talk for _, talk, _ in parts("digits", BOTH))
    to_each_other = max(0.0, meeting - 2 * letter) / 3
    to_the_server = max(0.0, rest["digits"] - 2 * letter - 2 * request) / 4
    nbytes = 4 * sum(p.numel() for p in WORKLOADS["mlp"].build().parameters())
    memory = (rest["mlp"] - rest["digits"]) / (LOOK + UPDATE) / nbytes
    kinds = {}
    for task, once in (("digits", 0.0), ("mlp", memory * nbytes)):
        alone = median(timing.seconds for timing in times[task, *ALONE[0]]) - UPDATE * once
        held_up = median(wait for _, _, wait in parts(task, BOTH)) / alone  # as a share
        quick, pause = 1 - held_up, max(1, round((PAUSE - 1) * (1 - held_up) / held_up))
        both = alone + (2 * COPY + UPDATE) / 2 * once
        contention = max(0.0, computing(task, BOTH) / both - 1)
        one, two = computing(task, SERVED), computing(task, SIDE_BY_SIDE)
        unlike = [log(w[0] / one) for w in parts(task, SERVED)] + [log(w[0] / two) for w in parts(task, SIDE_BY_SIDE)]
        kinds[task] = {
            "allreduce": Kind(alone * quick, pause, contention, 0.0, to_each_other),
            "served": Kind(
                (one - 2 * COPY * once) * quick, pause, max(0.0, two / one - 1), pstdev(unlike), to_the_server
            ),
        }
    return Fit(kinds, memory, letter, request)


# -- results ------------------------------------------------------------------------------------------------------
def markdown(times: Times, predicted: dict[Key, float], found: Fit, host: dict[str, Any], command: str) -> str:
    by_key = {key: [timing.seconds for timing in timings] for key, timings in times.items()}
    errors = {key: predicted[key] / median(seconds) - 1 for key, seconds in by_key.items()}
    lines = [
        "task | strategy | workers | measured (min–max) | predicted | error",
        "--- | --- | ---: | ---: | ---: | ---:",
    ]
    for key, seconds in by_key.items():
        task, strategy, workers = key
        shown = f"{_ms(median(seconds))} ({_ms(min(seconds))}–{_ms(max(seconds))})"
        mark = " (fit)" if key[1:] in FITTED else ""
        lines.append(f"{task} | {strategy} | {workers} | {shown} | {_ms(predicted[key])} | {errors[key]:+.0%}{mark}")
    rest = [abs(error) for key, error in errors.items() if key[1:] not in FITTED]
    rounds = max(map(len, times.values()))
    about = [
        f"{task}, {name}: forward and backward {_ms(kind.compute)} ms, contention {kind.contention:.2f}, "
        f"a pause in {kind.pause} steps, unlike {kind.unlike:.2f}, latency {1e6 * kind.latency:.0f} µs"
        for task in TASKS
        for name, kind in found.kinds[task].items()
    ]
    about.append(f"{1e9 * found.memory:.3f} ns per byte of memory, {host['cores']} cores")
    about.append(f"letter {1e6 * found.letter:.0f} µs, request {1e6 * found.request:.0f} µs")
    return "\n".join(
        [
            f"Milliseconds per step, medians of up to {rounds} interleaved rounds. {describe(host)}.",
            "",
            *(f"| {line} |" for line in lines),
            "",
            f"Error: median {median(map(abs, errors.values())):.0%}, worst {max(map(abs, errors.values())):.0%}; "
            f"without the rows that were fitted: median {median(rest):.0%}, worst {max(rest):.0%}.",
            "",
            f"Fitted: {'; '.join(about)}.",
            "",
            f"    {command}",
            "",
        ]
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{2 if seconds < 0.01 else 0}f}"


def draw(times: Times, predicted: dict[Key, float], path: Path) -> None:
    """Step time over the number of workers: dots measured, lines predicted."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is missing; no picture")
        return
    strategies = list(dict.fromkeys(strategy for _, strategy, _ in times))
    figure, panels = plt.subplots(1, len(TASKS), figsize=(10, 4.5), layout="constrained")
    for panel, task in zip(panels, TASKS, strict=True):
        for colour, strategy in enumerate(strategies):
            keys = [key for key in times if key[:2] == (task, strategy)]
            places = [key[2] * (1 + 0.02 * (colour - 1.5)) for key in keys]  # beside one another
            seconds = [[1e3 * timing.seconds for timing in times[key]] for key in keys]
            middle = [median(s) for s in seconds]
            down = [m - min(s) for m, s in zip(middle, seconds, strict=True)]
            up = [max(s) - m for m, s in zip(middle, seconds, strict=True)]
            panel.errorbar(places, middle, [down, up], fmt="o", color=f"C{colour}", capsize=3, label=strategy)
            panel.plot(places, [1e3 * predicted[key] for key in keys], color=f"C{colour}", marker="_", markersize=14)
        panel.set(title=task, xlabel="workers", ylabel="ms per step", xscale="log")
        counts = sorted({workers for _, _, workers in times})
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    title = "dots: measured (min–max); lines: simulated"
    figure.legend(handles, labels, title=title, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", default="1,2", help="1 and 2 among them")
    parser.add_argument("--strategies", default="allreduce,downpour,ssp,backup")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=420.0, help="for all measurements")
    parser.add_argument("--only-measure", action="store_true", help="write what was measured, and predict elsewhere")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    raw = given.out / "fidelity.json"
    known: dict[str, Any] = json.loads(raw.read_text()) if raw.exists() else {"machine": machine(), "results": []}
    host, command = known["machine"], f"python -m benchmarks.fidelity OUT --workers {given.workers}"
    times: Times = {
        (r["task"], r["strategy"], r["workers"]): [Timing(**t) for t in r["measured"]] for r in known["results"]
    }
    names, counts = given.strategies.split(","), [int(count) for count in given.workers.split(",")]
    keys = [(task, name, count) for task in TASKS for name in names for count in counts]

    def keep(**more: Any) -> None:
        raw.write_text(json.dumps({"machine": host, "command": command, **more}, indent=1) + "\n")

    for _ in _measure_all(times, keys, given):
        keep(results=_results(times, {}))  # a prediction can be made again, a measurement not
    if given.only_measure:
        return
    found = fit(times)
    print(found, flush=True)
    predicted = {key: predict(key, found.cluster(key, host["cores"])) for key in times}
    keep(fitted=asdict(found), results=_results(times, predicted))
    text = markdown(times, predicted, found, host, command)
    (given.out / "fidelity.md").write_text(text)
    draw(times, predicted, given.out / "fidelity.png")
    print(text)


def _results(times: Times, predicted: dict[Key, float]) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "strategy": strategy,
            "workers": workers,
            "measured": [asdict(timing) for timing in timings],
            "predicted": predicted.get((task, strategy, workers)),
        }
        for (task, strategy, workers), timings in times.items()
    ]


def _measure_all(times: Times, keys: list[Key], given: argparse.Namespace) -> Iterator[None]:
    """Stops after each."""
    if given.rounds:
        measure(keys[0])  # the first run finds nothing warm
    began, longest = time.monotonic(), 0.0
    for number in range(given.rounds):
        round_began = time.monotonic()
        if number and round_began - began + longest > given.seconds:
            break
        for key in keys if number % 2 == 0 else reversed(keys):
            times.setdefault(key, []).append(measure(key))
            at = time.monotonic() - began
            print(f"{at:4.0f} s  {key[0]:7}{key[1]:10}{key[2]:3} {1e3 * times[key][-1].seconds:8.2f} ms", flush=True)
            yield
        longest = max(longest, time.monotonic() - round_began)


if __name__ == "__main__":
    main()
