"""From a directory to a Study: one made by `torrential compare`, a directory of runs, or one run.

What cannot be read is left out, and named in `problems`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from torrential import records
from torrential.config import WORLDS, Compression, Recipe, label_of, read_config
from torrential.errors import BadInput, UnknownName
from torrential.records import Evaluation, Event, Manifest, Step, Summary, Work
from torrential.study.ask import Question, Spec, cluster_name, grid, own_options
from torrential.study.directory import read_question
from torrential.study.plan import RUNS, looks, trial_directory, tuning_directory
from torrential.study.results import STUDY, Entry, Run, Study
from torrential.study.tuning import choose
from torrential.terminal import printable

FEW = 6  # names in a message

ReadRun = Callable[[Path], Run]


def read_study(directory: Path, task: str | None = None, read: ReadRun | None = None) -> Study:
    """Read the runs of a directory, each with `read`, which is read_run by default.

    `task` chooses among runs of several tasks, which cannot be compared: by default those with the most finished runs.
    """
    read = read or read_run
    if not directory.is_dir():
        raise BadInput(f"there is no directory {directory}; name a study, a directory of runs, or a run")
    if (directory / STUDY).exists():
        return _asked_or_plain(directory, task, read)
    if _is_run(directory):
        return _plain(directory, [directory], [], task, read)
    inside = _runs_in(directory)
    studies = sorted(place.name for place in directory.iterdir() if (place / STUDY).exists())
    one = f"name one: {directory / studies[-1]}" if studies else ""
    if not inside:
        if studies:
            raise BadInput(f"{directory} holds studies ({_few(studies)}); {one}")
        raise BadInput(f"there is no run in {directory}; make some with torrential compare, or torrential train")
    separate = [f"studies are shown one at a time ({_few(studies)}); {one}"] if studies else []
    return _plain(directory, inside, separate, task, read)


def read_runs(directory: Path, task: str | None = None, read: ReadRun | None = None) -> Study:
    """The runs that lie in a directory; other files there are ignored."""
    return _plain(directory, _runs_in(directory), [], task, read or read_run)


def _asked_or_plain(directory: Path, task: str | None, read: ReadRun) -> Study:
    """The study in a directory; where its question cannot be read, its runs as they are."""
    try:
        question = read_question(directory)
    except BadInput as error:
        if not (inside := _runs_in(directory / RUNS)):
            raise
        return _plain(directory, inside, [f"{error}; its runs are shown, but not the study's question"], task, read)
    if task not in (None, question.task):
        raise UnknownName(f"task in {directory}", task, [question.task])
    return _asked(directory, question, read)


def _runs_in(directory: Path) -> list[Path]:
    return sorted(filter(_is_run, directory.iterdir())) if directory.is_dir() else []


def read_known_manifest(directory: Path) -> Manifest:
    """The manifest of a run that this version can show; raises BadInput where there is none."""
    try:
        str(directory).encode()
    except UnicodeEncodeError as error:  # no page, table or JSON could name it
        raise BadInput(f"the name of {printable(str(directory))} is not UTF-8; rename it") from error
    manifest = records.read_manifest(directory)
    try:
        read_config(manifest.config)
    except msgspec.ValidationError as error:
        path = directory / records.MANIFEST
        raise BadInput(f"{path} is of another version, or damaged ({error}); use the version that wrote it") from error
    return manifest


def read_run(directory: Path) -> Run:
    """Raises BadInput where there is nothing to be had."""
    manifest = read_known_manifest(directory)
    path = directory / records.RECORDS
    found, cut = records.scan_records(path) if path.exists() else ([], 0)
    few = [r for r in found if not isinstance(r, Step)]
    run = Run(
        directory,
        manifest,
        steps=[r for r in found if isinstance(r, Step)],
        evaluations=[r for r in few if isinstance(r, Evaluation)],
        events=[r for r in few if isinstance(r, Event)],
        summary=next((r for r in reversed(few) if isinstance(r, Summary)), None),
        batches=[r for r in few if isinstance(r, Work)],
    )
    if run.finished:
        return run
    if run.failed:
        return replace(run, problem=f"failed: {run.failed}; it does not count")
    how = "its records end in the middle of a line" if cut else "its records have no end"
    return replace(run, problem=f"{how}: it was cut off, or is going on; it does not count")


def _is_run(directory: Path) -> bool:
    return (directory / records.MANIFEST).exists()


def _read_all(directories: Iterable[Path], problems: list[str], read: ReadRun) -> list[Run]:
    runs = []
    for directory in filter(_is_run, directories):
        try:
            runs.append(read(directory))
        except BadInput as error:
            problems.append(str(error))
    return runs


def _problems_of(runs: Iterable[Run]) -> list[str]:
    return [f"{run.directory}: {run.problem}" for run in runs if run.problem]


# -- a study ----------------------------------------------------------------------------------------------------------
def _asked(directory: Path, question: Question, read: ReadRun) -> Study:
    asked, problems = question.asked, list[str]()
    entries, tuning = [], []
    for spec in question.entries:
        tried = []
        for values in grid(asked.tune):
            numbers = range(1, asked.tune_trials + 1)
            runs = _read_all((tuning_directory(directory, spec, values, n) for n in numbers), problems, read)
            tried.append((values, runs))
            words = " ".join(f"{name}={value}" for name, value in values.items())
            tuning.append(_entry(spec, f"{spec.name} · {words}", own_options(spec) | values, runs))
        complete = tried and all(sum(run.finished for run in runs) == asked.tune_trials for _, runs in tried)
        tuned = choose(tried, question.maximize) if complete else {}
        runs = _read_all((trial_directory(directory, spec, n) for n in range(1, asked.trials + 1)), problems, read)
        entries.append(replace(_entry(spec, spec.name, own_options(spec) | tuned, runs), tuned=tuned))
    problems += _problems_of(run for entry in (*tuning, *entries) for run in entry.runs)
    return Study(
        directory=directory,
        task=question.task,
        metric=question.metric,
        target=asked.target,
        trials=_trials(entries, looks(question)),
        entries=entries,
        tuning=tuning,
        command=question.command,
        problems=problems,
        maximize=question.maximize,
        interval=question.interval,
        own_loop=question.own_loop,
        asked=True,
        looks=looks(question) if asked.auto else [],
        measured=question.measured,
    )


def _trials(entries: Sequence[Entry], looks: Sequence[int]) -> int:
    """The number of trials asked for; where trials are added, as many as the look needs that the last ones were made
    for."""
    begun = max(len(entry.runs) for entry in entries)
    return next((trials for trials in looks if trials >= begun), looks[-1])


def _entry(spec: Spec, name: str, options: dict[str, Any], runs: list[Run]) -> Entry:
    servers = runs[0].config["servers"] if runs else spec.servers or 0
    cluster = cluster_name(spec.cluster)
    return Entry(name, spec.strategy, options, spec.workers, servers, spec.world, cluster, runs)


# -- a directory of runs ----------------------------------------------------------------------------------------------
def _plain(directory: Path, inside: Sequence[Path], problems: list[str], task: str | None, read: ReadRun) -> Study:
    runs = _read_all(inside, problems, read)
    if not runs:
        raise BadInput(f"no run in {directory} can be read: {'; '.join(problems[:FEW])}")
    task, runs = _of_one_task(directory, runs, problems, task)
    problems += _problems_of(runs)
    targets = {run.config["target"] for run in runs}
    if len(targets) > 1:
        problems.append(f"the runs have different targets ({_few(sorted(map(str, targets)))}): none is judged by")
    entries = _group(runs, problems)
    return Study(
        directory=directory,
        task=task,
        metric=_metric(runs),
        target=targets.pop() if len(targets) == 1 else None,
        trials=min(len(entry.finished) for entry in entries),
        entries=entries,
        tuning=[],
        command=[],
        problems=problems,
        maximize=_maximize(runs),
        own_loop=any(run.config.get("script") is not None for run in runs),
    )


def _of_one_task(directory: Path, runs: list[Run], problems: list[str], asked: str | None) -> tuple[str, list[Run]]:
    """The task that is shown, and its runs: that was asked for, or has the most, first of runs that have come to their
    end; `problems` names the others."""
    counts = Counter(run.config["task"] for run in runs)
    finished = Counter(run.config["task"] for run in runs if run.finished)
    if asked is not None and asked not in counts:
        raise UnknownName(f"task in {directory}", asked, counts)
    (first, count), *others = sorted(counts.most_common(), key=lambda each: finished[each[0]], reverse=True)
    if asked is None and others:
        rest = _few([f"{other} ({number})" for other, number in others])
        problems.append(
            f"{directory} holds runs of several tasks, which cannot be compared: shown are the {count} of {first}, and "
            f"not those of {rest}; choose with --task NAME"
        )
    shown = first if asked is None else asked
    return shown, [run for run in runs if run.config["task"] == shown]


def _group(runs: Sequence[Run], problems: list[str]) -> list[Entry]:
    """Runs that differ in nothing but their seeds are trials of one entry."""
    varying = [name for name in ("batch_size", "epochs", "steps") if len({str(run.config[name]) for run in runs}) > 1]
    rates = {run.config["strategy"]: set[float]() for run in runs}  # a strategy may have one of its own
    for run in runs:
        rates[run.config["strategy"]].add(run.config["lr"])
    several_workers, several_worlds = (len({run.config[name] for run in runs}) > 1 for name in ("workers", "world"))
    groups: dict[str, Entry] = {}
    for run in runs:
        config = run.config
        distinct = [*(["lr"] if len(rates[config["strategy"]]) > 1 else []), *varying]
        options = _set_options(config, problems) | {name: config[name] for name in distinct}
        cluster = str((config.get("cluster") or {}).get("name", ""))
        where = (config["strategy"], options, config["workers"], config["servers"], config["world"], cluster)
        more = (":" if options else "") + "+".join(f"{option}={value}" for option, value in options.items())
        more += f" · {config['workers']} workers" if several_workers else ""
        more += f" · {cluster}" if cluster else " · simulated" if several_worlds and config["world"] == "sim" else ""
        key = f"{more} {where}"
        if key not in groups:
            label, servers = label_of(config["strategy"]), f" · {config['servers']} servers"
            taken = [entry.name for entry in groups.values()]
            with_servers = [label + more + servers] if config["servers"] else []
            names = (label + more, *with_servers, config["strategy"] + more, config["strategy"] + more + servers)
            groups[key] = Entry(next(name for name in names if name not in taken or name is names[-1]), *where)
        groups[key].runs.append(run)
    return list(groups.values())


def _set_options(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """The options of strategy, world, recipe and compression that are not at their defaults."""
    settings = {name: value for name, value in config["settings"].items() if name != "evaluate_every"}
    options = _changed(settings, WORLDS[config["world"]]()) | _changed(config.get("recipe", {}), Recipe())
    options |= _changed(config.get("compression", {}), Compression())
    if (changed := config.get("changed")) is not None:
        return dict(changed) | options
    from torrential.strategies import STRATEGIES  # loads torch

    strategy = config["strategy"]
    if strategy in STRATEGIES:
        return _changed(config["options"], STRATEGIES[strategy]()) | options
    if ":" in strategy:  # somebody's own, whose file is not run to look at records
        return dict(config["options"]) | options
    unknown = f"this version has no strategy {strategy!r}; its runs are shown as their records are"
    if unknown not in problems:
        problems.append(unknown)
    return dict(config["options"]) | options


def _changed(given: dict[str, Any], default: msgspec.Struct) -> dict[str, Any]:
    usual = msgspec.json.decode(msgspec.json.encode(default))  # as in the manifest
    return {name: value for name, value in given.items() if value != usual.get(name)}


def _metric(runs: Sequence[Run]) -> str:
    """The name of the metric; runs of earlier versions have it in their last record only."""
    named = (run.config.get("metric") or (run.summary and run.summary.metric) for run in runs)
    return next(filter(None, named), "metric")


def _maximize(runs: Sequence[Run]) -> bool:
    """The direction of the metric is not on record, but who reached the target is."""
    for run in runs:
        if run.summary is None or run.summary.target is None:
            continue
        for evaluation in run.validation:
            if evaluation.value != run.summary.target:
                above = evaluation.value > run.summary.target
                return above == (evaluation.time == run.summary.time_to_target)
    return True


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:FEW]) + (", ..." if len(names) > FEW else "")
