"""Whether steps can be computed as it is asked: in which precision, what is recomputed, how much memory it takes."""

from __future__ import annotations

from torch import nn

from torrential.compute import precision
from torrential.compute.activations import kept_bytes
from torrential.compute.compiled import check_compiler
from torrential.compute.memory import state_bytes
from torrential.compute.recompute import chain_of, check_recompute, rows_of
from torrential.compute.segments import Plan, fitting_plan, halves_plan, peak_bytes, recomputed, spans_of
from torrential.config import LocalSettings, SimSettings
from torrential.errors import BadInput
from torrential.strategies.base import Strategy
from torrential.task import Task

GIGA = 1e9


def check_recomputing(strategy: Strategy, settings: LocalSettings | SimSettings, model: nn.Module) -> None:
    """Refuse to recompute what the strategy does not compute by itself, or what would not be the same again."""
    mode, name = settings.recompute, type(strategy).name
    if settings.memory is not None and mode != "auto":
        raise BadInput(f"memory={settings.memory:g} is for recompute=auto (given: {mode}); add that, or leave it out")
    if mode == "auto" and settings.memory is None:
        raise BadInput("recompute=auto needs to know how much memory there is: add --set memory=GIGABYTES")
    known = strategy.recomputes()
    if mode != "none":
        _check_trains(strategy, f"recompute={mode}")
    if mode not in known:
        remedy = "leave it out" if known == ("none",) else f"use recompute={' or '.join(known[1:])}"
        raise BadInput(f"{name} cannot recompute that way (recompute={mode}); {remedy}")
    if mode == "stage":
        for place, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                raise BadInput(
                    f"recompute would count every batch twice in the running statistics of {place}; use group norm, or "
                    "leave out recompute"
                )
    check_recompute(model, mode)


def check_precision(strategy: Strategy, settings: LocalSettings | SimSettings, model: nn.Module, device: str) -> None:
    """Refuse half precision where it cannot be computed, or where the strategy computes by itself."""
    wanted, name = settings.precision, type(strategy).name
    if wanted == "float32":
        return
    _check_trains(strategy, f"precision={wanted}")
    if not strategy.has_whole_model():
        raise BadInput(f"{name} computes parts of the model in float32 alone (precision={wanted}); leave it out")
    if wanted == "fp16":
        if not type(strategy).uses_rate:
            raise BadInput(f"{name} cannot leave out a step, as fp16 may have to; use precision=bf16")
        if isinstance(settings, SimSettings) and settings.processes:
            raise BadInput("helpers do not know how the loss is scaled (precision=fp16); leave out processes")
    precision.check_model(model, wanted)
    precision.check_machine(wanted, device)


def check_compiling(strategy: Strategy, settings: LocalSettings | SimSettings, device: str) -> None:
    """Refuse to compile what the strategy computes by itself, or where a compiled step would be another one."""
    name = type(strategy).name
    if not settings.compile:
        return
    _check_trains(strategy, "compile=true")
    if not strategy.has_whole_model():
        raise BadInput(f"{name} computes parts of the model by itself (compile=true); leave it out")
    if settings.recompute != "none":
        raise BadInput(
            f"a compiled step says by itself what is computed again (compile=true, recompute={settings.recompute}); "
            "leave out one of them"
        )
    if isinstance(settings, SimSettings) and settings.processes:
        raise BadInput("helpers compute steps that are not compiled (compile=true); leave out processes")
    check_compiler(device)


def _check_trains(strategy: Strategy, option: str) -> None:
    if not strategy.evaluates:
        raise BadInput(f"{type(strategy).name} trains no model ({option}); leave it out")


def fit_segments(
    settings: LocalSettings | SimSettings, task: Task, model: nn.Module
) -> tuple[tuple[tuple[int, int], ...], list[str]]:
    """The segments that recompute=auto computes again, and a line about them."""
    if settings.recompute != "auto" or settings.memory is None:
        return (), []
    kept = kept_bytes(task, model, task.batch_size, settings.precision)
    state = state_bytes(model, task.optimizer_spec).total
    chain, budget = chain_of(rows_of(model)), round(settings.memory * GIGA)
    plan = fitting_plan(chain, kept.layers, budget - state - kept.elsewhere)
    if plan is None:
        least = peak_bytes(halves_plan(chain), kept.layers) + state + kept.elsewhere
        further = "use recompute=recursive" if least <= budget else "take smaller batches"
        raise BadInput(
            f"no segments fit memory={settings.memory:g}: with recompute=recursive it takes {least / GIGA:.3g} GB; "
            f"{further}, or more memory"
        )
    spans = tuple(spans_of(plan))
    return spans, [_said(plan, chain.layers, peak_bytes(plan, kept.layers) + state + kept.elsewhere)]


def _said(plan: Plan, layers: int, total: int) -> str:
    again = recomputed(plan)
    return f"recompute=auto: {again} of {layers} layers are computed again, which takes {total / GIGA:.3g} GB in all"
