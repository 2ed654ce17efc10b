"""Learning by map-reduce: results that do not depend on who computes them, deaths, bytes, and each example."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import torrential as tt
from examples.map_reduce import least_squares, naive_bayes, principal_components, products
from examples.map_reduce_clusters import k_means, mixture
from examples.map_reduce_logistic import gradient_descent, newton
from tests.killing import Killing
from torrential.data.ordered_sum import Block, OrderedSum
from torrential.errors import BadInput, RunFailed
from torrential.opening import resume_run
from torrential.records import Event, Work
from torrential.worlds.failure import resuming

pytestmark = pytest.mark.timeout(120)

ROWS, COLUMNS = 4096, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = drawn(ROWS, COLUMNS)
WEIGHTS = torch.arange(COLUMNS, dtype=torch.float64) - 2
Y = X @ WEIGHTS + drawn(ROWS, seed=1)
LABELS = (
    torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) < (X @ WEIGHTS).sigmoid()
).double()


class Simulated:
    """Runs in simulation, each in a directory of its own."""

    def __init__(self, path: Path) -> None:
        self._path, self._numbers = path, itertools.count()

    def __call__(self, workers: int = 3, faults: Any = (), **more: Any) -> dict[str, Any]:
        table = {"compute": {"seconds_per_sample": 1e-3}, "faults": list(faults)} | more.pop("cluster", {})
        out = self._path / str(next(self._numbers))
        return {"workers": workers, "world": "sim", "cluster": table, "out": out, "progress": False, **more}


@pytest.fixture
def sim(tmp_path: Path) -> Simulated:
    return Simulated(tmp_path)


# -- the order of sums ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 64])
def test_sums_are_made_in_one_order_whoever_has_which_terms(count: int) -> None:
    whole = OrderedSum[str](count, "({}{})".format)
    for number in range(count):
        whole.add(Block(0, number), f"[{number}]")
    chance = random.Random(count)
    for workers in (1, 2, 3, 7):
        shares = [OrderedSum[str](count, "({}{})".format) for _ in range(workers)]
        for number in chance.sample(range(count), count):
            chance.choice(shares).add(Block(0, number), f"[{number}]")
        total = OrderedSum[str](count, "({}{})".format)
        assert sorted(term for share in shares for term in share.terms()) == list(range(count))
        for block, value in chance.sample(sent := [n for s in shares for n in s.blocks.items()], len(sent)):
            total.add(block, value)
        assert total.total == whole.total
    assert whole.total.count("[") == count


# -- the same result with any number of workers -----------------------------------------------------------------------
def test_least_squares_is_the_same_to_the_last_bit_on_any_number_of_workers(sim: Simulated, tmp_path: Path) -> None:
    alone = least_squares(X, Y, **sim(1))
    for workers in (2, 3, 4, 8):
        assert torch.equal(least_squares(X, Y, **sim(workers)), alone)
    for workers in (1, 3):
        out = tmp_path / f"local{workers}"
        assert torch.equal(least_squares(X, Y, workers=workers, out=out, progress=False), alone)
    reference = torch.linalg.lstsq(X, Y).solution
    assert float((alone - reference).norm() / reference.norm()) < 1e-10


@pytest.mark.parametrize("rows", [ROWS, ROWS // 4])
def test_workers_send_one_statistic_each_however_many_rows_there_are(sim: Simulated, rows: int) -> None:
    for workers in (1, 2, 4, 8):
        done = tt.map_reduce((X[:rows], Y[:rows]), products, **sim(workers))
        assert done.summary.bytes_sent == 8 * (COLUMNS**2 + COLUMNS) * workers


def test_newtons_method_finds_the_maximum_of_the_likelihood(sim: Simulated, tmp_path: Path) -> None:
    here = newton(X, LABELS, workers=2, out=tmp_path / "local", progress=False)
    there = newton(X, LABELS, **sim(3))
    assert torch.equal(here.value, there.value) and here.rounds == there.rounds <= 10
    weights = np.zeros(COLUMNS)
    x, y = X.numpy(), LABELS.numpy()
    for _ in range(30):
        sure = 1 / (1 + np.exp(-x @ weights))
        weights -= np.linalg.solve(x.T @ (x * (sure * (1 - sure))[:, None]), x.T @ (sure - y))

    def loss(w: Any) -> float:
        return float(np.logaddexp(0, -(2 * y - 1) * (x @ np.asarray(w))).mean())

    assert loss(here.value) == pytest.approx(loss(weights), rel=1e-8)
    objectives = [r.loss for r in here.history if type(r).__name__ == "Step" and r.loss == r.loss]
    assert objectives and objectives[-1] == pytest.approx(loss(weights), rel=1e-8)


# -- the other examples -----------------------------------------------------------------------------------------------
def test_a_ridge_shrinks_the_weights(sim: Simulated) -> None:
    found = least_squares(X, Y, ridge=100.0, **sim())
    reference = torch.linalg.solve(X.T @ X + 100 * torch.eye(COLUMNS, dtype=torch.float64), X.T @ Y)
    assert torch.allclose(found, reference, rtol=1e-10)


def test_gradient_descent(sim: Simulated) -> None:
    found = gradient_descent(X, LABELS, rate=0.5, rounds=20, **sim())
    weights = torch.zeros(COLUMNS, dtype=torch.float64)
    for _ in range(20):
        weights -= 0.5 * X.T @ ((X @ weights).sigmoid() - LABELS) / ROWS
    assert found.rounds == 20 and torch.allclose(found.value, weights, rtol=1e-12)


def test_naive_bayes_counts(sim: Simulated) -> None:
    classes = torch.arange(ROWS) % 3
    words = torch.poisson(torch.rand(3, 5, generator=torch.Generator().manual_seed(3))[classes] * 4).long()
    found = naive_bayes(words, classes, 3, **sim())
    for each in range(3):
        counts = words[classes == each].sum(0).double() + 1
        assert torch.allclose(found["word"][each].exp(), counts / counts.sum(), rtol=1e-12)
    assert torch.allclose(found["prior"].exp(), torch.bincount(classes).double() / ROWS)


def test_k_means_moves_centres_as_a_plain_loop_does(sim: Simulated) -> None:
    points = torch.cat([drawn(200, 2) + 5 * corner for corner in torch.eye(2, dtype=torch.float64)])
    centres = points[[0, 1, 200]]
    found = k_means(points, centres, **sim())
    moved = centres
    for _ in range(found.rounds):
        which = torch.cdist(points, moved).argmin(1)
        moved = torch.stack([points[which == k].mean(0) for k in range(3)])
    assert torch.allclose(found.value, moved, rtol=1e-10) and found.rounds < 50


def test_principal_components(sim: Simulated) -> None:
    mixed = X @ drawn(COLUMNS, COLUMNS, seed=4) + 3
    found = principal_components(mixed, 2, **sim())
    values, vectors = np.linalg.eigh(np.cov(mixed.numpy().T, bias=True))
    assert np.allclose(found["variance"], values[::-1][:2])
    assert np.allclose(np.abs((found["components"].numpy() * vectors.T[::-1][:2]).sum(1)), 1)


def test_a_mixture_of_gaussians_is_found(sim: Simulated) -> None:
    centres = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0]], dtype=torch.float64)
    points = centres[torch.arange(3000) % 3] + drawn(3000, 2)
    found = mixture(points, points[[0, 1, 2]], **sim())
    nearest = torch.cdist(found.value["mean"], centres).min(1)
    assert float(nearest.values.max()) < 0.2 and sorted(nearest.indices.tolist()) == [0, 1, 2]
    losses = [r.loss for r in found.history if type(r).__name__ == "Step" and r.loss == r.loss]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(losses))


# -- data of every kind -----------------------------------------------------------------------------------------------
def total(rows: Any) -> Any:
    return rows.sum(0)


def test_rows_come_from_arrays_data_sets_tasks_and_functions(sim: Simulated) -> None:
    whole = X.sum(0)
    assert torch.allclose(tt.map_reduce(X, total, **sim()).value, whole)
    assert np.allclose(tt.map_reduce(X.numpy(), total, **sim()).value, whole)
    assert np.allclose(tt.map_reduce(scipy.sparse.csr_matrix(X.numpy()), total, **sim()).value, whole)
    assert torch.allclose(tt.map_reduce({"x": X}, lambda rows: total(rows["x"]), **sim()).value, whole)
    assert torch.allclose(tt.map_reduce(TensorDataset(X), lambda rows: total(rows[0]), **sim()).value, whole)
    parts = [partial(X.narrow, 0, at, 100) for at in range(0, 900, 100)]
    assert torch.allclose(tt.map_reduce(parts, total, **sim()).value, X[:900].sum(0))
    digits = tt.load_task("digits-mlp")
    count = tt.map_reduce(digits, lambda rows: torch.bincount(rows[1], minlength=10), **sim()).value
    assert int(count.sum()) == len(digits.train) and len(count) == 10


def test_sums_are_made_in_float64(sim: Simulated) -> None:
    tenths = torch.full((1 << 16,), 0.1)
    found = tt.map_reduce(tenths, lambda rows: rows[:1024].sum(), **sim()).value
    assert found.dtype == torch.float64


HUGE = 1 << 62


@pytest.mark.parametrize(
    "value",
    [torch.tensor([1, HUGE]), np.array([1, HUGE]), np.int64(HUGE), -3 * HUGE // 2, HUGE],
    ids=["tensor", "array", "numpy's number", "a negative number", "a number"],
)
def test_whole_numbers_beyond_64_bits_are_refused(sim: Simulated, value: Any) -> None:
    with pytest.raises(BadInput, match="beyond 64 bits"):
        tt.map_reduce(X, lambda rows: {"n": value}, **sim())


def test_numbers_without_a_sign_beyond_63_bits_are_refused(sim: Simulated) -> None:
    for value in (np.uint64(2 * HUGE), np.array([2 * HUGE], np.uint64), torch.tensor(2 * HUGE, dtype=torch.uint64)):
        with pytest.raises(BadInput, match="beyond 64 bits"):
            tt.map_reduce(X, lambda rows, value=value: value, **sim())  # type: ignore[misc]


def test_every_sum_of_whole_numbers_is_looked_at(sim: Simulated) -> None:
    with pytest.raises(RunFailed, match="beyond 64 bits"):
        tt.map_reduce(X, lambda rows: torch.tensor(HUGE // 16), **sim())
    found = tt.map_reduce(X, lambda rows: torch.tensor([HUGE // 32 - 1, -HUGE // 32]), **sim())
    assert found.value.tolist() == [64 * (HUGE // 32 - 1), -2 * HUGE]


BUFFER = torch.zeros(COLUMNS, COLUMNS, dtype=torch.float64)


def test_statistics_are_copies_and_whole_numbers_do_not_overflow(sim: Simulated) -> None:
    def reused(rows: Tensor) -> Tensor:
        return torch.matmul(rows.T, rows, out=BUFFER)

    assert torch.allclose(tt.map_reduce(X, reused, **sim()).value, X.T @ X)
    view = tt.map_reduce(X, lambda rows: rows[0], lambda a, b: a.add_(b), **sim()).value
    assert torch.allclose(view, X[:: ROWS // 64].sum(0))
    assert int(tt.map_reduce(X, lambda rows: torch.tensor(10, dtype=torch.uint8), **sim()).value) == 640
    assert int(tt.map_reduce(X, lambda rows: np.bool_(True), **sim()).value) == 64
    assert tt.map_reduce(X, lambda rows: True, **sim()).value == 64


def test_a_maximum_is_combined_by_a_function_of_ones_own(sim: Simulated) -> None:
    found = tt.map_reduce(X, lambda rows: rows.amax(0), torch.maximum, **sim())
    assert torch.equal(found.value, X.amax(0))


def test_a_combine_of_ones_own_may_keep_texts(sim: Simulated) -> None:
    def either(one: Any, other: Any) -> Any:
        return {"unit": one["unit"], "most": max(one["most"], other["most"])}

    found = tt.map_reduce(X, lambda rows: {"unit": "m", "most": float(rows.max())}, either, **sim())
    assert found.value == {"unit": "m", "most": float(X.max())}


def noted(path: Path, part: int) -> Tensor:
    """Read a part, and leave a note that it was read."""
    with (path / f"{part}.{os.getpid()}").open("a") as file:
        file.write("read\n")
    return X[part * 64 : (part + 1) * 64]


def test_what_a_worker_has_read_it_keeps(tmp_path: Path) -> None:
    parts = [partial(noted, tmp_path, part) for part in range(16)]
    rounds = dict(start=torch.zeros(COLUMNS), rounds=5, workers=2, copies=0, out=tmp_path / "run", progress=False)
    found = tt.map_reduce(parts, lambda rows, now: rows.sum(0), finish=lambda total, now: now + total, **rounds)
    assert torch.allclose(found.value, 5 * X[: 16 * 64].sum(0))
    here = f".{os.getpid()}"
    notes = [file for file in tmp_path.glob("*.*") if file.suffix != here]
    assert all(note.read_text() == "read\n" for note in notes), "no worker read anything twice"
    assert {int(note.stem) for note in notes} == set(range(16))


# -- deaths -----------------------------------------------------------------------------------------------------------
def rounds(data: Any = X, **how: Any) -> tt.Reduction:
    return tt.map_reduce(data, moments, finish=blend, start=torch.zeros(COLUMNS, dtype=torch.float64), rounds=6, **how)


def moments(rows: Tensor, now: Tensor) -> Tensor:
    return ((rows - now).tanh() * rows).sum(0)


def blend(total: Tensor, now: Tensor) -> Tensor:
    return 0.5 * now + total / ROWS


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tt.Reduction:
    return rounds(**Simulated(tmp_path_factory.mktemp("undisturbed"))())


@pytest.mark.parametrize("seed", range(30))
def test_deaths_change_nothing(undisturbed: tt.Reduction, sim: Simulated, seed: int) -> None:
    chance = random.Random(seed)
    last = undisturbed.summary.seconds
    kinds = chance.choices(["worker", "coordinator"], k=chance.randint(1, 4))
    faults = [
        {
            "kind": "crash",
            "at": chance.uniform(0, 1.2 * last),
            kind: 0 if kind == "coordinator" else chance.randrange(3),
        }
        | ({} if kind == "coordinator" else {"lasts": chance.uniform(0.01, 0.3)})
        for kind in kinds
    ]
    detection = chance.choice([1e-4, 1e-2, 0.1])
    slow = {"stragglers": [{"worker": 1, "factor": 10.0}]} if seed % 3 == 0 else {}
    found = rounds(**sim(3, faults, cluster={"detection": detection} | slow, copies=chance.choice([0, 1])))
    assert torch.equal(found.value, undisturbed.value) and found.rounds == 6


@pytest.mark.parametrize("share", [0.13, 0.4, 0.71])
def test_a_coordinator_that_comes_back_repeats_no_finished_portion(
    undisturbed: tt.Reduction, sim: Simulated, share: float
) -> None:
    calls = itertools.count()

    def counted(rows: Tensor, now: Tensor) -> Tensor:
        next(calls)
        return moments(rows, now)

    crash = {"kind": "crash", "coordinator": 0, "at": share * undisturbed.summary.seconds}
    start = torch.zeros(COLUMNS, dtype=torch.float64)
    how = sim(3, [crash], cluster={"detection": 1e-3}, copies=0)
    found = tt.map_reduce(X, counted, finish=blend, start=start, rounds=6, **how)
    assert torch.equal(found.value, undisturbed.value)
    assert any(isinstance(r, Event) and r.event == "coordinator_joined" for r in found.history)
    assert next(calls) == 6 * 64 + 1  # and the trial before it begins


def slowly(rows: Tensor, now: Tensor) -> Tensor:
    time.sleep(0.005)
    return moments(rows, now)


@pytest.mark.parametrize("role", ["worker-1", "coordinator-0"])
def test_a_role_that_is_killed_changes_nothing(undisturbed: tt.Reduction, tmp_path: Path, role: str) -> None:
    killing = Killing(
        f"tt-{role.replace('coordinator', 'coord')}", lambda record: isinstance(record, Work) and record.step == 2
    )
    found = tt.map_reduce(
        X,
        slowly,
        finish=blend,
        start=torch.zeros(COLUMNS, dtype=torch.float64),
        rounds=6,
        workers=3,
        out=tmp_path / "run",
        progress=False,
        listeners=[killing],
    )
    assert killing.killed.is_set() and torch.equal(found.value, undisturbed.value)
    assert any(isinstance(r, Event) and r.event == f"{role[:-2]}_lost" for r in found.history)


def test_a_run_goes_on_where_it_ended(undisturbed: tt.Reduction, tmp_path: Path) -> None:
    how: dict[str, Any] = {"workers": 2, "progress": False}
    start = torch.zeros(COLUMNS, dtype=torch.float64)
    begun = tt.map_reduce(X, moments, finish=blend, start=start, rounds=2, out=tmp_path / "run", **how)
    assert begun.rounds == 2
    found = tt.map_reduce(X, moments, finish=blend, start=start, rounds=6, resume=tmp_path / "run", progress=False)
    assert found.rounds == 6 and torch.equal(found.value, undisturbed.value)


# -- what cannot be done ----------------------------------------------------------------------------------------------
def doubled(rows: Any) -> Any:
    rows *= 2
    return rows.sum(0)


class Pair(NamedTuple):
    """A tuple whose places have names."""

    total: Any
    count: int


class Frame:
    """As pandas has it."""

    def to_numpy(self) -> Any:
        return X.numpy()


def refusals() -> Iterator[tuple[str, Any, str]]:
    yield "no rows", lambda how: tt.map_reduce(X[:0], total, **how), "there are no rows"
    yield "a number", lambda how: tt.map_reduce(3, total, **how), "no rows can be read from int"
    yield (
        "unequal",
        lambda how: tt.map_reduce((X, Y[:5]), total, **how),
        r"same number of rows each \(given: \[5, 4096\]",
    )
    yield "no start", lambda how: tt.map_reduce(X, total, rounds=3, **how), "rounds=3 without start"
    yield "no function", lambda how: tt.map_reduce(X, 3, **how), "statistic must be a function"  # type: ignore[arg-type]
    yield "portions", lambda how: tt.map_reduce([lambda: X], total, portions=3, **how), "every function reads a portion"
    yield "a frame", lambda how: tt.map_reduce(Frame(), total, **how), r"give data.to_numpy\(\)"
    yield "None", lambda how: tt.map_reduce(X, lambda rows: None, **how), "the statistic returned None"
    yield "complex", lambda how: tt.map_reduce(X, lambda rows: rows.sum().cfloat(), **how), r"given: complex64\[\]"
    yield "a key", lambda how: tt.map_reduce(X, lambda rows: {1: 2}, **how), "a dict with the key 1"
    yield "large", lambda how: tt.map_reduce(X, lambda rows: 1 << 70, **how), "more than 64 bits"
    yield "mixed", lambda how: tt.map_reduce([total, X], total, **how), "has Tensor in it"
    yield (
        "in place",
        lambda how: tt.map_reduce(X.clone(), lambda rows: rows.mul_(2).sum(0), **how),
        "changes its argument",
    )
    yield "numpy in place", lambda how: tt.map_reduce(X.numpy(), doubled, **how), "read-only"
    yield (
        "text",
        lambda how: tt.map_reduce(X, lambda rows: {"s": rows.sum(0), "unit": "m"}, **how),
        r"has a text in \['unit'\], which cannot be added",
    )
    yield (
        "a None",
        lambda how: tt.map_reduce(X, lambda rows: [rows.sum(0), None], **how),
        r"has None in \[1\], which cannot be added",
    )
    yield (
        "a named tuple",
        lambda how: tt.map_reduce(X, lambda rows: Pair(rows.sum(0), 1), **how),
        r"given: Pair\(float64\[6\], int\), a tuple of its own class",
    )
    yield "a set", lambda how: tt.map_reduce(X, lambda rows: {1, 2}, **how), "may be made of dicts"
    yield (
        "raises",
        lambda how: tt.map_reduce(X, lambda rows: 1 / 0, **how),
        "map_reduce.s statistic raised ZeroDivisionError",
    )


@pytest.mark.parametrize(("call", "why"), [pytest.param(c, w, id=name) for name, c, w in refusals()])
def test_bad_input_is_refused_in_one_line(sim: Simulated, call: Any, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        call(sim())


@pytest.mark.parametrize("workers", [1, 3])
def test_a_statistic_that_changes_its_shape_is_named(sim: Simulated, workers: int) -> None:
    def odd(rows: Tensor) -> Tensor:
        return rows.sum(0) if float(rows[0, 0]) != float(X[640, 0]) else rows.sum(0)[:3]

    with pytest.raises(
        RunFailed, match=r"statistic of rows 640 to 703 has another shape .*float64\[3\], not float64\[6\]"
    ):
        tt.map_reduce(X, odd, **sim(workers))


@dataclass
class Columns:
    """Rows that are neither an array nor a nest."""

    x: Any


def read_columns() -> Columns:
    return Columns(np.arange(8.0))


def writes() -> Iterator[tuple[str, Any, Callable[[Any, Any], Any]]]:
    yield "numpy of a tensor", X.clone(), lambda rows, now: np.subtract(rows.numpy(), 1.0, out=rows.numpy())
    yield "tensor of an array", X.numpy().copy(), lambda rows, now: torch.from_numpy(rows).sub_(1.0)
    yield "data of a tensor", X.clone(), lambda rows, now: rows.data.sub_(1.0)
    yield "its order", X.clone(), lambda rows, now: rows.numpy().sort(axis=0)
    yield "columns of a matrix", X.clone().T.contiguous().T, lambda rows, now: rows.data.sub_(1.0)
    yield "half precision", X.bfloat16(), lambda rows, now: rows.data[-1].sub_(1.0)
    yield "a dataclass", [read_columns] * 8, lambda rows, now: np.subtract(rows.x, 1.0, out=rows.x)
    yield "a sparse matrix", scipy.sparse.csr_matrix(X.numpy()), lambda rows, now: rows.data.sort()
    yield "the estimate", X, lambda rows, now: now.data.add_(1.0)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(("data", "write"), [pytest.param(d, w, id=name) for name, d, w in writes()])
def test_writes_that_leave_no_other_trace_are_seen(sim: Simulated, data: Any, write: Callable[[Any, Any], Any]) -> None:
    def writing(rows: Any, now: Tensor) -> float:
        write(rows, now)
        return 1.0

    with pytest.raises(BadInput, match="the statistic changes its argument in place"):
        tt.map_reduce(data, writing, finish=lambda t, now: now, start=torch.zeros(()), rounds=3, **sim())


def test_containers_of_rows_and_estimates_may_be_changed(sim: Simulated) -> None:
    def replacing(rows: Any, now: Any) -> Tensor:
        rows["x"] = rows["x"] - 1.0
        return rows.pop("x").sum(0) + now.pop()

    def as_before(total: Any, now: Any) -> tt.Estimate:
        return tt.Estimate(now, objective=float(total.sum()))

    parts = [partial(dict, x=X[part : part + 8]) for part in range(0, 64, 8)]
    found = tt.map_reduce(parts, replacing, finish=as_before, start=[0.0], rounds=3, **sim())
    losses = [r.loss for r in found.history if type(r).__name__ == "Step" and r.loss == r.loss]
    assert losses == [pytest.approx(float((X[:64] - 1).sum()))] * 3


@pytest.mark.parametrize("workers", [1, 3])
def test_a_write_into_later_rows_is_seen_by_their_worker(sim: Simulated, workers: int) -> None:
    def writing(rows: Tensor) -> Tensor:
        if float(rows[0, 0]) == float(X[64, 0]):
            rows.data.sub_(1.0)
        return rows.sum(0)

    with pytest.raises(RunFailed, match="the statistic changes its argument in place"):
        tt.map_reduce(X.clone(), writing, **sim(workers))


def test_an_estimate_that_is_not_finite_is_refused(sim: Simulated) -> None:
    with pytest.raises(RunFailed, match=r"ended with a number that is not finite \(in estimate\['value'\]"):
        tt.map_reduce(X, total, finish=lambda t: t / 0, **sim())


def test_numpys_numbers_will_do_for_an_estimate(sim: Simulated) -> None:
    def last(total: Any, now: Any) -> tt.Estimate:
        return tt.Estimate(total, objective=total.sum(), done=(total == total).all())  # type: ignore[arg-type]

    found = tt.map_reduce(X.numpy(), lambda rows, now: rows.sum(0), finish=last, start=0.0, rounds=9, **sim())
    assert found.rounds == 1


def test_functions_may_change_estimates_of_their_own(sim: Simulated) -> None:
    def more(total: Tensor, now: Tensor) -> Tensor:
        now += total
        return now

    start = torch.zeros(COLUMNS, dtype=torch.float64)
    found = tt.map_reduce(X, lambda rows, now: rows.sum(0), finish=more, start=start, rounds=2, **sim())
    assert torch.allclose(found.value, 2 * X.sum(0)) and not start.any()


def test_a_run_that_failed_says_how_to_go_on(tmp_path: Path) -> None:
    tt.map_reduce(X, total, out=tmp_path / "run", progress=False)
    assert resuming(tmp_path / "run") == f"go on with: tt.map_reduce(..., resume='{tmp_path / 'run'}')"


def test_a_run_is_not_resumed_with_other_portions(tmp_path: Path) -> None:
    tt.map_reduce(X, total, out=tmp_path / "run", world="sim", progress=False)
    with pytest.raises(BadInput, match="the options of MapReduce have changed"):
        tt.map_reduce(X, total, portions=7, resume=tmp_path / "run", progress=False)


def test_a_run_that_cannot_go_on_speaks_of_rounds_and_rows(sim: Simulated) -> None:
    how = sim()
    rounds(**how)
    with pytest.raises(BadInput, match=r"is finished: it has come to round 6 \(rounds=6\); to go on further, give it"):
        rounds(resume=how["out"], progress=False)
    with pytest.raises(BadInput, match=r"the data of .* has changed \(rows: 4096 then, 100 now\); start another"):
        rounds(X[:100], resume=how["out"], progress=False)
    with pytest.raises(BadInput, match=r"was made in a program; go on with: tt.map_reduce\(..., resume="):
        resume_run(how["out"])


def test_normal_equations_that_are_none_are_refused() -> None:
    with pytest.raises(BadInput, match=r"a square matrix .*\(a: \[3, 3\], b: \[2\]\)"):
        tt.solve_normal(np.eye(3), np.ones(2))
    with pytest.raises(BadInput, match="not finite; look for such in the data"):
        tt.solve_normal(np.full((2, 2), np.nan), np.ones(2))


def test_singular_normal_equations_are_named_with_the_remedy(sim: Simulated) -> None:
    twice = torch.cat([X, X[:, 1:2] * 7 - X[:, 4:5]], 1)
    with pytest.raises(RunFailed, match=r"columns 1, 4, 6 depend on one another; .* ridge"):
        least_squares(twice, Y, **sim())
    with pytest.raises(RunFailed, match="column 2 is zero in all rows"):
        least_squares(X * torch.tensor([1, 1, 0, 1, 1, 1]), Y, **sim())
    with pytest.raises(RunFailed, match="its 6 columns have only 3 independent ones"):
        least_squares(X[:3], Y[:3], **sim())
    assert least_squares(twice, Y, ridge=1e-3, **sim()).isfinite().all()
