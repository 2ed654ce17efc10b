"""What a recording of a whole run holds: never the secret, and with security=tls nothing of what was said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may listen to an interface"),
    pytest.mark.timeout(180),
]

TASK = """
import torch.nn.functional as F
from torch import nn

import torrential as tt
from torrential.tasks.digits import digits

MARK = "words that stand in the task's file alone"


def model():
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    nn.init.constant_(made[1].weight, 0.0123456)
    return made


data = digits()
task = tt.Task(model=model, loss=F.cross_entropy, train=data.train, test=data.test, name=MARK)
"""

RUN = """
import json
import sys

from benchmarks import link
from benchmarks.wiretap import Wiretap, forms

link.own_loopback("a recording")  # on which there is nothing else

import torch

import torrential as tt
from torrential.comm.admission import Admission
from torrential.worlds.local import crew

secrets = []


def admission(address, secret, *rest):
    secrets.append(secret)
    return Admission(address, secret, *rest)


crew.Admission = admission
security, out = sys.argv[1:]
with Wiretap() as tap:
    run = tt.train("task.py", "downpour", workers=2, servers=2, steps=6, out=out, transport="tcp", security=security,
                   progress=False, timeout=150.0)
sought = {
    "secret": [form for secret in secrets for form in forms(secret)],
    "greeting": [b"Greeting"],
    "letters": [b"Pull", b"Push"],
    "first parameters": [torch.full((16,), 0.0123456).numpy().tobytes()],
    "last parameters": [p.detach().flatten()[:16].numpy().tobytes() for p in run.model.parameters()],
    "task": [b"words that stand in the task", b"nn.init.constant_"],
    "key": [b"PRIVATE KEY"],
}
found = {name: any(tap.holds(form) for form in sought[name]) for name in sought}
print(json.dumps({"bytes": sum(map(len, tap.said.values())), "secrets": len(secrets), **found}))
"""


@pytest.mark.parametrize("security", ["token", "tls"])
def test_a_recording_of_a_whole_run(security: str, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "run.py").write_text(RUN)
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "run.py", security, "out"],
        cwd=tmp_path, capture_output=True, text=True, timeout=170, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("bytes") > 6 * 17_000 * 4 and found.pop("secrets") == 1  # it is a recording of that run
    in_clear = security == "token"
    assert found.pop("greeting") == found.pop("letters") == found.pop("first parameters") == in_clear
    if in_clear:
        found.pop("last parameters")  # whether somebody fetched them is a matter of chance
    assert not any(found.values()), found
