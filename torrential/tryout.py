"""Runs two samples through a task's model and loss, so that what does not fit together is known before a run starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torrential.data.batches import training_batches
from torrential.data.nest import form
from torrential.data.resize import Resize
from torrential.errors import BadInput
from torrential.step import StepResult, check_metric, pair, run_step
from torrential.task import Task, build_model, training_samples
from torrential.usercode import calling

Sample = Any  # a batch of a few samples


def try_once(task: Task) -> tuple[nn.Module, Sample]:
    """The model, and the samples that it was tried on."""
    batch = training_batches(task).fetch(torch.arange(min(2, training_samples(task))))
    model = build_model(task)
    _check_model(model)
    if task.step is not None:
        _try_step(task, model, batch)
        return model, batch
    assert task.loss is not None
    inputs, targets = pair(batch)
    with torch.no_grad():
        with calling(f"forward pass on {_sizes(inputs=inputs)}", task.model):
            outputs = model(inputs)
        with calling(f"loss on {_sizes(outputs=outputs, targets=targets)}"):
            loss = task.loss(outputs, targets)
    if not torch.is_tensor(loss) or loss.numel() != 1:
        raise BadInput(f"the task's loss must return one number, the mean over the batch (it returned {loss!r})")
    check_metric(task, StepResult(loss, {}, outputs, targets))
    return model, (inputs, targets)


def _try_step(task: Task, model: nn.Module, batch: Any) -> None:
    result = run_step(task, model, batch, f" on a batch of {form(batch)}")
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise BadInput(
            "the task's step has called backward(); let it return the loss alone: Torrential runs backward and the "
            "optimizer (torch.autograd.grad may be used inside of a step)"
        )
    if not result.loss.requires_grad:
        raise BadInput("the loss of the task's step depends on no parameter; do not detach it, or take .item() of it")
    check_metric(task, result)


def _check_model(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise BadInput("the model has no trainable parameters; unfreeze some")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise BadInput("the model has lazy layers; give their sizes, or run one batch in the model's factory")
    odd = [name for name, value in model.state_dict().items() if not torch.is_tensor(value)]
    if odd:
        raise BadInput(f"the model keeps state that is not a tensor ({odd[0]}), which checkpoints cannot hold")


def try_resized(resize: Resize, task: Task, model: nn.Module, sample: Sample) -> None:
    """The same at every size of image that is to come."""
    if task.loss is None:
        raise BadInput(f"resize={resize} is for (image, target) pairs; a task with a step of its own resizes there")
    inputs, targets = sample
    for scale in sorted({scale for _, scale in resize.stages}):
        small = resize.apply(inputs, scale)
        if small is inputs:
            continue
        try:
            with torch.no_grad():
                task.loss(model(small), targets)
        except Exception as error:
            (height, width), full = small.shape[2:], inputs.shape[2:]
            raise BadInput(
                f"the model does not run on images of {height} × {width} (resize={resize}, full size: {full[0]} × "
                f"{full[1]}): {type(error).__name__}: {error}; use larger scales, or leave resize out"
            ) from error


def _sizes(**values: Any) -> str:
    """The shapes or kinds of what was given to the user's code: "outputs (2, 10) and targets (2,)"."""
    kinds = {name: type(value).__name__ for name, value in values.items()}
    return " and ".join(
        f"{name} {tuple(value.shape) if torch.is_tensor(value) else kinds[name]}" for name, value in values.items()
    )
