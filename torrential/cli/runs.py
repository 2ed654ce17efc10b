"""The commands that run something to its end: `train` and `launch`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torrential import completion
from torrential.cli.common import count_roles, err, only_given, options_of, prepared
from torrential.errors import INTERRUPTS, BadInput
from torrential.terminal import printable_json
from torrential.worlds.local.launch import Launch

if TYPE_CHECKING:
    from torrential.worlds.base import Job
    from torrential.worlds.hosts.rendezvous import Rendezvous
    from torrential.worlds.ray.agents import Agents

TRAIN_EXAMPLES = """Examples:\n
    torrential train digits --workers 2\n
    torrential train my_task.py --workers 4 --set transport=tcp --target 0.98\n
    torrential train digits --workers 4 --set restart=true --set accumulate=2\n
    torrential train digits --strategy downpour --workers 64 --servers 4 --cluster spot64\n
    torrential train digits --workers 16 --world ray --set hosts=4\n
    torrential train digits --epochs 50 --patience 5 --keep-best 1 --log tensorboard\n
    torrential train --resume runs/digits-allreduce-20260101-120000\n
    torrential train --resume runs/digits-allreduce-20260101-120000 --epochs 100"""
LAUNCH_EXAMPLES = """Examples:\n
    torrential launch train.py --workers 4\n
    torrential launch train.py --workers 4 --strategy ssp --set staleness=2 --target 0.97 -- --lr 0.1\n
    torrential launch --resume runs/train-allreduce-20260101-120000 --epochs 20"""


def train(
    task: Annotated[
        str | None,
        typer.Argument(help="A built-in task, or file.py[:name].", show_default=False, autocompletion=completion.tasks),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="How workers cooperate: a name ('torrential strategies' lists them) or file.py[:Class]; allreduce by "
            "default.",
            autocompletion=completion.strategies,
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; 1 by default.")] = None,
    servers: Annotated[int | None, typer.Option(help="Parameter servers; 1 for strategies that need them.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; the task's own by default.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Stop after this many steps; ssp and downpour finish what is under way.")
    ] = None,
    target: Annotated[float | None, typer.Option(help="Stop when validation reaches this value.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after this many evaluations in a row without improvement.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option(help="Keep this many of the best checkpoints beside the two newest.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per worker and step.")] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate; the task's own by default, or 0.01 for Adagrad of downpour (LARS wants a larger one)."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random; 0 by default.")] = None,
    device: Annotated[
        str | None, typer.Option(help="auto (the default), cpu or cuda.", autocompletion=completion.devices)
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(
            help="local (this machine's processes, the default), hosts (with --rendezvous), ray or sim.",
            autocompletion=completion.worlds,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="What is simulated: a TOML file, or laptop, spot64, goyal256.", autocompletion=completion.clusters
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(help="HOST:PORT, an address of host 0: train on several hosts; the same command runs on each."),
    ] = None,
    host_rank: Annotated[int | None, typer.Option(help="The number of this host, from 0 on.")] = None,
    hosts: Annotated[int | None, typer.Option(help="The number of hosts.")] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the secret that all hosts know; TORRENTIAL_SECRET by default.", show_default=False
        ),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Write trace.json, for Perfetto.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="name=value: an option of the strategy, the world or the recipe for large batches; "
            "'torrential strategies NAME' shows and explains them all.",
            autocompletion=completion.settings,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the run; a fresh one under runs/ by default.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this directory; runs the files of task and strategy that it names. Further "
            "than it was to go with --epochs, --steps, --target or --patience."
        ),
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            help="Loggers that hear of the run, as in tensorboard,wandb,mlflow.", autocompletion=completion.loggers
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data sets are.", envvar="TORRENTIAL_DATA")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve a live page of the run while it goes on.")] = False,
    port: Annotated[int | None, typer.Option(help="The port of --watch; a free one by default.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End stdout with one JSON object.")] = False,
) -> None:
    """Train TASK on this machine's processes, on those of several hosts, or on a simulated cluster."""
    if port is not None and not watch:
        raise BadInput(f"--port {port} is the port of the live page; give --watch as well, or leave it out")
    meeting = _meeting(rendezvous, host_rank, hosts, secret_file, world)
    if meeting is not None:
        world = "hosts"
    with contextlib.ExitStack() as stack:
        here = world not in ("ray", "sim") and cluster is None
        launch = stack.enter_context(prepared(here, count_roles(workers, servers)))
        if meeting is not None and meeting.host:
            from torrential.worlds.hosts.program import follow

            assert launch is not None
            err.print(f"host {meeting.host} of {meeting.hosts}", highlight=False)
            return follow(meeting, launch, task, None if data_dir is None else str(data_dir))
        options = options_of(set_ or []) | only_given(patience=patience, keep_best=keep_best)
        agents = None
        if world == "ray" and resume is None and task is not None:
            from torrential.worlds.ray.agents import agents_for

            agents = agents_for(options, 1 if workers is None else workers)  # they load torch while it is loaded here
            stack.callback(agents.close)
            options["hosts"] = agents.hosts
        from torrential.data import find
        from torrential.limits import OF_SETTINGS
        from torrential.listeners.loggers import make_loggers
        from torrential.opening import open_run, resume_run
        from torrential.reporting.serve import check_port
        from torrential.resolve import RunRequest
        from torrential.tasks import load_task

        loggers = [] if log is None else make_loggers(log)
        find.set_data_dir(data_dir)
        if port is not None:
            check_port(port)  # before there is a directory
        if resume is not None:
            kept: dict[str, object] = {
                "batch-size": batch_size,
                "lr": lr,
                "out": out,
                "workers": workers,
                "servers": servers,
            }
            kept |= {"seed": seed, "device": device, "world": None if meeting else world, "cluster": cluster}
            changed = [f"--{name}" for name, value in kept.items() if value is not None]
            changed += [f"--set {name}" for name in options if name not in OF_SETTINGS]
            if changed:
                raise BadInput(f"a resumed run keeps its options; leave out {', '.join(changed)}")
            limits = options | only_given(epochs=epochs, steps=steps, target=target)
            job = resume_run(resume, None if task is None else load_task(task), strategy, limits)
        elif task is None:
            raise BadInput("which task? give a built-in name (see 'torrential tasks') or file.py[:name]")
        else:
            loaded = load_task(task)
            asked = RunRequest(
                task=loaded,
                source=task,
                strategy=strategy or "allreduce",
                options=options | ({"trace": True} if trace else {}) | ({"hosts": meeting.hosts} if meeting else {}),
                workers=1 if workers is None else workers,
                servers=servers,
                epochs=epochs,
                steps=steps,
                target=target,
                batch_size=batch_size,
                lr=lr,
                seed=seed or 0,
                device=device or "auto",
                world=world or ("local" if cluster is None else "sim"),
                cluster=cluster,
            )
            job = open_run(asked, out)
        page = page_shown(job.directory, port) if watch else contextlib.nullcontext()
        _carry_out(job, agents or launch, json, "train", loggers, page, meeting)


def _meeting(
    where: str | None, host: int | None, hosts: int | None, secret_file: Path | None, world: str | None
) -> Rendezvous | None:
    """Where this host meets others, if it does."""
    if where is None:
        given = {"--host-rank": host, "--hosts": hosts, "--secret-file": secret_file}
        if named := [name for name, value in given.items() if value is not None]:
            raise BadInput(f"{named[0]} is for runs on several hosts; give --rendezvous HOST:PORT as well")
        if world == "hosts":
            raise BadInput("--world hosts needs --rendezvous HOST:PORT, the address of host 0")
        return None
    if world not in (None, "hosts"):
        raise BadInput(f"--rendezvous is for --world hosts (given: --world {world}); leave one out")
    from torrential.worlds.hosts.rendezvous import rendezvous

    return rendezvous(where, host, hosts, secret_file)


def launch(
    script: Annotated[
        Path | None, typer.Argument(help="A Python file that calls tt.join().", show_default=False)
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments, after --.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="How workers cooperate; allreduce by default.", autocompletion=completion.strategies),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; 1 by default.")] = None,
    servers: Annotated[int | None, typer.Option(help="Parameter servers; 1 for strategies that need them.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="In the place of what the script gives to run.epochs(...).")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps.")] = None,
    target: Annotated[float | None, typer.Option(help="Stop when a report of the script reaches this value.")] = None,
    minimize: Annotated[bool, typer.Option("--minimize", help="A smaller reported value is better.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of samples and of random draws.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="name=value: an option of the strategy or the world.", autocompletion=completion.settings
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the run; a fresh one under runs/ by default.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = None,
    log: Annotated[
        str | None,
        typer.Option(help="Loggers that hear of the run, as in tensorboard,wandb,mlflow.", show_default=False),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve a live page of the run while it goes on.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End stdout with one JSON object.")] = False,
) -> None:
    """Run a script with a training loop of its own in every worker."""
    with prepared(roles=count_roles(workers, servers)) as nursery:
        from torrential import launching
        from torrential.listeners.loggers import make_loggers

        assert nursery is not None
        loggers = [] if log is None else make_loggers(log)
        if resume is not None:
            given: dict[str, object] = {"workers": workers, "servers": servers, "seed": seed, "out": out}
            given |= {"strategy": strategy}
            changed = [f"--{name}" for name, value in given.items() if value is not None] + ["--set"] * bool(set_)
            if changed:
                raise BadInput(f"a resumed run keeps its options; leave out {', '.join(changed)}")
            if script is not None:
                raise BadInput(f"a resumed run keeps its script and its arguments; leave out {script}")
            limits = only_given(epochs=epochs, steps=steps, target=target)
            job = launching.resume_launch(resume, nursery, limits=limits)
        elif script is None:
            raise BadInput("which script? give a Python file that calls tt.join()")
        else:
            job = launching.open_launch(
                launching.script_of(script, tuple(args or ())),
                nursery,
                out,
                strategy=strategy or "allreduce",
                options=options_of(set_ or []),
                maximize=not minimize,
                workers=1 if workers is None else workers,
                servers=servers,
                epochs=epochs,
                steps=steps,
                target=target,
                seed=seed or 0,
            )
        page = page_shown(job.directory, None) if watch else contextlib.nullcontext()
        _carry_out(job, nursery, json, "launch", loggers, page)


def _carry_out(
    job: Job,
    launch: Launch | Agents | None,
    json: bool,
    command: str,
    listeners: Sequence[Any],
    page: contextlib.AbstractContextManager[Any],
    meeting: Rendezvous | None = None,
) -> None:
    """Run it to its end, and show what came of it. `command`: the one by which it goes on if it is stopped; `page`: the
    live page, or nothing."""
    from torrential import records, run
    from torrential.progress import final_table

    err.print(f"run directory: {job.directory}", highlight=False, soft_wrap=True)
    gathering = None
    if meeting is not None:
        from torrential.worlds.hosts.gathering import Gathering

        gathering = Gathering(meeting)
    try:
        began = time.monotonic()
        with page:
            result = run.execute(job, launch, lambda j: run.show_progress(j, err), listeners, gathering)
    except INTERRUPTS:
        onward = f"torrential {command} --resume {job.directory}"
        err.print(f"stopped; go on with: {onward}", highlight=False, soft_wrap=True)
        raise
    err.print(final_table(result.summary, time.monotonic() - began))
    if json:
        print(printable_json(records.encode(result.summary).decode()))


@contextlib.contextmanager
def page_shown(directory: Path, port: int | None) -> Iterator[None]:
    """A block beside which a live page of the run is served; its address is printed."""
    from torrential.reporting.beside import page_beside

    with page_beside(directory, port or 0) as address:
        err.print(f"live page: {address}", highlight=False, soft_wrap=True)
        yield
