"""How long a worker computes for one sample: as the cluster says, or as it is measured on this machine."""

from __future__ import annotations

import time

import torch

from torrential.data.batches import training_batches
from torrential.errors import TaskFailed
from torrential.step import run_step
from torrential.task import Task, build_model
from torrential.usercode import calling

BATCHES = 5  # that are timed; their median counts


def measure_seconds_per_sample(task: Task, batch_size: int, device: torch.device, threads: int) -> float:
    """The time that forward and backward of a batch take here, per sample, to three significant digits: what is
    printed is then what is used, and can be written into a cluster file."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = _time_batches(task, batch_size, device)
    except TaskFailed as error:  # in a run of processes it would have been at some step
        told = TaskFailed(f"while compute time was measured, before step 1: {error}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from error
    finally:
        torch.set_num_threads(before)
    return float(f"{sorted(times)[BATCHES // 2]:.3g}")


def _time_batches(task: Task, batch_size: int, device: torch.device) -> list[float]:
    model, data = build_model(task).to(device).train(), training_batches(task, device)
    count = min(batch_size, len(data))
    batch = data.fetch(torch.arange(count))
    times = []
    for _ in range(BATCHES):
        model.zero_grad()  # as before every batch of a worker; else gradients would be added up
        began = time.perf_counter()
        loss = run_step(task, model, batch).loss
        with calling("backward pass", task.model):
            loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / count)
    return times
