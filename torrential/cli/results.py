"""The commands about runs that there are: `export` and `watch`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from torrential.cli.common import end, err, prepared

EXPORT_EXAMPLES = """Examples:\n
    torrential export runs/digits-allreduce-20260101-120000\n
    torrential export runs/digits-allreduce-20260101-120000 --best --out digits.pt"""
WATCH_EXAMPLES = """Examples:\n
    torrential watch runs\n
    torrential watch runs/compare-digits-20260101-120000 --port 8000"""


def export(
    run: Annotated[Path, typer.Argument(help="The directory of a run, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="A .safetensors or .pt file; model.safetensors in RUN by default.")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The model with the best validation metric, in the place of the newest.")
    ] = False,
) -> None:
    """Write the model of a run as a file that plain PyTorch loads."""
    from torrential.exporting import how_to_load, write_model

    path, checkpoint = write_model(run, out, best)
    value = "" if checkpoint.value is None else f", {checkpoint.value:.4g} on validation data"
    err.print(f"the model of step {checkpoint.step}{value}; load it with:", highlight=False, soft_wrap=True)
    print(how_to_load(path))


def watch(
    directory: Annotated[Path, typer.Argument(help="A run, a study, or a directory of them.")],
    task: Annotated[str | None, typer.Option(help="Of runs of several tasks, those to show.")] = None,
    port: Annotated[int, typer.Option(help="The port to listen on; a free one by default.", show_default=False)] = 0,
) -> None:
    """Serve a live page of the runs in DIRECTORY on this machine, until Ctrl-C."""
    with prepared(local=False):
        from torrential.reporting import serve

        signal.signal(signal.SIGHUP, end)  # unlike a run, a page is of no use without its terminal
        serve.watch(directory, task, port, lambda address: print(f"{address} (Ctrl-C ends it)", flush=True))
        err.print("stopped", highlight=False)
