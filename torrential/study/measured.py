"""How long a sample takes where the cluster of a study says "measure": measured once, and then used by all its runs.

A machine never takes as long twice, so figures that every run measured for itself would make entries differ by noise.
The figures are part of the question (study.json), so a study that goes on uses those it was begun with; and of every
run's manifest, where they stand in the cluster, so that each run can be repeated alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torrential.config import Settings
from torrential.options import make
from torrential.resolve import RunRequest, cluster_table
from torrential.study.ask import ComputeTime
from torrential.worlds.sim.cluster import make_cluster
from torrential.worlds.sim.compute_time import measure_seconds_per_sample


def measure_compute_times(
    requests: Iterable[RunRequest], device: str, known: Sequence[ComputeTime] = ()
) -> list[ComputeTime]:
    """One figure for each batch size and number of threads that is simulated without one; `known` are not repeated."""
    found = list(known)
    for request in requests:
        batch_size, threads = _settings(request)
        if _leaves_it_open(_table(request)) and _find(found, request) is None:
            seconds = measure_seconds_per_sample(request.task, batch_size, torch.device(device), threads)
            found.append(ComputeTime(batch_size=batch_size, threads=threads, seconds_per_sample=seconds))
    return found


def with_compute_time(request: RunRequest, measured: Sequence[ComputeTime]) -> RunRequest:
    """The request with the study's figure in its cluster, if the cluster leaves that open."""
    table, figure = _table(request), _find(measured, request)
    if table is None or figure is None or not _leaves_it_open(table):
        return request
    compute = table.get("compute", {}) | {"seconds_per_sample": figure.seconds_per_sample}
    return replace(request, cluster=table | {"compute": compute})


def _table(request: RunRequest) -> dict[str, Any] | None:
    """The table of the simulated cluster; None: nothing is simulated."""
    if request.world != "sim":
        return None
    return cluster_table(request.cluster)


def _leaves_it_open(table: dict[str, Any] | None) -> bool:
    return table is not None and make_cluster(table).compute.seconds_per_sample == "measure"


def _settings(request: RunRequest) -> tuple[int, int]:
    """The settings on which the time of a sample depends: the batch size, and the number of threads."""
    threads = make(Settings, {k: v for k, v in request.options.items() if k == "threads"}).threads
    return request.task.batch_size if request.batch_size is None else request.batch_size, threads or 1


def _find(measured: Sequence[ComputeTime], request: RunRequest) -> ComputeTime | None:
    return next((each for each in measured if (each.batch_size, each.threads) == _settings(request)), None)
