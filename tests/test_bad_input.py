"""Whatever is wrong, the user sees one clear message with the offending value in it, and nothing is left behind.

Exit codes: 2 for what cannot be used, 1 for a run that failed. What is refused before a process is needed runs through
`main` in this process, with a launch that starts nothing and lets nothing be started; a few of those, and every run
that fails after its start, go through a command of their own. Where a task's own code raises: test_failures.py.
"""

from __future__ import annotations

import grp
import inspect
import os
import pwd
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
import torch

from torrential import checkpoint as checkpoints
from torrential import cli, records, run
from torrential.cli import common
from torrential.config import WORLDS, Compression, Recipe, Settings, without_effect
from torrential.data.deal import Deal
from torrential.errors import BadInput
from torrential.options import explain
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers
from torrential.userfiles import check_own

Cli = Callable[..., subprocess.CompletedProcess[str]]

HEAD = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import torrential as tt

SAMPLES, BATCH = 48, 4
inputs = torch.arange(1.0, SAMPLES + 1).repeat(3, 1).t() / SAMPLES
targets = torch.arange(SAMPLES) % 2
data = TensorDataset(inputs, targets)

def make(**changes):
    given = dict(model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, train=data, test=data, validation=data,
                 optimizer=tt.optimizer("sgd", lr=0.01), batch_size=BATCH, epochs=3)
    return tt.Task(**given | changes)
"""
SAMPLES, BATCH = 48, 4


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class NothingStarts:
    """Stands in for the launch where nothing may be launched."""

    def close(self) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"bad input has come as far as the world (launch.{name})")


@pytest.fixture
def main_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ended]]:
    """The command line's `main` in this process."""

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task's file puts its directory there

    def main(*args: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["torrential", *map(str, args)])
        code = cli.carry_out()
        streams = capfd.readouterr()
        return Ended(code, streams.out, streams.err)

    yield main
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def refused(main_here: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The message with which a command is refused, before anything has started."""
    monkeypatch.setattr(common, "Launch", NothingStarts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def refuse(*args: object, code: int = 2) -> str:
        return one_message(main_here(*args), code, only=True)

    return refuse


def one_message(ended: Ended | subprocess.CompletedProcess[str], code: int, only: bool = False) -> str:
    """The one error on standard error; `only`: there is nothing else there."""
    if isinstance(ended, subprocess.CompletedProcess):
        ended = Ended(ended.returncode, ended.stdout, ended.stderr)
    assert ended.code == code, ended
    assert ended.out == ""
    assert "Traceback" not in ended.err
    before, found, message = ended.err.partition("error: ")
    assert found and "\nerror: " not in message, ended.err
    assert not (before if only else before.rpartition("\n")[2]), ended.err
    return message


def write(directory: Path, text: str, name: str = "mine.py") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def line_of(text: str, words: str) -> int:
    (number,) = (number for number, line in enumerate(text.splitlines(), start=1) if words in line)
    return number


# -- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "kind", "given", "nearest"),
    [
        (("digitz",), "task", "digitz", "digits"),
        (("digits", "--strategy", "allreduc"), "strategy", "allreduc", "allreduce"),
        (("digits", "--set", "acumulate=2"), "option", "acumulate", "accumulate"),
        (("digits", "--set", "transprot=tcp"), "option", "transprot", "transport"),
    ],
)
def test_unknown_names_come_with_the_nearest(
    args: tuple[str, ...], kind: str, given: str, nearest: str, refused: Callable[..., str]
) -> None:
    message = refused("train", *args)
    assert message.startswith(f"no {kind} named {given!r}; did you mean {nearest!r}?")


def test_an_unknown_flag(refused: Callable[..., str]) -> None:
    message = refused("train", "digits", "--worker", "2")
    assert "--worker" in message and "--workers" in message


def test_a_name_like_nothing_we_have_comes_with_all_names(refused: Callable[..., str]) -> None:
    message = refused("train", "xyzzy")
    assert "'xyzzy'" in message and "digits-mlp" in message and "fashion" in message


# -- values -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", ["workers", "epochs", "steps", "batch-size"])
def test_counts_below_one(name: str, value: int, refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused("train", "digits", f"--{name}", value, "--out", tmp_path / "out")
    assert name in message.replace("_", "-") and str(value) in message and "at least 1" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--workers", "many"), ("--workers", "many")),
        (("--lr", "0"), ("learning rate", "0")),
        (("--lr", "nan"), ("learning rate", "nan")),
        (("--target", "nan"), ("target", "nan")),
        (("--set", "accumulate=0"), ("accumulate", "0")),
        (("--set", "transport=pigeon"), ("transport", "pigeon")),
        (("--set", "threads=-1"), ("threads", "-1")),
        (("--set", "timeout=soon"), ("timeout", "soon")),
        (("--set", "algorithm=shared", "--set", "transport=tcp"), ("algorithm=shared", "transport=tcp")),
        (("--set", "accumulate"), ("--set", "name=value", "'accumulate'")),
        (("--set", "=2"), ("--set", "name=value", "'=2'")),
        (("--device", "tpu"), ("'tpu'", "cuda")),
        (("--device", "cuda"), ("--device cuda", "no usable GPU")),
        (("--workers", "5000"), ("workers: 5000", "samples: 1350", "--workers 1350")),
    ],
)
def test_values_that_cannot_be_used(
    args: tuple[str, ...], words: tuple[str, ...], refused: Callable[..., str], tmp_path: Path
) -> None:
    message = refused("train", "digits", *args, "--out", tmp_path / "out")
    assert [word for word in words if word not in message] == [], message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("transport=foo",), "transport must be shared, unix or tcp (given: 'foo')"),
        (("security=ssl",), "security must be token or tls (given: 'ssl')"),
        (("algorithm=rign",), "halving, blocks or tree (given: 'rign'); did you mean 'ring'?"),
        (("schedule=foo",), "schedule must be constant, step, cosine or poly (given: 'foo')"),
        (("scaling=cubic",), "scaling must be none, linear, sqrt or loss (given: 'cubic')"),
        (("warmup_kind=sudden",), "warmup_kind must be gradual or constant (given: 'sudden')"),
        (("layerwise=adam",), "layerwise must be none, lars or lamb (given: 'adam')"),
        (("recipe=foo",), "recipe must be none or goyal (given: 'foo')"),
        (("restart=perhaps",), "restart must be true or false (given: 'perhaps')"),
        (("server=foo", "--strategy", "downpour"), "server must be adagrad or task (given: 'foo')"),
        (("accumulate=0",), "accumulate must be a whole number of at least 1 (given: '0')"),
        (("timeout=inf",), "timeout must be a number above 0, and finite (given: 'inf')"),
        (("milestones=0.5;0.7",), "milestones must be a list of numbers, as in 0.5,0.75 (given: '0.5;0.7')"),
    ],
)
def test_a_wrong_value_comes_with_the_right_ones(args: tuple[str, ...], said: str, refused: Callable[..., str]) -> None:
    assert said in " ".join(refused("train", "digits", "--set", *args).split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("compress=zip",), "compress must be none, topk, dgc, powersgd or int8 (given: 'zip')"),
        (("wire=bf8",), "wire must be float32, bf16 or fp16 (given: 'bf8')"),
        (("ratio=0",), "ratio must be a number above 0 up to 1 (given: '0')"),
        (("ratio=1.5",), "ratio must be a number above 0 up to 1 (given: '1.5')"),
        (("rank=0",), "rank must be a whole number of at least 1 (given: '0')"),
        (("sparsity_warmup=-1",), "sparsity_warmup must be a number of at least 0 (given: '-1')"),
        (
            ("compress=topk", "--strategy", "local"),
            "local cannot compress gradients (compress: topk): its workers send",
        ),
        (("wire=bf16", "--strategy", "ddp"), "ddp cannot compress gradients (wire: bf16): torch sends its gradients;"),
        (("compress=dgc", "--set", "layerwise=lars"), "layerwise=lars goes by norms of whole gradients, and dgc sends"),
        (("compress=int8", "--set", "wire=fp16"), "int8 sends bytes, and no values in another precision (wire: fp16)"),
        (("compress=topk", "--set", "algorithm=native"), "algorithm=native has torch sum gradients, which are compr"),
    ],
)
def test_compression_that_cannot_be(args: tuple[str, ...], said: str, refused: Callable[..., str]) -> None:
    assert said in " ".join(refused("train", "digits", "--set", *args).split())


def test_compression_that_does_not_suit_the_task(refused: Callable[..., str], tmp_path: Path) -> None:
    mixed = "nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).bfloat16())"
    tasks = {
        "mixed": f"tt.Task(model=lambda: {mixed}, step=lambda m, b: m[0](b[0]).sum(), train=data, test=data)",
        "damped": "make(optimizer=tt.optimizer('sgd', lr=0.01, momentum=0.9, dampening=0.5))",
        "moved": "make(optimizer=tt.optimizer('sgd', lr=0.01, momentum=0.9), schedule=tt.scheduler(lambda o: "
        "torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=36), every='batch'))",
    }
    path = write(tmp_path, HEAD + "".join(f"{name} = {task}\n" for name, task in tasks.items()))
    said = {
        "mixed": "a compressor takes parameters of one dtype (the model's: float32, bfloat16); convert",
        "damped": "momentum correction is of SGD without dampening (dampening: 0.5); leave it out, or use --set",
        "moved": "the task's schedule moves momentum, which workers have for themselves with momentum correction",
    }
    for name, words in said.items():
        assert words in refused("train", f"{path}:{name}", "--set", "compress=dgc"), name


def test_nccl_without_gpus(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = ("train", "digits", "--workers", 2, "--set", "algorithm=nccl")
    assert refused(*nccl) == ("NCCL needs a GPU for each worker (GPUs here: 0); use --set algorithm=native or auto\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "(GPUs here: 1); use" in refused(*nccl)
    assert "(given: --device cpu); use" in refused(*nccl, "--device", "cpu")


@pytest.mark.parametrize(("gpus", "library"), [(1, "Gloo"), (2, "NCCL")])
def test_native_without_its_library(
    gpus: int, library: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, f"is_{library.lower()}_available", lambda: False)
    message = refused("train", "digits", "--workers", 2, "--set", "algorithm=native")
    assert f"algorithm=native needs {library}" in message and "use --set algorithm=auto" in message


@pytest.mark.parametrize(
    ("task", "value", "words"),
    [
        ("digits", "half", ("list of start:scale", "'half'", "try 0:0.5,0.6:1")),
        ("digits", "0:0.01", ("nothing of images of 8 × 8", "scale: 0.01", "at least 0.12")),
        ("digits", "0:0.25,0.5:1", ("does not run on images of 2 × 2", "full size: 8 × 8", "leave resize out")),
        ("digits-mlp", "0:0.5", ("does not run on images of 4 × 4", "RuntimeError", "use larger scales")),
    ],
)
def test_resizing_that_cannot_be(task: str, value: str, words: tuple[str, ...], refused: Callable[..., str]) -> None:
    message = refused("train", task, "--workers", 2, "--set", f"resize={value}")
    assert [word for word in words if word not in message] == [], message


def test_resizing_what_is_no_image(refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused("train", write(tmp_path, f"{HEAD}task = make()\n"), "--set", "resize=0:0.5")
    assert message.startswith("only images (N, C, H, W) can be resized (got shape (2, 3)); leave resizing out")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--batch-size", 1400), "(samples a step: 1400, samples: 1350); use --batch-size 1350"),
        (("--workers", 4, "--batch-size", 400), "(samples a step: 1600, samples: 1350); use --batch-size 337"),
        (("--set", "accumulate=2000"), "use --batch-size 1 and a smaller accumulate"),
        (("--strategy", "downpour", "--set", "push_every=2000"), "use --batch-size 1 and a smaller push_every"),
        (("--epochs", 10, "--set", "warmup=11"), "(warmup: 11 epochs, run: 10); use --set warmup=1"),
        (("--set", "warmup=-1"), "(warmup: -1 epochs); use --set warmup=0"),
        (
            ("--epochs", 10, "--set", "warmup=5", "--set", "schedule=step"),
            "before warm-up is over (warmup: 5 epochs, first milestone at 3.33); use --set warmup=1",
        ),
        (("--strategy", "ssp", "--set", "resize=0:0.5"), "ssp does not know resize; leave it out, or use"),
        (
            ("--strategy", "downpour", "--set", "layerwise=lars"),
            "layerwise=lars would have no effect: servers of downpour have an optimizer of their own; add --set",
        ),
    ],
)
def test_recipes_that_cannot_be(args: tuple[object, ...], said: str, refused: Callable[..., str]) -> None:
    assert said in refused("train", "digits", *args)


@pytest.mark.parametrize(
    ("strategy", "args", "said"),
    [
        *(
            (strategy, ("--set", "period=0"), "period must be a whole number of at least 1 (given: '0')")
            for strategy in ("local", "adacomm", "diloco", "easgd", "hogwild")
        ),
        (
            "fedavg",
            ("--set", "clients=10", "--set", "sampled=11"),
            "a round cannot take more clients than there are (sampled: 11, clients: 10); use sampled=10 at most",
        ),
        (
            "easgd",
            ("--set", "beta=3.9", "--lr", "0.5"),
            "(alpha = beta / workers = 1.95, the bound at a rate of 0.5 is 0.857); use a smaller beta",
        ),
        ("easgd", ("--lr", "2"), "(alpha = beta / workers = 0.45, the bound at a rate of 2 is 0); use a smaller beta"),
        ("hogwild", ("--set", "transport=tcp"), "memory that all workers see (transport=tcp); leave it out"),
    ],
)
def test_local_updates_that_cannot_be(
    strategy: str, args: tuple[str, ...], said: str, refused: Callable[..., str]
) -> None:
    message = refused("train", "digits-mlp", "--strategy", strategy, "--workers", 2, *args)
    assert said in message and message.count("\n") == 1


def test_a_partition_that_leaves_a_client_empty(refused: Callable[..., str], tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}task = make(partition=[[0, 1], []])\n")
    message = refused("train", path, "--strategy", "fedavg")
    assert "the partition leaves a client without samples (client: 1); leave it out" in message


def test_adacomm_without_a_loss_to_adapt_to(run_cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}task = make(loss=lambda outputs, targets: -F.cross_entropy(outputs, targets))\n")
    message = one_message(train_two(run_cli, path, tmp_path / "out", "--strategy", "adacomm"), 1)
    assert "adacomm adapts to the training loss, which has to be positive (first round: -0." in message
    assert "add a constant to the loss, or use local" in message and message.count("\n") == 1


def test_no_task_at_all(refused: Callable[..., str]) -> None:
    assert "which task" in refused("train")


# -- task files -------------------------------------------------------------------------------------------------------
def test_a_task_file_that_raises_shows_its_own_traceback_alone(run_cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, "def build():\n    return 1 / 0\n\nvalue = build()\n")
    message = one_message(run_cli("train", path), 2, only=True)
    lines = [line for line in message.splitlines() if line.strip("~^ ")]  # newer Pythons underline
    assert lines == [
        f"{path} cannot be loaded: ZeroDivisionError: division by zero ({path}:2)",
        f'  File "{path}", line 4, in <module>',
        "    value = build()",
        f'  File "{path}", line 2, in build',
        "    return 1 / 0",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import numpyy\n", ("ModuleNotFoundError", "numpyy", "mine.py:1")),
        ("task = (\n", ("SyntaxError", "mine.py:1")),
        ("x = 1\n", ("holds no Task", "mine.py:NAME")),
        ("task = 7\n", ("int", "not a Task")),
        (f"{HEAD}task = make(batch_size=0)\n", ("mine.py:", "batch_size", "0")),
        (
            f"{HEAD}task = make(model=lambda: nn.Linear(5, 2))\n",
            ("forward pass", "inputs (2, 3)", "shapes", "mine.py:"),
        ),
        (f"{HEAD}task = make(train=TensorDataset(inputs, torch.rand(48, 5)))\n", ("outputs (2, 2)", "targets (2, 5)")),
        (f"{HEAD}task = make(loss=lambda a, b: a.sum(1))\n", ("one number", "tensor")),
        (f"{HEAD}task = make(train=data.tensors[0])\n", ("pairs", "Tensor")),
    ],
    ids=["import", "syntax", "empty", "no task", "count", "inputs", "targets", "loss", "items"],
)
def test_task_files_that_do_not_work(
    text: str, words: tuple[str, ...], refused: Callable[..., str], tmp_path: Path
) -> None:
    message = refused("train", write(tmp_path, text), "--out", tmp_path / "out")
    assert [word for word in words if word not in message] == [], message
    assert not (tmp_path / "out").exists()


TRAINS = f"""{HEAD}
task = make()
print("trained", tt.train(task, out="trained", progress=False).summary.steps)
"""


def test_a_file_that_trains_when_it_is_imported(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, TRAINS)
    assert refused("train", path, "--out", tmp_path / "out") == (
        f"{path}:{line_of(TRAINS, 'tt.train')}: mine.py trains when it is imported; run it with `python mine.py`, "
        'or put that under `if __name__ == "__main__":`\n'
    )
    guarded = TRAINS.replace("print", "if __name__ == '__main__': print")
    with pytest.raises(AssertionError, match="as far as the world"):  # of what is not bad input
        refused("train", write(tmp_path, guarded, "guarded.py"), "--out", tmp_path / "out")
    assert not (tmp_path / "trained").exists()


RAISING_ITEMS = f"""{HEAD}
class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise RuntimeError(f"cannot decode image-{{index}}.png")

task = make(train=Broken())
"""


def test_a_data_set_that_raises(refused: Callable[..., str], tmp_path: Path) -> None:
    message = refused("train", write(tmp_path, RAISING_ITEMS), "--out", tmp_path / "out")
    assert "RuntimeError: cannot decode image-0.png" in message


# A task's code that ends the process it runs in: {exit} stands for the call.
ENDING = {
    "import": "{exit}\ntask = make()\n",
    "model": "def model():\n    {exit}\ntask = make(model=model)\n",
    "loss": "def loss(outputs, targets):\n    {exit}\ntask = make(loss=loss)\n",
    "item": """
class Ends(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        {exit}

task = make(train=Ends())
""",
    "step": """
class Ends(nn.Linear):
    def forward(self, x):
        if self.training and torch.is_grad_enabled() and (x[:, 0] == inputs[{sentinel}, 0]).any():
            {exit}
        return super().forward(x)

task = make(model=lambda: Ends(3, 2))
""",
    "evaluation": """
class Ends(nn.Linear):
    def forward(self, x):
        if not self.training:
            {exit}
        return super().forward(x)

task = make(model=lambda: Ends(3, 2))
""",
}


def ending(directory: Path, where: str, how: str) -> Path:
    text = f"import sys\n{HEAD}{ENDING[where].replace('{exit}', how).replace('{sentinel}', str(SENTINEL))}"
    return write(directory, text)


ENDED = (
    "the command exited with status {} before it was done, as by os._exit in the task's code; "
    "look for that in the model, the loss, the data sets and what they import\n"
)


@pytest.mark.parametrize("status", [0, 7])
@pytest.mark.parametrize("where", ["import", "model", "loss", "item"])
def test_a_task_that_ends_the_process_does_not_end_the_command(
    where: str, status: int, run_cli: Cli, tmp_path: Path
) -> None:
    path = ending(tmp_path, where, f"os._exit({status})")
    message = one_message(run_cli("train", path, "--out", tmp_path / "out"), 2, only=True)
    assert message == ENDED.format(status)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_a_task_that_ends_a_simulation_is_told_and_its_records_are_kept(
    where: str, run_cli: Cli, tmp_path: Path
) -> None:
    path = ending(tmp_path, where, "os._exit(0)")
    ended = train_two(run_cli, path, tmp_path / "out", "--world", "sim")
    kept = records.read_records(tmp_path / "out" / records.RECORDS)
    last = max(record.step for record in kept if isinstance(record, records.Step))
    said = (
        ENDED.format(0)
        .replace("done", f"done (the last step on record: {last})")
        .replace("\n", "; no checkpoint was made yet")
    )
    assert last > 0 and one_message(ended, 1) == f"{said}\n"
    assert isinstance(kept[-1], records.Event) and (kept[-1].event, kept[-1].detail) == ("failed", said)


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ("model", "model factory"),
        ("loss", "loss on outputs (2, 2) and targets (2,)"),
        ("item", "training data"),
    ],
)
def test_a_task_that_exits_is_bad_input(where: str, part: str, refused: Callable[..., str], tmp_path: Path) -> None:
    path = ending(tmp_path, where, "sys.exit(0)")
    line = line_of(path.read_text(), "sys.exit(0)")
    message = f"the task's {part} raised SystemExit: 0 ({path}:{line})"
    assert refused("train", path, "--out", tmp_path / "out") == f"{message}\n"
    with pytest.raises(BadInput, match=re.escape(message)):
        run.train(str(path), out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (
            "step",
            "all workers are gone (worker {} exited with status 0, as by os._exit in the task's code; look for that in "
            "the model, the loss, the data sets and what they import); no checkpoint was made yet",
        ),
        (
            "evaluation",
            "the observer died 3 times (the last one exited with status 0, as by os._exit in the task's code; look for "
            "that in the model, the loss, the data sets and what they import); no checkpoint was made yet",
        ),
    ],
)
def test_a_role_that_ends_itself_has_died(where: str, said: str, run_cli: Cli, tmp_path: Path) -> None:
    message = one_message(train_two(run_cli, ending(tmp_path, where, "os._exit(0)"), tmp_path / "out"), 1)
    assert message.startswith(said.format(1 - place_of(SENTINEL)[1]))
    kept = records.read_records(tmp_path / "out" / records.RECORDS)
    lost = [record for record in kept if isinstance(record, records.Event) and record.event.endswith("_lost")]
    assert len(lost) == 2
    if where == "step":  # the cause is on record, of a worker that others went on without, too
        assert {event.detail for event in lost} == {said.partition("} ")[2].partition(");")[0]}
    assert isinstance(kept[-1], records.Event) and (kept[-1].event, f"{kept[-1].detail}\n") == ("failed", message)


def test_a_worker_that_nobody_can_replace_is_told_with_what_is_left(run_cli: Cli, tmp_path: Path) -> None:
    path = ending(tmp_path, "step", "os._exit(0)")
    message = one_message(train_two(run_cli, path, tmp_path / "out", "--strategy", "ddp"), 1)
    assert message == (
        f"worker {place_of(SENTINEL)[1]} is gone (exited with status 0, as by os._exit in the task's code; look for "
        "that in the model, the loss, the data sets and what they import), and no other can take its place; no "
        "checkpoint was made yet\n"
    )


def test_a_task_file_that_is_not_there(refused: Callable[..., str], tmp_path: Path) -> None:
    assert str(tmp_path / "none.py") in refused("train", tmp_path / "none.py")


# -- directories ------------------------------------------------------------------------------------------------------
def test_an_out_that_exists_is_refused_and_left_as_it_is(run_cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out, "precious", "notes.txt")
    message = one_message(run_cli("train", "digits", "--out", out), 2, only=True)
    assert str(out) in message and f"--resume {out}" in message
    assert {p.name: p.read_text() for p in out.iterdir()} == {"notes.txt": "precious"}


def test_directories_that_cannot_be_written(refused: Callable[..., str], tmp_path: Path) -> None:
    """Root may write anywhere but below a file, and in /proc."""
    write(tmp_path, "", "file")
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/torrential-run")):
        message = refused("train", "digits", "--out", out)
        assert str(out) in message and "--out" in message


def finished_run(directory: Path, **config: Any) -> Path:
    """A directory as a finished run leaves it, as far as --resume looks at it."""
    given = dict(
        task="digits", source="digits", strategy="allreduce", options={}, world="local", workers=1, servers=0,
        epochs=1, steps=None, target=None, batch_size=32, lr=0.05, samples=1350, seed=0, device="cpu",
        optimizer={"kind": "SGD", "lr": 0.05, "momentum": 0.9}, settings={"world": "local"}, samples_per_step=32,
    )  # fmt: skip
    directory.mkdir()
    records.write_manifest(
        directory,
        records.Manifest(
            torrential="0.1.0", config=given | config, versions={}, hardware={}, seed=0, created="", command=[]
        ),
    )
    summary = records.Summary(
        task="digits", strategy="allreduce", world="local", workers=1, servers=0, seed=0, steps=1, samples=32,
        seconds=1.0, metric="accuracy", value=0.5, target=None, reached=None, time_to_target=None, bytes_sent=0,
        staleness_mean=0.0, staleness_max=0, events=0, out=str(directory),
    )  # fmt: skip
    with records.RecordWriter(directory / records.RECORDS) as writer:
        writer.write(summary)
    return directory


def test_resuming_what_is_not_there_or_finished(refused: Callable[..., str], tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    for directory in (missing, empty):
        message = refused("train", "--resume", directory)
        assert str(directory) in message and "is no run" in message
    assert not missing.exists()
    done = finished_run(tmp_path / "done")
    before = (done / records.RECORDS).read_bytes()
    message = refused("train", "--resume", done)
    assert str(done) in message and "finished" in message
    assert (done / records.RECORDS).read_bytes() == before


def test_a_damaged_manifest(refused: Callable[..., str], tmp_path: Path) -> None:
    path = finished_run(tmp_path / "run") / records.MANIFEST
    whole = path.read_bytes()
    plain = msgspec.json.decode(whole)
    for content in (
        b"",
        b"\xff\xfe garbage",
        whole[: len(whole) // 2],
        msgspec.json.encode(plain | {"config": {}}),
        msgspec.json.encode(plain | {"config": plain["config"] | {"workers": "two"}}),
    ):
        path.write_bytes(content)
        message = refused("train", "--resume", path.parent)
        assert str(path) in message and "damaged" in message


def test_damaged_checkpoints(refused: Callable[..., str], tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    (run / records.RECORDS).unlink()
    broken = run / "checkpoints" / "step-00000010"
    broken.mkdir(parents=True)
    write(broken, "{}", checkpoints.STATE)
    message = refused("train", "--resume", run, code=1)
    assert str(broken) in message and "state.json" in message


def test_resuming_without_what_the_task_came_from(refused: Callable[..., str], tmp_path: Path) -> None:
    gone = tmp_path / "gone.py"
    run = finished_run(tmp_path / "moved", source=str(gone))
    assert str(gone) in refused("train", "--resume", run)
    run = finished_run(tmp_path / "script", source=None)
    message = refused("train", "--resume", run)
    assert str(run) in message and "resume=" in message


def test_resuming_with_other_options(refused: Callable[..., str], tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    message = refused("train", "--resume", run, "--lr", "0.1", "--set", "restart=true")
    assert "--lr" in message and "--set" in message


@pytest.mark.parametrize("what", ["directory", "manifest", "task", "task's directory"])
@pytest.mark.parametrize("how", ["another user's", "open to everybody", "open to a group"])
def test_resuming_runs_no_code_that_others_may_have_chosen(
    what: str, how: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    task = write(
        tmp_path / "tasks", f"{HEAD}\nfrom pathlib import Path\nPath(__file__ + '.run').touch()\ntask = make()"
    )
    run = finished_run(tmp_path / "run", source=str(task))
    path = {"directory": run, "manifest": run / records.MANIFEST, "task": task, "task's directory": task.parent}[what]
    if how == "open to everybody":
        path.chmod(path.stat().st_mode | 0o002)
        said = f"every user can write to {path} (mode: "
    elif how == "open to a group":
        path.chmod(path.stat().st_mode | 0o020)
        monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name="lab", gr_mem=["somebody"]))
        said = f"the group lab can write to {path} (mode: "
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
        said = f"{path} is not yours (owner: 12345), and the Python file that manifest.json names would be run; "
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        said = f"{run} is not yours (owner: "
    message = refused("train", "--resume", run)
    assert said in message and f"name the task yourself: torrential train TASK --resume {run}" in message
    assert not Path(f"{task}.run").exists()
    assert "has changed" in refused("train", task, "--resume", run)  # who names the task decides what is run
    assert Path(f"{task}.run").exists()


def test_a_tasks_file_may_belong_to_root(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    manifest, task = write(tmp_path / "run", "{}", records.MANIFEST), write(tmp_path, "")
    real, owners = Path.stat, {str(manifest): 12345, str(manifest.parent): 12345, str(task): 0}

    def stat(path: Path, **keywords: Any) -> os.stat_result:
        fields = list(real(path, **keywords))
        fields[4] = owners.get(str(path), 0)
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    check_own(manifest, str(task), "")
    owners[str(manifest)] = 0
    with pytest.raises(BadInput, match=f"{manifest} is not yours"):
        check_own(manifest, str(task), "")


@pytest.mark.parametrize("kept", ["manifest", "task"])
def test_nobody_else_may_replace_a_directory_above(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a user: who can write to a directory further up puts another in its place, and its files are run."""
    above, own = tmp_path / "above", tmp_path / "own"
    for place in (above / "mine", own / "mine"):
        place.mkdir(parents=True)
    manifest = write((above if kept == "manifest" else own) / "mine", "{}", records.MANIFEST)
    task = write((above if kept == "task" else own) / "mine", "")
    check_own(manifest, str(task), "")
    above.chmod(0o777)
    with pytest.raises(BadInput, match=rf"every user can write to {above} \(mode: 777\), and the Python file"):
        check_own(manifest, str(task), "")
    check_own(manifest, "digits", "")  # no file is run
    link = own / "link"
    link.symlink_to(above / "mine")
    with pytest.raises(BadInput, match=f"every user can write to {above}"):
        if kept == "task":
            check_own(manifest, str(link / task.name), "")
        else:
            check_own(link / records.MANIFEST, str(task), "")
    above.chmod(0o1777)  # as /tmp has it: others add to it, and replace nothing that is ours
    check_own(manifest, str(task), "")
    above.chmod(0o770)
    users = {os.geteuid(): "me", 0: "root"}
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_name=users[number]))
    monkeypatch.setattr(
        pwd, "getpwall", lambda: [SimpleNamespace(pw_name=users[os.geteuid()], pw_gid=above.stat().st_gid)]
    )
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name="lab", gr_mem=members))
    members: list[str] = []  # a group of the user's own
    check_own(manifest, str(task), "")
    members.append("somebody")
    with pytest.raises(BadInput, match=rf"the group lab can write to {above} \(mode: 770\)"):
        check_own(manifest, str(task), "")


# -- runs that fail after they have started ---------------------------------------------------------------------------
SENTINEL = 26  # the sample that is special; its turn comes to worker 1

FAILING = f"""{HEAD}
class Picky(nn.Linear):
    def forward(self, x):
        if self.training and torch.is_grad_enabled() and (x[:, 0] == inputs[{SENTINEL}, 0]).any():
            raise ValueError("met the sample {SENTINEL}")
        return super().forward(x)

task = make(model=lambda: Picky(3, 2))
"""


def place_of(sample: int, epoch: int = 0) -> tuple[int, int]:
    """The step and the worker, of two, at which a sample's turn comes; steps count from 1."""
    deal, step = Deal(SAMPLES, 0, epoch), SAMPLES // (2 * BATCH) * epoch
    while True:
        step += 1
        for worker in (0, 1):
            if sample in deal.share(worker, 2, BATCH).indices.tolist():
                return step, worker
        deal.advance(2 * BATCH)


def train_two(run_cli: Cli, task: Path, out: Path, *more: object, **keywords: Any) -> subprocess.CompletedProcess[str]:
    return run_cli("train", task, "--workers", 2, "--device", "cpu", "--out", out, *more, **keywords)


def test_a_model_that_fails_in_one_worker_only(run_cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, FAILING)
    message = one_message(train_two(run_cli, path, tmp_path / "out"), 1)
    step, worker = place_of(SENTINEL)
    assert message == (
        f"worker {worker} failed at step {step}: the task's forward pass raised ValueError: met the sample {SENTINEL} "
        f"({path}:{line_of(FAILING, 'raise ValueError')}); no checkpoint was made yet\n"
    )


@pytest.mark.parametrize("strategy", ["allreduce", "ssp"])
def test_a_rate_that_explodes_in_warm_up(strategy: str, run_cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, f"{HEAD}task = make(optimizer=tt.optimizer('sgd', lr=3e38))\n")
    recipe = ("--strategy", strategy, "--set", "scaling=linear", "--set", "warmup=2")
    message = one_message(train_two(run_cli, path, tmp_path / "out", *recipe), 1)
    assert "the rate had come to" in message and "in warm-up; lengthen warmup, lower --lr" in message


EPOCH_STEPS = SAMPLES // (2 * BATCH)

TURNING_NAN = f"""{HEAD}
SAVED = Path(os.environ["SAVED"])

class Unsteady(nn.Linear):
    steps = 0

    def forward(self, x):
        outputs = super().forward(x)
        if self.training and torch.is_grad_enabled():
            self.steps += 1
            if self.steps > {EPOCH_STEPS} and (x[:, 0] == inputs[{SENTINEL}, 0]).any():
                while not SAVED.exists():
                    time.sleep(0.01)
                return outputs * float("nan")
        return outputs

task = make(model=lambda: Unsteady(3, 2))
"""


def test_a_loss_that_turns_nan(run_cli: Cli, tmp_path: Path) -> None:
    """The second time the sample comes, and not before the first epoch's checkpoint is there."""
    out = tmp_path / "out"
    last_good = out / "checkpoints" / f"step-{EPOCH_STEPS:08d}"
    path = write(tmp_path, TURNING_NAN)
    message = one_message(train_two(run_cli, path, out, env={"SAVED": str(last_good)}), 1)
    step, worker = place_of(SENTINEL, epoch=1)
    assert "nan" in message
    assert f"worker {worker}" in message and f"worker {1 - worker}" not in message
    assert f"step {step}" in message
    assert str(last_good) in message
    assert checkpoints.load(last_good).step == EPOCH_STEPS


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A directory with little space behind it, and what to give to a process that shall find it so.

    A small file system where we may mount one; elsewhere a limit on the size of files, which one worker's shared
    buffers stay below and the optimizer's file does not.
    """
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1300k", "torrential-test", str(directory)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (750_000, 750_000))  # noqa: E731
    yield directory, {} if mounted else {"preexec_fn": limit}
    if mounted:
        subprocess.run(["umount", str(directory)], check=True)


WIDE = f"""{HEAD}
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 20_000), nn.Linear(20_000, 2)  # 480 kB, and twice that for Adam

    def forward(self, x):
        return self.two(self.one(x))

task = make(model=Wide, optimizer=tt.optimizer("adam", lr=1e-4))
"""


def test_a_full_disk(run_cli: Cli, full_disk: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    directory, limits = full_disk
    out = directory / "run"
    ended = run_cli("train", write(tmp_path, WIDE), "--device", "cpu", "--out", out, **limits)
    message = one_message(ended, 1)
    assert str(out) in message
    assert ("no room" in message and "bytes" in message) or "File too large" in message
    assert "--resume" in message
    assert list((out / "checkpoints").iterdir()) == []  # nothing half-written


def test_too_little_shared_memory(
    main_here: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torrential.worlds.local.registry.available_memory", lambda: 200_000)
    ended = main_here("train", "digits", "--workers", 2, "--device", "cpu", "--out", tmp_path / "out")
    message = one_message(ended, 1)
    assert "too little memory" in message and "200,000" in message and "fewer workers" in message


def test_a_target_that_no_accuracy_can_reach(refused: Callable[..., str]) -> None:
    message = refused("train", "digits", "--target", "98")
    assert "98" in message and "between 0 and 1" in message


# -- help -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_that_can_be_set_is_shown_and_explained(name: str, main_here: Callable[..., Ended]) -> None:
    ended = main_here("strategies", name)
    assert ended.code == 0 and ended.err == ""
    shown = " ".join(ended.out.split())
    hidden, sections = without_effect(needs_servers(STRATEGIES[name])), shown
    owners = {f"Options of {name} itself": STRATEGIES[name]} | {
        str(kind.__doc__): kind for kind in (Settings, *WORLDS.values())
    }
    common = [Recipe] if STRATEGIES[name].uncompressed else [Recipe, Compression]
    for heading, kind in reversed([*owners.items(), *((str(kind.__doc__), kind) for kind in common)]):
        sections, _, section = sections.partition(f"{heading}")
        own = inspect.get_annotations(kind) if kind in WORLDS.values() else kind.__struct_fields__
        options = [o for o in explain(kind) if o.name not in hidden and o.name in own]
        assert section.count("=") >= sum(bool(o.default) for o in options)
        for option in options:
            default = f"={option.default}" if option.default else ""
            choices = [c for c in option.choices if not (c == "loss" and needs_servers(STRATEGIES[name]))]
            allowed = f"({' | '.join(choices) or option.bounds}) " if choices or option.bounds else ""
            assert option.about and f" {option.name}{default} {allowed}{option.about} " in f"{section} ", option
        assert not [name for name in hidden if f" {name}=" in section]
    assert "Options of " not in sections.rpartition("What can be set")[2]


@pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if needs_servers(kind)])
def test_what_is_not_shown_is_refused(name: str, refused: Callable[..., str]) -> None:
    for option in ("algorithm=ring", "grow=true", "resize=0:0.5", "scaling=loss"):
        given = ("--strategy", name, "--workers", 2, "--set", option, "--set", "schedule=step")
        assert option.partition("=")[0] in refused("train", "digits-mlp", *given)
    assert without_effect(with_servers=True) == {"algorithm", "hosts", "grow", "resize"}


def test_help_says_where_options_are_explained(main_here: Callable[..., Ended]) -> None:
    ended = main_here("train", "--help")
    assert "torrential strategies NAME" in " ".join(ended.out.replace("│", " ").split())


def test_a_directory_that_cannot_be_is_one_message(refused: Callable[..., str], tmp_path: Path) -> None:
    far = tmp_path / ("a" * 300)
    assert "File name too long" in refused("train", "digits", "--out", far)
    compare = ("compare", "digits", "--strategies", "ssp,bsp", "--target", "0.9", "--out", far)
    assert "File name too long" in refused(*compare)


def test_no_target_can_be_reached_without_gradients(refused: Callable[..., str]) -> None:
    given = ("digits", "--cluster", "laptop", "--workers", "8", "--target", "0.9", "--set", "gradients=off")
    assert "gradients=off" in refused("train", *given)
    assert "gradients=off" in refused("compare", *given, "--strategies", "ssp,bsp")
