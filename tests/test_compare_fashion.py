"""The comparison with DDP: that its runs are read as torrential's own, under the same rules. Nothing is trained."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest
from made_up import EPOCH, config, study, write_run

from experiments import compare_fashion as experiment
from torrential.study.ask import Question
from torrential.study.directory import open_directory
from torrential.study.plan import reported_trials
from torrential.study.read import read_study
from torrential.study.verdict import judge
from torrential.tasks import load_task


@pytest.fixture(scope="module")
def question() -> Question:
    args = argparse.Namespace(task="digits-mlp", workers=2, trials=6, target=0.9, epochs=3, every=320)
    return experiment.ask(args, "straggler")[0]


def test_ddp_is_an_entry_like_the_others(question: Question) -> None:
    assert [spec.name for spec in question.entries] == experiment.STRATEGIES
    every = {spec.strategy: spec.evaluate_every for spec in question.entries}
    batch = load_task("digits-mlp").batch_size
    assert every["ddp"] == every["allreduce"] == 320 // (2 * batch) and every["downpour"] == 320 // batch
    assert question.asked.set["slow"] == "1:4" and question.asked.strategies == experiment.STRATEGIES
    trials = reported_trials(question, Path("out"), {})
    assert len({trial.seed for trial in trials}) == 6 * 6
    order = [trial.entry for trial in trials]
    assert all(sorted(order[i : i + 6]) == sorted(experiment.STRATEGIES) for i in range(0, 36, 6)), "not interleaved"


def test_a_study_with_ddp_is_judged_as_any_other(question: Question, tmp_path: Path) -> None:
    out = tmp_path / "straggler"
    question = msgspec.structs.replace(question, interval=EPOCH)  # as often as the runs made up here were evaluated
    open_directory(out, question)
    for trial in reported_trials(question, out, {}):
        time = 8.0 if trial.spec.strategy == "ddp" else 4.0
        write_run(trial.directory, config(trial.spec.strategy, seed=trial.seed), time + trial.number / 10)
    found = read_study(out)
    assert not found.problems and len(found.entries) == 6
    verdict = judge(found)
    assert not verdict.refused
    row = verdict.rows[0]
    assert experiment.against_ddp(verdict, row).startswith("**1.92 (")
    experiment.report(tmp_path, experiment.Console(quiet=True))
    table = (tmp_path / "table.md").read_text()
    assert "| worker 1 is 4× slow | ddp | 6 of 6 | 8.3 ± 0.2 | 8.1 8.2 8.3 8.4 8.5 8.6 |" in table
    assert "allreduce reached 90 % accuracy 1.92x sooner than ddp" in table
    assert (out / "report.html").exists() and (out / "trials.csv").exists() and (tmp_path / "results.json").exists()


def test_how_many_times_sooner_is_told_the_same_way_round() -> None:
    verdict = judge(study({"ssp": [4.0, 4.1, 4.2, 4.3, 4.4, 4.5], "ddp": [2.0, 2.1, 2.1, 2.2, 2.2, 2.3]}))
    assert experiment.against_ddp(verdict, verdict.rows[0]).startswith("**0.51 (0.4")
    assert experiment.against_ddp(verdict, verdict.rows[1]) == ""
