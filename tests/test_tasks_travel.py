"""What the user writes in a file or a script reaches every process: classes, lambdas, modules beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import torrential

Cli = Callable[..., subprocess.CompletedProcess[str]]

SIBLING = """
from torch import nn

def head(width):
    return nn.Linear(width, 2)
"""

TASK_FILE = """
import torch
from torch import nn
from torch.utils.data import Dataset
import torrential as tt
from beside_it import head

class Points(Dataset):
    def __init__(self, samples, seed):
        made = torch.Generator().manual_seed(seed)
        self.points = torch.randn(samples, 2, generator=made)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point, int(point.prod() > 0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 16), head(16)

    def forward(self, points):
        return self.head(self.body(points).relu())

mine = tt.Task(
    model=lambda: Net(),
    loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
    metric=lambda outputs, targets: (outputs.argmax(1) == targets).float().mean(),
    train=Points(200, 0),
    test=Points(50, 1),
    optimizer=tt.optimizer("adam", lr=0.02),
    batch_size=10,
    epochs=3,
)
"""

# No `if __name__ == "__main__"`: workers never run the script again.
SCRIPT = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import Dataset
import torrential as tt

print("started", os.getpid())

class Line(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.tensor([index / 48 - 1])
        return x, SLOPE * x

class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.slope * x

SLOPE = 3.0
task = tt.Task(
    model=Slope,
    loss=lambda outputs, targets: ((outputs - targets) ** 2).mean(),
    metric=lambda outputs, targets: (outputs - targets).abs().mean(),
    maximize=False,
    train=Line(),
    test=Line(),
    optimizer=tt.optimizer("sgd", lr=0.3),
    batch_size=8,
    epochs=6,
)
result = tt.train(task, tt.AllReduce(accumulate=1), workers=2, seed=3, device="cpu", out=sys.argv[1], progress=False)
steps = [r for r in result.history if type(r).__name__ == "Step"]
evaluations = [r for r in result.history if type(r).__name__ == "Evaluation"]
print(json.dumps({
    "model": type(result.model).__name__,
    "slope": float(result.model(torch.ones(1))),
    "value": result.summary.value,
    "steps": result.summary.steps,
    "workers": sorted({s.worker for s in steps}),
    "losses": [steps[0].loss, steps[-1].loss],
    "splits": sorted({e.split for e in evaluations}),
    "last": type(result.history[-1]).__name__,
    "read": len(tt.read_records(result.out / "records.jsonl")) == len(result.history),
}))
"""


def test_a_file_with_classes_lambdas_and_a_module_beside_it(run_cli: Cli, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "beside_it.py").write_text(SIBLING)
    (code / "points.py").write_text(TASK_FILE)
    out = tmp_path / "out"
    done = run_cli("train", code / "points.py", "--workers", 2, "--device", "cpu", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["workers"], summary["steps"], summary["samples"]) == (2, 27, 3 * 180)  # a tenth was held out
    assert summary["metric"] == "metric"  # a lambda has no better name
    assert summary["value"] > 0.8
    (last,) = (out / "checkpoints").glob("step-00000027")
    weights = load_file(last / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in weights.items()} == {
        "body.weight": (16, 2), "body.bias": (16,), "head.weight": (2, 16), "head.bias": (2,)
    }  # fmt: skip
    assert all(torch.isfinite(t).all() for t in weights.values())


def test_a_script_that_defines_everything_itself_and_has_no_guard(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    here = str(Path(torrential.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script), str(out)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": here},
        timeout=40,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("started") == 1
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["model"] == "Slope" and abs(got["slope"] - 3.0) < 0.05
    assert got["value"] < 0.05
    assert got["steps"] == 36  # 6 epochs of 87 samples, 16 at a time
    assert got["workers"] == [0, 1]
    assert got["losses"][1] < 0.01 * got["losses"][0]
    assert got["splits"] == ["test", "validation"]
    assert got["last"] == "Summary" and got["read"]
