"""Runs of scripts with a loop of their own: deaths, checkpoints, what is refused."""

import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import torrential as tt
from torrential.cli import app
from torrential.errors import BadInput, RunFailed, WorkerFailed
from torrential.records import Evaluation, Event, Step
from torrential.reporting import series, tables
from torrential.study.intervals import interval, unevenly_evaluated
from torrential.study.read import read_study
from torrential.study.show import columns

HEAD = """
import os, signal, sys, torch
from pathlib import Path
import torrential as tt
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
data = TensorDataset(torch.randn(61, 4), torch.arange(61))
loader = DataLoader(data, batch_size=4, shuffle=True)
run = tt.join()
"""
PREPARED = HEAD + "model, optimizer, loader = run.prepare(model, optimizer, loader)\n"
DYING = (
    PREPARED
    + """
home, dies, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
taken = 0
def die(where):
    if where == when and run.rank == 1 and taken == int(dies) and not (home / "died").exists():
        (home / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
with open(home / f"seen-{run.rank}-{os.getpid()}", "a", buffering=1) as seen:
    for epoch in run.epochs(3):
        for x, numbers in loader:
            taken += 1
            optimizer.zero_grad()
            die("before backward")
            model(x).pow(2).mean().backward()
            die("before step")
            optimizer.step()
            seen.write(f"{epoch} " + " ".join(map(str, numbers.tolist())) + "\\n")
            die("after step")
"""
)


def launch(tmp_path: Path, source: str, strategy="allreduce", **options):
    (tmp_path / "script.py").write_text(source)
    options = {"workers": 2, "threads": 1, "out": tmp_path / "run", "progress": False} | options
    return tt.launch(tmp_path / "script.py", strategy, **options)


def seen(directory: Path) -> Counter:
    found = Counter()
    for file in directory.glob("seen-*"):
        for line in file.read_text().splitlines():
            epoch, *numbers = map(int, line.split())
            found.update((epoch, number) for number in numbers)
    return found


@pytest.mark.parametrize(
    ("strategy", "when", "dies", "options"),
    [
        ("allreduce", "before backward", 3, {}),
        ("allreduce", "before step", 5, {}),
        ("allreduce", "before step", 15, {"transport": "unix"}),
        ("allreduce", "after step", 10, {"restart": True}),
        ("allreduce", "before step", 4, {"accumulate": 2}),
        ("bsp", "before step", 5, {"restart": True}),
        ("ssp", "before step", 2, {}),
        ("downpour", "after step", 2, {}),
        ("downpour", "before step", 2, {"push_every": 2}),
    ],
)
def test_a_worker_dies_and_every_sample_is_trained_on_once(tmp_path, strategy, when, dies, options):
    result = launch(tmp_path, DYING, strategy, workers=3, args=[str(tmp_path), str(dies), when], **options)
    assert (tmp_path / "died").exists()
    assert [e.worker for e in result.history if isinstance(e, Event) and e.event == "worker_lost"] == [1]
    found = seen(tmp_path)
    if strategy in ("ssp", "downpour"):  # what a dead worker had may be trained on in the next epoch
        found = Counter({(0, n): sum(found[(e, n)] for e in range(3)) - 2 for n in range(61)})
        odd = {n: times for (_, n), times in found.items() if times != 1}
    else:
        odd = {(e, n): found[(e, n)] for e in range(3) for n in range(61) if found[(e, n)] != 1}
    if options.keys() & {"accumulate", "push_every"}:  # its first batch of two was not in any update yet
        assert len(odd) <= 4 and set(odd.values()) <= {2}
    else:
        assert odd == {}
    assert result.summary.samples == 3 * 61


RESUMED = (
    HEAD
    + """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60)
run.save(scheduler=scheduler)
for epoch in run.epochs(4):
    for number, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        if Path(sys.argv[1]).exists() and epoch == 2 and number == 4:
            raise KeyError("stopped")
    run.report(loss=scheduler.get_last_lr()[0])
"""
)


@pytest.mark.parametrize(("strategy", "workers"), [("allreduce", 2), ("bsp", 1)])
def test_a_resumed_script_ends_in_the_same_bits(tmp_path, strategy, workers):
    options = {"workers": workers, "evaluate_every": 6, "minimize": True, "args": [str(tmp_path / "stop")]}
    whole = launch(tmp_path, RESUMED, strategy, **options)
    (tmp_path / "stop").touch()
    with pytest.raises(WorkerFailed, match="KeyError: 'stopped'"):
        launch(tmp_path, RESUMED, strategy, out=tmp_path / "cut", **options)
    (tmp_path / "stop").unlink()
    resumed = tt.launch(tmp_path / "script.py", args=options["args"], resume=tmp_path / "cut", progress=False)
    for file in ("model", "optimizer"):
        last = f"checkpoints/step-{whole.summary.steps:08}/{file}.safetensors"
        one, other = (load_file(result.out / last) for result in (whole, resumed))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    reports = [[e.value for e in result.history if isinstance(e, Evaluation)] for result in (whole, resumed)]
    assert reports[0] == reports[1] and len(reports[0]) == 4


def test_a_target_stops_all_workers_and_the_script_goes_on_to_its_end(tmp_path):
    source = PREPARED + (
        "for epoch in range(50):\n"
        "    for x, _ in loader:\n"
        "        model(x).pow(2).mean().backward()\n"
        "        optimizer.step()\n"
        "    run.report(progress=epoch / 10)\n"
        f"open({str(tmp_path)!r} + f'/ended-{{run.rank}}', 'w').close()\n"
    )
    result = launch(tmp_path, source, target=0.2)
    assert result.summary.reached and result.summary.metric == "progress"
    assert (tmp_path / "ended-0").exists() and (tmp_path / "ended-1").exists()
    assert result.summary.steps < 40


LATE = (
    PREPARED
    + """
home = Path(sys.argv[1])
for epoch in run.epochs(3):
    if run.rank == 0 and epoch == 0 and (home / "run").exists():  # not in the trial
        while not (home / "done").exists(): time.sleep(0.01)
    for x, _ in loader:
        model(x).pow(2).mean().backward()
        optimizer.step()
    run.report(progress=epoch)
(home / "done").touch()
"""
)


def test_reports_are_on_record_though_the_first_worker_has_no_batch(tmp_path):
    result = launch(
        tmp_path, LATE.replace("import os", "import os, time"), "downpour", target=2.0, args=[str(tmp_path)]
    )
    found = [(e.value, e.loss) for e in result.history if isinstance(e, Evaluation)]
    assert found == [(0.0, None), (1.0, None), (2.0, None)] and result.summary.reached
    assert [e.event for e in result.history if isinstance(e, Event)] == ["target_reached"]


def test_of_several_reports_of_an_epoch_the_first_is_on_record(tmp_path):
    source = (
        PREPARED + "for epoch in run.epochs(3):\n    for x, _ in loader:\n    " + STEP.replace("\n    ", "\n        ")
    )
    heard: list[Any] = []
    listener = SimpleNamespace(record=heard.append)
    source += "    run.report(progress=epoch, loss=7.0, f1=0.5)\n"
    result = launch(tmp_path, source, "bsp", listeners=[listener])
    found = [e for e in result.history if isinstance(e, Evaluation)]
    assert [(e.value, e.loss, e.epoch, e.figures) for e in found] == [(n, 7, n + 1, {"f1": 0.5}) for n in range(3)]
    assert [e for e in heard if isinstance(e, Evaluation)] == found


def test_a_script_is_compared_with_arguments_and_reports_of_its_own(tmp_path):
    (tmp_path / "script.py").write_text(
        PREPARED + "for n, (x, _) in enumerate(loader):\n" + STEP + "    run.report(progress=n * int(sys.argv[1]))\n"
    )
    asked = ["compare", str(tmp_path / "script.py"), "--strategies", "allreduce", "--target", "6", "--trials", "1"]
    result = CliRunner().invoke(app, [*asked, "--workers", "1", "--out", str(tmp_path / "study"), "--", "3"])
    assert result.exit_code == 0, result.output
    found = tt.compare(
        asked[1], ["allreduce"], target=6, trials=1, workers=1, args=["3"], out=tmp_path / "own", progress=False
    )
    assert [entry.reached for entry in found.entries] == [1]
    study = read_study(tmp_path / "study")
    assert [run.summary.reached for run in study.entries[0].runs] == [True]
    assert unevenly_evaluated(study) == [] and interval(study) == "when the script reports"
    assert [e.value for e in study.entries[0].runs[0].evaluations][:3] == [0, 3, 6]
    plain = read_study(tmp_path / "study" / "runs")
    for found in (study, plain):
        head = tables.trials(found, {id(run): series.work(run) for run in found.entries[0].runs}).head
        assert "reported progress" in head and "reported progress" in columns(found) and found.own_loop
        assert not {"test progress", "validation progress"} & {*head, *columns(found)}


def test_a_script_may_end_the_run_and_a_resumed_one_goes_further(tmp_path):
    source = PREPARED + (
        "for epoch in run.epochs(2):\n"
        "    for x, _ in loader:\n"
        "        model(x).pow(2).mean().backward()\n"
        "        optimizer.step()\n"
        "    if run.rank == 1 and epoch == 1 and sys.argv[1:]: run.stop()\n"
    )
    result = launch(tmp_path, source)
    assert result.summary.samples == 2 * 61
    with pytest.raises(BadInput, match="no forward pass; load them into a model"):
        result.model(torch.ones(1, 4))
    further = tt.launch(tmp_path / "script.py", resume=tmp_path / "run", epochs=3, progress=False)
    assert further.summary.samples == 3 * 61
    stopped = launch(tmp_path, source, out=tmp_path / "stopped", epochs=50, args=["stop"])
    assert stopped.summary.samples == 2 * 61
    events = [e.detail for e in stopped.history if isinstance(e, Event) and e.event == "stopped"]
    assert events == ["worker 1 has called run.stop()"]


@pytest.mark.parametrize(
    ("strategy", "who"), [("allreduce", "0"), ("allreduce", "1"), ("allreduce", "01"), ("bsp", "01")]
)
def test_a_run_stops_before_the_next_batch(tmp_path, strategy, who):
    """Also where other workers have computed on it already: that step is not taken, and nothing is reported of it."""
    source = PREPARED + (
        "for epoch in range(9):\n"
        "    for x, _ in loader:\n"
        "        model(x).pow(2).mean().backward()\n"
        "        optimizer.step()\n"
        "    run.report(epochs=epoch + 1)\n"
        "    if epoch == 1 and str(run.rank) in sys.argv[1]: run.stop()\n"
    )
    result = launch(tmp_path, source, strategy, args=[who])
    found = [(e.value, e.epoch, e.samples) for e in result.history if isinstance(e, Evaluation)]
    assert found == [(1, 1, 61), (2, 2, 2 * 61)] and result.summary.samples == 2 * 61
    assert load_file(next((tmp_path / "run" / "checkpoints").glob(f"*{result.summary.steps}/model.safetensors")))


@pytest.mark.parametrize("strategy", ["ssp", "downpour"])
def test_gradients_that_are_added_up_have_a_loss_on_record_and_no_total_of_steps(tmp_path, strategy, capfd):
    source = PREPARED + (
        "for epoch in run.epochs(2):\n"
        "    for n, (x, _) in enumerate(loader):\n"
        "        model(x).pow(2).mean().backward()\n"
        "        if n % 3 == 2: optimizer.step()\n"
    )
    result = launch(tmp_path, source, strategy, workers=1, progress=None)
    losses = [record.loss for record in result.history if isinstance(record, Step)]
    assert losses and all(map(math.isfinite, losses))
    shown = capfd.readouterr().err
    assert " % of the samples" in shown and not re.search(r"step \d+ / ", shown)


STREAM = (
    HEAD
    + """
from torch.utils.data import IterableDataset
class Numbers(IterableDataset):
    def __iter__(self):
        return ((torch.randn(4), n) for n in range(61))
    def __len__(self):
        return int(sys.argv[1])
Endless = type("Endless", (IterableDataset,), {"__iter__": None})
loader = DataLoader(Endless() if sys.argv[1] == "-1" else Numbers(), batch_size=4)
model, optimizer, loader = run.prepare(model, optimizer, loader)
with open(Path(__file__).parent / f"seen-{run.rank}", "w") as seen:
    for epoch in run.epochs(2):
        for x, numbers in loader:
            model(x).pow(2).mean().backward()
            optimizer.step()
            seen.writelines(f"{epoch} {n}\\n" for n in numbers.tolist())
"""
)


@pytest.mark.parametrize("strategy", ["allreduce", "ssp"])
def test_a_stream_with_a_length_is_dealt_out(tmp_path, strategy):
    assert launch(tmp_path, STREAM, strategy, args=["61"]).summary.samples == 2 * 61
    seen = [line for rank in range(2) for line in (tmp_path / f"seen-{rank}").read_text().splitlines()]
    assert sorted(seen) == sorted(f"{epoch} {n}" for epoch in range(2) for n in range(61))


def test_a_stream_of_another_length_or_none_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"stream without a length \(Endless\).*; give it a __len__: the samples of an"):
        launch(tmp_path, STREAM, args=["-1"])
    said = r"the stream of the loader's data set ended after 61 samples of epoch 0 \(samples: 70\); let __len__ give 61"
    with pytest.raises(RunFailed, match=said):
        launch(tmp_path, STREAM, args=["70"])


STEP = "    model(x).pow(2).mean().backward()\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("print('nothing')", BadInput, "never calls tt.join"),
        (HEAD, BadInput, "ended without a batch or step"),
        (PREPARED + "for x, _ in loader: pass", BadInput, r"never called optimizer.step\(\)"),
        (PREPARED + "for x, _ in loader: model(x).mean().backward()", RunFailed, r"never called optimizer.step\(\)"),
        (HEAD + "run.prepare(model, model)", BadInput, "the model Linear was prepared already"),
        (HEAD + "run.prepare(3)", BadInput, r"given: a int"),
        (HEAD + "raise KeyError('x')", BadInput, r"script.py raised KeyError: 'x' \(.*script.py:14\)"),
        (HEAD + "import sys; sys.exit(3)", BadInput, r"sys.exit\(3\) before its first batch"),
        (HEAD + "run.prepare(model, optimizer); optimizer.step()", BadInput, "prepared no loader"),
        (
            HEAD + "run.prepare(DataLoader(data, batch_sampler=[[1], [2]]))",
            BadInput,
            "batch_sampler of its own, and the run deals batches out",
        ),
        (
            PREPARED.replace("batch_size=4", "batch_size=50") + "for x, _ in loader:\n" + "    optimizer.step()",
            BadInput,
            r"\(samples a step: 100, samples: 61\); give the loader batch_size=30$",
        ),
        (
            PREPARED + "for x, _ in loader:\n" + STEP + "    os._exit(5)",
            RunFailed,
            r"^all workers are gone \(worker . exited with status 5, as by os._exit; look for that in the script and ",
        ),
        (PREPARED + "for x, _ in loader: optimizer.step()", RunFailed, "backward has left no gradient"),
        (
            PREPARED + "other = torch.optim.AdamW([model.bias])\nfor x, _ in loader:\n" + STEP + "    other.step()",
            RunFailed,
            r"an optimizer that was not prepared \(AdamW\) takes a step with parameters of the prepared model",
        ),
        (PREPARED + "for x, _ in loader:\n    optimizer.step(lambda: 1)", RunFailed, "was given a closure"),
        (
            HEAD + "model(data[:4][0]).mean().backward()\noptimizer.step()\n"
            "model, optimizer, loader = run.prepare(model, optimizer, loader)\nnext(iter(loader))\n",
            BadInput,
            r"SGD has state already \(momentum_buffer of weight, from steps or load_state_dict\), and a run begins",
        ),
        (
            PREPARED + "for x, _ in loader:\n" + STEP + "    optimizer.load_state_dict({})",
            RunFailed,
            "load_state_dict was called in a launched script, where the run keeps the state; leave it out",
        ),
        (
            PREPARED
            + "from types import SimpleNamespace\n"
            + "odd = SimpleNamespace(state_dict=lambda: {'where': Path('.')}, load_state_dict=print)\n"
            + "run.save(odd=odd)\nfor x, _ in loader:\n"
            + STEP,
            RunFailed,
            r"the state of 'odd' holds a pathlib.\w+, which no checkpoint can hold",
        ),
        (
            PREPARED
            + "for x, _ in loader:\n"
            + STEP
            + "    optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})",
            RunFailed,
            r"another parameter group \(there were 1, now 2\)",
        ),
        (
            PREPARED + "for x, _ in loader:\n" + STEP + "    if run.rank: raise ValueError('here')",
            WorkerFailed,
            r"worker 1 failed.*ValueError: here \(.*script.py:18\)",
        ),
        (
            PREPARED + "for n, (x, _) in enumerate(loader):\n    if run.rank and n == 3: continue\n" + STEP,
            RunFailed,
            "scripts of workers differ at step 4: worker 0 took 1 batch .* worker 1 took 2 batches",
        ),
        (
            PREPARED + "for x, _ in loader:\n    if run.rank: optimizer.param_groups[0]['lr'] = 0.0\n" + STEP,
            RunFailed,
            r"differ at step 1: an option of the optimizer \(lr, say\) is 0.05 on worker 0 and 0 on worker 1",
        ),
        (
            PREPARED + "for n, (x, _) in enumerate(loader):\n" + STEP + "    if run.rank and n == 3: break",
            RunFailed,
            r"^worker 1 came to the end of the script before step 5, and worker 0 waits for all to take it; have them "
            r"take the same steps, or end the run with run.stop\(\); no checkpoint",
        ),
        (
            PREPARED + "for x, _ in loader:\n" + STEP + "    model.bias.data = model.bias.data.clamp(-1, 1)",
            RunFailed,
            "the parameter bias was given new memory .* change it in place",
        ),
        (
            PREPARED + "for x, _ in loader:\n    (model(x).mean() * float('nan')).backward()\n    optimizer.step()",
            RunFailed,
            "the loss turned nan on worker . at step 1; lower the script's learning rate",
        ),
    ],
)
def test_what_is_wrong_with_a_script_is_said_in_one_line(tmp_path, source, error, said):
    with pytest.raises(error, match=said) as raised:
        launch(tmp_path, source)
    assert "\n" not in str(raised.value)


SCALED = (
    HEAD.replace("momentum=0.5", "fused=sys.argv[1] == 'fused'").replace("shuffle=True", "shuffle=False")
    + """
import numpy as np
model, optimizer, loader = run.prepare(model, optimizer, loader)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
for epoch in run.epochs(int(sys.argv[3])):
    optimizer.param_groups[0]["lr"] = np.interp(epoch, [0, 2], [0.05, 0.03])
    for x, _ in loader:
        optimizer.zero_grad()
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
assert not optimizer.state_dict()["state"] or not type(run).__name__.startswith("Worker")
torch.save(model.state_dict(), sys.argv[2])
"""
)


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_scaled_gradients_are_unscaled_before_a_step(tmp_path, kind, monkeypatch):
    """Also after a resume, with rates that are numpy's."""
    monkeypatch.setattr("sys.argv", ["script.py", kind, str(tmp_path / "alone.pt"), "3"])
    exec(compile(SCALED, "script.py", "exec"), {"__name__": "__main__"})
    there = str(tmp_path / "launched.pt")
    launch(tmp_path, SCALED, workers=1, args=[kind, there, "2"])
    launch(tmp_path, SCALED, workers=1, args=[kind, there, "3"], resume=tmp_path / "run", epochs=3)
    alone, found = torch.load(tmp_path / "alone.pt"), torch.load(there)
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


ADDING_UP = (
    PREPARED
    + """
import time
for number, (x, _) in enumerate(loader):
    if run.rank == 1: time.sleep(2)
    model(x).pow(2).mean().backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
print(f"worker {run.rank} had {0 if not len(loader) else number + 1}")
"""
)


def test_a_slow_worker_with_too_few_batches_for_a_step_is_no_failure(tmp_path):
    result = launch(tmp_path, ADDING_UP, "downpour", servers=1, epochs=1)
    taken = Counter(record.worker for record in result.history if isinstance(record, Step) and record.samples)
    assert result.summary.samples == 61 and taken[0]


LEAVING = (
    PREPARED
    + """
def main():
    for epoch in run.epochs(2):
        for n, (x, _) in enumerate(loader):
            if n == 3 and (sys.argv[1] == "all" or sys.argv[1] == str(run.rank)): sys.exit(0)
            if n == 3 and sys.argv[1] == "break": break
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        if epoch == 0 and sys.argv[1] == "epoch": raise SystemExit
        if sys.argv[1] == "break": return
sys.exit(main())
"""
)


@pytest.mark.parametrize(
    ("strategy", "workers", "who", "said"),
    [
        (
            "allreduce",
            1,
            "all",
            r"worker 0 called sys.exit\(0\) at step 4 \(.*script.py:19\), before its loop was done",
        ),
        ("allreduce", 2, "1", r"worker 1 called sys.exit\(0\) at step 4 \(.*script.py:19\)"),
        ("ssp", 2, "1", r"worker 1 called sys.exit\(0\) at step \d+ \(.*script.py:19\)"),
        ("bsp", 2, "epoch", r"worker \d called sys.exit\(None\) at step 9 \(.*script.py:24\)"),
    ],
)
def test_a_script_that_leaves_its_loop_by_sys_exit_has_failed(tmp_path, strategy, workers, who, said):
    with pytest.raises(RunFailed, match=said):
        launch(tmp_path, LEAVING, strategy, workers=workers, args=[who])


@pytest.mark.parametrize(("who", "steps"), [("nobody", 16), ("break", 3)])
def test_a_script_may_end_by_sys_exit_when_its_loop_is_done(tmp_path, who, steps):
    assert launch(tmp_path, LEAVING, args=[who]).summary.steps == steps


def test_what_no_script_can_be_run_with_is_refused(tmp_path):
    for options, said in (
        ({"strategy": "ddp"}, "ddp wraps the model"),
        ({"warmup": 1}, "warmup is for tasks"),
    ):
        with pytest.raises(BadInput, match=said):
            launch(tmp_path, PREPARED + "for x, _ in loader:\n" + STEP, **options)
    with pytest.raises(BadInput, match="there is no script"):
        tt.launch(tmp_path / "gone.py")


def test_alone_a_script_is_a_plain_loop():
    run = tt.join()
    model, loader = torch.nn.Linear(2, 1), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    assert run.prepare(model) is model and run.prepare(loader) is loader
    assert (list(run.epochs(3)), run.rank, run.workers) == ([0, 1, 2], 0, 1)
    run.report(accuracy=1.0)
    with pytest.raises(BadInput, match="prepared already"):
        run.prepare(model)


def test_readers_of_a_loader_that_have_no_effect_are_named(tmp_path):
    source = PREPARED.replace("batch_size=4,", "batch_size=4, num_workers=2,")
    source += (
        "for x, _ in loader:\n    optimizer.zero_grad()\n    model(x).pow(2).mean().backward()\n    optimizer.step()\n"
    )
    (tmp_path / "script.py").write_text(source)
    ended = CliRunner().invoke(app, ["launch", str(tmp_path / "script.py"), "--out", str(tmp_path / "run")])
    assert ended.exit_code == 0, ended.output
    assert "num_workers=2 has no effect" in " ".join(ended.output.split())
