"""The command line of `python -m torrential.testing`."""

from __future__ import annotations

import os
from collections import Counter
from time import perf_counter
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from torrential import streams
from torrential.terminal import Terminal, check_output
from torrential.testing.schedule import draw
from torrential.testing.sweep import ScheduleFailed, outcome, outcomes

MOST_FAILURES = 5

app = typer.Typer(add_completion=False)


@app.command()
def sweep(
    seed: Annotated[int | None, typer.Option(help="Only the schedule of this seed, and all about it.")] = None,
    schedules: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
    first: Annotated[int, typer.Option(min=0, help="The seed of the first; the others follow.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
) -> None:
    """Random fault schedules over the shipped strategies, in simulated time."""
    console = Terminal(highlight=False, soft_wrap=True)
    if seed is not None:
        result = outcome(seed)
        said = (
            str(result)
            if isinstance(result, ScheduleFailed)
            else f"{draw(seed)}\n{result or 'nothing'} was lost; all held"
        )
        console.print(said, markup=False)
        raise typer.Exit(isinstance(result, ScheduleFailed))
    began, done, lost, failures = perf_counter(), 0, Counter[str](), list[ScheduleFailed]()
    with _bar(console) as bar:
        task = bar.add_task("schedules", total=schedules)
        for result in outcomes(range(first, first + schedules), jobs):
            bar.advance(task)
            done += 1
            if isinstance(result, ScheduleFailed):
                failures.append(result)
                bar.console.print(str(result), markup=False)
                if len(failures) == MOST_FAILURES:
                    break
            elif result:
                lost["parameters" if result.startswith("parameters") else result] += 1
    minutes = (perf_counter() - began) / 60
    console.print(
        f"{done} schedules in {minutes:.1f} min ({done / minutes:.0f} a minute): {len(failures)} failed; "
        f"lost in {sum(lost.values())}: {dict(lost)}"
    )
    raise typer.Exit(bool(failures))


def _bar(console: Terminal) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


def main() -> None:
    """Entry point. The exit code is 0, 1 (a schedule failed, or standard output is lost) or 2 (bad arguments)."""
    streams.keep()
    os.environ["PYTHONSAFEPATH"] = "1"  # the processes of --jobs import nothing from the current directory, either
    try:
        app()
    except SystemExit as end:
        raise SystemExit(int(end.code or 0) or check_output(Terminal(stderr=True))) from None
