"""Loggers by name, as after `--log`."""

from __future__ import annotations

from torrential.errors import UnknownName
from torrential.listeners.base import Listener
from torrential.listeners.mlflow import MLflow
from torrential.listeners.tensorboard import TensorBoard
from torrential.listeners.wandb import WandB

LOGGERS: dict[str, type[Listener]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_loggers(names: str) -> list[Listener]:
    """The loggers of a list such as "tensorboard,mlflow", each once; refuses one whose package is not installed."""
    wanted = dict.fromkeys(name.strip() for name in names.split(","))
    for name in wanted:
        if name not in LOGGERS:
            raise UnknownName("logger", name, LOGGERS)
    return [LOGGERS[name]() for name in wanted]
