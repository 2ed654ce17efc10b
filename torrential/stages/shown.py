"""What a person sees of profiles and plans: tables, a picture of the pipeline, a JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from rich import box
from rich.table import Table

from torrential.compute.memory import activation_bytes, state_bytes
from torrential.errors import BadInput
from torrential.optim.built import over_model
from torrential.stages.picture import LEGEND, LEGEND_OF_HALVES, draw_pipeline
from torrential.stages.plan import PipelinePlan, TwoLevelNetwork
from torrential.stages.profile import LayerProfile
from torrential.stages.rehearse import Rehearsal, StageCosts, rehearse_schedule
from torrential.stages.schedules import SCHEDULES, all_stages
from torrential.stages.schedules.base import BackwardWeight
from torrential.task import Task, build_model

WIDTH = 104  # what the tables need
PLANNED = tuple(name for name, found in SCHEDULES.items() if not (found.chunked or found.asynchronous))


def check_schedule(schedule: str, stages: int, microbatches: int) -> None:
    """Refuse schedules that a straight pipeline cannot be planned for, before anything is measured."""
    all_stages(schedule, stages, microbatches)
    if schedule not in PLANNED:
        raise BadInput(f"--stages cannot be planned under schedule {schedule!r}; use one of {', '.join(PLANNED)}")


def profile_table(layers: Sequence[LayerProfile]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"{len(layers)} layers", title_justify="left", show_footer=True)
    total = sum(layer.seconds for layer in layers) or 1.0
    columns = {
        "#": (str(i) for i in range(len(layers))),
        "layer": (layer.name for layer in layers),
        "kind": (layer.kind for layer in layers),
        "forward ms": _milliseconds(layer.forward_seconds for layer in layers),
        "backward ms": _milliseconds(layer.backward_seconds for layer in layers),
        "recompute ms": _milliseconds(layer.recompute_seconds for layer in layers),
        "share": (f"{100 * layer.seconds / total:.0f} %" for layer in layers),
        "output MB": (f"{layer.activation_bytes / 1e6:.3f}" for layer in layers),
        "parameters MB": (f"{layer.parameter_bytes / 1e6:.3f}" for layer in layers),
    }
    footers = {
        "layer": "all",
        "forward ms": f"{1e3 * sum(layer.forward_seconds for layer in layers):.3f}",
        "backward ms": f"{1e3 * sum(layer.backward_seconds for layer in layers):.3f}",
        "recompute ms": f"{1e3 * sum(layer.recompute_seconds for layer in layers):.3f}",
        "output MB": f"{sum(layer.activation_bytes for layer in layers) / 1e6:.3f}",
        "parameters MB": f"{sum(layer.parameter_bytes for layer in layers) / 1e6:.3f}",
    }
    for name in columns:
        table.add_column(name, footers.get(name, ""), justify="left" if name in ("layer", "kind") else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def memory_table(task: Task, batch_size: int) -> Table:
    """What training takes of a worker's memory, before anything runs."""
    model = build_model(task)
    state = state_bytes(model, over_model(task.optimizer, model))
    title = (
        f"memory of a worker, batch {batch_size}: parameters {state.parameters / 1e6:.3f} MB, gradients "
        f"{state.gradients / 1e6:.3f} MB, optimizer {state.optimizer / 1e6:.3f} MB, and activations at most"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("precision", "recompute", "activations MB", "layers again", "all MB"):
        table.add_column(name, justify="left" if name in ("precision", "recompute") else "right")
    for row in activation_bytes(task, model, batch_size):
        again = f"{row.again} of {row.layers}" if row.again else ""
        both = (f"{size / 1e6:.3f}" for size in (row.peak, row.peak + state.total))
        table.add_row(row.precision, row.recompute, next(both), again, next(both))
    return table


def _milliseconds(seconds: Iterator[float]) -> Iterator[str]:
    return (f"{1e3 * value:.3f}" for value in seconds)


def plan_table(layers: Sequence[LayerProfile], plan: PipelinePlan) -> Table:
    count = "1 stage" if len(plan.stages) == 1 else f"{len(plan.stages)} stages"
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
    title = f"{count} on {workers}: a minibatch every {1e3 * plan.seconds:.3f} ms"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("stage", "layers", "workers", "ms", "kept", "memory MB"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    for number, stage in enumerate(plan.stages):
        first, last = layers[stage.first].name, layers[stage.stop - 1].name
        table.add_row(
            str(number),
            first if stage.stop == stage.first + 1 else f"{first} .. {last}",
            str(stage.replicas),
            f"{1e3 * stage.seconds:.3f}",
            str(stage.live),
            f"{stage.memory_bytes / 1e6:.3f}",
        )
    return table


def rehearse_plan(
    layers: Sequence[LayerProfile],
    plan: PipelinePlan,
    network: TwoLevelNetwork,
    schedule: str,
    microbatches: int,
    per_minibatch: int,
) -> Rehearsal:
    """The plan under a schedule, where `per_minibatch` microbatches are a minibatch and cost that part of it. A stage
    with replicas is taken for one that is so many times as fast; every link for the slowest one."""
    forward, backward = [], []
    for stage in plan.stages:
        part = stage.replicas * per_minibatch
        forward.append(sum(layer.forward_seconds for layer in layers[stage.first : stage.stop]) / part)
        backward.append(sum(layer.backward_seconds for layer in layers[stage.first : stage.stop]) / part)
    inside = network.hosts == 1
    bandwidth = network.inside_bytes_per_second if inside else network.between_bytes_per_second
    crossing = max((layers[stage.stop - 1].activation_bytes for stage in plan.stages[:-1]), default=0)
    costs = StageCosts(forward, backward, communication=crossing / bandwidth / per_minibatch)
    return rehearse_schedule(schedule, costs, microbatches)


def picture_lines(plan: PipelinePlan, done: Rehearsal) -> Iterator[str]:
    """The pipeline as text, and what it says."""
    for number, (stage, line) in enumerate(zip(plan.stages, draw_pipeline(done), strict=True)):
        yield f"stage {number}{'' if stage.replicas == 1 else f' ×{stage.replicas}':4} {line}"
    halves = any(isinstance(span.action, BackwardWeight) for span in done.timeline)
    yield LEGEND_OF_HALVES if halves else LEGEND
    yield (
        f"{1e3 * done.seconds:.3f} ms from the first to the last; stages idle for {100 * done.bubble:.1f} % of the time"
    )


def as_json(
    task: str, batch_size: int, layers: Sequence[LayerProfile], plan: PipelinePlan | None, done: Rehearsal | None
) -> str:
    """Everything as one JSON object on one line."""
    found: dict[str, object] = {"task": task, "batch_size": batch_size, "layers": list(layers)}
    if plan is not None and done is not None:
        found["plan"] = plan
        found["pipeline"] = {"seconds": done.seconds, "bubble": done.bubble, "live": done.live}
    return msgspec.json.encode(found).decode()
