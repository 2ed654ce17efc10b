"""What a study is asked: which entries, under which rules. Text from the command line to plain data that is kept.

    allreduce,downpour:push_every=5+fetch_every=5,ssp:staleness=3+lr=0.05

An entry is a strategy with options of its own after the colon, joined by '+'. They are those of --set, and lr,
batch_size, workers and servers. A comma works in the place of '+' too: what follows it is an option if it has a '=',
and the rest of a list if it is no name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from torrential.config import Count, Positive, Workers
from torrential.errors import BadInput
from torrential.options import make
from torrential.records import Seconds

NAME = r"[A-Za-z][\w-]*"
FORMAT = 1
SAME_FOR_ALL = ("epochs", "steps", "target", "seed", "device", "world", "cluster", "evaluate_every")
SLUG = 60  # characters; file systems take 255


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The question, as it was put. Two calls are about the same study if these are equal."""

    task: str
    strategies: list[str]
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
    clusters: list[str] = []
    set: dict[str, str] = {}
    tune: dict[str, list[str]] = {}
    tune_trials: int = 1


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An entry as it is to be run."""

    name: str
    slug: str  # of its directories
    strategy: str
    options: dict[str, str]  # of its own
    workers: Workers
    servers: Count | None = None
    batch_size: Count | None = None
    lr: float | None = None
    steps: int | None = None
    evaluate_every: int | None = None
    world: str = "local"
    cluster: str = ""


class ComputeTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample takes on the machine where the study was begun, measured once for all its runs."""

    batch_size: Positive
    threads: Positive
    seconds_per_sample: Seconds


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What study.json holds."""

    format: int = FORMAT
    torrential: str
    digest: str  # of the task's file and the clusters, if there are any
    created: str
    command: list[str]
    asked: Asked
    entries: list[Spec]
    task: str
    metric: str
    maximize: bool
    interval: Positive | None  # samples between two evaluations; None: an epoch
    measured: list[ComputeTime] = []  # for clusters that leave open how long a sample takes


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an entry that are not after --set in a run."""

    workers: int | None = None
    servers: int | None = None
    batch_size: int | None = None
    lr: float | None = None


# -- entries ----------------------------------------------------------------------------------------------------------
def split_entries(texts: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Strategies, each with options of its own."""
    found = []
    for text in texts:
        for part in re.split(rf",(?=\s*{NAME}\s*(?:[:,]|$))", text):
            strategy, _, rest = part.strip().partition(":")
            if not strategy:
                raise BadInput(f"--strategies takes NAME[:option=value[+...]],... (given: {text!r})")
            options: dict[str, str] = {}
            for pair in re.split(rf"[+;,](?=\s*{NAME}=)", rest) if rest else []:
                name, equals, value = pair.partition("=")
                if not equals or not name.strip():
                    raise BadInput(f"options of an entry are name=value, joined by '+' (given: {part.strip()!r})")
                options[name.strip().replace("-", "_")] = value.strip()
            found.append((strategy, options))
    return found


def make_specs(asked: Asked) -> list[Spec]:
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
                name = strategy + (":" if options else "") + "+".join(f"{k}={v}" for k, v in options.items())
                name += f" · {workers} workers" if many_workers and own.workers is None else ""
                name += f" · {Path(cluster).stem}" if many_clusters else ""
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


def slug(name: str, taken: Sequence[str]) -> str:
    """A name for directories."""
    plain = re.sub(r"[^A-Za-z0-9=._]+", "-", name).strip("-.")[:SLUG]
    return plain if plain not in taken else f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def own_options(spec: Spec) -> dict[str, str]:
    """All that the entry was given, as text."""
    own = {name: getattr(spec, name) for name in ("servers", "batch_size", "lr")}
    return spec.options | {name: f"{value:g}" for name, value in own.items() if value is not None}


# -- tuning -----------------------------------------------------------------------------------------------------------
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
def check_asked(asked: Asked) -> None:
    """What can be refused before anything is loaded."""
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
    """Where another question was put, in words."""
    found = []
    for name in ("torrential", "digest"):
        if getattr(here, name) != getattr(asked, name):
            what = "the task's file has changed, or a cluster" if name == "digest" else None
            found.append(what or f"torrential: {here.torrential} there, {asked.torrential} here")
    for name in Asked.__struct_fields__:
        there, now = getattr(here.asked, name), getattr(asked.asked, name)
        if there != now:
            found.append(f"{name}: {_text(there)} there, {_text(now)} asked")
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={','.join(v) if isinstance(v, list) else v}" for k, v in value.items()) or "nothing"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "nothing"
    return "nothing" if value is None else str(value)
