"""Traces of pipelines: what every worker did with every microbatch, and what the report makes of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

from tests.test_pipeline import INPUTS, LABELS, crashing, task, train
from torrential.reporting.page import pipeline_sections, report
from torrential.reporting.pipeline_trace import message_seconds, predicted, read_trace
from torrential.study.read import read_study

pytestmark = pytest.mark.timeout(120)
SLOW = {"compute": {"seconds_per_sample": 0.1}}  # so that messages cost little beside it
EVEN = {"batch_size": 60, "train": TensorDataset(INPUTS[:60], LABELS[:60])}


def spans(out: Path) -> Counter[tuple[int, str]]:
    """How often each worker did what."""
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    return Counter((event["tid"], event["name"].rstrip("0123456789 ")) for event in events if event["ph"] == "X")


@pytest.mark.parametrize("world", ["sim", "local"])
def test_every_worker_has_a_span_for_all_that_it_does_with_a_microbatch(tmp_path: Path, world: str) -> None:
    train(tmp_path / "run", task(**EVEN), 3, world=world, microbatches=4, trace=True, epochs=2)
    found = spans(tmp_path / "run")
    for worker in range(3):
        assert found[worker, "forward"] == found[worker, "backward"] == 2 * 4
        assert found[worker, "step"] == 2 and found[worker, "wait"] > 0
        if world == "local":  # where no time has passed there is nothing to see
            assert found[worker, "receive activation"] == (8 if worker > 0 else 0) == found[worker, "send gradient"]
            assert found[worker, "receive gradient"] == (8 if worker < 2 else 0) == found[worker, "send activation"]
    assert not list((tmp_path / "run").glob(".trace*"))


def test_there_is_no_trace_unless_it_is_asked_for(tmp_path: Path) -> None:
    train(tmp_path / "run", task(epochs=1), 2, world="local")
    assert not (tmp_path / "run" / "trace.json").exists()


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
def test_the_measured_bubble_is_the_predicted_one(tmp_path: Path, order: str) -> None:
    """In simulated time, where all stages cost the same and messages next to nothing."""
    chunks = 2 if order == "interleaved" else 1
    how: dict[str, Any] = {"order": order, "chunks": chunks, "costs": ",".join(["1"] * 3 * chunks), "copies": False}
    train(tmp_path / "run", task(**EVEN), 3, microbatches=6, trace=True, cluster=SLOW, epochs=3, **how)
    trace = read_trace(tmp_path / "run" / "trace.json", stages=3)
    assert trace is not None and [step.number for step in trace.steps] == [1, 2, 3]
    step = trace.typical
    rehearsed = predicted(step, order)
    assert rehearsed is not None and len(step.workers) == 3 and message_seconds(step) < 1e-3
    assert rehearsed.bubble == pytest.approx(step.bubble, abs=0.01)
    if order != "interleaved":
        assert step.bubble == pytest.approx(2 / (6 + 2), abs=0.01)


def test_steps_that_were_given_up_are_left_out(tmp_path: Path) -> None:
    """Worker 1 dies in the second step and is not replaced: worker 0 runs both stages."""
    faults = crashing({"worker": 1, "at": 0.025})
    train(tmp_path / "run", task(epochs=1), 2, microbatches=4, trace=True, cluster=faults)
    trace = read_trace(tmp_path / "run" / "trace.json", stages=2)
    assert trace is not None and [step.number for step in trace.steps] == [1, 2, 3, 4]
    assert [len(step.workers) for step in trace.steps][-1] == 1 and len(trace.typical.workers) == 2
    for step in trace.steps:
        mine = [doing for doing in step.doings if doing.worker == 0 and doing.what == "forward"]
        assert len(mine) == len({doing.microbatch for doing in mine}) == 4


def test_the_report_draws_one_step(tmp_path: Path) -> None:
    train(tmp_path / "run", task(**EVEN), 3, world="local", microbatches=4, trace=True, epochs=3)
    (section,) = pipeline_sections(read_study(tmp_path / "run", None))
    assert "the one of median length" in section.text and "by a rehearsal of 1f1b" in section.text
    assert "33.3 % if all stages were equally slow" in section.text  # (3 - 1) / (4 + 3 - 1)
    (figure,) = section.figures.values()
    bars = {trace["name"]: len(trace["x"]) for trace in figure["data"]}
    assert bars["forward"] == bars["backward"] == 3 * 4
    assert section.table is not None and [row[0] for row in section.table.rows] == ["0", "1", "2"]
    assert all(float(row[-1]) >= float(row[-2]) > 10 for row in section.table.rows)  # megabytes, now and at the peak
    assert "One step of the pipeline" in report(tmp_path / "run").read_text()


def test_a_damaged_trace_is_named(tmp_path: Path) -> None:
    train(tmp_path / "run", task(epochs=1), 2)
    for content in ("{", '{"traceEvents": [{"ph": "X", "name": "forward 0", "args": {"microbatch": "x"}}]}', "[]"):
        (tmp_path / "run" / "trace.json").write_text(content)
        (section,) = pipeline_sections(read_study(tmp_path / "run", None))
        assert section.text.startswith("trace.json of run cannot be read (") and not section.figures
    (tmp_path / "run" / "trace.json").write_text('{"traceEvents": []}')
    assert pipeline_sections(read_study(tmp_path / "run", None)) == []
