"""The model of a run alone, as a file that plain PyTorch loads."""

from __future__ import annotations

import io
import os
from pathlib import Path

import safetensors.torch
import torch

from torrential import checkpoint as checkpoints
from torrential import records
from torrential.checkpoint import Checkpoint
from torrential.config import RunConfig
from torrential.errors import BadInput
from torrential.opening import config_of
from torrential.records import Evaluation

FORMATS = {".safetensors": "safetensors.torch.load_file({!r})", ".pt": "torch.load({!r})"}  # how each is loaded


def export(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, best: bool = False) -> Path:
    """Write the model of the run in a directory as a file: its newest checkpoint's, or with `best` the one with the
    best metric on validation data. Gives the path.

    `out` ends with .safetensors or .pt, a state dict either way; by default it is model.safetensors in that directory.
    """
    return write_model(Path(run), None if out is None else Path(out), best)[0]


def write_model(directory: Path, out: Path | None, best: bool) -> tuple[Path, Checkpoint]:
    """Write a run's model; gives the path, and the checkpoint that it is of."""
    path = out or directory / "model.safetensors"
    if path.suffix not in FORMATS:
        raise BadInput(f"a model is written as .safetensors or .pt (given: {path}); name the file accordingly")
    config = config_of(directory)
    checkpoint = _best(directory, config) if best else _newest(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    records.replace_file(path, _encode(checkpoint, path.suffix, config))
    return path, checkpoint


def how_to_load(path: Path) -> str:
    """The line of Python that loads an exported model."""
    return f"model.load_state_dict({FORMATS[path.suffix].format(str(path))})"


def _newest(directory: Path) -> Checkpoint:
    found, _ = checkpoints.latest(directory / "checkpoints")
    if found is None:
        raise BadInput(f"the run in {directory} has no checkpoint yet; train it for longer, or wait for its first one")
    return found


def _best(directory: Path, config: RunConfig) -> Checkpoint:
    history = records.read_records(path) if (path := directory / records.RECORDS).exists() else []
    found = [r for r in history if isinstance(r, Evaluation) and r.split == "validation" and r.value == r.value]
    if not found:
        raise BadInput(f"the run in {directory} has no evaluation on record that gave a number; leave out --best")
    best = (min if config.minimize else max)(found, key=lambda evaluation: evaluation.value)
    path = checkpoints.path_of(directory / "checkpoints", best.step)
    if not path.exists():
        raise BadInput(
            f"the best checkpoint of {directory} was not kept (step {best.step}, value {best.value:.4g}); leave out "
            "--best, and train with --keep-best 1 the next time"
        )
    return checkpoints.load(path)


def _encode(checkpoint: Checkpoint, suffix: str, config: RunConfig) -> bytes:
    if suffix == ".safetensors":
        about = {"format": "pt", "task": config.task, "step": str(checkpoint.step)}
        return safetensors.torch.save(checkpoint.model, metadata=about)
    buffer = io.BytesIO()
    torch.save(checkpoint.model, buffer)
    return buffer.getvalue()
