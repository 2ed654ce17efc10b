"""A small dose of benchmarks/hostile.py: a run that goes on is attacked, refuses everybody, and ends as it should."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a network of its own and listen to it"),
    pytest.mark.timeout(180),
]


@pytest.mark.parametrize("security", ["token", "tls"])
def test_whoever_does_not_know_the_secret_is_refused_by_a_run_that_goes_on(security: str) -> None:
    command = ["benchmarks.hostile", "--frames", "300", "--alone", "1", "--security", security]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told.pop("wrong") == []
    assert told.keys() >= {"strangers", "wrong tokens", "replayed", "mutated", "silent"}
    assert all(one["calls"] == one["refused"] >= 40 for one in told.values()), told
