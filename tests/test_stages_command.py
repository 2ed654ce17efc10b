"""The command `profile`, and the picture that it draws."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from torrential.stages.picture import draw_pipeline
from torrential.stages.profile import load_profile
from torrential.stages.rehearse import StageCosts, rehearse_schedule

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_a_picture_shows_who_does_what_when() -> None:
    gpipe = rehearse_schedule("gpipe", StageCosts([1] * 3, [2] * 3), 2)
    assert draw_pipeline(gpipe, width=12) == ["FF······BBBB", "·FF···BBBB··", "··FFBBBB····"]
    halves = rehearse_schedule("zero-bubble", StageCosts([1] * 2, [2] * 2), 2)
    assert draw_pipeline(halves, width=7) == ["FF·BWBW", "·FBFBWW"]


def test_the_profile_and_the_plan_of_a_task(run_cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    asked = ("--batch-size", "8", "--runs", "1", "--out", str(file), "--json")
    done = run_cli("profile", "digits-mlp", "--stages", "2", "--microbatches", "4", *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["batch_size"] == 8 and len(found["layers"]) == 7 == len(load_profile(file))
    assert [stage["replicas"] for stage in found["plan"]["stages"]] == [1, 1]
    assert [stage["live"] for stage in found["plan"]["stages"]] == found["pipeline"]["live"] == [2, 1]
    assert 0 < found["pipeline"]["bubble"] < 1
    lines = done.stderr.splitlines()
    pictures = [line for line in lines if line.startswith(("stage 0 ", "stage 1 "))]
    assert len(pictures) == 2 and all(set(line[12:]) <= set("FB·") for line in pictures)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stages", "2", "--plan", "4"), "--stages 2 and --plan 4 are two ways to cut a model; give one"),
        (("--stages", "2", "--schedule", "1f2b"), "no schedule named '1f2b'; did you mean '1f1b'?"),
        (("--plan", "3", "--hosts", "2"), "3 workers cannot be on 2 hosts in equal shares; give a multiple of --hosts"),
        (("--runs", "1", "--stages", "8"), "7 layers cannot be cut into 8 stages; use at most 7 stages"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: tuple[str, ...], said: str, run_cli: Cli) -> None:
    done = run_cli("profile", "digits-mlp", *arguments)
    assert done.returncode == 2 and said in done.stderr
