"""The large-minibatch experiment: what it runs, what it makes of the records, and a whole one at toy size."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest

from experiments.jobs import Job, run_all
from experiments.large_minibatch import ablations, main, sweep, top_batch
from experiments.large_minibatch_report import OUTCOME, Configuration, Settings, read_results, write_report
from torrential.errors import BadInput
from torrential.records import RECORDS, Evaluation, RecordWriter

SETTINGS = Settings(
    task="fashion-resnet",
    epochs=6,
    seeds=2,
    base_batch=128,
    batches=[128, 1024, 8192],
    warmup=5.0,
    lr=0.1,
    task_batch=128,
    samples=55_000,
)


def ended(out: Path, configuration: Configuration, seed: int, accuracies: list[float], diverged: bool = False) -> None:
    """What a run leaves: one validation per epoch, one test, how it ended."""
    directory = out / "runs" / f"{configuration.name}-{seed}"
    directory.mkdir(parents=True)
    said = {"outcome": "diverged", "message": "the loss turned nan at step 3; lower --lr"} if diverged else {}
    (directory / OUTCOME).write_text(json.dumps({"outcome": "finished", "message": "", "seconds": 2.0} | said))
    with RecordWriter(directory / RECORDS) as writer:
        for epoch, value in enumerate(accuracies, start=1):
            place = {"step": 10 * epoch, "epoch": epoch, "samples": epoch, "time": float(epoch), "loss": 1.0}
            writer.write(Evaluation(split="validation", value=value, **place))
        if not diverged:
            writer.write(Evaluation(split="test", value=0.5, **place))


def test_plan() -> None:
    first, _, last = sweep(SETTINGS)
    assert first.name == "batch-128" and first.rate == pytest.approx(0.1)
    assert first.options["batch_size"] == 128 and first.options["accumulate"] == 1
    assert last.rate == pytest.approx(6.4) and last.options["ghost"] == 128
    assert last.options["batch_size"] == 4096 and last.options["accumulate"] == 2
    others = {c.name: c for c in ablations(SETTINGS, 8192)}
    assert others["sqrt-8192"].rate == pytest.approx(0.8) and others["no-warmup-8192"].options["warmup"] == 0
    assert {"gamma-one-128", "gamma-one-8192", "lars-16384", "lars-32768", "grow-128", "decay-128"} <= others.keys()
    assert "lars-65536" not in others  # more than there are samples
    poly, lars = others["poly-16384"].options, others["lars-16384"].options
    own = {"layerwise": "lars", "trust": 0.001, "scaling": "sqrt", "lr": pytest.approx(10 * (128 / 4096) ** 0.5)}
    assert lars == poly | own and others["lars-16384"].rate == pytest.approx(20)
    assert others["grow-128"].options == others["decay-128"].options | {"grow": True}
    with pytest.raises(BadInput, match="multiple"):
        ablations(SETTINGS, 5000)


def test_report(tmp_path: Path) -> None:
    base, large, largest = sweep(SETTINGS)
    for seed, shift in enumerate([0.0, 0.01]):
        ended(tmp_path, base, seed, [0.1, 0.90, 0.91 + shift, 0.92 + shift, 0.93 + shift, 0.94 + shift])
        ended(tmp_path, large, seed, [0.1, 0.5, 0.92, 0.92, 0.92, 0.92])
    ended(tmp_path, largest, 0, [0.2], diverged=True)
    results = read_results(tmp_path / "runs", sweep(SETTINGS), seeds=2)
    assert results[0].error is not None and results[0].error.mean == pytest.approx(7.5)  # medians 8 and 7
    assert results[0].error.deviation == pytest.approx(0.5**0.5)
    assert top_batch(SETTINGS, results) is None  # a run is missing
    ended(tmp_path, largest, 1, [0.2], diverged=True)
    results = read_results(tmp_path / "runs", sweep(SETTINGS), seeds=2)
    assert top_batch(SETTINGS, results) == 1024
    write_report(tmp_path, SETTINGS, 1024, results)
    table = (tmp_path / "table.md").read_text()
    assert "| the whole recipe | 128 | 0.1 | 60 | 7.50 ± 0.71 | 50.00 ± 0.00 | 2 |  |" in table
    assert "| the whole recipe | 8192 | 6.4 | 10 | diverged | – | 2 | 2 |" in table
    assert "Diverged: batch-8192, seed 1: the loss turned nan at step 3." in table
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["top"] == 1024 and len(numbers["configurations"]) == 3
    assert numbers["configurations"][2]["runs"][0]["validation_errors"] == [pytest.approx(80.0)]
    assert (tmp_path / "error_vs_batch.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_jobs_keep_to_the_time(tmp_path: Path) -> None:
    jobs = [Job("good", ["true"]), Job("bad", ["false"]), Job("long", ["true"])]
    heard = dict[str, bool]()
    left = run_all(
        jobs,
        at_once=2,
        deadline=time.monotonic() + 30,
        logs=tmp_path,
        expected=lambda name: 100.0 if name == "long" else None,
        ended=lambda job, well, _: heard.update({job.name: well}),
    )
    assert left == jobs[2:] and heard == {"good": True, "bad": False}


def test_other_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.json").write_bytes(SETTINGS.dump())
    assert main(["--out", str(tmp_path), "--task", "digits"]) == 2
    assert "choose another --out" in capsys.readouterr().err


@pytest.mark.timeout(180)
def test_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])  # runs are started by `-m experiments...`
    arguments = ["--out", str(tmp_path), "--task", "digits", "--device", "cpu", "--jobs", "2", "--only", "batch"]
    arguments += ["--epochs", "1", "--warmup", "0.2", "--seeds", "1", "--base-batch", "32", "--batches", "32,64"]
    assert main(arguments) == 0, capsys.readouterr().err
    said = capsys.readouterr().err
    assert "[2/2]" in said and "min left" in said
    numbers = json.loads((tmp_path / "results.json").read_text())
    sizes = {c["name"]: len(c["runs"]) for c in numbers["configurations"]}
    assert sizes == {"batch-32": 1, "batch-64": 1} and numbers["top"] in (32, 64)
    assert all(run["outcome"] == "finished" and run["steps"] for c in numbers["configurations"] for run in c["runs"])
    assert main(arguments) == 0 and "[1/" not in capsys.readouterr().err  # nothing was left to run
    assert json.loads((tmp_path / "results.json").read_text()) == numbers
