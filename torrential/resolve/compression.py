"""Whether gradients can be compressed on their way as asked for."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from torrential.config import Compression, LocalSettings, RunConfig
from torrential.errors import BadInput
from torrential.schedulers import Scheduler
from torrential.strategies.base import Strategy, needs_servers
from torrential.task import Task

_NEEDS = {  # the compressors that an option is for
    "ratio": ("topk", "dgc"),
    "rank": ("powersgd",),
    "momentum_correction": ("dgc",),
    "momentum_masking": ("dgc",),
    "local_clipping": ("dgc",),
    "sparsity_warmup": ("dgc",),
}


def check_compression(
    config: RunConfig, strategy: Strategy, task: Task, model: nn.Module, given: Collection[str]
) -> list[str]:
    """Raise BadInput if gradients cannot be compressed as asked for; a line for each option without effect."""
    compression = config.compression
    if compression.changes_gradients:
        _check_strategy(config, strategy)
        _check_model(compression, model)
        _check_step(config, task)
    return _without_effect(compression, task, given)


def _what(compression: Compression) -> str:
    if compression.compress == "none":
        return f"wire: {compression.wire}"
    return f"compress: {compression.compress}"


def _check_strategy(config: RunConfig, strategy: Strategy) -> None:
    compression, name = config.compression, type(strategy).name
    if why := type(strategy).uncompressed:
        raise BadInput(f"{name} cannot compress gradients ({_what(compression)}): {why}; use --strategy allreduce")
    if compression.compress == "none":
        return
    if needs_servers(strategy):
        _check_pushes(compression, strategy)
    if config.script is not None:
        raise BadInput(
            f"compressors are for tasks, whose loop the run has ({_what(compression)}); leave it out, or use wire=bf16"
        )
    settings = config.settings
    if isinstance(settings, LocalSettings) and settings.algorithm in ("native", "nccl"):
        raise BadInput(
            f"algorithm={settings.algorithm} has torch sum gradients, which are compressed here "
            f"({_what(compression)}); leave algorithm out"
        )
    if compression.compress == "int8" and compression.wire != "float32":
        raise BadInput(
            f"int8 sends bytes, and no values in another precision (wire: {compression.wire}); leave out wire"
        )


def _check_pushes(compression: Compression, strategy: Strategy) -> None:
    name, compress = type(strategy).name, compression.compress
    if compress not in ("topk", "dgc"):
        why = {
            "powersgd": "its factors are summed by workers, and servers have parts of many matrices",
            "int8": "its bytes are summed by workers, and servers have ranges that may be cut anew",
        }[compress]
        raise BadInput(f"{name} pushes no {compress}: {why}; use compress=topk or dgc, or --strategy allreduce")
    if getattr(strategy, "stages", 1) > 1:
        raise BadInput(f"stages push parts of gradients, which {compress} wants whole; leave out stages or compress")
    if getattr(strategy, "backups", 0):
        raise BadInput(
            f"{name} drops gradients that come late, and with {compress} what was kept back of earlier ones with "
            "them; use backups=0, or wire=bf16"
        )


def _check_model(compression: Compression, model: nn.Module) -> None:
    kinds = {str(p.dtype).removeprefix("torch."): p.dtype for p in model.parameters() if p.requires_grad}
    if not all(dtype.is_floating_point for dtype in kinds.values()):
        raise BadInput(f"only real numbers are compressed (the model's parameters: {', '.join(kinds)}); leave it out")
    if compression.compress != "none" and len(kinds) > 1:
        raise BadInput(
            f"a compressor takes parameters of one dtype (the model's: {', '.join(kinds)}); convert the model, or use "
            "wire=bf16 alone"
        )


def _check_step(config: RunConfig, task: Task) -> None:
    compression = config.compression
    if compression.compress in ("topk", "dgc") and config.recipe.layerwise != "none":
        raise BadInput(
            f"layerwise={config.recipe.layerwise} goes by norms of whole gradients, and {compression.compress} sends a "
            "few elements of them; use compress=powersgd or int8"
        )
    moved = task.schedule.moves if isinstance(task.schedule, Scheduler) else ()
    if compression.corrects_momentum and "momentum" in moved:
        raise BadInput(
            "the task's schedule moves momentum, which workers have for themselves with momentum correction; have the "
            "schedule move the rate alone (cycle_momentum=False), or use --set momentum_correction=false"
        )


def _without_effect(compression: Compression, task: Task, given: Collection[str]) -> list[str]:
    lines = [
        f"{option} has no effect without compress={' or '.join(needed)}"
        for option, needed in _NEEDS.items()
        if option in given and compression.compress not in needed
    ]
    if compression.compress == "dgc":
        if "local_clipping" in given and task.clip_norm is None:
            lines.append("local_clipping has no effect: the task has no clip_norm")
        if task.optimizer_spec.kind is not torch.optim.SGD:
            idle = [option for option in ("momentum_correction", "momentum_masking") if option in given]
            kind = task.optimizer_spec.kind.__name__
            lines += [f"{option} has no effect: it is of SGD's momentum (the optimizer: {kind})" for option in idle]
    return lines
