"""Learning by map-reduce: sums over all rows, computed by workers, and what is made of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from torrential import checkpoint as checkpoints
from torrential.data.query import Query
from torrential.data.rows import PartRows, rows_of
from torrential.errors import BadInput
from torrential.listeners.base import Listener
from torrential.records import Record, Summary
from torrential.run import train
from torrential.strategies.map_reduce import MapReduce, read_saved
from torrential.task import Task
from torrential.worlds.sim.cluster import Cluster

PORTIONS = 64


@dataclass(frozen=True)
class Reduction:
    """What map_reduce leaves: `value` is the last estimate, after so many `rounds`; `history` is every record."""

    value: Any
    rounds: int
    summary: Summary = field(repr=False)
    history: list[Record] = field(repr=False)
    out: Path


class _Nothing(nn.Module):
    """The model of a run that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(Tensor([0.0]))


class _Positions(Dataset[int]):
    """The places of rows; the rows themselves are the query's matter."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def map_reduce(
    data: Any,
    statistic: Callable[..., Any],
    combine: Callable[[Any, Any], Any] | None = None,
    finish: Callable[..., Any] | None = None,
    *,
    start: Any = None,
    rounds: int | None = None,
    portions: int | None = None,
    copies: int = 1,
    workers: int = 1,
    name: str = "map_reduce",
    seed: int = 0,
    world: str = "local",
    cluster: str | os.PathLike[str] | dict[str, Any] | Cluster | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    listeners: Sequence[Listener] = (),
    progress: bool | None = None,
    **options: Any,
) -> Reduction:
    """Compute a statistic of all rows on several workers, and finish it; blocks until it is done.

    `data`: arrays, tensors or sparse matrices, or a nest of them, with a row for each sample; a data set; a task, whose
    training data count; or a list of functions that read some rows each. What a worker has read it keeps.

    `statistic(rows)` gives a tensor, an array, a number, or a dict, list or tuple of these: a sum over those rows,
    which are cut from the data as they are. `combine(one, other)` makes one statistic of two, by default their sum, in
    float64. `finish(total)` makes of the statistic of all rows what you want to know; by default it is that itself.

    With `start` there are several `rounds`: `statistic(rows, estimate)` and `finish(total, estimate)` are given the
    estimate so far, and finish returns the next one, or tt.Estimate(value, objective, done) to put an objective on
    record, or to end before the last round. With `resume` the directory of a run, go on with that one: give the same
    data and functions again, and more `rounds` if it had done all; workers and world are those that it has.

    Rows are cut into `portions` (64, or one for each function), which idle workers get one by one; when none is left,
    `copies` of those that somebody is slow with. They are added in one order: the result does not depend on the number
    of workers. `options` are the world's, as after `--set`: `threads=2`, `slow="1:10"`, ...
    """
    rows = rows_of(data)
    if isinstance(rows, PartRows) and portions not in (None, len(rows)):
        raise BadInput(
            f"every function reads a portion (functions: {len(rows)}, portions: {portions}); leave out portions"
        )
    whole = {"rounds": 1 if rounds is None else rounds, "portions": PORTIONS if portions is None else portions}
    for role, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{role} must be a whole number of at least 1 (given: {value!r})")
    if start is None and whole["rounds"] > 1:
        raise BadInput(f"rounds={rounds} without start: each begins with an estimate; give the first one as start=...")
    for role, function in (("statistic", statistic), ("combine", combine), ("finish", finish)):
        if not callable(function) and (function is not None or role == "statistic"):
            raise BadInput(f"{role} must be a function (given: {function!r})")
    count = len(rows) if isinstance(rows, PartRows) else min(whole["portions"], len(rows))
    positions = _Positions(len(rows))
    task = Task(
        model=_Nothing,
        step=Query(rows, statistic, combine, finish, start, count),
        train=positions,
        test=positions,
        batch_size=-(-len(rows) // count),
        epochs=whole["rounds"],
        name=name,
    )
    result = train(
        task,
        MapReduce(portions=count, copies=copies),
        workers=min(workers, count),  # more would have nothing to do
        seed=seed,
        device="cpu",
        world=world,
        cluster=cluster,
        out=out,
        resume=resume,
        listeners=listeners,
        progress=progress,
        **({} if resume is None else {"epochs": rounds}),
        **options,
    )
    final, _ = checkpoints.latest(result.out / "checkpoints")
    assert final is not None
    prefix = "everybody/map_reduce/"
    saved = {name.removeprefix(prefix): t for name, t in final.workers.items() if name.startswith(prefix)}
    done, _, value = read_saved(saved)
    return Reduction(value, done, result.summary, result.history, result.out)
