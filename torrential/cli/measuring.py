"""The commands of `torrential bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torrential.cli.common import err, prepared
from torrential.terminal import Terminal, printable_json

ALLREDUCE_EXAMPLES = """Examples:\n
    torrential bench allreduce --workers 4\n
    torrential bench allreduce --transport tcp --sizes 4KB,1MB,100MB --algorithms native,ring,halving,auto\n
    torrential bench allreduce --fresh --rounds 21 --plot allreduce.png --json > allreduce.json"""


def allreduce(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    sizes: Annotated[
        str | None, typer.Option(help="Of the vector, as in 1KB,4MB; from 1KB to 100MB by default.", show_default=False)
    ] = None,
    transport: Annotated[
        str, typer.Option(help="What auto may use: shared (memory), unix, tcp, or tls (tcp in TLS).")
    ] = "shared",
    algorithms: Annotated[
        str | None,
        typer.Option(help="Some of shared, native (Gloo), naive, direct, ring, halving, blocks, tree, auto; or all."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Times that each is measured, in turns; the median counts.")] = 15,
    fresh: Annotated[bool, typer.Option("--fresh", help="Calibrate even if this machine's costs are known.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw time against size into this PNG file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End stdout with one JSON object.")] = False,
) -> None:
    """Time every way to sum a vector over workers, and what auto makes of it.

    Messages go over unix sockets, or tcp with --transport tcp or tls. Every sum is checked. What is measured to predict
    times is kept in ~/.cache/torrential, where training with algorithm=auto finds it.
    """
    with prepared() as launch:
        import msgspec

        from torrential.bench import allreduce as measuring
        from torrential.bench import show

        asked = measuring.ask(workers, sizes or measuring.SIZES, transport, algorithms, rounds, fresh)
        if plot is not None:
            show.check_plot(plot)
        watching = show.BenchmarkProgress(asked, err)
        try:
            result = measuring.measure(asked, launch, watching)
        finally:
            watching.close()
        console = Terminal(stderr=json)
        console.width = max(console.width, show.WIDTH)  # better wrapped by the terminal than cut short
        console.print(show.table(result))
        if plot is not None:
            show.plot(result, plot)
            err.print(f"drawn: {plot}", highlight=False)
        if json:
            print(printable_json(msgspec.json.encode(result).decode()))
