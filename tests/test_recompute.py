"""Recomputation: the same gradients to the bit, with the memory and the work that Chen et al. 2016 promise."""

import math
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.compute.activations import kept_bytes
from torrential.compute.memory import activation_bytes, state_bytes
from torrential.compute.recompute import chain_of, follow, rows_of
from torrential.compute.segments import (
    Chain,
    LayerBytes,
    Plan,
    fitting_plan,
    halves_plan,
    layers_of,
    peak_bytes,
    recomputed,
    spans_of,
    spans_plan,
    square_root_plan,
)
from torrential.config import read_config
from torrential.errors import BadInput, RunFailed
from torrential.records import Step, read_manifest

SQRT = square_root_plan
PLANS = {"sqrt": SQRT, "recursive": halves_plan}
Planner = Callable[[Chain], Plan]


def recomputing(model: nn.Module, planner: Planner) -> Plan:
    """The plan that the model follows from now on."""
    rows = rows_of(model)
    chain = chain_of(rows)
    plan = planner(chain)
    follow(rows, chain, plan)
    return plan


# -- plans ------------------------------------------------------------------------------------------------------------
def test_plans_of_eight_layers() -> None:
    chain = Chain([range(8)])
    assert square_root_plan(chain) == ((0, 1, 2), (3, 4, 5), 6, 7)
    assert halves_plan(chain) == ((((0,), 1), (2,), 3), ((4,), 5), (6,), 7)
    assert spans_of(square_root_plan(chain)) == [(0, 3), (3, 6)]
    assert spans_plan(chain, [(0, 3), (3, 6)]) == square_root_plan(chain)


def test_segments_stay_in_their_rows_and_begin_where_the_input_is_left_alone() -> None:
    chain = Chain([range(0, 3), range(3, 4), range(4, 9)], frozenset({0, 6}))
    assert square_root_plan(chain) == (0, 1, 2, (3,), (4, 5, 6), 7, 8)
    assert halves_plan(chain) == (0, 1, 2, (3,), (4, 5, 6), (7,), 8)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 1000])
def test_plans_have_every_layer_once_and_cost_what_the_paper_says(count: int) -> None:
    chain, equal = Chain([range(count)]), [LayerBytes(1, 1)] * count
    for planner in PLANS.values():
        assert list(layers_of(planner(chain))) == [*range(count)]
    assert peak_bytes(square_root_plan(chain), equal) <= 2 * math.isqrt(count) + 2
    assert recomputed(square_root_plan(chain)) < count
    assert peak_bytes(halves_plan(chain), equal) <= math.log2(count) + 2
    assert recomputed(halves_plan(chain)) + count <= max(count, count * math.log2(count), 2 * count)


def test_the_plan_that_fits_computes_as_little_again_as_it_can() -> None:
    chain, layers = Chain([range(64)]), [LayerBytes(1, 1)] * 64
    assert fitting_plan(chain, layers, 64) == tuple(range(64))
    before = 0
    for budget in (60, 40, 24, 17):
        plan = fitting_plan(chain, layers, budget)
        assert plan is not None and peak_bytes(plan, layers) <= budget
        assert recomputed(plan) >= before
        before = recomputed(plan)
    assert before <= 56
    assert fitting_plan(chain, layers, 8) is None
    uneven = [LayerBytes(100, 100)] * 4 + [LayerBytes(1, 1)] * 60
    plan = fitting_plan(chain, uneven, 420)
    assert plan is not None and recomputed(plan) < 20  # the large ones


# -- what is counted --------------------------------------------------------------------------------------------------
class Counter:
    calls = live = most = 0

    @classmethod
    def gone(cls) -> None:
        cls.live -= 1


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        memory = np.array((x * weight).detach().numpy())  # freed with the last tensor on it
        weakref.finalize(memory, Counter.gone)
        Counter.live += 1
        Counter.most = max(Counter.most, Counter.live)
        output = torch.from_numpy(memory)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        (output,) = ctx.saved_tensors
        return slope, (output * slope).sum()


class Counted(nn.Module):
    """A layer that keeps its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        Counter.calls += 1
        return _Scale.apply(x, self.weight)  # type: ignore[no-any-return]


def layers() -> nn.Sequential:
    return nn.Sequential(*(Counted() for _ in range(64)))


def counted(planner: Planner | None, make: Callable[[], nn.Sequential] = layers) -> tuple[int, int]:
    """The most activations that were live, and the calls of layers, of a step."""
    Counter.calls = Counter.live = Counter.most = 0
    model = make()
    count = len(model)
    plan = tuple(range(count)) if planner is None else recomputing(model, planner)
    model(torch.ones(2, 16)).sum().backward()
    assert Counter.live == 0
    assert Counter.calls == count + recomputed(plan)
    assert Counter.most <= peak_bytes(plan, [LayerBytes(1, 1)] * count)
    return Counter.most, Counter.calls


def test_live_activations_and_forwards_of_64_layers() -> None:
    """T18.2 and T18.4."""
    assert counted(None) == (64, 64)
    most, calls = counted(square_root_plan)
    assert most <= 17 and calls <= 64 + 56
    most, calls = counted(halves_plan)
    assert most <= math.log2(64) + 2 and calls <= 64 * math.log2(64)


class Dense(Counted):
    """A layer of an MLP, which keeps its output and nothing else that is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.linear(x))


def test_a_deep_mlp_takes_a_sixth_of_the_memory_and_a_third_more_work() -> None:
    """T18.3: backward takes two products for each layer, and forward one. benchmarks/recompute.py measures seconds."""
    plain, lean = (counted(planner, lambda: nn.Sequential(*(Dense() for _ in range(256)))) for planner in (None, SQRT))
    assert plain == (256, 256)
    assert plain[0] >= 6 * lean[0]
    assert 2 * 256 + lean[1] <= 1.34 * 3 * 256


# -- the same to the bit ----------------------------------------------------------------------------------------------
class Draws(nn.Module):
    """A layer that draws from generators that torch does not know of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() * float(np.random.rand())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        Draws(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Dropout(inplace=True),
        nn.Linear(8, 4),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.inner(x)


class Residual(nn.Module):
    """Blocks in an nn.ModuleList, a row beside them, and layers by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Flatten()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x, scale=1.0 / (1 + number))
        return self.head(x)  # type: ignore[no-any-return]


def drawn(planner: Planner | None, make: Callable[[], nn.Module]) -> Iterator[Tensor]:
    """Everything that a step changes: gradients, buffers, and what is drawn next."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = make()
    if planner is not None:
        plan = recomputing(model, planner)
        assert recomputed(plan) > 0
    for _ in range(2):
        model(torch.randn(6, 1, 8, 8)).square().sum().backward()
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    yield from model.buffers()
    yield torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)


@pytest.mark.parametrize("make", [convolutions, Residual])
@pytest.mark.parametrize("mode", PLANS)
def test_gradients_are_the_same_to_the_bit(mode: str, make: Callable[[], nn.Module]) -> None:
    """T18.1: with dropout, batch norm, layers that work in place, and generators of others."""
    plain, again = list(drawn(None, make)), list(drawn(PLANS[mode], make))
    assert len(plain) == len(again) and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_nothing_is_computed_again_where_there_is_no_backward() -> None:
    model = nn.Sequential(*(Counted() for _ in range(9)))
    recomputing(model, square_root_plan)
    Counter.calls = 0
    with torch.no_grad():
        model(torch.ones(2))
    assert Counter.calls == 9


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


def test_a_segment_whose_input_is_changed_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), InPlace(), nn.Linear(2, 2))
    recomputing(model, lambda chain: spans_plan(chain, [(1, 2)]))
    with pytest.raises(RunFailed, match=r"have changed their input in place \(InPlace\); use inplace=False"):
        model(torch.ones(1, 2)).sum().backward()


# -- runs -------------------------------------------------------------------------------------------------------------
torch.manual_seed(0)
IMAGES, LABELS = torch.randn(96, 1, 8, 8), torch.randint(0, 4, (96,))


def task(make: Callable[[], nn.Module] = Residual, **more: Any) -> tt.Task:
    data = TensorDataset(IMAGES, LABELS)
    given: dict[str, Any] = {"loss": F.cross_entropy, "train": data, "test": data, "validation": data, "batch_size": 8}
    return tt.Task(model=make, **(given | {"optimizer": tt.optimizer("sgd", lr=0.05, momentum=0.9)} | more))


def needed(given: tt.Task) -> float:
    """The gigabytes that training takes without recomputation."""
    model = given.model()
    return (kept_bytes(given, model, given.batch_size).total + state_bytes(model, given.optimizer_spec).total) / 1e9


def train(out: Path, given: tt.Task, strategy: str = "allreduce", workers: int = 2, **options: Any) -> tt.TrainResult:
    if options.get("recompute") == "auto":
        options = {"memory": 0.95 * needed(given)} | options
    return tt.train(given, strategy, workers=workers, out=out, device="cpu", progress=False, **{"steps": 4} | options)


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


SIM = {"world": "sim", "cluster": {"compute": {"seconds_per_sample": 1e-3}}}


@pytest.mark.parametrize("mode", [{"recompute": "sqrt"}, {"recompute": "recursive"}, {"recompute": "auto"}])
@pytest.mark.parametrize("make", [convolutions, Residual])
def test_runs_are_the_same_to_the_bit(tmp_path: Path, mode: dict[str, Any], make: Callable[[], nn.Module]) -> None:
    plain = train(tmp_path / "plain", task(make), **SIM)
    simulated = train(tmp_path / "sim", task(make), **SIM, **mode)
    real = train(tmp_path / "real", task(make), **mode)
    assert_same_bits(simulated.model, plain.model)
    assert_same_bits(real.model, plain.model)


def test_simulated_steps_take_the_time_of_what_is_computed_again(tmp_path: Path) -> None:
    seconds = []
    for mode in ("none", "sqrt"):
        result = train(tmp_path / mode, task(), **SIM, recompute=mode)
        seconds.append(sum(r.compute for r in result.history if isinstance(r, Step)))
    layers = recomputed(square_root_plan(chain_of(rows_of(Residual())))) / 8
    assert seconds[1] == pytest.approx(seconds[0] * (1 + layers / 3), rel=0.005)


def test_helpers_of_a_simulation_recompute_too(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", task(), **SIM, recompute="sqrt")
    helped = train(tmp_path / "helped", task(), **SIM, recompute="sqrt", processes=1)
    assert_same_bits(alone.model, helped.model)


def test_a_resumed_run_recomputes_as_before(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", task(), **SIM, recompute="auto", epochs=2, steps=None)
    train(tmp_path / "part", task(), **SIM, recompute="auto", epochs=1, steps=None)
    segments = read_manifest(tmp_path / "part").config["segments"]
    assert segments
    further = tt.train(task(), resume=tmp_path / "part", epochs=2, progress=False)
    assert_same_bits(whole.model, further.model)


def test_memory_decides_what_is_computed_again(tmp_path: Path) -> None:
    given = task()
    train(tmp_path / "plenty", given, **SIM, recompute="auto", memory=needed(given))
    assert read_manifest(tmp_path / "plenty").config["segments"] == []
    train(tmp_path / "less", given, **SIM, recompute="auto")
    assert len(read_manifest(tmp_path / "less").config["segments"]) > 0
    with pytest.raises(BadInput, match=r"no segments fit memory=1e-06: with recompute=recursive it takes .* GB"):
        train(tmp_path / "none", given, **SIM, recompute="auto", memory=1e-6)


def test_what_is_kept_is_what_autograd_keeps() -> None:
    """Against a real step, whose saved tensors are counted as they are."""
    given, found = task(convolutions), dict[int, Tensor]()
    model = given.model()
    kept = kept_bytes(given, model, 8)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: found.setdefault(t.untyped_storage()._cdata, t), lambda t: t
    ):
        F.cross_entropy(model(IMAGES[:8].clone()), LABELS[:8].clone())
    assert kept.total == sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in own)


def test_the_memory_page_is_what_is_planned() -> None:
    given = task(convolutions)
    rows = activation_bytes(given, given.model(), 8)
    assert [(row.precision, row.recompute) for row in rows] == [
        (precision, mode) for precision in ("float32", "bf16") for mode in ("none", "sqrt", "recursive")
    ]
    assert rows[0].peak == kept_bytes(given, given.model(), 8).total
    assert rows[3].peak < rows[0].peak and rows[0].again == 0 < rows[1].again < rows[2].again


def test_profiles_say_what_training_takes(run_cli: Any) -> None:
    done = run_cli("profile", "digits-mlp", "--runs", "1")
    assert done.returncode == 0 and "memory of a worker, batch 32" in done.stdout
    found = [line.split()[:2] for line in done.stdout.splitlines() if line.split()[:1] == ["bf16"]]
    assert found == [["bf16", mode] for mode in ("none", "sqrt", "recursive")]


class Looks(nn.Module):
    """A layer whose forward looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) > 0 else -self.linear(x)  # type: ignore[no-any-return]


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (Residual, {"recompute": "half"}, "recompute must be none, sqrt, recursive, auto or stage"),
        (Residual, {"recompute": "auto", "memory": None}, "recompute=auto needs to know how much memory there is"),
        (Residual, {"memory": 1.0}, "memory=1 is for recompute=auto"),
        (Residual, {"recompute": "sqrt", "strategy": "tensor"}, r"tensor cannot recompute that way .*; leave it out"),
        (Residual, {"recompute": "sqrt", "strategy": "pipeline"}, "use recompute=stage"),
        (Residual, {"recompute": "stage"}, "allreduce cannot recompute that way .*; use recompute=sqrt or"),
        (Single, {"recompute": "sqrt"}, r"found no layers to compute again \(model: Single\)"),
        (lambda: nn.Sequential(nn.Flatten(), Looks()), {"recompute": "auto", "memory": 1.0}, "told from sizes alone"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(
    tmp_path: Path, make: Callable[[], nn.Module], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", task(make), **options)


def test_runs_of_pipelines_that_had_an_option_of_their_own_are_read(tmp_path: Path) -> None:
    train(tmp_path / "run", task(convolutions, optimizer=tt.optimizer("sgd", lr=0.1)), **SIM, epochs=1)
    table = msgspec.to_builtins(read_manifest(tmp_path / "run").config)
    old = table | {"options": {"stages": 2, "recompute": True}}
    old["settings"] = {name: value for name, value in table["settings"].items() if name != "recompute"}
    config = read_config(old)
    assert config.settings.recompute == "stage" and config.options == {"stages": 2}
