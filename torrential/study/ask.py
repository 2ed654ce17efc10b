"""What a study is asked: which entries, under which rules. Text from the command line to plain data that is kept.

    allreduce,downpour:push_every=5+fetch_every=5,mine.py:Mine:period=3+lr=0.05

An entry is a strategy (a name, or a class in a file) with options of its own after the colon, joined by '+'. They are
those of --set, and lr, batch_size, workers and servers. A comma works in the place of '+' too: what follows it is an
option if it has a '=', and the rest of a list if it is no name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torrential.config import Count, Positive, Workers, label_of
from torrential.errors import BadInput
from torrential.options import make
from torrential.records import Seconds
from torrential.userfiles import absolute_spec

NAME = r"[A-Za-z][\w-]*"
STRATEGY = rf"(?:[^,:]+\.py(?::{NAME}(?=\s*(?:[:,]|$)))?|{NAME})"
FORMAT = 1
SAME_FOR_ALL = ("epochs", "steps", "target", "seed", "device", "world", "cluster", "evaluate_every")
MOST_TRIALS = 20  # of each entry, where trials are added until it is decided
SLUG = 60  # characters; file systems take 255


class ObjectEntry(msgspec.Struct, frozen=True):
    """An entry that a program gave as an object of a strategy."""

    strategy: str  # as in RunConfig
    options: dict[str, Any]


class StudyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The question of a study as it was put. Two calls are about the same study if these are equal."""

    task: str
    strategies: list[str | ObjectEntry]
    program: bool = False  # whether the task or a strategy was made in a program, which alone can put it again
    target: float | None  # None: the task's own, until it is loaded
    trials: int
    auto: bool = False  # whether trials are added until it is decided which entry is soonest; `trials` is the most
    workers: list[int]
    servers: int | None = None
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int = 0
    device: str = "auto"
    world: str = "local"
    clusters: list[str | dict[str, Any]] = []
    set: dict[str, Any] = {}
    tune: dict[str, list[str]] = {}
    tune_trials: int = 1
    minimize: bool = False  # whether a smaller value of what a script reports is better
    args: list[str] = []  # of a script, its own


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An entry as it is to be run."""

    name: str
    slug: str  # the name of its directories
    strategy: str
    options: dict[str, Any]  # the strategy's options that are set
    workers: Workers
    servers: Count | None = None
    batch_size: Count | None = None
    lr: float | None = None
    steps: int | None = None
    evaluate_every: int | None = None
    world: str = "local"
    cluster: str | dict[str, Any] = ""


class ComputeTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a sample on the machine where the study was begun, measured once for all its runs."""

    batch_size: Positive
    threads: Positive
    seconds_per_sample: Seconds


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of study.json."""

    format: int = FORMAT
    torrential: str
    digest: str  # of the task's file, the strategies' and the clusters, if there are any
    created: str
    command: list[str]
    asked: StudyRequest
    entries: list[Spec]
    task: str
    metric: str
    maximize: bool
    interval: Positive | None  # samples between two evaluations; None: an epoch
    own_loop: bool = False  # whether it is of a script, which evaluates when it likes
    measured: list[ComputeTime] = []  # for clusters that leave open how long a sample takes


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an entry that are not after --set in a run."""

    workers: int | None = None
    servers: int | None = None
    batch_size: int | None = None
    lr: float | None = None


# -- entries ----------------------------------------------------------------------------------------------------------
def split_entries(given: Sequence[str | ObjectEntry]) -> list[tuple[str, dict[str, Any]]]:
    """Strategies, each with options of its own."""
    found: list[tuple[str, dict[str, Any]]] = []
    for one in given:
        if isinstance(one, ObjectEntry):
            found.append((one.strategy, one.options))
        else:
            found += [(strategy, _split_options(rest, part)) for part, strategy, rest in _split_text(one)]
    return found


def _split_text(text: str) -> Iterator[tuple[str, str, str]]:
    """Each entry of a text, its strategy, and what follows the strategy's colon."""
    for part in re.split(rf",(?=\s*{STRATEGY}\s*(?:[:,]|$))", text):
        match = re.fullmatch(rf"\s*({STRATEGY})\s*(?::(.*))?", part, re.DOTALL)
        strategy, rest = match.groups() if match else part.strip().partition(":")[::2]
        if not strategy:
            raise BadInput(f"--strategies takes NAME[:option=value[+...]],... (given: {text!r})")
        yield part.strip(), strategy, rest or ""


def _split_options(text: str, entry: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in re.split(rf"[+;,](?=\s*{NAME}=)", text) if text else []:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise BadInput(f"options of an entry are name=value, joined by '+' (given: {entry!r})")
        options[name.strip().replace("-", "_")] = value.strip()
    return options


def absolute_entries(text: str) -> str:
    """The same entries in any working directory."""
    parts = [(absolute_spec(strategy), rest) for _, strategy, rest in _split_text(text)]
    return ",".join(strategy + (rest and f":{rest}") for strategy, rest in parts)


def make_specs(asked: StudyRequest) -> list[Spec]:
    """All entries: each strategy on each number of workers and each cluster."""
    many_workers, many_clusters = len(asked.workers) > 1, len(asked.clusters) > 1
    specs: list[Spec] = []
    for strategy, options in split_entries(asked.strategies):
        for name in options:
            if name in SAME_FOR_ALL:
                raise BadInput(f"{name} is the same for all entries (given for {strategy}); leave it out there")
        own = make(Own, {k: v for k, v in options.items() if k in Own.__struct_fields__})
        for workers in asked.workers if own.workers is None else [own.workers]:
            for cluster in asked.clusters or [""]:
                name = label_of(strategy) + (":" if options else "") + _joined(options)
                name += f" · {workers} workers" if many_workers and own.workers is None else ""
                name += f" · {cluster_name(cluster)}" if many_clusters else ""
                if name in (spec.name for spec in specs):
                    raise BadInput(f"the entry {name} is there twice; leave one out")
                specs.append(
                    Spec(
                        name=name,
                        slug=slug(name, [spec.slug for spec in specs]),
                        strategy=strategy,
                        options={k: v for k, v in options.items() if k not in Own.__struct_fields__},
                        workers=workers,
                        servers=own.servers,
                        batch_size=own.batch_size,
                        lr=own.lr,
                        world=asked.world,
                        cluster=cluster,
                    )
                )
    return specs


def _joined(options: dict[str, Any]) -> str:
    return "+".join(f"{name}={value}" for name, value in options.items())


def cluster_name(cluster: str | dict[str, Any]) -> str:
    """The name of a cluster where people read it; empty: there is none."""
    return Path(cluster).stem if isinstance(cluster, str) else str(cluster.get("name", "cluster"))


def slug(name: str, taken: Sequence[str]) -> str:
    """A name for directories."""
    plain = re.sub(r"[^A-Za-z0-9=._]+", "-", name).strip("-.")[:SLUG]
    return plain if plain not in taken else f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def own_options(spec: Spec) -> dict[str, Any]:
    """All that the entry was given."""
    own = {name: getattr(spec, name) for name in ("servers", "batch_size", "lr")}
    return spec.options | {name: f"{value:g}" for name, value in own.items() if value is not None}


# -- trials and tuning ------------------------------------------------------------------------------------------------
def split_trials(text: str) -> tuple[int, bool]:
    """The number of trials, and whether that is the most and fewer may do."""
    word, _, most = text.strip().partition(":")
    number = (most or str(MOST_TRIALS)) if word == "auto" else text
    try:
        return int(number), word == "auto"
    except ValueError as error:
        raise BadInput(f"--trials takes a number, auto, or auto:N for at most N (given: {text!r})") from error


def split_tune(texts: Sequence[str]) -> dict[str, list[str]]:
    tune: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        tried = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not name or len(set(tried)) < 2 or len(set(tried)) < len(tried):
            raise BadInput(f"--tune takes a name and the values to try, as in lr=0.01,0.03,0.1 (given: {text!r})")
        if name in tune or name in ("workers", *SAME_FOR_ALL):
            why = "is given twice" if name in tune else "is the same for all"
            raise BadInput(f"--tune {name}: it {why}; leave it out")
        tune[name] = tried
    return tune


def grid(tune: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Every combination of the values to try."""
    combinations: list[dict[str, str]] = [{}]
    for name, values in tune.items():
        combinations = [before | {name: value} for before in combinations for value in values]
    yield from combinations if tune else ()


def with_values(spec: Spec, values: dict[str, str]) -> Spec:
    """The entry with what is tried, or was chosen."""
    own = msgspec.structs.asdict(make(Own, {k: v for k, v in values.items() if k in Own.__struct_fields__}))
    changed: dict[str, Any] = {k: v for k, v in own.items() if v is not None}
    rest = {k: v for k, v in values.items() if k not in Own.__struct_fields__}
    return msgspec.structs.replace(spec, options=spec.options | rest, **changed)


# -- the question -----------------------------------------------------------------------------------------------------
def check_asked(asked: StudyRequest) -> None:
    """Refuse what can be refused before anything is loaded."""
    for name, value in (
        ("trials", asked.trials),
        ("tune-trials", asked.tune_trials),
        *(("workers", w) for w in asked.workers),
    ):
        if value < 1:
            raise BadInput(f"--{name} must be at least 1 (given: {value})")
    if len(set(asked.workers)) < len(asked.workers):
        raise BadInput(f"--workers names a number twice (given: {','.join(map(str, asked.workers))})")
    if asked.target is not None and not math.isfinite(asked.target):
        raise BadInput(f"--target must be a finite number (given: {asked.target})")
    for name in asked.tune:
        if name in asked.set or (name in ("lr", "batch_size", "servers") and getattr(asked, name) is not None):
            raise BadInput(f"{name} is both set and tuned; leave one of them out")
    for strategy, options in split_entries(asked.strategies):
        if both := [name for name in options if name in asked.tune]:
            raise BadInput(f"{both[0]} is tuned, and set for {strategy}; leave one of them out")


def differences(here: Question, asked: Question) -> list[str]:
    """The fields in which another question was put, in words."""
    found = []
    for name in ("torrential", "digest"):
        if getattr(here, name) != getattr(asked, name):
            what = "the task's file has changed, or a strategy's, or a cluster" if name == "digest" else None
            found.append(what or f"torrential: {here.torrential} there, {asked.torrential} here")
    for name in StudyRequest.__struct_fields__:
        there, now = getattr(here.asked, name), getattr(asked.asked, name)
        if there != now:
            found.append(f"{name}: {_text(there)} there, {_text(now)} asked")
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={','.join(v) if isinstance(v, list) else v}" for k, v in value.items()) or "nothing"
    if isinstance(value, list):
        return ",".join(map(_text, value)) or "nothing"
    if isinstance(value, ObjectEntry):
        return f"{value.strategy}:{_joined(value.options)}".rstrip(":")
    return "nothing" if value is None else str(value)
