"""Torrential: one training script, any way of distributing it.

Names are imported when first used (PEP 562), so that `import torrential` costs nothing and starts nothing.
"""

from __future__ import annotations

import importlib

from torrential.version import __version__

TYPE_CHECKING = False  # type checkers know better; nothing more is imported before `python -m` has its path in order
if TYPE_CHECKING:
    from torrential.data.deal import Batch
    from torrential.data.query import Estimate
    from torrential.errors import TorrentialError
    from torrential.exporting import export
    from torrential.launching import launch
    from torrential.listeners.base import Listener, RunHandle
    from torrential.listeners.mlflow import MLflow
    from torrential.listeners.tensorboard import TensorBoard
    from torrential.listeners.wandb import WandB
    from torrential.loop.session import join
    from torrential.optim.normal import solve_normal
    from torrential.optimizers import optimizer
    from torrential.partitions import partition
    from torrential.records import read_records
    from torrential.reducing import Reduction, map_reduce
    from torrential.reporting.page import report
    from torrential.run import TrainResult, train
    from torrential.schedulers import scheduler
    from torrential.server.consistency import Consistency
    from torrential.server.messages import View
    from torrential.server.shard import Shard
    from torrential.strategies.adacomm import AdaComm
    from torrential.strategies.allreduce import AllReduce
    from torrential.strategies.backup import Backup
    from torrential.strategies.base import Strategy
    from torrential.strategies.bsp import Bsp
    from torrential.strategies.context import Context, Decision, Vote
    from torrential.strategies.ddp import Ddp
    from torrential.strategies.diloco import DiLoCo
    from torrential.strategies.downpour import Downpour
    from torrential.strategies.easgd import Easgd
    from torrential.strategies.fedavg import FedAvg
    from torrential.strategies.hogwild import Hogwild
    from torrential.strategies.local import Local
    from torrential.strategies.pipedream import PipeDream
    from torrential.strategies.pipeline import Pipeline
    from torrential.strategies.roles import Role, Roles, Servers
    from torrential.strategies.sandblaster import Sandblaster
    from torrential.strategies.ssp import Ssp
    from torrential.strategies.streaming import StreamingDiLoCo
    from torrential.strategies.tensor import TensorParallel
    from torrential.study.compare import compare
    from torrential.study.comparison import Comparison
    from torrential.task import Task, accuracy
    from torrential.tasks import load_task
    from torrential.worlds.sim.cluster import Cluster

__all__ = [
    "AdaComm",
    "AllReduce",
    "Backup",
    "Batch",
    "Bsp",
    "Cluster",
    "Comparison",
    "Consistency",
    "Context",
    "Ddp",
    "Decision",
    "DiLoCo",
    "Downpour",
    "Easgd",
    "Estimate",
    "FedAvg",
    "Hogwild",
    "Listener",
    "Local",
    "MLflow",
    "PipeDream",
    "Pipeline",
    "Reduction",
    "Role",
    "Roles",
    "RunHandle",
    "Sandblaster",
    "Servers",
    "Shard",
    "Ssp",
    "Strategy",
    "StreamingDiLoCo",
    "Task",
    "TensorBoard",
    "TensorParallel",
    "TorrentialError",
    "TrainResult",
    "View",
    "Vote",
    "WandB",
    "__version__",
    "accuracy",
    "compare",
    "export",
    "join",
    "launch",
    "load_task",
    "map_reduce",
    "optimizer",
    "partition",
    "read_records",
    "report",
    "scheduler",
    "solve_normal",
    "train",
]

_HOME = {
    "AdaComm": "torrential.strategies.adacomm",
    "AllReduce": "torrential.strategies.allreduce",
    "Backup": "torrential.strategies.backup",
    "Batch": "torrential.data.deal",
    "Bsp": "torrential.strategies.bsp",
    "Cluster": "torrential.worlds.sim.cluster",
    "Comparison": "torrential.study.comparison",
    "Consistency": "torrential.server.consistency",
    "Context": "torrential.strategies.context",
    "Ddp": "torrential.strategies.ddp",
    "Decision": "torrential.strategies.context",
    "DiLoCo": "torrential.strategies.diloco",
    "Downpour": "torrential.strategies.downpour",
    "Easgd": "torrential.strategies.easgd",
    "Estimate": "torrential.data.query",
    "FedAvg": "torrential.strategies.fedavg",
    "Hogwild": "torrential.strategies.hogwild",
    "Listener": "torrential.listeners.base",
    "Local": "torrential.strategies.local",
    "MLflow": "torrential.listeners.mlflow",
    "PipeDream": "torrential.strategies.pipedream",
    "Pipeline": "torrential.strategies.pipeline",
    "Reduction": "torrential.reducing",
    "Role": "torrential.strategies.roles",
    "Roles": "torrential.strategies.roles",
    "RunHandle": "torrential.listeners.base",
    "Sandblaster": "torrential.strategies.sandblaster",
    "Servers": "torrential.strategies.roles",
    "Shard": "torrential.server.shard",
    "Ssp": "torrential.strategies.ssp",
    "Strategy": "torrential.strategies.base",
    "StreamingDiLoCo": "torrential.strategies.streaming",
    "Task": "torrential.task",
    "TensorParallel": "torrential.strategies.tensor",
    "TensorBoard": "torrential.listeners.tensorboard",
    "TorrentialError": "torrential.errors",
    "TrainResult": "torrential.run",
    "View": "torrential.server.messages",
    "Vote": "torrential.strategies.context",
    "WandB": "torrential.listeners.wandb",
    "accuracy": "torrential.task",
    "compare": "torrential.study.compare",
    "export": "torrential.exporting",
    "join": "torrential.loop.session",
    "launch": "torrential.launching",
    "load_task": "torrential.tasks",
    "map_reduce": "torrential.reducing",
    "optimizer": "torrential.optimizers",
    "partition": "torrential.partitions",
    "read_records": "torrential.records",
    "report": "torrential.reporting.page",
    "scheduler": "torrential.schedulers",
    "solve_normal": "torrential.optim.normal",
    "train": "torrential.run",
}


if not TYPE_CHECKING:  # a type checker that saw this would believe any name to be there

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value  # the next look-up finds it without us
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
