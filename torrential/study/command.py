"""The commands `compare` and `report`. Imports nothing heavy before it is asked to do something."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torrential import completion
from torrential.errors import BadInput
from torrential.terminal import Terminal, printable_json

if TYPE_CHECKING:
    from torrential.study.ask import StudyRequest
    from torrential.study.results import Study

WriteReport = Callable[["Study", Path], None]
WORKERS = "2"
TRIALS = "5"  # with which up to four entries can be told apart
TENSORBOARD = "Write the runs as event files for TensorBoard, too."
EXAMPLES = """Examples:\n
    torrential compare digits --strategies allreduce,downpour,ssp --target 0.97 --set slow=1:4\n
    torrential compare digits --strategies downpour:push_every=5+lr=0.02,ssp:staleness=3 --target 0.97 --workers 2,4\n
    torrential compare my_task.py --strategies allreduce,ssp --target 0.9 --tune lr=0.01,0.03,0.1 --trials auto\n
    torrential compare --resume runs/compare-digits-20260101-120000"""


def add(
    app: typer.Typer,
    ending: Callable[[], AbstractContextManager[Any]],
    options: Callable[[list[str]], dict[str, Any]],
    write_report: WriteReport,
) -> None:
    """`ending` makes signals exceptions; `options` reads what is after --set."""
    err = Terminal(stderr=True)

    @app.command(epilog=EXAMPLES)
    def compare(
        task: Annotated[
            str | None,
            typer.Argument(
                help="A built-in task, file.py[:name], or a script for 'torrential launch'.",
                show_default=False,
                autocompletion=completion.tasks,
            ),
        ] = None,
        args: Annotated[
            list[str] | None, typer.Argument(help="Of a script, its own arguments, after --.", show_default=False)
        ] = None,
        strategies: Annotated[
            list[str] | None,
            typer.Option(
                help="Ways to train, as in allreduce,ssp:staleness=3,mine.py:Mine; options of one entry "
                "after ':', joined by '+': those of --set, and lr, batch_size, workers, servers.",
                show_default=False,
                autocompletion=completion.strategies,
            ),
        ] = None,
        target: Annotated[
            float | None, typer.Option(help="The value of validation to reach; the task's own by default.")
        ] = None,
        minimize: Annotated[
            bool | None, typer.Option("--minimize", help="A smaller value of what a script reports is better.")
        ] = None,
        trials: Annotated[
            str | None,
            typer.Option(
                help=f"Runs of each entry; {TRIALS} by default. auto: until it is decided which entry is soonest, at "
                "most 20, or N with auto:N."
            ),
        ] = None,
        workers: Annotated[
            str | None, typer.Option(help=f"Worker processes, as in 2,4: each entry with each; {WORKERS} by default.")
        ] = None,
        servers: Annotated[int | None, typer.Option(help="Parameter servers, of entries that have any.")] = None,
        epochs: Annotated[int | None, typer.Option(help="Passes over the data; the task's own by default.")] = None,
        steps: Annotated[
            int | None, typer.Option(help="Stop after so many steps of the first entry; others after as many samples.")
        ] = None,
        batch_size: Annotated[int | None, typer.Option(help="Samples per worker and step.")] = None,
        lr: Annotated[
            float | None,
            typer.Option(help="Learning rate; the task's own by default, or 0.01 for Adagrad of downpour."),
        ] = None,
        seed: Annotated[int | None, typer.Option(help="The seeds of all runs are made from it; 0 by default.")] = None,
        device: Annotated[
            str | None, typer.Option(help="auto (the default), cpu or cuda.", autocompletion=completion.devices)
        ] = None,
        world: Annotated[
            str | None,
            typer.Option(
                help="local (this machine's processes, the default), ray or sim.", autocompletion=completion.worlds
            ),
        ] = None,
        cluster: Annotated[
            str | None,
            typer.Option(
                help="What is simulated, as in laptop,mine.toml: each entry on each.",
                autocompletion=completion.clusters,
            ),
        ] = None,
        set_: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                help="name=value for all entries; evaluate_every counts steps of the first entry.",
                autocompletion=completion.settings,
            ),
        ] = None,
        tune: Annotated[
            list[str] | None,
            typer.Option(help="Values that every entry tries first, as in lr=0.01,0.03,0.1; validation data decides."),
        ] = None,
        tune_trials: Annotated[int | None, typer.Option(help="Runs with each such value; 1 by default.")] = None,
        out: Annotated[
            Path | None, typer.Option(help="Directory for the study; a fresh one under runs/ by default.")
        ] = None,
        resume: Annotated[
            Path | None,
            typer.Option(help="Go on with the study in this directory; runs the task's file that it names."),
        ] = None,
        data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.", envvar="TORRENTIAL_DATA")] = None,
        tensorboard: Annotated[bool, typer.Option("--tensorboard", help=TENSORBOARD)] = False,
        json: Annotated[bool, typer.Option("--json", help="End stdout with one JSON object.")] = False,
    ) -> None:
        """Train TASK in several ways, several times each, and say which reaches the target soonest.

        Runs take turns, each with a seed of its own. Called again with the same --out, or with --resume, a study goes
        on where it was stopped: no run that ended is repeated.
        """
        given = {
            "strategies": strategies,
            "target": target,
            "minimize": minimize,
            "trials": trials,
            "workers": workers,
            "servers": servers,
            "epochs": epochs,
            "steps": steps,
            "batch-size": batch_size,
            "lr": lr,
            "seed": seed,
            "device": device,
            "world": world,
            "cluster": cluster,
            "set": set_,
            "tune": tune,
            "tune-trials": tune_trials,
            "out": out,
            "args": args or None,
        }
        with ending():
            from torrential.data import find
            from torrential.study.compare import carry_out
            from torrential.study.directory import read_question
            from torrential.study.tensorboard import check_tensorboard

            if tensorboard:
                check_tensorboard()
            find.set_data_dir(data_dir)
            if resume is not None:
                changed = [f"--{name}" for name, value in given.items() if value is not None]
                if changed or task is not None:
                    raise BadInput(f"a resumed study keeps its question; leave out {', '.join(changed) or task}")
                asked, out = read_question(resume).asked, resume
                _check_resumable(resume, asked)
            else:
                asked = _asked(task, given, options(set_ or []))
            study = carry_out(asked, out, err)
            try:
                _tell(study, json, tensorboard, write_report, err)
            except BaseException as error:
                if not isinstance(error, Exception):  # Ctrl-C, or asked to end
                    all_there = "stopped; all runs are there, and their report is written by: torrential report"
                    err.print(f"{all_there} {study.directory}", highlight=False, soft_wrap=True)
                raise

    @app.command()
    def report(
        directory: Annotated[Path, typer.Argument(help="A study, a directory of runs, or one run.")],
        task: Annotated[
            str | None,
            typer.Option(help="Of runs of several tasks, those to show; by default those there are most of."),
        ] = None,
        tensorboard: Annotated[bool, typer.Option("--tensorboard", help=TENSORBOARD)] = False,
        json: Annotated[bool, typer.Option("--json", help="End stdout with one JSON object.")] = False,
    ) -> None:
        """Say what the runs in DIRECTORY show, and write it as a page (report.html) and as a table (trials.csv)."""
        with ending():
            from torrential.study.read import read_study
            from torrential.study.tensorboard import check_tensorboard

            if tensorboard:
                check_tensorboard()
            _tell(read_study(directory, task), json, tensorboard, write_report, err)


def _check_resumable(directory: Path, asked: StudyRequest) -> None:
    """A study goes on from its directory alone if that is the caller's own and names all that it takes."""
    from torrential.study.ask import split_entries
    from torrential.study.results import STUDY
    from torrential.userfiles import check_own

    if asked.program:
        raise BadInput(
            f"the task or a strategy of {directory} was made in a program; go on there with the same "
            f"tt.compare(..., out={str(directory)!r})"
        )
    remedy = "look at that file, then put the question yourself, with --out in the place of --resume"
    for spec in (asked.task, *(strategy for strategy, _ in split_entries(asked.strategies))):
        check_own(directory / STUDY, spec, remedy)


def _asked(task: str | None, given: dict[str, Any], options: dict[str, Any]) -> StudyRequest:
    from torrential.study.ask import StudyRequest, absolute_entries, split_trials, split_tune
    from torrential.userfiles import absolute_spec

    if task is None:
        raise BadInput("which task? give a built-in name (see 'torrential tasks') or file.py[:name]")
    if not given["strategies"]:
        raise BadInput("which strategies? give some with --strategies, as in --strategies allreduce,ssp")
    clusters = [name.strip() for name in (given["cluster"] or "").split(",") if name.strip()]
    clusters = [str(Path(name).absolute()) if Path(name).suffix else name for name in clusters]

    def or_default(name: str, default: Any) -> Any:
        return default if given[name] is None else given[name]

    most, auto = split_trials(or_default("trials", TRIALS))
    return StudyRequest(
        task=absolute_spec(task),
        strategies=[absolute_entries(text) for text in given["strategies"]],
        target=given["target"],
        minimize=bool(given["minimize"]),
        args=given["args"] or [],
        trials=most,
        auto=auto,
        workers=_numbers(or_default("workers", WORKERS)),
        servers=given["servers"],
        epochs=given["epochs"],
        steps=given["steps"],
        batch_size=given["batch-size"],
        lr=given["lr"],
        seed=or_default("seed", 0),
        device=or_default("device", "auto"),
        world=or_default("world", "sim" if clusters else "local"),
        clusters=clusters,
        set=options,
        tune=split_tune(given["tune"] or []),
        tune_trials=or_default("tune-trials", 1),
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise BadInput(f"--workers takes whole numbers, as in 2,4 (given: {text!r})") from error


def _tell(study: Study, json: bool, tensorboard: bool, write_report: WriteReport, err: Terminal) -> None:
    from torrential.study.results import REPORT
    from torrential.study.show import show, to_json, write_csv
    from torrential.study.verdict import judge

    verdict = judge(study)
    show(study, verdict, Terminal(stderr=json))
    page = study.directory / REPORT
    write_report(study, page)
    written = {"runs": write_csv(study), "report": page}
    if tensorboard:
        from torrential.study.tensorboard import write_events

        written = {"TensorBoard": write_events(study)} | written
    for name, path in written.items():
        err.print(f"{name}: {path}", highlight=False, soft_wrap=True)
    if json:
        print(printable_json(to_json(study, verdict, page)))
