"""Whether this machine, or the cluster that is simulated, can carry a run out, and with how many servers."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from torrential.config import HostsSettings, LocalSettings, RaySettings, SimSettings
from torrential.data.batches import is_vectorised
from torrential.descriptors import check_descriptors
from torrential.errors import BadInput
from torrential.resolve.request import AnySettings, RunRequest
from torrential.strategies.base import Strategy, needs_servers
from torrential.task import Task
from torrential.usercode import calling
from torrential.worlds.sim.cluster import Cluster, make_cluster, read_cluster

DEVICES = ("auto", "cpu", "cuda")


def choose_device(asked: str) -> str:
    if asked not in DEVICES:
        raise BadInput(f"no device {asked!r}; use auto, cpu or cuda")
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise BadInput("--device cuda: this machine has no usable GPU; use --device cpu")
    return "cuda" if available and asked != "cpu" else "cpu"


def device_on_ray(asked: RunRequest, settings: RaySettings) -> str:
    """The device of a run on a Ray cluster, whose GPUs are not this machine's: workers have those that are reserved."""
    if asked.device not in DEVICES:
        return choose_device(asked.device)
    if settings.gpus_per_worker and asked.device == "cpu":
        raise BadInput(
            f"--device cpu makes no use of gpus_per_worker={settings.gpus_per_worker:g}; leave one of the two out"
        )
    if asked.device == "cuda" and not settings.gpus_per_worker:
        raise BadInput("--device cuda needs GPUs that Ray reserves; add --set gpus_per_worker=1")
    return "cuda" if settings.gpus_per_worker else "cpu"


def check_local(asked: RunRequest, settings: LocalSettings, servers: int, device: str) -> LocalSettings:
    """Whether this machine can run it; the settings as they are carried out."""
    if asked.cluster is not None:
        raise BadInput("--cluster describes a simulated cluster; add --world sim, or leave it out")
    if not isinstance(settings, HostsSettings) and settings.hosts > asked.workers:
        raise BadInput(f"more hosts than workers (hosts: {settings.hosts}, workers: {asked.workers}); use fewer hosts")
    check_descriptors(asked.workers + servers)
    if isinstance(settings, RaySettings):
        return msgspec.structs.replace(settings, threads=settings.threads or settings.cpus_per_worker)
    return _check_native(settings, device, asked.workers)


def check_one_memory(strategy: Strategy, settings: AnySettings, device: str) -> None:
    """Refuse what workers that have to see the same memory cannot be run with."""
    name = type(strategy).name
    if not strategy.one_memory:
        return
    if device != "cpu":
        raise BadInput(f"{name} needs memory that all workers see (device: {device}); use --device cpu")
    if isinstance(settings, HostsSettings):
        raise BadInput(f"{name} needs memory that all workers see, which several hosts have not; use --world local")
    if isinstance(settings, LocalSettings):
        if settings.transport != "shared":
            raise BadInput(f"{name} needs memory that all workers see (transport={settings.transport}); leave it out")
        if settings.algorithm in ("native", "nccl"):
            raise BadInput(f"{name} needs memory that all workers see (algorithm={settings.algorithm}); leave it out")


def _on_one_host(table: dict[str, Any], strategy: Strategy, workers: int, given: bool) -> dict[str, Any]:
    """The cluster with all workers on one host, where it is not `given` how many there are on each."""
    cluster = make_cluster(table)
    if not given and cluster.hosts is None:
        return table | {"workers_per_host": workers}
    hosts = len({cluster.host_of_worker(rank) for rank in range(workers)})
    if hosts > 1:
        raise BadInput(
            f"{type(strategy).name} needs memory that all workers see (hosts with workers: {hosts}); use "
            f"workers_per_host = {workers}"
        )
    return table


def check_loaders(settings: LocalSettings, task: Task) -> tuple[LocalSettings, list[str]]:
    """The settings without loaders that would have nothing to do, and what to say of that."""
    if not settings.loaders or task.collate is not None or not is_vectorised(task.train):
        return settings, []
    said = f"loaders={settings.loaders} has no effect: the training data is a TensorDataset, which is read at once"
    return msgspec.structs.replace(settings, loaders=0), [said]


def _check_native(settings: LocalSettings, device: str, workers: int) -> LocalSettings:
    """What torch.distributed does needs its libraries, and NCCL a GPU for each worker. From here on nccl is native."""
    if settings.algorithm not in ("native", "nccl"):
        return settings
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    own_gpus = device == "cuda" and workers <= gpus
    if settings.algorithm == "nccl" and not own_gpus:
        here = f"GPUs here: {gpus}" if device == "cuda" or not gpus else f"given: --device {device}"
        raise BadInput(f"NCCL needs a GPU for each worker ({here}); use --set algorithm=native or auto")
    library, built = ("NCCL", dist.is_nccl_available()) if own_gpus else ("Gloo", dist.is_gloo_available())
    if not built:
        raise BadInput(
            f"algorithm={settings.algorithm} needs {library}, which this torch was built without; "
            "use --set algorithm=auto"
        )
    return msgspec.structs.replace(settings, algorithm="native")


def check_simulation(
    asked: RunRequest, settings: SimSettings, servers: int, device: str, strategy: Strategy
) -> dict[str, Any]:
    """The cluster that is simulated, as plain data; refuses what cannot be."""
    if settings.gradients == "off" and asked.target is not None:
        raise BadInput(
            f"nothing is learnt with gradients=off, so no target is reached (target: {asked.target:g}); drop one"
        )
    if settings.gradients == "off" and (settings.patience or settings.keep_best):
        given = f"patience: {settings.patience}" if settings.patience else f"keep_best: {settings.keep_best}"
        raise BadInput(f"nothing is evaluated or saved with gradients=off ({given}); drop one")
    if settings.processes and (settings.gradients == "off" or device != "cpu"):
        what = "gradients=off" if settings.gradients == "off" else f"device: {device}"
        raise BadInput(f"processes compute gradients on this machine's cores ({what}); leave processes out")
    cores = len(os.sched_getaffinity(0))
    if settings.processes > cores:
        best = f"use {cores - 1}, which leaves one for the simulation" if cores > 1 else "leave processes out"
        raise BadInput(f"more processes than cores (processes: {settings.processes}, cores: {cores}); {best}")
    table = cluster_table(asked.cluster)
    if strategy.one_memory:
        by_default = isinstance(asked.cluster, Cluster) and asked.cluster.workers_per_host == 1
        table = _on_one_host(table, strategy, asked.workers, "workers_per_host" in table and not by_default)
    roles = strategy.roles(asked.workers, max(1, servers))
    coordinators = sum(role.count for role in roles if role.name == "coordinator")
    make_cluster(table).check(asked.workers, servers, coordinators)
    return table


def cluster_table(cluster: str | dict[str, Any] | Cluster | None) -> dict[str, Any]:
    """The table of the cluster that is simulated, as in a cluster file: from a file, a shipped one, or an object."""
    if isinstance(cluster, str):
        return read_cluster(cluster)
    if isinstance(cluster, Cluster):
        table: dict[str, Any] = msgspec.to_builtins(cluster)
        return table
    return cluster or {}


def count_servers(asked: RunRequest, strategy: Strategy, settings: AnySettings, model: nn.Module) -> int:
    """The number of servers that the run has."""
    name = type(strategy).name
    if asked.world not in strategy.worlds:
        raise BadInput(f"{name} runs in --world {' or '.join(strategy.worlds)} only (given: {asked.world})")
    with calling("roles", whose=name):
        strategy.roles(asked.workers, 1)  # refuses what does not go together
    if not needs_servers(strategy):
        if asked.servers:
            raise BadInput(f"{name} needs no servers (given: {asked.servers}); leave out --servers")
        return 0
    servers = 1 if asked.servers is None else asked.servers
    trained = [p for p in model.parameters() if p.requires_grad]
    numel = sum(p.numel() for p in trained)
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
    if servers < 1:
        raise BadInput(f"{name} needs a server (given: {servers}); use --servers 1")
    if servers > numel:
        raise BadInput(f"more servers than parameters (servers: {servers}, parameters: {numel})")
    if settings.replicas is not None and settings.replicas >= servers:
        raise BadInput(f"{settings.replicas} replicas do not fit {servers} servers; use --set replicas={servers - 1}")
    if len(kinds) > 1:
        raise BadInput(f"servers keep parameters of one type (the model has {', '.join(kinds)}); convert some of them")
    if settings.algorithm != "auto":
        raise BadInput(f"{name} sums nothing among workers; leave out algorithm={settings.algorithm}")
    return servers
