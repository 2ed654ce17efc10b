"""The command line. Reads arguments and environment, and turns every error on purpose into one clear message."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torrential import completion, descriptors, processes, stages_command, streams
from torrential.errors import BY_THE_TASK, INTERRUPTS, BadInput, Terminated, TorrentialError
from torrential.study import command as studies
from torrential.terminal import Terminal, check_output, printable, printable_json
from torrential.usercode import place_of, refuse_exit, telling_interrupts
from torrential.version import __version__
from torrential.worlds.local.launch import Launch

if TYPE_CHECKING:
    from torrential.options import Option
    from torrential.strategies.base import Strategy
    from torrential.worlds.base import Job

app = typer.Typer(
    name="torrential",
    help="Train one script in any distributed way, and see which reaches the target soonest.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Measure torrential itself on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
_err = Terminal(stderr=True)


@app.command(
    epilog="""Examples:\n
    torrential train digits --workers 2\n
    torrential train my_task.py --workers 4 --set transport=tcp --target 0.98\n
    torrential train digits --workers 4 --set restart=true --set accumulate=2\n
    torrential train digits --strategy downpour --workers 64 --servers 4 --cluster spot64\n
    torrential train digits --epochs 50 --patience 5 --keep-best 1 --log tensorboard\n
    torrential train --resume runs/digits-allreduce-20260101-120000\n
    torrential train --resume runs/digits-allreduce-20260101-120000 --epochs 100"""
)
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
        typer.Option(help="local (this machine's processes, the default) or sim.", autocompletion=completion.worlds),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="What is simulated: a TOML file, or laptop, spot64, goyal256.", autocompletion=completion.clusters
        ),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Write trace.json of a simulation, for Perfetto.")] = False,
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
    """Train TASK on this machine's processes, or on a simulated cluster."""
    if port is not None and not watch:
        raise BadInput(f"--port {port} is the port of the live page; give --watch as well, or leave it out")
    with _launching(world != "sim" and cluster is None, _roles(workers, servers)) as launch:
        from torrential.data import find
        from torrential.limits import OF_SETTINGS
        from torrential.listeners.loggers import make_loggers
        from torrential.opening import open_run, resume_run
        from torrential.reporting.serve import check_port
        from torrential.resolve import RunRequest
        from torrential.tasks import load_task

        loggers = [] if log is None else make_loggers(log)
        find.set_data_dir(data_dir)
        options = _options(set_ or []) | _given(patience=patience, keep_best=keep_best)
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
            kept |= {"seed": seed, "device": device, "world": world, "cluster": cluster}
            changed = [f"--{name}" for name, value in kept.items() if value is not None]
            changed += [f"--set {name}" for name in options if name not in OF_SETTINGS]
            if changed:
                raise BadInput(f"a resumed run keeps its options; leave out {', '.join(changed)}")
            limits = options | _given(epochs=epochs, steps=steps, target=target)
            job = resume_run(resume, None if task is None else load_task(task), strategy, limits)
        elif task is None:
            raise BadInput("which task? give a built-in name (see 'torrential tasks') or file.py[:name]")
        else:
            loaded = load_task(task)
            asked = RunRequest(
                task=loaded,
                source=task,
                strategy=strategy or "allreduce",
                options=options | ({"trace": True} if trace else {}),
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
        page = _page_beside(job.directory, port) if watch else contextlib.nullcontext()
        _carry_out(job, launch, json, "train", loggers, page)


def _carry_out(
    job: Job,
    launch: Launch | None,
    json: bool,
    command: str,
    listeners: Sequence[Any],
    page: contextlib.AbstractContextManager[Any],
) -> None:
    """Run it to its end, and show what came of it. `command`: the one by which it goes on if it is stopped; `page`: the
    live page, or nothing."""
    from torrential import records, run
    from torrential.progress import final_table

    _err.print(f"run directory: {job.directory}", highlight=False, soft_wrap=True)
    try:
        began = time.monotonic()
        with page:
            result = run.execute(job, launch, lambda j: run.show_progress(j, _err), listeners)
    except INTERRUPTS:
        onward = f"torrential {command} --resume {job.directory}"
        _err.print(f"stopped; go on with: {onward}", highlight=False, soft_wrap=True)
        raise
    _err.print(final_table(result.summary, time.monotonic() - began))
    if json:
        print(printable_json(records.encode(result.summary).decode()))


@app.command(
    epilog="""Examples:\n
    torrential launch train.py --workers 4\n
    torrential launch train.py --workers 4 --strategy ssp --set staleness=2 --target 0.97 -- --lr 0.1\n
    torrential launch --resume runs/train-allreduce-20260101-120000 --epochs 20"""
)
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
    with _launching(roles=_roles(workers, servers)) as nursery:
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
            limits = _given(epochs=epochs, steps=steps, target=target)
            job = launching.resume_launch(resume, nursery, limits=limits)
        elif script is None:
            raise BadInput("which script? give a Python file that calls tt.join()")
        else:
            job = launching.open_launch(
                launching.script_of(script, tuple(args or ())),
                nursery,
                out,
                strategy=strategy or "allreduce",
                options=_options(set_ or []),
                maximize=not minimize,
                workers=1 if workers is None else workers,
                servers=servers,
                epochs=epochs,
                steps=steps,
                target=target,
                seed=seed or 0,
            )
        page = _page_beside(job.directory, None) if watch else contextlib.nullcontext()
        _carry_out(job, nursery, json, "launch", loggers, page)


@app.command(
    epilog="""Examples:\n
    torrential export runs/digits-allreduce-20260101-120000\n
    torrential export runs/digits-allreduce-20260101-120000 --best --out digits.pt"""
)
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
    _err.print(f"the model of step {checkpoint.step}{value}; load it with:", highlight=False, soft_wrap=True)
    print(how_to_load(path))


@bench.command(
    epilog="""Examples:\n
    torrential bench allreduce --workers 4\n
    torrential bench allreduce --transport tcp --sizes 4KB,1MB,100MB --algorithms native,ring,halving,auto\n
    torrential bench allreduce --fresh --rounds 21 --plot allreduce.png --json > allreduce.json"""
)
def allreduce(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    sizes: Annotated[
        str | None, typer.Option(help="Of the vector, as in 1KB,4MB; from 1KB to 100MB by default.", show_default=False)
    ] = None,
    transport: Annotated[str, typer.Option(help="What auto may use: shared (memory), unix or tcp.")] = "shared",
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

    Messages go over unix sockets, or tcp with --transport tcp. Every sum is checked. What is measured to predict times
    is kept in ~/.cache/torrential, where training with algorithm=auto finds it.
    """
    with _launching() as launch:
        import msgspec

        from torrential.bench import allreduce as measuring
        from torrential.bench import show

        asked = measuring.ask(workers, sizes or measuring.SIZES, transport, algorithms, rounds, fresh)
        if plot is not None:
            show.check_plot(plot)
        watching = show.BenchmarkProgress(asked, _err)
        try:
            result = measuring.measure(asked, launch, watching)
        finally:
            watching.close()
        console = Terminal(stderr=json)
        console.width = max(console.width, show.WIDTH)  # better wrapped by the terminal than cut short
        console.print(show.table(result))
        if plot is not None:
            show.plot(result, plot)
            _err.print(f"drawn: {plot}", highlight=False)
        if json:
            print(printable_json(msgspec.json.encode(result).decode()))


@contextlib.contextmanager
def _page_beside(directory: Path, port: int | None) -> Iterator[None]:
    from torrential.reporting.beside import page_beside

    with page_beside(directory, port or 0) as address:
        _err.print(f"live page: {address}", highlight=False, soft_wrap=True)
        yield


@app.command(
    epilog="""Examples:\n
    torrential watch runs\n
    torrential watch runs/compare-digits-20260101-120000 --port 8000"""
)
def watch(
    directory: Annotated[Path, typer.Argument(help="A run, a study, or a directory of them.")],
    task: Annotated[str | None, typer.Option(help="Of runs of several tasks, those to show.")] = None,
    port: Annotated[int, typer.Option(help="The port to listen on; a free one by default.", show_default=False)] = 0,
) -> None:
    """Serve a live page of the runs in DIRECTORY on this machine, until Ctrl-C."""
    with _launching(local=False):
        from torrential.reporting import serve

        signal.signal(signal.SIGHUP, _end)  # unlike a run, a page is of no use without its terminal
        serve.watch(directory, task, port, lambda address: print(f"{address} (Ctrl-C ends it)", flush=True))
        _err.print("stopped", highlight=False)


@app.command()
def tasks() -> None:
    """List the built-in tasks."""
    from torrential.tasks import TASKS

    for name, builtin in TASKS.items():
        print(f"{name:16} {builtin.description}")


@app.command()
def strategies(
    name: Annotated[
        str | None,
        typer.Argument(help="One to show in full, or file.py[:Class].", autocompletion=completion.strategies),
    ] = None,
) -> None:
    """List the strategies; with a NAME, the idea of one, and all that --set can set for it, explained."""
    from torrential.strategies.registry import registered, resolve_strategy

    if name is None:
        for known, about in registered().items():
            print(f"{known:14} {about}")
        return
    kind = resolve_strategy(name).kind
    print(_about(kind))
    print("\nWhat can be set with --set name=value; shown with the default, if there is one.")
    for heading, options in _sections(kind):
        print(f"\n{heading}")
        _print_options(options)


def _about(kind: type[Strategy]) -> str:
    """What a strategy does, in its author's words: the docstring of a built-in's file, or of another's class."""
    import inspect

    from torrential.strategies import STRATEGIES

    explained = sys.modules[kind.__module__] if kind in STRATEGIES.values() else kind
    return inspect.getdoc(explained) or kind.name


def _sections(kind: type[Strategy]) -> Iterator[tuple[str, list[Option]]]:
    """All options that have an effect on a strategy: a heading for each owner, and its options."""
    from torrential.config import LocalSettings, Recipe, Settings, SimSettings, without_effect
    from torrential.options import explain
    from torrential.strategies.base import needs_servers

    with_servers = needs_servers(kind)
    own = "." if kind.__struct_fields__ else ": there are none."
    yield f"Options of {kind.name} itself{own}", list(explain(kind))
    for owner in (Settings, LocalSettings, SimSettings, Recipe):
        common = Settings.__struct_fields__ if issubclass(owner, Settings) and owner is not Settings else ()
        hidden = without_effect(with_servers) | {*common}
        options = [option for option in explain(owner) if option.name not in hidden]
        if with_servers:  # which know nothing of a scaled loss
            options = [o._replace(choices=[c for c in o.choices if c != "loss"]) for o in options]
        yield (owner.__doc__ or "").strip(), options


def _print_options(options: Iterable[Option]) -> None:
    import shutil
    from textwrap import TextWrapper

    width = max(40, min(100, shutil.get_terminal_size().columns))
    head = TextWrapper(width, initial_indent="  ", subsequent_indent=" " * 6, break_on_hyphens=False)
    body = TextWrapper(width, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    for option in options:
        default = f"={option.default}" if option.default else ""
        allowed = " | ".join(option.choices) or option.bounds
        choices = f"  ({allowed})" if allowed else ""
        print(head.fill(f"{option.name}{default}{choices}"))
        if option.about:
            print(body.fill(option.about))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _options(pairs: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise BadInput(f"--set takes name=value (given: {pair!r})")
        options[name.strip().replace("-", "_")] = value.strip()
    return options


def _given(**options: Any) -> dict[str, Any]:
    """Those options that were given a value."""
    return {name: value for name, value in options.items() if value is not None}


def _write_report(study: Any, path: Path) -> None:
    from torrential.reporting.page import write_report

    write_report(study, path)


def _roles(workers: int | None, servers: int | None) -> int:
    """Workers and servers at most: whether the strategy has a server is not known yet."""
    return (1 if workers is None else workers) + (1 if servers is None else servers)


def _end(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)  # a whole group may have been sent it, and we be told twice
    raise Terminated(signum)


@contextlib.contextmanager
def _launching(local: bool = True, roles: int = 1) -> Iterator[Launch | None]:
    """`roles`: workers and servers, as far as they are known before torch is loaded."""
    signal.signal(signal.SIGTERM, _end)
    descriptors.raise_limit()
    if local:
        descriptors.check_descriptors(roles, early=True)  # before anything is started
    launch = Launch() if local else None
    try:
        with telling_interrupts():
            yield launch
    finally:
        if launch is not None:
            launch.close()


studies.add(app, lambda: _launching(local=False), _options, _write_report)
stages_command.add(app, lambda: _launching(local=False))


def main() -> None:
    """Entry point. The command is carried out in a child: a task's code may end that, and is not this process.

    Without a terminal, when nobody reads what is printed, a run goes on: its records are what counts.
    """
    streams.keep()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    code, finished = processes.run_in_child(carry_out)
    if code < 0:
        _err.fail(f"the command was ended by {signal.Signals(-code).name}; what a run had recorded is in its directory")
        code = 128 - code
    elif not finished:
        directory = processes.begun()
        _err.fail(_exited(code, directory))
        code = 2 if directory is None else 1
    os._exit(code)  # this process has nothing to take down


def _exited(code: int, directory: Path | None) -> str:
    """What is said where something has ended the child that carried the command out; of a run it goes on record."""
    words = f"the command exited with status {code} before it was done"
    if directory is None:
        return f"{words}, {BY_THE_TASK}"
    from torrential import records
    from torrential.worlds.failure import going_on

    path = directory / records.RECORDS
    found = records.read_records(path) if path.exists() else []
    last = max((record.step for record in found if isinstance(record, records.Step)), default=0)
    said = f"{words} (the last step on record: {last}), {BY_THE_TASK}; {going_on(directory)}"
    records.note_end(directory, records.FAILED, said)
    return said


def carry_out() -> int:
    """The exit code: 0, 1 (the run failed), 2 (bad input), 130 (interrupted), 143 (terminated); and 141 if standard
    output is a pipe that was closed, as of any program that SIGPIPE ends."""
    code = 0
    try:
        _check_arguments()
        with descriptors.explained():
            code = app(standalone_mode=False) or 0
    except TorrentialError as error:
        _err.fail("\n".join([str(error), *getattr(error, "__notes__", ())]))
        code = error.exit_code
    except SystemExit as end:
        if place_of(end):
            refused = refuse_exit(end)
            _err.fail(str(refused))
            code = refused.exit_code
        else:  # what a shell asks for its completion ends like this
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Abort:
        code = 130
    except KeyboardInterrupt:
        code = 130
    except Terminated as end:
        code = 128 + int(end.args[0])
    except ImportError as error:  # what modules in C++ make of a signal that comes while they are loaded
        if not isinstance(error.__cause__, INTERRUPTS):
            raise
        code = 130 if isinstance(error.__cause__, KeyboardInterrupt) else 128 + int(error.__cause__.args[0])
    except OSError as error:  # a directory that cannot be written to, a name that is too long
        if error.filename is None:
            raise
        _err.fail(f"{error.filename}: {error.strerror}")
        code = 1
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")) and hasattr(error, "format_message"):
            if text := _usage(error):  # none where the help itself was the answer
                _err.fail(text)
            code = 2
        else:
            raise
    sys.stdout.flush()  # whoever leaves with a code does so at once
    return code or check_output(_err, " (the records of a run are complete all the same)" if processes.begun() else "")


def _check_arguments() -> None:
    """Names of files need not be text, but manifests, records and pages that name them are."""
    for argument in sys.argv:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"the argument {printable(argument)} is not UTF-8; give another name") from error


def _usage(error: Any) -> str:
    """What is wrong with the arguments; where one could not be converted, with the value given."""
    message = str(error.format_message())
    errors = getattr(error.__cause__, "errors", None)
    return message if errors is None else f"{message} (given: {errors()[0]['input']!r})"
