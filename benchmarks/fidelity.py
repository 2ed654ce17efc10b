"""How well the simulated world predicts the local one: the time of a step, measured and simulated.

python -m benchmarks.fidelity OUT --workers 1,2

    measure   each strategy with each number of workers, in processes; rounds interleaved, medians
    fit       a few numbers about this machine, from runs of one and two workers alone (see `fit`)
    predict   every time by the simulator, with these numbers and gradients=off

Rounds go on as long as another one fits into --seconds; the first is always finished. Written: OUT/fidelity.json with
all that was measured, OUT/fidelity.md and, with matplotlib, OUT/fidelity.png. What OUT/fidelity.json has already is
added to; with `--rounds 0` it is only predicted anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import torrential as tt
from benchmarks.models import WORKLOADS, mlp
from benchmarks.sync import NEVER, describe, machine
from torrential.records import Step
from torrential.strategies import STRATEGIES
from torrential.tasks.digits import digits
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
FITTED = ALONE + BOTH + SERVED

Key = tuple[str, str, int]  # task, strategy, workers


@dataclass(frozen=True)
class Timing:
    """Of a step: an update of the parameters."""

    seconds: float
    compute: float | None = (
        None  # seconds of worker 0, in the mean, and all there is where a step is one of each worker
    )
    communicate: float | None = None
    wait: float | None = None


Times = dict[Key, list[Timing]]  # by round


def measure(key: Key) -> Timing:
    task, _, workers = key
    steps = STEPS[task] if workers <= 2 else STEPS[task] // 3
    return _time(key, TASKS[task](), steps, WARMUP, WINDOW, threads=1)


def predict(key: Key, cluster: dict[str, Any]) -> float:
    task = TASKS[key[0]]()
    task = replace(task, model=partial(_empty, task.model))
    here = {"hosts": 1, "workers_per_host": key[2]} | cluster
    return _time(key, task, SIMULATED[key[0]], 0.0, NEVER, world="sim", cluster=here, gradients="off").seconds


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
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        result = tt.train(
            task,
            strategy,
            workers=workers,
            servers=1 if STRATEGIES[strategy].served else None,
            steps=steps,
            epochs=NEVER,
            evaluate_every=NEVER,
            device="cpu",
            out=Path(directory) / "run",
            progress=False,
            **options,
        )
    records = [r for r in result.history if isinstance(r, Step) and r.worker == 0 and r.step >= warmup * steps]
    window = min(window, len(records) - 1)
    first, *others = records
    return Timing(
        median((b.time - a.time) / (b.step - a.step) for a, b in zip(records, records[window:], strict=False)),
        *(sum(getattr(r, part) for r in others) / (others[-1].step - first.step) for part in PARTS),
    )


# -- the machine --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fit:
    compute: dict[str, float]  # seconds of forward and backward, by task; so are the next two
    contention: dict[str, float]
    pause: dict[str, int]  # once in so many steps a worker takes PAUSE times as long
    memory: float
    latency: float
    letter: float

    def cluster(self, task: str, cores: int) -> dict[str, Any]:
        return {
            "compute": {
                "seconds_per_step": self.compute[task],  # batches are all of one size
                "seconds_per_sample": 1e-12,
            },
            "stragglers": [{"factor": PAUSE, "every": self.pause[task]}],
            "network": {"inside_latency": self.latency},
            "inside": {
                "cores": cores,
                "contention": self.contention[task],
                "letter": self.letter,
                "memory": self.memory,
            },
        }


def fit(times: Times) -> Fit:
    """From `allreduce` with one and two workers, and what has a server with one.

    A step takes, for a model of b bytes at m seconds per byte read or written, and g seconds of gradients, with pauses:

        allreduce, 1 worker    g + 5mb                                              update
        served, 1 worker       g + (3 + 1 + 5 + 3) mb + 4 (latency + letter)        copy, look, update, copy
                               communicate and wait 4 (latency + letter), of digits
        allreduce, 2 workers   compute (g + (6 + 5)/2 mb) (1 + contention)          keep a copy of half, update it
                               communicate 3 latency, of digits                     meet three times
                               wait (PAUSE - 1) / pause of a batch                  for the other's pauses

    The MLP is large enough for bytes to count and letters not to; with digits it is the other way round.
    """

    def found(runs: list[tuple[str, int]], part: str = "seconds") -> dict[str, float]:
        known = {task: [getattr(t, part) for run in runs for t in times.get((task, *run), [])] for task in TASKS}
        return {task: median(s for s in seconds if s is not None) for task, seconds in known.items()}

    alone, served = found(ALONE), found(SERVED)
    computing, meeting, waiting = (found(BOTH, part) for part in PARTS)
    either = (found(SERVED, "communicate")["digits"] + found(SERVED, "wait")["digits"]) / 4  # latency + letter
    latency = meeting["digits"] / 3
    letter = max(0.0, either - latency)
    nbytes = 4 * sum(p.numel() for p in WORKLOADS["mlp"].build().parameters())
    memory = (served["mlp"] - alone["mlp"] - 4 * either) / (2 * COPY + LOOK) / nbytes
    once = {"digits": 0.0, "mlp": memory * nbytes}
    compute = {task: alone[task] - UPDATE * once[task] for task in TASKS}
    both = {task: compute[task] + (2 * COPY + UPDATE) / 2 * once[task] for task in TASKS}
    contention = {task: max(0.0, computing[task] / both[task] - 1) for task in TASKS}
    quick = {task: compute[task] - waiting[task] for task in TASKS}  # without pauses
    pause = {task: max(1, round((PAUSE - 1) * quick[task] / waiting[task])) for task in TASKS}
    return Fit(quick, contention, pause, memory, latency, letter)


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
        f"{task}: forward and backward {_ms(found.compute[task])} ms, contention {found.contention[task]:.2f}, "
        f"a pause in {found.pause[task]} steps"
        for task in TASKS
    ]
    about.append(f"{1e9 * found.memory:.3f} ns per byte of memory")
    about.append(f"latency {1e6 * found.latency:.0f} µs, letter {1e6 * found.letter:.0f} µs, {host['cores']} cores")
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
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    raw = given.out / "fidelity.json"
    known = json.loads(raw.read_text()) if raw.exists() else {"machine": machine(), "results": []}
    host, command = known["machine"], f"python -m benchmarks.fidelity OUT --workers {given.workers}"
    times: Times = {
        (r["task"], r["strategy"], r["workers"]): [Timing(**t) for t in r["measured"]] for r in known["results"]
    }
    names, counts = given.strategies.split(","), [int(count) for count in given.workers.split(",")]
    _measure_all(times, [(task, name, count) for task in TASKS for name in names for count in counts], given)
    found = fit(times)
    print(found, flush=True)
    clusters = {task: found.cluster(task, host["cores"]) for task in TASKS}
    whole = {"machine": host, "command": command, "clusters": clusters, "results": _results(times, {})}
    raw.write_text(json.dumps(whole, indent=1) + "\n")  # a prediction can be made again, a measurement not
    predicted = {key: predict(key, clusters[key[0]]) for key in times}
    raw.write_text(json.dumps(whole | {"results": _results(times, predicted)}, indent=1) + "\n")
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


def _measure_all(times: Times, keys: list[Key], given: argparse.Namespace) -> None:
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
        longest = max(longest, time.monotonic() - round_began)


if __name__ == "__main__":
    main()
