"""The comparison with DDP: that its runs are read as torrential's own, under the same rules. Nothing is trained."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest
import torch
from made_up import EPOCH, config, study, write_run
from torch.utils.data import DistributedSampler, TensorDataset

from experiments import compare_fashion as experiment
from experiments import ddp
from torrential import opening, records
from torrential.records import Record, Step
from torrential.strategies import STRATEGIES
from torrential.study.ask import Question
from torrential.study.directory import open_directory
from torrential.study.plan import reported_trials
from torrential.study.question import Subject, request
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


def test_the_manifest_of_a_ddp_run(question: Question, tmp_path: Path) -> None:
    (spec,) = (spec for spec in question.entries if spec.strategy == "allreduce")
    subject = Subject(load_task("digits-mlp"), "digits-mlp", STRATEGIES)
    asked = request(question.asked, spec, subject, 7)
    job = ddp.as_ddp(opening.open_run(asked, tmp_path / "run"))
    opening.unlock(job.directory)
    kept = records.read_manifest(job.directory).config
    assert kept["strategy"] == "ddp" and kept["seed"] == 7 and kept["workers"] == 2 and kept["target"] == 0.9
    assert kept["settings"]["slow"] == "1:4" and kept["settings"]["evaluate_every"] == spec.evaluate_every
    assert kept["source"] == "digits-mlp", "its processes load the task by this name"


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


def test_every_sample_once_in_an_epoch_over_all_workers() -> None:
    of = config(workers=2, batch_size=4, epochs=2)
    data = TensorDataset(torch.arange(22))
    dealt = [
        list(ddp._order(DistributedSampler(data, 2, rank, seed=3), of)) for rank in range(2)
    ]  # (epoch, indices, whether it is the epoch's last)
    for epoch in range(2):
        seen = [torch.cat([i for e, i, _ in of_rank if e == epoch]) for of_rank in dealt]
        assert sorted(torch.cat(seen).tolist()) == list(range(22))
    assert [(e, len(i), last) for e, i, last in dealt[0][:3]] == [(0, 4, False), (0, 4, False), (0, 3, True)]
    assert len(dealt[0]) == 6 and not torch.equal(dealt[0][0][1], dealt[0][3][1]), "each epoch is shuffled anew"


def test_time_of_a_step_record_is_all_accounted_for() -> None:
    said: list[Record] = []
    recorder = ddp._Recorder(said.append, rank=1, sent=100)
    for step, now in enumerate((0.1, 0.2, 0.4, 0.5), start=1):
        recorder.wait += 0.05
        recorder.look(now, 1.0, {"step": step, "epoch": 0, "samples": 8 * step}, ended=step == 4)
    steps = [record for record in said if isinstance(record, Step)]
    assert [(s.step, s.bytes_sent) for s in steps] == [(1, 100), (3, 300), (4, 400)]
    assert [round(s.wait, 3) for s in steps] == [0.05, 0.1, 0.05]
    assert round(sum(s.compute + s.wait for s in steps), 3) == 0.5
