"""Sandblaster's L-BFGS beside scipy's L-BFGS-B: how many evaluations of the objective each needs.

python -m experiments.against_scipy --a9a a9a.gz --out OUT

Logistic regression on a9a (LIBSVM's file, 32,561 rows of 123 features and a bias), from zero, with a decay of 1e-4 on
all parameters, which makes it convex: both come to one optimum. And a perceptron 64-64-10 on the training part of
digits, tanh, decay 1e-4, from several seeds. Both minimise the same function in float64, from the same parameters and
with as many pairs; sandblaster in the simulated world. An evaluation is a `work` record. a9a once more in float32.

Written: OUT/against_scipy.json, OUT/against_scipy.png. Without --a9a only digits is done.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.comm.protocol import COORDINATORS
from torrential.records import Event, Record, Step, Work, replace_file
from torrential.tasks.digits import digits_mlp

DECAY = 1e-4
FEATURES = 123
LEVELS = (1e-4, 1e-6, 1e-8)
DIGITS_SEEDS = range(5)
MOST, MOST_A9A = 400, 600  # evaluations
DIGITS_COUNTS = (100, 200, 400)
Curve = list[tuple[int, float]]  # evaluations so far, and the least objective known then
Array = np.ndarray[Any, np.dtype[np.float64]]


# -- what is minimised ------------------------------------------------------------------------------------------------
def read_libsvm(path: Path) -> tuple[Tensor, Tensor]:
    """Rows (n, 123) and labels 0 or 1."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        lines = [line.split() for line in file]
    rows = torch.zeros(len(lines), FEATURES, dtype=torch.float64)
    for row, (_, *entries) in zip(rows, lines, strict=True):
        for entry in entries:
            index, value = entry.split(":")
            row[int(index) - 1] = float(value)
    return rows, torch.tensor([float(line[0]) > 0 for line in lines], dtype=torch.float64)


def logistic(rows: Tensor, labels: Tensor) -> tt.Task:
    def model() -> nn.Module:
        linear = nn.Linear(rows.shape[1], 1, dtype=rows.dtype)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear, nn.Flatten(0))

    def right(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs > 0) == (targets > 0.5)).double().mean()

    return task_of(model, TensorDataset(rows, labels), F.binary_cross_entropy_with_logits, right)


def perceptron() -> tt.Task:
    given: Any = digits_mlp().train
    images, labels = given.tensors
    data = TensorDataset((images.double().flatten(1) - 0.305) / 0.376, labels)
    return task_of(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double(), data)


def task_of(model: Any, data: TensorDataset, loss: Any = F.cross_entropy, metric: Any = tt.accuracy) -> tt.Task:
    few = TensorDataset(*(column[:100] for column in data.tensors))  # what is looked at is the objective
    optimizer = tt.optimizer("sgd", lr=0.1, weight_decay=DECAY)
    return tt.Task(
        model=model, loss=loss, train=data, validation=few, test=few, metric=metric, optimizer=optimizer, name="same"
    )  # fmt: skip


# -- both -------------------------------------------------------------------------------------------------------------
def scipys(task: tt.Task, history: int, seed: int, most: int) -> Curve:
    """The decay is that of all parameters, half of its product with their squares."""
    torch.manual_seed(seed)
    model = task.model()
    data: Any = task.train
    inputs, targets = data.tensors
    parameters, values = list(model.parameters()), list[float]()

    def objective(flat: Array) -> tuple[float, Array]:
        vector = torch.from_numpy(flat)
        nn.utils.vector_to_parameters(vector, parameters)
        model.zero_grad()
        loss = task.loss(model(inputs), targets)  # type: ignore[misc]
        loss.backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters if p.grad is not None])
        values.append(loss.item() + DECAY / 2 * float(vector @ vector))
        return values[-1], (gradient + DECAY * vector).numpy()

    start = nn.utils.parameters_to_vector(parameters).detach().numpy().copy()
    limits = {"maxcor": history, "ftol": 0, "gtol": 1e-9, "maxiter": most, "maxfun": most, "maxls": 50}
    minimize(objective, start, jac=True, method="L-BFGS-B", options=limits)
    return list(enumerate(np.minimum.accumulate(values).tolist(), start=1))


def ours(task: tt.Task, history: int, seed: int, most: int) -> tuple[Curve, str]:
    """And why the run ended."""
    with tempfile.TemporaryDirectory() as directory:
        result = tt.train(
            task,
            tt.Sandblaster(history=history, portions=4),
            workers=2,
            servers=2,
            epochs=most,
            seed=seed,
            world="sim",
            cluster={"compute": {"seconds_per_sample": 1e-3}},  # so slow that every step is on record
            evaluate_every=10**6,
            threads=1,
            out=Path(directory) / "run",
            progress=False,
            device="cpu",
        )
    ended = [r.detail for r in result.history if isinstance(r, Event) and r.event == "ended"]
    return curve_of(result.history), ended[0] if ended else "all evaluations are used up"


def curve_of(history: list[Record]) -> Curve:
    """The objective after every step, as the coordinator has it on record."""
    works = sorted(r.time for r in history if isinstance(r, Work))
    steps = [r for r in history if isinstance(r, Step) and r.worker >= COORDINATORS]
    return [(sum(time <= step.time for time in works), step.loss) for step in steps]


def evaluations_to(curve: Curve, value: float) -> int | None:
    return next((count for count, found in curve if found <= value), None)


# -- what came of it --------------------------------------------------------------------------------------------------
def of_a9a(rows: Tensor, labels: Tensor) -> dict[str, Any]:
    task, found = logistic(rows, labels), dict[str, Any]()
    for history in (10, 20):
        mine, why = ours(task, history, 0, MOST_A9A)
        found[str(history)] = {"scipy": scipys(task, history, 0, MOST_A9A), "sandblaster": mine, "ended": why}
    mine, why = ours(logistic(rows.float(), labels.float()), 10, 0, MOST_A9A)
    found["float32"] = {"sandblaster": mine, "ended": why}
    found["optimum"] = min(found[history]["scipy"][-1][1] for history in ("10", "20"))
    return found


def of_digits() -> dict[str, Any]:
    """Sandblaster may have half as many evaluations more."""
    task = perceptron()
    return {
        str(seed): {"scipy": scipys(task, 10, seed, MOST), "sandblaster": ours(task, 10, seed, MOST * 3 // 2)[0]}
        for seed in DIGITS_SEEDS
    }


def lines(found: dict[str, Any]) -> list[str]:
    told = ["| objective | pairs | to within | scipy | sandblaster | ratio |", "|---|---:|---|---:|---:|---:|"]
    for history in ("10", "20") if "a9a" in found else ():
        for level in LEVELS:
            goal = found["a9a"]["optimum"] * (1 + level)
            told.append(_line("a9a", history, f"{level:g} of the optimum", goal, found["a9a"][history]))
    for seed, both in found["digits"].items():
        for count in DIGITS_COUNTS:
            goal = min(value for number, value in both["scipy"] if number <= count) * (1 + 1e-6)
            told.append(_line(f"digits, seed {seed}", "10", f"1e-06 of scipy's after {count}", goal, both))
    if "a9a" in found:
        plain = found["a9a"]["float32"]
        gap = min(value for _, value in plain["sandblaster"]) / found["a9a"]["optimum"] - 1
        told += [
            "",
            f"a9a in float32: {plain['ended']}; after {plain['sandblaster'][-1][0]} evaluations, {gap:.1e} off",
        ]
    return told


def _line(name: str, history: str, level: str, goal: float, both: dict[str, Any]) -> str:
    theirs, mine = evaluations_to(both["scipy"], goal), evaluations_to(both["sandblaster"], goal)
    ratio = f"{mine / theirs:.2f}" if mine is not None and theirs is not None else "–"
    return f"| {name} | {history} | {level} | {theirs} | {mine} | {ratio} |"


def draw(path: Path, found: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    if "a9a" in found:
        optimum = found["a9a"]["optimum"]
        for name, curve, style in (
            ("scipy, 10 pairs", found["a9a"]["10"]["scipy"], "C0--"),
            ("sandblaster, 10 pairs", found["a9a"]["10"]["sandblaster"], "C0-"),
            ("scipy, 20 pairs", found["a9a"]["20"]["scipy"], "C1--"),
            ("sandblaster, 20 pairs", found["a9a"]["20"]["sandblaster"], "C1-"),
            ("sandblaster, 10 pairs, float32", found["a9a"]["float32"]["sandblaster"], "C3-"),
        ):
            shown = [(count, value / optimum - 1) for count, value in curve if value / optimum - 1 > 1e-11]
            left.semilogy(*zip(*shown, strict=True), style, label=name, linewidth=1.2)
    left.set(title="logistic regression on a9a", xlabel="evaluations", ylabel="relative distance from the optimum")
    left.legend(fontsize=8)
    for seed, both in found["digits"].items():
        needed = [(count, evaluations_to(both["sandblaster"], value * (1 + 1e-6))) for count, value in both["scipy"]]
        x, y = zip(*((count, own) for count, own in needed if own is not None), strict=True)
        right.plot(x, y, f"C{seed}-", label=f"seed {seed}", linewidth=1.2)
    right.plot((0, MOST), (0, MOST), "k-", linewidth=0.5)
    right.plot((0, MOST), (0, 1.5 * MOST), "k--", linewidth=0.5, label="1.5 times as many")
    right.set(title="perceptron 64-64-10 on digits: to the same objective", xlabel="evaluations by scipy")
    right.set_ylabel("evaluations by sandblaster")
    right.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a9a", type=Path, help="the training file of a9a as LIBSVM has it, .gz or not")
    parser.add_argument("--out", type=Path, default=Path("runs/sandblaster"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {"a9a": of_a9a(*read_libsvm(given.a9a))} if given.a9a is not None else {}
    found["digits"] = of_digits()
    given.out.mkdir(parents=True, exist_ok=True)
    replace_file(given.out / "against_scipy.json", (json.dumps(found) + "\n").encode())
    draw(given.out / "against_scipy.png", found)
    print("\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
