"""The command `profile`. Imports nothing heavy before it is asked to do something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torrential import completion
from torrential.errors import BadInput
from torrential.terminal import Terminal, printable_json

if TYPE_CHECKING:
    from torrential.stages.plan import PipelinePlan, TwoLevelNetwork
    from torrential.stages.profile import LayerProfile
    from torrential.stages.rehearse import Rehearsal
    from torrential.task import Task

MEGA = 1e6
EXAMPLES = """Examples:\n
    torrential profile digits\n
    torrential profile digits --stages 2 --schedule gpipe --microbatches 4\n
    torrential profile my_task.py --batch-size 128 --plan 4 --hosts 2 --memory 500 --json"""


def add(app: typer.Typer, ending: Callable[[], AbstractContextManager[Any]]) -> None:
    """`ending` makes signals exceptions."""

    @app.command(epilog=EXAMPLES)
    def profile(
        task: Annotated[
            str, typer.Argument(help="A built-in task, or file.py[:name].", autocompletion=completion.tasks)
        ],
        batch_size: Annotated[
            int | None, typer.Option(help="Samples of a minibatch; the task's own by default.")
        ] = None,
        layers: Annotated[str | None, typer.Option(help="Modules to profile, as in stem,body.0,body.1,head.")] = None,
        runs: Annotated[int, typer.Option(help="Times that each layer is measured; the median counts.")] = 11,
        stages: Annotated[int | None, typer.Option(help="Cut the model into this many stages, a worker each.")] = None,
        plan: Annotated[
            int | None, typer.Option(help="Cut it for this many workers; stages may be replicated.")
        ] = None,
        schedule: Annotated[str, typer.Option(help="How --stages takes turns: gpipe, 1f1b or zero-bubble.")] = "1f1b",
        microbatches: Annotated[int, typer.Option(help="Microbatches that --stages makes of a minibatch.")] = 8,
        hosts: Annotated[int, typer.Option(help="Hosts that the workers are on, in equal shares.")] = 1,
        bandwidth: Annotated[float, typer.Option(help="MB per second between workers of a host.")] = 5000,
        between: Annotated[float, typer.Option(help="MB per second between hosts.")] = 1250,
        memory: Annotated[float | None, typer.Option(help="MB of weights and activations for each worker.")] = None,
        data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.", envvar="TORRENTIAL_DATA")] = None,
        out: Annotated[Path | None, typer.Option(help="Write the profile into this JSON file.")] = None,
        json: Annotated[bool, typer.Option("--json", help="End stdout with one JSON object.")] = False,
    ) -> None:
        """Time every layer of TASK's model, forward and backward; with --stages or --plan, say where to cut it."""
        if stages is not None and plan is not None:
            raise BadInput(f"--stages {stages} and --plan {plan} are two ways to cut a model; give one")
        workers = plan if stages is None else stages
        with ending():
            from torrential.data import find
            from torrential.stages import shown
            from torrential.stages.profile import save_profile
            from torrential.tasks import load_task

            find.set_data_dir(data_dir)
            network = None if workers is None else _network(workers, hosts, bandwidth, between)
            if stages is not None:
                shown.check_schedule(schedule, stages, microbatches)
            loaded = load_task(task)
            found = _measure(loaded, batch_size, layers, runs)
            if out is not None:
                save_profile(found, out)
            cut, rehearsed = None, None
            if network is not None:
                limit = None if memory is None else memory * MEGA
                turns = None if stages is None else (schedule, microbatches)
                cut, rehearsed = _plan(found, network, limit, turns)
            _show(found, cut, rehearsed, Terminal(stderr=json))
            _show_memory(loaded, batch_size or loaded.batch_size, Terminal(stderr=json))
            if json:
                size = batch_size or loaded.batch_size
                print(printable_json(shown.as_json(loaded.name, size, found, cut, rehearsed)))


def _plan(
    layers: Sequence[LayerProfile], network: TwoLevelNetwork, limit: float | None, turns: tuple[str, int] | None
) -> tuple[PipelinePlan, Rehearsal]:
    """A straight pipeline whose stages take turns by a schedule with so many microbatches; without one, PipeDream's
    plan, drawn until every stage has been busy for a while."""
    from torrential.stages import shown
    from torrential.stages.plan import plan_pipeline

    name, parts = turns or ("pipedream", 1)
    straight = turns is not None
    cut = plan_pipeline(layers, network, memory_limit=limit, replicate=not straight, schedule=name, microbatches=parts)
    count = parts if straight else 4 * len(cut.stages)
    return cut, shown.rehearse_plan(layers, cut, network, name, count, parts)


def _network(workers: int, hosts: int, bandwidth: float, between: float) -> TwoLevelNetwork:
    from torrential.stages.plan import TwoLevelNetwork

    if workers < 1 or hosts < 1 or workers % hosts:
        raise BadInput(f"{workers} workers cannot be on {hosts} hosts in equal shares; give a multiple of --hosts")
    for name, value in (("bandwidth", bandwidth), ("between", between)):
        if not value > 0:
            raise BadInput(f"--{name} must be positive (given: {value})")
    return TwoLevelNetwork(
        workers_per_host=workers // hosts,
        hosts=hosts,
        inside_bytes_per_second=bandwidth * MEGA,
        between_bytes_per_second=between * MEGA,
    )


def _measure(task: Task, batch_size: int | None, layers: str | None, runs: int) -> list[LayerProfile]:
    """The profile, with a bar on a terminal while it is made."""
    from rich.progress import Progress

    from torrential.stages.profile import profile_task
    from torrential.worlds.local.nursery import keep_freed_memory

    keep_freed_memory()  # as workers do, who have to take as long
    console = Terminal(stderr=True)
    names = None if layers is None else [name.strip() for name in layers.split(",")]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        place = bar.add_task("profiling layers", total=None)
        return profile_task(
            task,
            batch_size,
            layers=names,
            runs=runs,
            progress=lambda done, count: bar.update(place, completed=done, total=count),
        )


def _show_memory(task: Task, batch_size: int, console: Terminal) -> None:
    from torrential.stages import shown

    console.width = max(console.width, shown.WIDTH)
    try:
        console.print(shown.memory_table(task, batch_size))
    except BadInput as error:  # the model looks at values; its layers are there all the same
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)


def _show(
    layers: Sequence[LayerProfile], cut: PipelinePlan | None, rehearsed: Rehearsal | None, console: Terminal
) -> None:
    from torrential.stages import shown

    console.width = max(console.width, shown.WIDTH)  # better wrapped by the terminal than cut short
    console.print(shown.profile_table(layers))
    if cut is not None and rehearsed is not None:
        console.print(shown.plan_table(layers, cut))
        for line in shown.picture_lines(cut, rehearsed):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
