"""The command line as a whole: all commands, in the order in which the help shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from torrential import stages_command
from torrential.cli import listing, measuring, results, runs
from torrential.cli.common import options_of, prepared
from torrential.study import command as studies
from torrential.version import __version__

app = typer.Typer(
    name="torrential",
    help="Train one script in any distributed way, and see which reaches the target soonest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Measure torrential itself on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def write_report(study: Any, path: Path) -> None:
    from torrential.reporting.page import write_report

    write_report(study, path)


app.command(epilog=runs.TRAIN_EXAMPLES)(runs.train)
app.command(epilog=runs.LAUNCH_EXAMPLES)(runs.launch)
app.command(epilog=results.EXPORT_EXAMPLES)(results.export)
bench.command(epilog=measuring.ALLREDUCE_EXAMPLES)(measuring.allreduce)
app.command(epilog=results.WATCH_EXAMPLES)(results.watch)
app.command()(listing.tasks)
app.command()(listing.strategies)
studies.add(app, lambda: prepared(local=False), options_of, write_report)
stages_command.add(app, lambda: prepared(local=False))
