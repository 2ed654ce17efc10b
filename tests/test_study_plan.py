"""What a study plans: a directory for each run, and the same clusters to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from torrential.errors import BadInput
from torrential.study.ask import StudyRequest
from torrential.study.directory import open_directory
from torrential.study.plan import tuning_trials
from torrential.study.question import make_question

CLUSTER = "[compute]\nseconds_per_sample = {}\n"


def asked(**changes: object) -> StudyRequest:
    given = {"task": "digits", "strategies": ["ssp", "allreduce"], "target": 0.9, "trials": 1, "workers": [2]}
    return StudyRequest(**given | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tune",
    [
        {"lr": ["1e-2", "1e+2", "0.01", "1e2"]},
        {"lr": ["0.1", "0.10"], "milestones": ["0.333", "0.333000000000000000000000000000000000000000000000000001"]},
    ],
)
def test_every_value_that_is_tried_has_a_directory_of_its_own(tune: dict[str, list[str]], tmp_path: Path) -> None:
    set_ = {"schedule": "step"} if "milestones" in tune else {}
    question, _ = make_question(asked(tune=tune, tune_trials=2, set=set_), [])
    directories = [trial.directory for trial in tuning_trials(question, tmp_path)]
    assert len(set(directories)) == len(directories) == 2 * 2 * 4


def test_a_study_does_not_go_on_with_a_cluster_that_was_changed(tmp_path: Path) -> None:
    cluster = tmp_path / "rack.toml"
    cluster.write_text(CLUSTER.format(0.002))
    given = asked(world="sim", clusters=[str(cluster)])
    question, _ = make_question(given, [])
    assert open_directory(tmp_path / "study", question) == question
    cluster.write_text("# a remark\n" + CLUSTER.format(0.002))
    assert make_question(given, [])[0].digest == question.digest
    cluster.write_text(CLUSTER.format(0.2))
    with pytest.raises(BadInput, match="or a cluster"):
        open_directory(tmp_path / "study", make_question(given, [])[0])
