"""Sandblaster: L-BFGS with all vectors on servers, batches in portions, and everybody may die."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.comm.protocol import COORDINATORS, role_of
from torrential.optim.lbfgs import DIRECTION, GRADIENT, CurvaturePair, two_loop, wolfe
from torrential.records import Evaluation, Event, Summary, Work
from torrential.reporting import tables
from torrential.resolve import RunRequest, resolve
from torrential.server import vectors
from torrential.server.messages import Save
from torrential.study.read import read_study
from torrential.tasks import load_task
from torrential.worlds.sim.mail import SimMail

pytestmark = pytest.mark.timeout(180)

torch.manual_seed(0)
INPUTS = torch.randn(200, 6, dtype=torch.float64)
LABELS = (INPUTS @ torch.randn(6, 3, dtype=torch.float64) + 0.3 * torch.randn(200, 3, dtype=torch.float64)).argmax(1)
DATA = TensorDataset(INPUTS, LABELS)
DECAY = 1e-3


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def task_of(
    model: Any = small_net, data: Any = DATA, loss: Any = nn.functional.cross_entropy, **changes: Any
) -> tt.Task:
    given = {"optimizer": tt.optimizer("sgd", lr=0.1, weight_decay=DECAY), "epochs": 200, "batch_size": 16}
    return tt.Task(model=model, loss=loss, train=data, validation=data, test=data, name="small", **(given | changes))


def simulate(
    out: Path, task: tt.Task | None = None, faults: Any = (), *, cluster: Any = None, run: Any = None, **options: Any
) -> tt.TrainResult:
    table = {"compute": {"seconds_per_sample": 1e-3}, "faults": list(faults)} | (cluster or {})
    given = {"workers": 3, "servers": 3, "steps": 12} | (run or {})
    strategy = tt.Sandblaster(**options)
    return tt.train(task or task_of(), strategy, world="sim", cluster=table, out=out, progress=False, **given)


def objectives(result: tt.TrainResult) -> dict[int, float]:
    """The loss after every step, as it was evaluated on the training data."""
    return {r.step: r.loss for r in result.history if isinstance(r, Evaluation) and r.split == "validation"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tt.TrainResult:
    return simulate(tmp_path_factory.mktemp("undisturbed") / "run")


def assert_same(result: tt.TrainResult, other: tt.TrainResult) -> None:
    assert objectives(result) == pytest.approx(objectives(other), rel=1e-9)


# -- the maths --------------------------------------------------------------------------------------------------------
class Ranges:
    """Vectors cut over ranges, as servers have them."""

    def __init__(self, named: dict[str, Tensor], cuts: list[int]) -> None:
        size = next(iter(named.values())).numel()
        self.named = named
        self.shards = [
            SimpleNamespace(
                start=a, stop=b, parameters=torch.zeros(b - a), states={n: v[a:b] for n, v in named.items()}
            )
            for a, b in itertools.pairwise([0, *cuts, size])
        ]
        for shard in self.shards:
            shard.notes = {}
        self.number = 0

    def run(self, commands: Any) -> list[float]:
        self.number += 1
        options = {"number": self.number, "forget": 0, "word": None, "commands": commands}
        return vectors.combined(commands, [vectors.vectors(shard, options, ())[0] for shard in self.shards])


@pytest.mark.parametrize("cuts", [[], [40], [1, 7, 70]])
def test_the_direction_is_that_of_a_two_loop_recursion_in_one_place(cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    size, pairs = 100, 6
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    hessian = root @ root.T / size + torch.eye(size, dtype=torch.float64)
    named = {
        GRADIENT: torch.randn(size, generator=generator, dtype=torch.float64),
        DIRECTION: torch.zeros(size).double(),
    }
    kept = []
    for place in range(pairs):
        s = torch.randn(size, generator=generator, dtype=torch.float64)
        named |= {f"s{place}": s, f"y{place}": hessian @ s}
        kept.append(CurvaturePair(f"s{place}", f"y{place}", 1 / float(s @ hessian @ s)))
    s, y = named[f"s{pairs - 1}"], named[f"y{pairs - 1}"]
    scale = float(s @ y / (y @ y))
    slope = two_loop(Ranges(named, cuts).run, kept, scale)
    inverse = scale * torch.eye(size, dtype=torch.float64)
    for pair in kept:  # the matrix that the recursion stands for
        s, y = named[pair.s], named[pair.y]
        left = torch.eye(size, dtype=torch.float64) - pair.rho * torch.outer(s, y)
        inverse = left @ inverse @ left.T + pair.rho * torch.outer(s, s)
    torch.testing.assert_close(named[DIRECTION], -inverse @ named[GRADIENT], rtol=1e-10, atol=1e-10)
    assert slope == pytest.approx(float(named[GRADIENT] @ named[DIRECTION]), rel=1e-12)


def test_commands_are_carried_out_once_whoever_says_them_again() -> None:
    ranges = Ranges({GRADIENT: torch.ones(10).double(), DIRECTION: torch.zeros(10).double()}, [3])
    add = [("axpy", DIRECTION, 2.0, GRADIENT), ("dot", DIRECTION, GRADIENT)]
    assert ranges.run(add) == [20.0]
    ranges.number = 0
    assert ranges.run(add) == [20.0]
    assert ranges.named[DIRECTION].tolist() == [2.0] * 10


@pytest.mark.parametrize("first", [1e-4, 0.1, 1.0, 50.0])
@pytest.mark.parametrize(
    "function",
    [lambda t: (-t / (t * t + 2), (t * t - 2) / (t * t + 2) ** 2), lambda t: ((t - 3) ** 4 - 81, 4 * (t - 3) ** 3)],
)
def test_the_line_search_ends_where_the_strong_wolfe_conditions_hold(function: Any, first: float) -> None:
    value, slope = function(0.0)
    search, tries = wolfe(value, slope, first), 0
    step = next(search)
    while True:
        tries += 1
        try:
            step = search.send(function(step))
        except StopIteration as end:
            taken = end.value
            break
    assert taken.value <= value + 1e-4 * taken.step * slope and abs(taken.slope) <= 0.9 * abs(slope)
    assert tries <= 14


def test_a_value_that_is_no_number_shortens_the_step() -> None:
    search = wolfe(1.0, -1.0, 1.0)
    assert next(search) == 1.0
    assert search.send((float("nan"), float("nan"))) == pytest.approx(0.1)


# -- whole runs -------------------------------------------------------------------------------------------------------
def reference(task: tt.Task, decay: float, history: int, **options: Any) -> Any:
    """What scipy's L-BFGS makes of the same objective from the same parameters."""
    torch.manual_seed(0)
    model = task.model()
    inputs, targets = task.train.tensors
    parameters = list(model.parameters())

    def objective(flat: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        vector = torch.from_numpy(flat)
        nn.utils.vector_to_parameters(vector, parameters)
        model.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in parameters])
        total = loss.item() + decay / 2 * float(vector @ vector)
        return total, (gradient + decay * vector).numpy()

    start = nn.utils.parameters_to_vector(parameters).detach().numpy()
    return minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxcor": history, **options})


def test_an_ill_conditioned_quadratic_takes_at_most_twice_the_iterations_of_scipy(tmp_path: Path) -> None:
    scales = torch.logspace(0, 4, 100, dtype=torch.float64)

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(100, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return 0.5 * (scales * self.x * self.x).sum() + 0 * inputs.sum()

    data = TensorDataset(torch.zeros(30, 1, dtype=torch.float64), torch.zeros(30))
    task = task_of(
        Point, data, lambda outputs, targets: outputs, optimizer=tt.optimizer("sgd", lr=0.1), epochs=2000,
        metric=lambda outputs, targets: outputs, maximize=False,
    )  # fmt: skip
    found = simulate(tmp_path / "run", task, run={"workers": 2, "servers": 2, "steps": None}, tolerance=1e-6)
    scipys = reference(task, 0.0, 10, gtol=1e-6, ftol=0, maxiter=5000, maxfun=10000)
    ended = next(r for r in found.history if isinstance(r, Event) and r.event == "ended")
    assert ended.detail.startswith("converged")
    assert float((scales * found.model.x.detach()).abs().max()) <= 1e-6
    assert found.summary.steps <= 2 * scipys.nit


def test_the_objective_is_that_of_scipy(tmp_path: Path) -> None:
    task = task_of()
    result = simulate(tmp_path / "run", task, run={"steps": 150, "epochs": 400}, tolerance=1e-7)
    scipys = reference(task, DECAY, 10, gtol=1e-7, ftol=0, maxiter=1000, maxfun=2000)
    model = result.model
    flat = nn.utils.parameters_to_vector(model.parameters())
    mine = (task.loss(model(INPUTS), LABELS) + DECAY / 2 * flat @ flat).item()
    assert mine <= scipys.fun * (1 + 1e-2)  # the loss is not convex: they need not end in the same place
    batches = sum(isinstance(r, Work) for r in result.history)
    assert batches <= 1.5 * scipys.nfev


def ill_scaled_rows() -> tuple[Any, TensorDataset]:
    """A logistic regression as a9a's, whose features differ in size: convex, so that there is one optimum."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(500, 20, generator=generator, dtype=torch.float64) * torch.logspace(-0.5, 0.5, 20).double()
    noise = torch.randn(500, generator=generator, dtype=torch.float64)
    labels = (rows @ torch.randn(20, generator=generator).double() + 4 * noise > 0).long()
    return lambda: nn.Linear(20, 2).double(), TensorDataset(rows, labels)


def digits_in_float64() -> tuple[Any, TensorDataset]:
    images, labels = load_task("digits-mlp").train.tensors
    layers = lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()  # noqa: E731
    return layers, TensorDataset(images.flatten(1).double(), labels)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch in this process: two that wait for each other on busy cores take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("objective", "most"), [(ill_scaled_rows, 500), (digits_in_float64, 60)])
def test_scipys_objective_is_reached_with_at_most_half_as_many_evaluations_more(
    objective: Any, most: int, tmp_path: Path
) -> None:
    model, data = objective()
    task = task_of(model, data)
    scipys = reference(task, DECAY, 10, gtol=1e-6, ftol=0, maxiter=most, maxfun=most)
    once: Any = {"workers": 2, "servers": 2, "epochs": most * 3 // 2, "steps": None}
    once |= {"evaluate_every": 10**6, "threads": 1}
    result = simulate(tmp_path / "run", task, run=once, portions=4, tolerance=1e-6)
    flat = nn.utils.parameters_to_vector(result.model.parameters())
    mine = (task.loss(result.model(data.tensors[0]), data.tensors[1]) + DECAY / 2 * flat @ flat).item()
    assert mine <= scipys.fun * (1 + 1e-6)
    assert sum(isinstance(r, Work) for r in result.history) <= 1.5 * scipys.nfev


@pytest.mark.parametrize("world", ["local", "sim"])
def test_copies_change_nothing(world: str, undisturbed: tt.TrainResult, tmp_path: Path) -> None:
    for copies in (0, 3):
        cluster = {"compute": {"seconds_per_sample": 1e-3}, "stragglers": [{"worker": 1, "factor": 6.0}]}
        where: dict[str, Any] = {"world": "sim", "cluster": cluster} if world == "sim" else {"slow": "1:4"}
        strategy = tt.Sandblaster(copies=copies)
        given = {"workers": 3, "servers": 3, "steps": 12, "out": tmp_path / f"{copies}", "progress": False}
        result = tt.train(task_of(), strategy, **(given | where))
        works = [r for r in result.history if isinstance(r, Work)]
        assert (sum(work.copies for work in works) > 0) == (copies > 0)
        assert all(work.portions == 60 for work in works)
        assert_same(result, undisturbed)


def test_a_slow_worker_costs_little_with_portions_and_copies_and_ten_times_with_shards(tmp_path: Path) -> None:
    slow = {"stragglers": [{"worker": 2, "factor": 10.0}], "compute": {"seconds_per_sample": 1e-2}}
    ideal = 200 * 1e-2 / (3 + 0.1)  # three workers, and one that does a tenth of what they do
    tiny = simulate(tmp_path / "tiny", cluster=slow, run={"workers": 4, "servers": 1, "steps": 4}, portions=100)
    static = simulate(
        tmp_path / "static", cluster=slow, run={"workers": 4, "servers": 1, "steps": 4}, portions=4, copies=0
    )
    seconds = {
        name: sorted(r.seconds for r in run.history if isinstance(r, Work))
        for name, run in {"tiny": tiny, "static": static}.items()
    }
    assert seconds["tiny"][len(seconds["tiny"]) // 2] <= 1.3 * ideal
    assert seconds["static"][0] >= 9 * (200 * 1e-2 / 4)


@pytest.mark.parametrize("seed", range(12))
def test_deaths_change_nothing_but_the_order_of_sums(seed: int, undisturbed: tt.TrainResult, tmp_path: Path) -> None:
    chance = random.Random(seed)
    last = max(r.time for r in undisturbed.history if isinstance(r, Evaluation))
    kinds = chance.choices(["worker", "coordinator"], k=chance.randint(1, 3)) + ["server"] * chance.randint(0, 1)
    faults = [
        {"kind": "crash", "at": chance.uniform(0, last), kind: 0 if kind == "coordinator" else chance.randrange(3)}
        | ({} if kind == "coordinator" else {"lasts": chance.uniform(0.01, 0.2)})
        for kind in kinds
    ]
    detection = chance.choice([0.001, 0.01, 0.3])
    result = simulate(
        tmp_path / "run", faults=faults, cluster={"detection": detection}, sum_every=chance.choice([1, 4])
    )
    assert_same(result, undisturbed)


def test_the_same_seed_gives_the_same_records_with_letters_lost_on_the_way(tmp_path: Path) -> None:
    faults = [{"kind": "crash", "worker": 1, "at": 0.1, "lasts": 0.05}, {"kind": "crash", "coordinator": 0, "at": 0.3}]
    rough = {"detection": 0.01, "accidents": {"loss": 0.05, "delay": 1e-3}}
    one, other = (simulate(tmp_path / name, faults=faults, cluster=rough) for name in ("one", "other"))
    assert [r for r in one.history if not isinstance(r, Summary)] == [
        r for r in other.history if not isinstance(r, Summary)
    ]


def test_a_coordinator_that_comes_back_repeats_no_finished_portion(undisturbed: tt.TrainResult, tmp_path: Path) -> None:
    ends = [r.time for r in undisturbed.history if isinstance(r, Work)]
    crash = {"kind": "crash", "coordinator": 0, "at": (ends[3] + ends[4]) / 2}
    result = simulate(tmp_path / "run", faults=[crash], cluster={"detection": 1e-3}, copies=0)
    assert [r.event for r in result.history if isinstance(r, Event)] == ["coordinator_lost", "coordinator_joined"]
    assert sum(r.wasted for r in result.history if isinstance(r, Work)) == 0
    assert_same(result, undisturbed)


def test_a_resumed_run_takes_the_same_steps(undisturbed: tt.TrainResult, tmp_path: Path) -> None:
    simulate(tmp_path / "run", run={"steps": 5})
    resumed = tt.train(task_of(), resume=tmp_path / "run", steps=12, progress=False)
    assert objectives(resumed) == pytest.approx(objectives(undisturbed), rel=1e-12)


def test_a_coordinator_sends_as_much_whatever_the_size_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    post = SimMail.post

    def counted(mail: SimMail, to: int, message: Any, tensors: Any = ()) -> Any:
        if mail.address >= COORDINATORS and role_of(to)[0] == "server" and not isinstance(message, Save):
            assert not tensors
            sent.append(len(msgspec.msgpack.encode(message)))
        return post(mail, to, message, tensors)

    monkeypatch.setattr(SimMail, "post", counted)

    def wide(width: int) -> Any:
        return lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()

    for_each_step = []
    for width in (8, 2000):
        sent.clear()
        options = {"workers": 2, "servers": 1, "steps": 12}
        result = simulate(tmp_path / f"{width}", task_of(wide(width)), run=options, history=4)
        evaluations = sum(isinstance(r, Work) for r in result.history)
        assert len(sent) <= 12 * (2 * 4 + 4) + 2 * evaluations + 4  # lists of commands: two loops, and the rest
        for_each_step.append(sum(sent) / 12)
    assert for_each_step[1] < 1.2 * for_each_step[0] < 6000


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layer", "words"),
    [(nn.Dropout(0.5), "dropout"), (nn.BatchNorm1d(8), "batch norm")],
)
def test_an_objective_that_is_no_sum_over_samples_is_refused(layer: nn.Module, words: str, tmp_path: Path) -> None:
    task = task_of(lambda: nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3)).double())
    with pytest.raises(tt.TorrentialError, match=words):
        simulate(tmp_path / "run", task)


def test_a_rate_without_effect_is_said() -> None:
    task = task_of(optimizer=tt.optimizer("adamw", lr=0.01, weight_decay=0.1))
    asked = RunRequest(task=task, strategy="sandblaster", lr=0.5, options={"schedule": "cosine"}, device="cpu")
    assert resolve(asked).warnings == [
        "sandblaster does without the task's AdamW, without its weight decay of 0.1",
        "sandblaster finds its steps by itself: --lr, schedule has no effect",
    ]


def test_a_clipped_gradient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tt.TorrentialError, match="clip_norm"):
        simulate(tmp_path / "run", task_of(clip_norm=1.0))


def test_a_loss_that_is_no_number_in_the_line_search_shortens_the_step_and_is_on_record(tmp_path: Path) -> None:
    def fragile(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss if float(outputs.detach().abs().max()) < 2.0 else loss * float("nan")

    result = simulate(tmp_path / "run", task_of(loss=fragile), run={"steps": 8})
    events = [r for r in result.history if isinstance(r, Event) and r.event == "step_shortened"]
    assert events and "the objective is nan" in events[0].detail
    values = list(objectives(result).values())
    assert values == sorted(values, reverse=True)


def test_the_report_has_a_table_of_portions(undisturbed: tt.TrainResult) -> None:
    table = tables.portions(read_study(undisturbed.out))
    batches = [r for r in undisturbed.history if isinstance(r, Work)]
    assert len(table.rows) == 1
    row = dict(zip(table.head, table.rows[0], strict=True))
    assert row["batches"] == f"{len(batches):,}" and row["portions"] == f"{60 * len(batches):,}"
    assert row["thrown away"] == f"{sum(batch.wasted for batch in batches):,}"
    assert '<section id="portions">' in tt.report(undisturbed.out).read_text()
