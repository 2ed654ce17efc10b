"""`tt.compare`: a study from a program; and what carries a study out, for the command as well."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torrential.errors import BadInput, RunFailed
from torrential.records import fresh_directory
from torrential.strategies.base import Strategy
from torrential.strategies.registry import Given, check_object, is_loadable, plain_options, resolve_strategy
from torrential.study.ask import ObjectEntry, StudyRequest, absolute_entries, split_trials
from torrential.study.comparison import Comparison, comparison_of
from torrential.study.conduct import conduct
from torrential.study.directory import locked, open_directory, read_question
from torrential.study.outlook import outlook
from torrential.study.question import make_question
from torrential.study.results import STUDY, Study
from torrential.study.runner import Train
from torrential.study.watch import StudyProgress
from torrential.task import Task
from torrential.terminal import Terminal, standard_error
from torrential.usercode import refuse_exit, refuse_training, telling_interrupts
from torrential.userfiles import absolute_spec
from torrential.worlds.ray.cluster import on_cluster
from torrential.worlds.sim.cluster import Cluster

AnyCluster = str | os.PathLike[str] | dict[str, Any] | Cluster


@telling_interrupts()
def compare(
    task: Task | str,
    strategies: Sequence[Given],
    *,
    target: float | None = None,
    trials: int | str = 5,
    workers: int | Sequence[int] = 2,
    servers: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    device: str = "auto",
    world: str | None = None,
    cluster: AnyCluster | Sequence[AnyCluster] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    tune_trials: int = 1,
    args: Sequence[str] = (),
    minimize: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Comparison:
    """Train a task in several ways, several times each, and say which reaches the target soonest.

    `strategies` are objects (`tt.Downpour(push_every=4)`, or one of a class of your own), classes, or texts as after
    `--strategies`: "ssp:staleness=3+lr=0.05", "mine.py:Mine". `trials` is a number, or "auto" for as many as it takes.
    Each entry is run with each of `workers` and on each `cluster`. `tune` has values that every entry tries first:
    `tune={"lr": [0.01, 0.1]}`. `options` are for all entries, as after `--set`.

    `task` may be the path of a script with a loop of its own, as for `tt.launch`; `args` are its arguments, and
    `minimize` says that a smaller value of what it reports is better.

    Called again with the same arguments and the same `out`, a study goes on where it was stopped.
    """
    refuse_training()
    entries = [_entry(given) for given in strategies]
    if not entries:
        raise BadInput("which strategies? give some, as in tt.compare(task, [tt.AllReduce(), 'ssp'])")
    kinds = {one.strategy: kind for one, kind in entries if isinstance(one, ObjectEntry) and kind is not None}
    many = cluster if isinstance(cluster, Sequence) and not isinstance(cluster, str) else [cluster]
    clusters = [_cluster(one) for one in many if one is not None]
    most, auto = split_trials(str(trials))
    asked = StudyRequest(
        task=absolute_spec(task) if isinstance(task, str) else task.name,
        strategies=[one for one, _ in entries],
        program=isinstance(task, Task) or not all(map(is_loadable, kinds)),
        target=target,
        trials=most,
        auto=auto,
        workers=[workers] if isinstance(workers, int) else list(workers),
        servers=servers,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        device=device,
        world=world or ("sim" if clusters else "local"),
        clusters=clusters,
        set=options,
        tune={name: [str(value) for value in values] for name, values in (tune or {}).items()},
        tune_trials=tune_trials,
        minimize=minimize,
        args=list(args),
    )
    console = Terminal(quiet=True) if progress is False else standard_error()
    try:
        made = task if isinstance(task, Task) else None
        return comparison_of(carry_out(asked, None if out is None else Path(out), console, made, kinds, python=True))
    except SystemExit as end:
        raise refuse_exit(end) from end


def _entry(given: Given) -> tuple[str | ObjectEntry, type[Strategy] | None]:
    """An entry as it is kept, and the class of one that is not given as text. Of an object's options, those are kept
    that differ from the defaults."""
    if isinstance(given, str):
        return absolute_entries(given), None
    found = resolve_strategy(given)
    if isinstance(given, type):
        return ObjectEntry(found.source, {}), found.kind
    check_object(given)
    fields = msgspec.structs.fields(found.kind)
    usual = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields}
    plain = plain_options(given)
    changed = {name: value for name, value in plain.items() if getattr(given, name) != usual[name]}
    return ObjectEntry(found.source, changed), found.kind


def _cluster(given: AnyCluster) -> str | dict[str, Any]:
    if isinstance(given, Cluster):
        table: dict[str, Any] = msgspec.to_builtins(given)
        return table
    if isinstance(given, dict):
        return given
    name = os.fspath(given)
    return str(Path(name).absolute()) if Path(name).suffix else name


def carry_out(
    asked: StudyRequest,
    out: Path | None,
    console: Terminal,
    task: Task | None = None,
    strategies: Mapping[str, type[Strategy]] | None = None,
    python: bool = False,
) -> Study:
    """Put the question, or find it put, and run all that is not there yet. `task` and `strategies`: a program's own;
    `python`: advice is on arguments of a function."""
    with on_cluster() if asked.world == "ray" else contextlib.nullcontext():  # before there is a directory
        return _carry_out(asked, out, console, task, strategies, python)


def _carry_out(
    asked: StudyRequest,
    out: Path | None,
    console: Terminal,
    task: Task | None,
    strategies: Mapping[str, type[Strategy]] | None,
    python: bool,
) -> Study:
    kept = read_question(out).measured if out is not None and os.path.exists(out / STUDY) else []
    question, subject = make_question(asked, sys.argv, kept, task, strategies)
    directory = out or fresh_directory(f"compare-{Path(question.task).stem}")
    onward = f"finished runs are kept; go on with: {_again(asked, directory)}"
    with locked(directory):
        question = open_directory(directory, question)
        console.print(f"study directory: {directory}", highlight=False, soft_wrap=True)
        for line in outlook(question, python):
            console.print(line, highlight=False, soft_wrap=True)
        watching = StudyProgress(question.metric, question.asked.target or 0.0, console)
        train = Train(question, subject, watching)
        try:
            return conduct(question, directory, train, watching)
        except RunFailed as error:
            raise RunFailed(f"{error}\n{onward}") from error
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C, or asked to end
                watching.close()
                console.print(f"stopped; {onward}", highlight=False, soft_wrap=True)
            raise
        finally:
            watching.close()
            train.close()


def _again(asked: StudyRequest, directory: Path) -> str:
    program = f"the same tt.compare(..., out={str(directory)!r})"
    return program if asked.program else f"torrential compare --resume {directory}"
