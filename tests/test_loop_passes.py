"""Passes over a prepared loader that are no plain epochs: looks at a batch, evaluations, breaks."""

import contextlib
import io
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torrential as tt
from torrential.errors import RunFailed, WorkerFailed
from torrential.records import Evaluation, Event

HEAD = """
import sys, time, torch
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import torrential as tt
torch.manual_seed(0)
inputs = torch.randn(96, 5)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
loader = DataLoader(TensorDataset(inputs), batch_size=int(sys.argv[1]))
def wait_for_checkpoint():
    while not (Path(sys.argv[2]) / "cut/checkpoints/step-00000006").exists(): time.sleep(0.01)
def note(seen):
    with (Path(sys.argv[2]) / f"seen-{run.rank}").open("a") as file:
        print(seen, file=file)
def loss_of(x):
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
run = tt.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
"""
STEP = "optimizer.zero_grad(); loss_of(x).backward(); optimizer.step()"
LOOP = """
for epoch in run.epochs(3):
    for i, (x,) in enumerate(loader):
        {before}
        optimizer.zero_grad(); loss_of(x).backward(); optimizer.step()
        {after}
    {evaluate}
    run.report(loss=loss_of(inputs).item())
"""
NOTHING = {"before": "pass", "after": "pass", "evaluate": "pass"}
PEEK = "first, = next(iter(loader)); assert len(first) == int(sys.argv[1])\n"
KINDS = {  # what comes before the loop, what is in it, and the steps of 16 samples that it takes
    "a look at a batch": (PEEK, {}, 18),
    "a break after the step": ("", {"after": "if i == 2: break"}, 9),
    "a break before the step": ("", {"before": "if i == 2: break"}, 6),
    "a break in one epoch": ("", {"after": "if epoch == 1 and i == 0: break"}, 13),
    "an evaluation": ("", {"evaluate": "note(sum(len(x) for x, in loader))"}, 18),
    "an evaluation without gradients": (
        "@torch.no_grad()\ndef look():\n    note(sum(len(x) for x, in loader))\n",
        {"evaluate": "look()"},
        18,
    ),
}


def source(kind: str) -> str:
    before, inside, _ = KINDS[kind]
    return HEAD + before + LOOP.format(**(NOTHING | inside))


def trained_plainly(tmp_path: Path, text: str, monkeypatch) -> dict[str, torch.Tensor]:
    (tmp_path / "plain").mkdir()
    monkeypatch.setattr("sys.argv", ["plain", "16", str(tmp_path / "plain")])
    scope = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, "plain", "exec"), scope)
    return scope["model"].state_dict()


def launch(tmp_path: Path, text: str, strategy="allreduce", workers=2, **options):
    (tmp_path / "script.py").write_text(text)
    options = {"threads": 1, "out": tmp_path / "run", "progress": False, "minimize": True} | options
    args = [str(16 // workers), str(tmp_path)]
    return tt.launch(tmp_path / "script.py", strategy, args=args, workers=workers, **options)


CASES = [("allreduce", 2, kind) for kind in KINDS]
CASES += [("allreduce", 1, "a break before the step"), ("allreduce", 1, "an evaluation")]
CASES += [("bsp", 2, kind) for kind in ("a look at a batch", "a break before the step")]
CASES += [("downpour", 1, "a break in one epoch"), ("downpour", 1, "an evaluation without gradients")]


@pytest.mark.parametrize(("strategy", "workers", "kind"), CASES)
def test_a_pass_is_one_epoch_as_in_the_plain_script(tmp_path, monkeypatch, strategy, workers, kind):
    result = launch(tmp_path, source(kind), strategy, workers)
    expected = trained_plainly(tmp_path, source(kind), monkeypatch)
    for key, value in result.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-6)
    assert sum(isinstance(record, Evaluation) for record in result.history) == 3
    if strategy == "allreduce":
        assert (result.summary.steps, result.summary.samples) == (KINDS[kind][2], 16 * KINDS[kind][2])
    if (tmp_path / "plain" / "seen-0").exists():  # all workers together see what the plain script sees
        parts = [list(map(int, path.read_text().split())) for path in sorted(tmp_path.glob("seen-*"))]
        plainly = list(map(int, (tmp_path / "plain" / "seen-0").read_text().split()))
        assert len(parts) == workers and [sum(part) for part in zip(*parts, strict=True)] == plainly


def test_a_broken_epoch_is_over_in_a_resumed_run_too(tmp_path):
    stop = "if (Path(sys.argv[2]) / 'stop').exists() and epoch == 2: wait_for_checkpoint(); raise KeyError('stopped')"
    text = HEAD + LOOP.format(**(NOTHING | {"before": stop, "after": "if i == 2: break"}))
    text = text.replace("batch_size=int(sys.argv[1])", "batch_size=int(sys.argv[1]), shuffle=True").replace(
        "\nfor epoch", "\n" + PEEK + "for epoch"
    )
    whole = launch(tmp_path, text)
    (tmp_path / "stop").touch()
    with pytest.raises(WorkerFailed, match="KeyError: 'stopped'"):
        launch(tmp_path, text, out=tmp_path / "cut")
    (tmp_path / "stop").unlink()
    args = ["8", str(tmp_path)]
    resumed = tt.launch(tmp_path / "script.py", args=args, resume=tmp_path / "cut", progress=False)
    one, other = (load_file(r.out / "checkpoints/step-00000009/model.safetensors") for r in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [e.step for e in resumed.history if isinstance(e, Event) and e.event == "resumed"] == [6]
    counts = Counter(record.step for record in resumed.history if isinstance(record, Evaluation))
    assert counts == {3: 1, 6: 1, 9: 1}
    further = tt.launch(tmp_path / "script.py", args=args, resume=tmp_path / "cut", epochs=4, progress=False)
    assert (further.summary.steps, further.summary.samples) == (12, 12 * 16)


def test_batches_that_gradients_were_computed_on_stay_part_of_the_step(tmp_path, monkeypatch):
    """Six batches an epoch, a step for every four of them, and a pass in between that trains on nothing."""
    text = HEAD + (
        "n = 0\n"
        "for epoch in run.epochs(2):\n"
        "    for x, in loader:\n"
        "        loss_of(x).backward(); n += 1\n"
        "        if n % 4 == 0: optimizer.step(); optimizer.zero_grad()\n"
        "    seen = sum(len(x) for x, in loader)\n"
        "    run.report(loss=loss_of(inputs).item())\n"
    )
    result, expected = launch(tmp_path, text), trained_plainly(tmp_path, text, monkeypatch)
    for key, value in result.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-6)
    assert (result.summary.steps, result.summary.samples) == (3, 192)


def test_what_the_trial_computes_is_not_where_a_run_begins(tmp_path, monkeypatch):
    """Without run.epochs the trial goes on to the first backward, and batch norm has seen a batch by then."""
    text = HEAD.replace("nn.Tanh()", "nn.BatchNorm1d(8)") + LOOP.replace("run.epochs(3)", "range(3)").format(**NOTHING)
    result, expected = launch(tmp_path, text, workers=1), trained_plainly(tmp_path, text, monkeypatch)
    assert int(expected["1.num_batches_tracked"]) == 18 + 3
    for key, value in result.model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "inside", "said"),
    [
        ("allreduce", {"after": "if run.rank and i == 2: break"}, "worker 0 is in epoch 0; worker 1 is in epoch 1"),
        (
            "downpour",
            {"evaluate": "sum(len(x) for x, in loader)"},
            r"trained on none of them; evaluate under torch.no_",
        ),
    ],
)
def test_passes_that_no_run_can_be_made_of_are_named(tmp_path, strategy, inside, said):
    with pytest.raises(RunFailed, match=said):
        launch(tmp_path, HEAD + LOOP.format(**(NOTHING | inside)), strategy)


def test_one_pass_follows_another(tmp_path):
    with pytest.raises(RunFailed, match="goes on with a pass over its loader after it has begun another"):
        launch(tmp_path, HEAD + f"for (x,), _ in zip(loader, loader):\n    {STEP}\n", workers=1)
