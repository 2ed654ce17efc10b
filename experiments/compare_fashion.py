"""Fashion-MNIST to a fixed validation accuracy: every strategy and plain PyTorch DDP, under the rules of one study.

python -m experiments.compare_fashion --out OUT               # all of it; called again, it goes on where it was stopped
python -m experiments.compare_fashion --out OUT --report      # only the tables and pictures of what is there
python -m experiments.compare_fashion --out OUT --workers 16

Two studies, as `torrential compare` makes them and `torrential report` reads them:

    OUT/nobody      nobody is slow
    OUT/straggler   worker 1 takes four times as long for every batch (slow=1:4)

One entry is PyTorch's own: `ddp`, in turn with the others, by the same plan: an order drawn for each trial, a seed for
each run. Written: report.html and trials.csv in both, OUT/table.md, OUT/results.json,
OUT/times.png and OUT/curves.png (with matplotlib).
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from torrential.errors import TorrentialError
from torrential.progress import metric_value
from torrential.records import replace_file
from torrential.reporting.page import write_report
from torrential.study.ask import Question, StudyRequest
from torrential.study.conduct import conduct
from torrential.study.directory import locked, open_directory
from torrential.study.outlook import outlook
from torrential.study.question import Subject, make_question
from torrential.study.read import read_study
from torrential.study.results import STUDY, Entry, Run, Study
from torrential.study.runner import Train
from torrential.study.show import show, to_json, write_csv
from torrential.study.verdict import Row, Verdict, judge
from torrential.study.watch import StudyProgress
from torrential.tasks import load_task

DDP = "ddp"
CONDITIONS: dict[str, tuple[str, dict[str, str]]] = {
    "nobody": ("nobody is slow", {}),
    "straggler": ("worker 1 is 4× slow", {"slow": "1:4"}),
}
STRATEGIES = ["allreduce", "bsp", "ssp", "backup", "downpour:server=adagrad+lr=0.02", DDP]
TARGET = 0.87
EPOCHS = 3  # after which a run has missed the target
EVERY = 6400  # samples between two evaluations
SEED = 1  # a pilot with 0 chose the target
TRIALS = 6  # fewer cannot show a difference between six entries


def ask(args: argparse.Namespace, condition: str) -> tuple[Question, Subject]:
    """The question that `torrential compare` would ask."""
    joined = args.workers * load_task(args.task).batch_size  # of a step of the first entry
    asked = StudyRequest(
        task=args.task,
        strategies=list(STRATEGIES),
        target=args.target,
        trials=args.trials,
        workers=[args.workers],
        epochs=args.epochs,
        seed=SEED,
        device="cpu",
        set=CONDITIONS[condition][1] | {"evaluate_every": str(max(1, args.every // joined))},
    )
    return make_question(asked, sys.argv)


def carry_out(args: argparse.Namespace, condition: str, err: Console) -> None:
    question, subject = ask(args, condition)
    directory = Path(args.out) / condition
    with locked(directory):
        question = open_directory(directory, question)
        err.print(f"{CONDITIONS[condition][0]}: {'; '.join(outlook(question))}", highlight=False, soft_wrap=True)
        watching = StudyProgress(question.metric, question.asked.target or 0.0, err)
        runner = Train(question, subject, watching)
        try:
            conduct(question, directory, runner, watching)
        finally:
            watching.close()
            runner.close()


# -- what came of it --------------------------------------------------------------------------------------------------
def report(out: Path, console: Console) -> None:
    found = {name: read_study(out / name) for name in CONDITIONS if (out / name / STUDY).exists()}
    verdicts = {name: judge(study) for name, study in found.items()}
    for name, study in found.items():
        show(study, verdicts[name], console)
        write_csv(study)
        write_report(study, study.directory / "report.html")
    replace_file(out / "table.md", table(found, verdicts).encode())
    results = {name: json.loads(to_json(study, verdicts[name], None)) for name, study in found.items()}
    replace_file(out / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    draw(out, found)


def table(found: dict[str, Study], verdicts: dict[str, Verdict]) -> str:
    lines = [
        "| slow | entry | reached | seconds | all | samples | samples/s | waiting | test | × ddp |",
        "|---|---|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for name, verdict in verdicts.items():
        for row in verdict.rows:
            if row.trials:
                lines.append(f"| {CONDITIONS[name][0]} | {' | '.join(cells(found[name], verdict, row))} |")
    for name, verdict in verdicts.items():
        said = [*verdict.sentences, *(pair.sentence for pair in verdict.pairs)]
        lines += ["", f"{CONDITIONS[name][0]}:", "", *(f"- {line}" for line in dict.fromkeys(said))]
    return "\n".join(lines) + "\n"


def cells(study: Study, verdict: Verdict, row: Row) -> list[str]:
    runs = row.entry.finished
    samples = [end.samples / 1000 for run in runs if (end := reached(run)) is not None]
    return [
        row.entry.name,
        f"{row.reached} of {row.trials}",
        spread([time for time in row.times if time < float("inf")], 1),
        " ".join("missed" if time == float("inf") else f"{time:.1f}" for time in row.times),
        spread(samples, 1) + "k",
        spread([max(s.samples for s in run.steps) / run.seconds for run in runs if run.steps], 0),
        f"{statistics.mean(map(waiting, runs)):.0%}",
        metric_value(study.metric, row.value.mean) if row.value.count else "–",
        against_ddp(verdict, row),
    ]


def reached(run: Run) -> Any:
    return next((e for e in run.validation if e.time == run.time_to_target), None)


def waiting(run: Run) -> float:
    """The share of the workers' time that was neither computing nor, where that is told apart, sending."""
    total = sum(step.compute + step.communicate + step.wait for step in run.steps)
    return sum(step.wait for step in run.steps) / total if total else 0.0


def against_ddp(verdict: Verdict, row: Row) -> str:
    """How many times sooner than DDP, with the 95 % interval; bold where they differ by the rules of the study."""
    for pair in verdict.pairs:
        names = [pair.first.entry.strategy, pair.second.entry.strategy]
        if DDP in names and row in (pair.first, pair.second) and row.entry.strategy != DDP:
            of = pair.difference
            ratio, low, high = of.ratio, of.low, of.high
            if names[0] == DDP:
                ratio, low, high = 1 / ratio, 1 / high, 1 / low
            text = f"{ratio:.2f} ({low:.2f}–{high:.2f})"
            return f"**{text}**" if pair.differs else text
    return ""


def spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.{digits}f}{deviation}"


def draw(out: Path, found: dict[str, Study]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no pictures: matplotlib is not installed", file=sys.stderr)
        return
    times, curves = (Figure(figsize=(11, 4), layout="constrained") for _ in range(2))
    for figure, part in ((times, _draw_times), (curves, _draw_curves)):
        for axes, (name, study) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
            part(axes, study)
            axes.set_title(CONDITIONS[name][0])
    times.savefig(out / "times.png", dpi=130)
    curves.savefig(out / "curves.png", dpi=130)


def _draw_times(axes: Any, study: Study) -> None:
    for place, entry in enumerate(study.entries):
        times = [run.time_to_target for run in entry.finished if run.time_to_target is not None]
        axes.bar(place, statistics.mean(times) if times else 0.0, 0.7, color=f"C{place}", alpha=0.5)
        axes.plot([place] * len(times), times, ".", color=f"C{place}")
    axes.set_xticks(range(len(study.entries)), [entry.name for entry in study.entries], rotation=20)
    axes.set_ylabel(f"seconds to {metric_value(study.metric, study.target or 0.0)} {study.metric}")


def _draw_curves(axes: Any, study: Study) -> None:
    for place, entry in enumerate(study.entries):
        for number, run in enumerate(entry.finished):
            _draw_curve(axes, entry, run, f"C{place}", labelled=number == 0)
    if study.target is not None:
        axes.axhline(study.target, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_ylim(bottom=study.target - 0.1)
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"validation {study.metric}")
    axes.legend(fontsize=8)


def _draw_curve(axes: Any, entry: Entry, run: Run, colour: str, labelled: bool) -> None:
    seen = [(e.time, e.value) for e in run.validation]
    if seen:
        axes.plot(*zip(*seen, strict=True), color=colour, linewidth=0.9, label=entry.name if labelled else None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/compare_fashion")
    parser.add_argument("--task", default="fashion")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--target", type=float, default=TARGET)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--every", type=int, default=EVERY, help="samples between two evaluations")
    parser.add_argument("--report", action="store_true", help="only write the tables and pictures of what is there")
    args = parser.parse_args(arguments)
    err = Console(stderr=True)
    if not args.report:
        try:
            for condition in CONDITIONS:
                carry_out(args, condition, err)
        except KeyboardInterrupt:
            err.print("stopped; finished runs are kept; call again to go on")
            return 130
        except TorrentialError as error:
            err.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
            return 1
    report(Path(args.out), Console())
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run under way is ended, as by Ctrl-C
    sys.exit(main())
