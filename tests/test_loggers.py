"""What TensorBoard, Weights & Biases and MLflow are told, by their own packages: nothing here stands in for them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torrential as tt
from tests.test_bad_input import main_here, refused  # noqa: F401
from tests.test_listeners import WORLDS, a_task
from torrential.errors import BadInput
from torrential.records import RECORDS, Evaluation, Step, read_manifest, read_records

Cli = Callable[..., subprocess.CompletedProcess[str]]
Points = list[tuple[int, float]]

READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient

client = MlflowClient()
runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
print(json.dumps([
    {
        "name": run.info.run_name,
        "status": run.info.status,
        "params": run.data.params,
        "metrics": {
            name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        },
    }
    for run in runs
]))
"""


def expected(run: Path) -> dict[str, Points]:
    """The figures of a run by name, as its records have them: samples and value."""
    found: dict[str, Points] = {}
    for record in read_records(run / RECORDS):
        if isinstance(record, Step):
            found.setdefault("train/loss", []).append((record.samples, record.loss))
        elif isinstance(record, Evaluation):
            found.setdefault(f"{record.split}/accuracy", []).append((record.samples, record.value))
            found.setdefault(f"{record.split}/loss", []).append((record.samples, record.loss))
    return found


def in_tensorboard(place: Path) -> dict[str, Points]:
    shown = EventAccumulator(str(place)).Reload()
    return {name: [(e.step, e.value) for e in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


def as_floats(points: dict[str, Points]) -> dict[str, Points]:
    """As TensorBoard keeps them, in four bytes."""
    return {name: [(step, float(np.float32(value))) for step, value in each] for name, each in points.items()}


@pytest.mark.timeout(180)
def test_all_loggers_have_what_is_on_record_and_go_on_with_a_resumed_run(run_cli: Cli, tmp_path: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    env |= {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    out, log = tmp_path / "run", ["--log", "tensorboard,wandb,mlflow"]
    done = run_cli("train", "digits", "--epochs", 2, "--workers", 2, "--out", out, *log, "--json", env=env, timeout=90)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    assert json.loads(done.stdout)["steps"] == 44  # and nothing of the loggers' on standard output
    (kept,) = (out / "wandb").glob("offline-run-*/run-*.wandb")
    for record in read_records(out / RECORDS):
        if isinstance(record, Step | Evaluation):
            assert json.dumps(record.loss).encode() in kept.read_bytes()
    assert as_floats(expected(out)) == in_tensorboard(out / "tensorboard")

    done = run_cli("train", "--resume", out, "--epochs", 3, "--log", "tensorboard,mlflow", env=env, timeout=90)
    assert done.returncode == 0, done.stderr
    assert as_floats(expected(out)) == in_tensorboard(out / "tensorboard")
    (script := tmp_path / "read.py").write_text(READ_MLFLOW)
    done = run_cli(script=script, env=env)
    (run,) = json.loads(done.stdout)
    assert run["name"] == "run" and run["status"] == "FINISHED"
    assert run["params"]["batch_size"] == "32" and run["params"]["settings.timeout"] == "60.0"
    points = {name: [(step, value) for step, value in each] for name, each in run["metrics"].items()}
    assert {name: sorted(each) for name, each in points.items()} == {
        name: sorted(each) for name, each in expected(out).items()
    }
    assert len(points["validation/accuracy"]) == 3


def test_tensorboard_has_the_times_of_the_records(tmp_path: Path) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "events.out.tfevents.old").write_text("of another run")
    board = tt.TensorBoard(place)
    tt.train(a_task(), out=tmp_path / "run", progress=False, listeners=[board], workers=2, **WORLDS["sim"])
    began = datetime.fromisoformat(read_manifest(tmp_path / "run").created).timestamp()
    shown = EventAccumulator(str(place)).Reload().Scalars("validation/loss")
    evaluations = [r for r in read_records(tmp_path / "run" / RECORDS) if isinstance(r, Evaluation)]
    assert [e.wall_time for e in shown] == [began + r.time for r in evaluations if r.split == "validation"]
    assert not (place / "events.out.tfevents.old").exists() and not (tmp_path / "run" / "tensorboard").exists()


# -- bad input --------------------------------------------------------------------------------------------------------
def test_unknown_loggers(refused: Callable[..., str], tmp_path: Path) -> None:  # noqa: F811
    message = refused("train", "digits", "--log", "tensorbord", "--out", tmp_path / "run")
    assert "no logger named 'tensorbord'; did you mean 'tensorboard'? known: mlflow, tensorboard, wandb" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "package", "listener"),
    [("tensorboard",) * 2 + (tt.TensorBoard,), ("wandb",) * 2 + (tt.WandB,), ("mlflow",) * 2 + (tt.MLflow,)],
)
def test_loggers_that_are_not_installed(
    name: str,
    package: str,
    listener: Any,
    refused: Callable[..., str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *rest: None if n == package else find(n, *rest))
    said = f"needs the package {package}, which is not installed; pip install {package}"
    assert said in refused("train", "digits", "--log", name, "--out", tmp_path / "run")
    if name == "tensorboard":
        assert said in refused("report", tmp_path, "--tensorboard")
    with pytest.raises(BadInput, match=said):
        listener()
    assert not (tmp_path / "run").exists()


def test_wandb_without_an_account(run_cli: Cli, tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": ""}
    done = run_cli("train", "digits", "--log", "wandb", "--out", tmp_path / "run", env=env)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "error: wandb: UsageError: No API key configured" in done.stderr
    assert "to log without an account, set WANDB_MODE=offline" in done.stderr
