"""Accurate, large minibatch SGD (P. Goyal et al. 2017, tables 1 and 2, figure 1) on one machine.

python -m experiments.large_minibatch --out OUT --jobs 8 --seconds 560
python -m experiments.large_minibatch --out OUT --report

A sweep over total batches with the whole recipe (linear scaling, gradual warm-up, zero gamma, no decay of norms and
biases), then what becomes of it at the `top` batch when one part of the recipe is left out or replaced: the largest
batch whose mean error is within 0.3 points or two deviations of the base's, unless --top says which. Batch norm always
sees groups of --base-batch samples, as if each were a worker of its own; above 4,096 a batch is a sum of micro-batches.

Every (configuration, seed) is a run of its own in OUT/runs. What is finished is never run again, so it may be
interrupted and called again. Written: OUT/table.md, OUT/results.json, OUT/error_vs_batch.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from experiments.jobs import Job, last_line, run_all
from experiments.large_minibatch_report import OUTCOME, Configuration, Result, Settings, read_results, write_report
from torrential.data.find import set_data_dir
from torrential.errors import BadInput, NonFiniteLoss, RunFailed
from torrential.records import replace_file
from torrential.run import train
from torrential.tasks import load_task

_LARGEST_MICRO_BATCH = 4096
_WITHIN_POINTS = 0.3
_LARS_TRUST = 0.001
_LARS_RATE, _LARS_BATCH = 10.0, 4096  # You et al. (2017) had 10 at 4k; square root from there; not tuned here
_GROW_FACTOR = 0.2  # as Smith et al. 2018


def sweep(settings: Settings) -> list[Configuration]:
    return [_configuration(settings, "batch", batch, "the whole recipe") for batch in settings.batches]


def ablations(settings: Settings, top: int) -> list[Configuration]:
    """LARS comes with another schedule and rates of its own, so each of its batches is also run with that schedule
    alone."""
    base = settings.base_batch
    beyond = [k * top for k in (2, 4, 8) if k * top <= settings.samples]

    def at(batch: int, kind: str, about: str, **changes: Any) -> Configuration:
        return _configuration(settings, kind, batch, about, **changes)

    lars_rate = _LARS_RATE * (base / _LARS_BATCH) ** 0.5
    lars = {"layerwise": "lars", "trust": _LARS_TRUST, "scaling": "sqrt", "lr": lars_rate}
    return [
        at(top, "no-warmup", "no warm-up", warmup=0.0),
        at(top, "constant-warmup", "constant warm-up", warmup_kind="constant"),
        at(top, "sqrt", "rate × square root of the batch", scaling="sqrt"),
        at(top, "no-scaling", "the base rate", scaling="none"),
        at(top, "loss-scaling", "the loss scaled, not the rate", scaling="loss"),
        at(top, "gamma-one", "last gamma from 1", zero_gamma=False),
        at(base, "gamma-one", "last gamma from 1", zero_gamma=False),
        *(at(batch, "poly", "polynomial decay", schedule="poly") for batch in beyond),
        *(at(batch, "lars", "polynomial decay and LARS", schedule="poly", **lars) for batch in beyond),
        at(base, "decay", "rate / 5 at each milestone", factor=_GROW_FACTOR),
        at(base, "grow", "batch × 5 instead, up to a tenth of the data", factor=_GROW_FACTOR, grow=True),
    ]


def _configuration(settings: Settings, kind: str, batch: int, about: str, **changes: Any) -> Configuration:
    micro = min(batch, _LARGEST_MICRO_BATCH)
    if batch % micro:
        raise BadInput(f"a batch above {micro} must be a multiple of it (given: {batch})")
    base = settings.base_batch
    options = {"batch_size": micro, "accumulate": batch // micro, "recipe": "goyal", "ghost": base, "base_batch": base}
    options |= {"lr": settings.base_rate, "warmup": settings.warmup} | changes
    times = batch / base
    scaling = {"linear": times, "sqrt": times**0.5, "none": 1.0, "loss": 1.0}[changes.get("scaling", "linear")]
    return Configuration(kind=kind, batch=batch, rate=options["lr"] * scaling, about=about, options=options)


def _turn(what: tuple[int, Configuration]) -> tuple[bool, int]:
    """Long runs early, but three seeds of everything come before more of anything."""
    seed, configuration = what
    return seed >= 3, configuration.batch


def top_batch(settings: Settings, results: list[Result]) -> int | None:
    """The largest batch about as good as the base; None while runs of the sweep are missing."""
    found = {result.configuration.batch: result for result in results if result.configuration.kind == "batch"}
    complete = all(b in found and len(found[b].runs) >= settings.seeds for b in settings.batches)
    base = found.get(settings.base_batch)
    if not complete or base is None or base.error is None:
        return None
    margin = max(_WITHIN_POINTS, 2 * base.error.deviation)
    good = [
        batch
        for batch, result in found.items()
        if result.error is not None and not result.diverged and result.error.mean <= base.error.mean + margin
    ]
    return max(good)


def run_one(configuration: dict[str, Any], seed: int, directory: Path, task: str, epochs: int, device: str) -> None:
    """Trains in this process's name; what is there from an interrupted try is removed first."""
    shutil.rmtree(directory, ignore_errors=True)
    began, outcome, message = time.monotonic(), "finished", ""
    try:
        train(task, epochs=epochs, seed=seed, device=device, out=directory, progress=False, **configuration)
    except RunFailed as error:
        message = str(error)
        if not isinstance(error, NonFiniteLoss) and "the loss turned" not in message:
            raise
        outcome = "diverged"
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)  # the records are what counts here
    seconds = round(time.monotonic() - began, 1)
    replace_file(
        directory / OUTCOME,
        json.dumps({"outcome": outcome, "seconds": seconds, "message": message}).encode(),
    )


class Experiment:
    def __init__(self, settings: Settings, args: argparse.Namespace) -> None:
        self.settings, self.args, self.out = settings, args, Path(args.out)
        self.deadline = time.monotonic() + (args.seconds or float("inf"))
        self.failed: list[str] = []

    def run(self) -> None:
        self._run(sweep(self.settings))
        top = self.top()
        if top is not None:
            self._run(ablations(self.settings, top))

    def top(self) -> int | None:
        return self.args.top or top_batch(self.settings, self.results(sweep(self.settings)))

    def results(self, configurations: list[Configuration]) -> list[Result]:
        return read_results(self.out / "runs", configurations, self.settings.seeds)

    def report(self) -> None:
        top = self.top()
        configurations = sweep(self.settings) + (ablations(self.settings, top) if top else [])
        write_report(self.out, self.settings, top, self.results(configurations))
        print(f"written: {self.out}/table.md, results.json", file=sys.stderr)

    def _run(self, configurations: list[Configuration]) -> None:
        only = self.args.only.split(",") if self.args.only else None
        chosen = [c for c in configurations if only is None or {c.name, c.kind} & {*only}]
        todo = {
            f"{c.name}-{seed}": (c, seed)
            for seed, c in sorted(product(range(self.settings.seeds), chosen), key=_turn)
            if not (self.out / "runs" / f"{c.name}-{seed}" / OUTCOME).exists()
        }
        done, total = 0, len(todo)

        def ended(job: Job, well: bool, left: float) -> None:
            nonlocal done
            done += 1
            configuration, seed = todo[job.name]
            if well:
                run = next(r for r in self.results([configuration])[0].runs if r.seed == seed)
                said = f"error {run.error:.2f} %, {run.seconds:.0f} s" if run.error is not None else run.outcome
            else:
                self.failed.append(job.name)
                said = f"failed: {last_line(self.out / 'logs' / f'{job.name}.log')}"
            print(f"[{done}/{total}] {job.name}: {said} · {left / 60:.1f} min left", file=sys.stderr, flush=True)

        skipped = run_all(
            [Job(name, self._command(name, *what)) for name, what in todo.items()],
            at_once=self.args.jobs,
            deadline=self.deadline,
            logs=self.out / "logs",
            expected=lambda name: self._expected(todo[name][0]),
            ended=ended,
        )
        if skipped:
            print(f"no time for {len(skipped)} of {total} runs; call again to go on", file=sys.stderr)

    def _expected(self, configuration: Configuration) -> float | None:
        """From this configuration's other seeds, else the longest that any run took."""
        known = self._seconds(f"{configuration.name}-[0-9]*")
        return statistics.mean(known) if known else max(self._seconds("*"), default=None)

    def _seconds(self, pattern: str) -> list[float]:
        return [json.loads(path.read_bytes())["seconds"] for path in self.out.glob(f"runs/{pattern}/{OUTCOME}")]

    def _command(self, name: str, configuration: Configuration, seed: int) -> list[str]:
        what = {
            "configuration": configuration.options | {"threads": self.args.threads},
            "seed": seed,
            "directory": str(self.out / "runs" / name),
            "task": self.settings.task,
            "epochs": self.settings.epochs,
            "device": self.args.device,
            "data_dir": self.args.data_dir,
        }
        return [sys.executable, "-m", "experiments.large_minibatch", "--one", json.dumps(what)]


def settings_for(args: argparse.Namespace) -> Settings:
    """Those that OUT was begun with; the rest of a started experiment must be like them."""
    path = Path(args.out) / "settings.json"
    before = Settings.load(path) if path.exists() else None
    if before is not None and args.report:
        return before
    task = load_task(args.task)
    settings = Settings(
        task=args.task,
        epochs=args.epochs,
        seeds=args.seeds,
        base_batch=args.base_batch,
        batches=sorted({args.base_batch, *(int(batch) for batch in args.batches.split(","))}),
        warmup=args.epochs * 5 / 90 if args.warmup is None else args.warmup,
        lr=task.optimizer_spec.lr,
        task_batch=task.batch_size,
        samples=len(task.train),  # type: ignore[arg-type]
    )
    if before is not None and before.fixed() != settings.fixed():
        raise BadInput(f"{args.out} holds runs with {before.fixed()}, not {settings.fixed()}; choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, settings.dump())
    return settings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/large-minibatch")
    parser.add_argument("--task", default="fashion-resnet")
    parser.add_argument("--data-dir", help="where the task's data is")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5, help="how many runs of each configuration")
    parser.add_argument("--base-batch", type=int, default=32, help="as of one worker")
    parser.add_argument("--batches", default="32,64,128,256,512,1024,2048,4096,8192,16384")
    parser.add_argument("--warmup", type=float, help="epochs; by default 5 of 90, as in the paper")
    parser.add_argument("--top", type=int, help="the batch of the ablations; by default decided from the sweep")
    parser.add_argument("--only", help="names or kinds of configurations, with commas: batch,no-warmup,lars-16384")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run, for arithmetic on the CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, help="start nothing that would not end within this")
    parser.add_argument("--report", action="store_true", help="only write the table anew from the runs that are there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        what = json.loads(args.one) if args.one else {"data_dir": args.data_dir}
        data_dir = what.pop("data_dir")
        set_data_dir(Path(data_dir) if data_dir else None)
        if args.one:
            run_one(**what | {"directory": Path(what["directory"])})
            return 0
        experiment = Experiment(settings_for(args), args)
        try:
            if not args.report:
                experiment.run()
        finally:
            experiment.report()
        return 1 if experiment.failed else 0
    except KeyboardInterrupt:
        return 130
    except (BadInput, RunFailed) as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that runs under way are ended, as by Ctrl-C
    sys.exit(main())
