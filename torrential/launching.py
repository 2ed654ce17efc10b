"""From a script to a run of it: its trial, and the task that stands for it wherever the script does not run."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import select
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from torrential import shipping
from torrential.comm import stream
from torrential.config import NO_LIMIT
from torrential.errors import BadInput, RunFailed, TorrentialError
from torrential.listeners.base import Listener, check_listeners
from torrential.loop.blueprint import Blueprint, OwnLoop, Script
from torrential.opening import config_of, open_run, resume_run
from torrential.records import MANIFEST
from torrential.resolve import RunRequest, split_options
from torrential.run import TrainResult, display_of, execute
from torrential.strategies.base import Strategy
from torrential.strategies.registry import Given, Resolved, is_loadable, resolve_strategy
from torrential.task import Task
from torrential.usercode import refuse_exit, refuse_training, telling_interrupts
from torrential.userfiles import check_own
from torrential.worlds.base import Job
from torrential.worlds.local.launch import Launch
from torrential.worlds.local.orders import Born, Ended, FromNursery, Spawn, Surroundings

TRIAL_SECONDS = 600.0  # until a script has come to its first batch


def script_of(path: str | os.PathLike[str], args: tuple[str, ...] = ()) -> Script:
    """A script that is there, by its absolute path."""
    found = Path(path)
    if not found.is_file():
        raise BadInput(f"there is no script {os.fspath(path)}; give the path of a Python file")
    return Script(str(found.absolute()), args)


def is_script(spec: str) -> bool:
    """Whether a file is a script with a loop of its own: one that calls `join` of torrential."""
    path = Path(spec)
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False  # whoever loads it says what is wrong with it
    names, joins = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "torrential"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torrential":
            joins |= {alias.asname or alias.name for alias in node.names if alias.name == "join"}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return bool(called & ({f"{name}.join" for name in names} | joins))


def try_script(script: Script, workers: int, seed: int, launch: Launch) -> OwnLoop:
    """Run the script up to its first batch in a process of its own."""
    connection: stream.Plain[FromNursery | Spawn] = stream.Plain(launch.socket, FromNursery, ahead=0)
    launch.used = True
    with shipping.pack((script, workers, seed)) as parcel:
        connection.send(Spawn("trial", 0, 0, Surroundings((os.getpid(), *parcel.fds))))
        status = _ended(connection, launch, script)
        if status:
            how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
            raise BadInput(f"{script.name} ended its process {how} before its first batch; look for os._exit in it")
        found = shipping.unpack(*parcel.fds)
    if isinstance(found, TorrentialError):
        raise found
    assert isinstance(found, Blueprint)
    return OwnLoop(script, found)


def _ended(connection: stream.Plain[FromNursery | Spawn], launch: Launch, script: Script) -> int:
    ready = select.poll()  # select itself knows the first 1,024 descriptors only
    ready.register(launch.socket, select.POLLIN)
    while True:
        if not ready.poll(1000 * TRIAL_SECONDS):
            raise BadInput(f"{script.name} did not come to its first batch within {TRIAL_SECONDS:.0f} s")
        try:
            message = connection.receive()
        except stream.Closed as error:
            raise RunFailed("the process that starts workers is gone; run again") from error
        if isinstance(message, Ended):
            return message.status
        assert isinstance(message, Born)


# -- a run of it ------------------------------------------------------------------------------------------------------
def request(
    loop: OwnLoop, *, strategy: Given = "allreduce", options: dict[str, Any], maximize: bool = True, **asked: Any
) -> RunRequest:
    """A run of a script that was tried. The optimizer is the script's, unless an option says otherwise."""
    found, workers = resolve_strategy(strategy), int(asked.get("workers", 1))
    options = _with_the_scripts_optimizer(found, options, strategy)
    probe = RunRequest(task=task_of(loop, maximize, lambda batch: batch), strategy=strategy, options=options)
    made, *_ = split_options(probe, found)
    task = task_of(loop, maximize, lambda batch: made.samples_per_update(workers, batch))
    return RunRequest(task=task, loop=loop, source=None, strategy=strategy, options=options, **asked)


def open_launch(script: Script, launch: Launch, out: Path | None, **asked: Any) -> Job:
    """A run of a script, tried and checked, in a directory of its own."""
    loop = try_script(script, asked["workers"], asked["seed"], launch)
    return open_run(request(loop, **asked), out)


def resume_launch(
    directory: Path, launch: Launch, script: Script | None = None, limits: Mapping[str, Any] | None = None
) -> Job:
    """A run of a script that goes on from its last good checkpoint. `script`: given again where it was a function;
    `limits`: epochs, steps and target in the place of the run's own."""
    config = config_of(directory)
    if config.script is None:
        raise BadInput(f"the run in {directory} is of a task; go on with: torrential train --resume {directory}")
    if script is None:
        if not config.script[0]:
            raise BadInput(f"the run in {directory} is of a function; go on with tt.launch(function, resume=...)")
        check_own(directory / MANIFEST, config.script[0], "look at that file, then launch it anew")
        script = script_of(config.script[0], config.script[1:])
    loop = try_script(script, config.workers, config.seed, launch)
    task = task_of(loop, not config.minimize, lambda batch: config.samples_per_step)
    strategy = resolve_strategy(config.strategy).make(config.options) if is_loadable(config.strategy) else None
    return resume_run(directory, task, strategy, limits, loop)


@telling_interrupts()
def launch(
    script: Callable[[], Any] | str | os.PathLike[str],
    strategy: Given = "allreduce",
    *,
    args: Sequence[str] = (),
    workers: int = 1,
    servers: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    target: float | None = None,
    minimize: bool = False,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    listeners: Sequence[Listener] = (),
    progress: bool | None = None,
    **options: Any,
) -> TrainResult:
    """Run a function, or a script, with a training loop of its own in every worker; blocks until it is done.

    It calls `tt.join()`, as docs/loops.md shows. A function is sent to the workers with what it refers to, so it may be
    defined in a notebook. `strategy`, `workers` and `options` are as in `tt.train`; `target` is that of what the script
    reports. The result's `model` has the parameters and buffers, and no forward pass: load its state_dict() into a
    model of the script's class. With `resume`, `epochs`, `steps` and `target` take the place of the run's own.
    """
    refuse_training()
    nursery = Launch()
    try:
        hearing = check_listeners(listeners)
        run = Script(function=script) if callable(script) else script_of(script, tuple(args))
        if resume is not None:
            given = {"epochs": epochs, "steps": steps, "target": target}
            limits = {name: value for name, value in given.items() if value is not None}
            job = resume_launch(Path(resume), nursery, run, limits)
        else:
            job = open_launch(
                run,
                nursery,
                None if out is None else Path(out),
                strategy=strategy,
                options=options,
                maximize=not minimize,
                workers=workers,
                servers=servers,
                epochs=epochs,
                steps=steps,
                target=target,
                seed=seed,
            )
        return execute(job, nursery, lambda j: display_of(j, progress), hearing)
    except SystemExit as end:
        raise refuse_exit(end) from end
    finally:
        nursery.close()


def _with_the_scripts_optimizer(found: Resolved, options: dict[str, Any], strategy: Given) -> dict[str, Any]:
    """Servers that could have an optimizer of their own have the script's, whose rates and schedulers it knows."""
    if "server" in found.kind.__struct_fields__ and "server" not in options and not isinstance(strategy, Strategy):
        return options | {"server": "task"}
    return options


# -- the task that stands for a script --------------------------------------------------------------------------------
class _Samples(Dataset[Any]):
    """The samples of a script's loader, by their number alone: only the script has them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are read by the script")


class _StandIn:
    """Builds the module that stands for the script's models."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint

    def __call__(self) -> nn.Module:
        return self._blueprint.stand_in()


def _in_the_script(outputs: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("losses and metrics are computed by the script")


def task_of(loop: OwnLoop, maximize: bool, joined: Callable[[int], int]) -> Task:
    """What a run knows of a script. `joined`: the samples of a step, given those of a worker's batch."""
    blueprint, script = loop.blueprint, loop.script
    samples = blueprint.samples(joined(blueprint.batch_size))
    if not samples:
        raise BadInput(
            f"the loader drops its only batch (samples: {blueprint.dataset}, samples a step: "
            f"{joined(blueprint.batch_size)}, drop_last=True); use a smaller batch_size"
        )
    return Task(
        model=_StandIn(blueprint),
        loss=_in_the_script,
        train=_Samples(samples),
        test=_Samples(samples),
        metric=_Metric(reported_name(script)),
        maximize=maximize,
        optimizer=blueprint.optimizer,
        batch_size=blueprint.batch_size,
        epochs=blueprint.epochs or NO_LIMIT,
        name=Path(script.path).stem if script.path else script.name,
    )


class _Metric:
    """The metric that a script reports, by its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _in_the_script(outputs, targets)


def reported_name(script: Script) -> str:
    """The name of the first value that the script reports, as it is written there; "metric" where that is not seen."""
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        source = Path(script.path).read_text() if script.function is None else inspect.getsource(script.function)
        calls = [node for node in ast.walk(ast.parse(textwrap.dedent(source))) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "report" and call.keywords:
                return str(call.keywords[0].arg)
    return "metric"
