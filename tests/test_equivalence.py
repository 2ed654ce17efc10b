"""Golden equivalences: what workers compute together is what one plain loop computes alone, and what DDP computes.

Every run here is a real one, in processes of its own. Models are compared after the same number of steps, on the same
order of samples, to 1e-6; where only the carrier differs, bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import torrential as tt
from torrential import checkpoint as checkpoints
from torrential.data.deal import Deal
from torrential.params.base import state_keys
from torrential.tasks import load_task
from torrential.trainer.randomness import seed_all

TOLERANCE = 1e-6
CPU = torch.device("cpu")


def fresh(task: tt.Task) -> nn.Module:
    """The model as every worker of a run with seed 0 begins with it."""
    seed_all(CPU, 0, 0)
    return task.model().train()


def plain_loop(
    task: tt.Task,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    batch: int,
    *,
    steps: int,
    clip: float | None = None,
    before: Callable[[int], None] = lambda seen: None,
    after: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Ordinary training on joined batches, in the order in which a run with seed 0 deals the samples out. `before` and
    `after` are called around each step, `before` with the samples seen."""
    deal = Deal(len(task.train), seed=0)
    for _ in range(steps):
        indices = deal.share(0, 1, batch).indices
        items = [task.train[i] for i in indices.tolist()]
        inputs, targets = (torch.stack(column) for column in zip(*items, strict=True))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert norm > clip, "nothing was clipped, so nothing is shown"
        before(deal.epoch * len(task.train) + deal.cursor)
        optimizer.step()
        after()
        deal.advance(len(indices))
    return model


def train(task: tt.Task, out: Path, **options: Any) -> tt.TrainResult:
    return tt.train(task, out=out, device="cpu", progress=False, **options)


def assert_equal_models(ours: nn.Module, other: nn.Module, tolerance: float = TOLERANCE) -> None:
    mine, theirs = ours.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def small_task(samples: int, *, classes: int = 4, **changes: Any) -> tt.Task:
    """A smooth model on random data: nothing in it turns a last-bit difference into a large one."""
    made = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 16, generator=made)
    targets = torch.randint(classes, (samples,), generator=made)
    held_out = TensorDataset(inputs[:8], targets[:8])
    given: dict[str, Any] = dict(
        model=lambda: nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, classes)),
        loss=F.cross_entropy,
        train=TensorDataset(inputs, targets),
        validation=held_out,
        test=held_out,
        optimizer=tt.optimizer("sgd", lr=0.1, momentum=0.9),
        batch_size=8,
        epochs=100,
    )
    return tt.Task(**given | changes)


# -- the same seed, the same bytes ------------------------------------------------------------------------------------
def test_one_seed_gives_the_same_checkpoints_byte_for_byte(tmp_path: Path) -> None:
    for name in ("first", "second"):
        tt.train(
            "digits", workers=2, steps=30, seed=5, evaluate_every=15, device="cpu", progress=False, out=tmp_path / name
        )
    first, second = (files_below(tmp_path / name / "checkpoints") for name in ("first", "second"))
    assert {Path(name).parent.name for name in first} == {"step-00000015", "step-00000030"}
    assert first == second


# -- one task, one seed, 50 joined batches of 64, in every way there is ------------------------------------------------
MLP_STEPS = 50  # over two epochs, with their uneven last batches
MLP_RUNS: dict[str, dict[str, Any]] = {
    "two": dict(workers=2, batch_size=32),
    "one": dict(workers=1, batch_size=64),
    "accumulated": dict(workers=1, batch_size=32, accumulate=2),
    "tcp": dict(workers=2, batch_size=32, transport="tcp"),
    "native": dict(workers=2, batch_size=32, algorithm="native"),
}


def mlp_task() -> tt.Task:
    spec = tt.optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3)
    return dataclasses.replace(load_task("digits-mlp"), optimizer=spec)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tt.TrainResult:
    return train(mlp_task(), tmp_path_factory.mktemp("mlp") / "two", steps=MLP_STEPS, **MLP_RUNS["two"])


@pytest.fixture(scope="module")
def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh(mlp_task())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return plain_loop(mlp_task(), optimizer, model, 64, steps=MLP_STEPS), optimizer


def test_two_workers_equal_a_plain_loop(two: tt.TrainResult, plain: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = plain
    assert two.summary.steps == MLP_STEPS
    assert_equal_models(two.model, model)
    saved, _ = checkpoints.latest(two.out / "checkpoints")
    assert saved is not None and saved.step == MLP_STEPS
    for name, parameter in model.named_parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(saved.optimizer[f"{name}/momentum_buffer"], momentum, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", ["one", "accumulated"])
def test_one_worker_equals_both(
    way: str, two: tt.TrainResult, plain: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    alone = train(mlp_task(), tmp_path / way, steps=MLP_STEPS, **MLP_RUNS[way])
    assert alone.summary.samples == two.summary.samples
    assert_equal_models(alone.model, two.model)
    assert_equal_models(alone.model, plain[0])


@pytest.mark.parametrize("way", ["tcp", "native"])
def test_every_carrier_gives_the_same_bits(way: str, two: tt.TrainResult, tmp_path: Path) -> None:
    other = train(mlp_task(), tmp_path / way, steps=MLP_STEPS, **MLP_RUNS[way])
    model = f"checkpoints/step-{MLP_STEPS:08d}/model.safetensors"
    assert (other.out / model).read_bytes() == (two.out / model).read_bytes()
    (mine, _), (theirs, _) = (checkpoints.latest(r.out / "checkpoints") for r in (two, other))
    assert mine is not None and theirs is not None
    momentum = [name for name in mine.optimizer if name.endswith("/momentum_buffer")]
    assert len(momentum) == len(mine.model)
    assert all(torch.equal(mine.optimizer[name], theirs.optimizer[name]) for name in momentum)


# -- DDP --------------------------------------------------------------------------------------------------------------
DDP_STEPS, DDP_BATCH = 20, 16


class Awkward(nn.Module):
    """Tied weights, a branch that some batches use, one that none does, a frozen parameter, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24)
        self.inner = nn.Linear(24, 24)
        self.again = nn.Linear(24, 24)
        self.again.weight = self.inner.weight
        self.sometimes = nn.Linear(24, 24)
        self.never = nn.Linear(24, 24)
        self.frozen = nn.Parameter(torch.rand(24) + 0.5, requires_grad=False)
        self.leave = nn.Linear(24, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.enter(inputs)).tanh() * self.frozen
        hidden = self.again(self.inner(hidden).tanh()).tanh()
        if inputs[0, 0] == 0:  # the first target is even
            hidden = hidden + self.sometimes(hidden).tanh()
        return self.leave(hidden)


def awkward_task() -> tt.Task:
    """The first input of every sample tells whether its target is even."""
    samples = 2 * DDP_BATCH * DDP_STEPS
    task = small_task(samples, model=Awkward, batch_size=DDP_BATCH)
    inputs, targets = task.train.tensors
    inputs[:, 0] = targets % 2
    return dataclasses.replace(task, optimizer=tt.optimizer("sgd", lr=0.1, momentum=0.9, weight_decay=1e-3))


def ddp_worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/store", rank=rank, world_size=2)
    task = awkward_task()
    model = fresh(task)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(
        (p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9, weight_decay=1e-3
    )
    deal = Deal(len(task.train), seed=0)
    took = []
    for _ in range(DDP_STEPS):
        share = deal.share(rank, 2, DDP_BATCH)
        inputs, targets = task.train[share.indices]
        took.append(bool(inputs[0, 0] == 0))
        optimizer.zero_grad()
        task.loss(parallel(inputs), targets).backward()
        optimizer.step()
        deal.advance(share.total)
    torch.save((model.state_dict(), took), f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


def test_equals_ddp_on_an_awkward_model(tmp_path: Path) -> None:
    mp.spawn(ddp_worker, (str(tmp_path),), nprocs=2)
    (theirs, took0), (_, took1) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert {(True, True), (True, False), (False, True), (False, False)} == set(zip(took0, took1, strict=True))

    task = awkward_task()
    result = train(task, tmp_path / "ours", workers=2, steps=DDP_STEPS)
    ours, before = result.model.state_dict(), fresh(task).state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:  # parameters, and worker 0's running statistics
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=TOLERANCE, msg=lambda t, n=name: f"{n}: {t}")
    assert ours["norm.num_batches_tracked"] == DDP_STEPS
    assert torch.equal(ours["inner.weight"], ours["again.weight"])
    for name in ("frozen", "never.weight", "never.bias"):
        assert torch.equal(ours[name], before[name])
    assert not torch.equal(ours["sometimes.weight"], before["sometimes.weight"])


# -- dtypes, clipping, remainders, optimizers that need whole tensors -------------------------------------------------
class Widening(nn.Module):
    """float32, then float64, then float32 again; a part of it every third time, so that Adam's step counts differ."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(16, 24), nn.Linear(24, 24, dtype=torch.float64)
        self.seldom, self.leave = nn.Linear(24, 24, dtype=torch.float64), nn.Linear(24, 4)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.wide(self.narrow(inputs).tanh().double()).tanh()
        if self.calls % 3 == 0:
            hidden = hidden + self.seldom(hidden).tanh()
        return self.leave(hidden.float())


def test_several_dtypes_in_one_model_with_adam(tmp_path: Path) -> None:
    task = small_task(96, model=Widening, optimizer=tt.optimizer("adam", lr=1e-3, weight_decay=1e-2))
    model = fresh(task)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    plain_loop(task, optimizer, model, 16, steps=20)
    assert_equal_models(train(task, tmp_path / "ours", workers=2, steps=20).model, model)


def test_clipping_applies_to_the_joined_gradient(tmp_path: Path) -> None:
    """Clipped one by one, two workers' gradients would add up to something else."""
    task = dataclasses.replace(mlp_task(), clip_norm=0.05)
    model = fresh(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    plain_loop(task, optimizer, model, 64, steps=20, clip=0.05)
    assert_equal_models(train(task, tmp_path / "ours", workers=2, batch_size=32, steps=20).model, model)


class Logged(Dataset[Any]):
    """A data set that writes down which process asked for which sample."""

    def __init__(self, inner: Dataset[Any], path: Path) -> None:
        self.inner, self.path = inner, path

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{os.getpid()} {index}\n".encode())
        os.close(fd)
        return self.inner[index]


@pytest.mark.parametrize(("workers", "samples", "remainder"), [(2, 61, 13), (3, 50, 2)])
def test_an_uneven_last_batch_counts_for_what_it_is(workers: int, samples: int, remainder: int, tmp_path: Path) -> None:
    """Two whole epochs. With three workers and two samples left, one worker has nothing to do and takes part."""
    joined = workers * 8
    assert samples % joined == remainder
    task = small_task(samples, epochs=2)
    model = fresh(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain_loop(task, optimizer, model, joined, steps=2 * -(-samples // joined))

    log = tmp_path / "log"
    result = train(dataclasses.replace(task, train=Logged(task.train, log)), tmp_path / "ours", workers=workers)
    assert (result.summary.steps, result.summary.samples) == (2 * -(-samples // joined), 2 * samples)
    assert_equal_models(result.model, model)

    asked = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    asked = [(pid, index) for pid, index in asked if pid != os.getpid()]  # we tried the task once before the run
    assert len({pid for pid, _ in asked}) == workers
    for epoch in (asked[:samples], asked[samples:]):  # a step begins when the one before has ended everywhere
        assert sorted(index for _, index in epoch) == list(range(samples))
    assert asked[:samples] != asked[samples:]


class Sums(nn.Module):
    """Of half precision, without a matrix product: on some CPUs oneDNN's kills the process."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.enter = nn.Parameter(torch.randn(16, 24).mul(0.3).to(dtype))
        self.bias = nn.Parameter(torch.zeros(24, dtype=dtype))
        self.leave = nn.Parameter(torch.randn(24, 4).mul(0.3).to(dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = (inputs.to(self.enter.dtype)[:, :, None] * self.enter).sum(1) + self.bias
        return (hidden.tanh()[:, :, None] * self.leave).sum(1).float()


def half_task(dtype: torch.dtype) -> tt.Task:
    return small_task(160, model=lambda: Sums(dtype))


def half_loop(task: tt.Task, batch: int) -> nn.Module:
    """20 steps with the optimizer that is not fused."""
    model, before = fresh(task), fresh(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    plain_loop(task, optimizer, model, batch, steps=20)
    for moved, begun in zip(model.parameters(), before.parameters(), strict=True):
        assert (moved - begun).abs().max() > 0.1, "nothing was learnt, so nothing is shown"
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("carrier", [{}, {"transport": "tcp"}], ids=["shared", "tcp"])
@pytest.mark.parametrize("workers", [1, 2])
def test_half_precision_is_trained_as_by_a_plain_loop(
    workers: int, carrier: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Alone bit by bit; together but for roundings, since each worker rounds its part of the gradient."""
    task = half_task(dtype)
    ours = train(task, tmp_path / "ours", workers=workers, steps=20, **carrier).model
    assert_equal_models(ours, half_loop(task, 8 * workers), 0.0 if workers == 1 else 8 * torch.finfo(dtype).eps)


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates (You et al. 2017) in their smallest form: the norms of whole tensors matter."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.9, trust: float = 0.1) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, trust=trust))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                rate = group["lr"] * group["trust"] * (1 + parameter.norm()) / (1 + parameter.grad.norm())
                velocity.mul_(group["momentum"]).add_(parameter.grad * rate)
                parameter.sub_(velocity)


def test_an_optimizer_that_needs_whole_tensors(tmp_path: Path) -> None:
    task = small_task(96, optimizer=tt.optimizer(Lars, lr=0.5))
    assert state_keys(task.optimizer, torch.float32) is None  # not to be run on slices
    model = fresh(task)
    plain_loop(task, Lars(model.parameters(), lr=0.5), model, 16, steps=20)
    assert_equal_models(train(task, tmp_path / "ours", workers=2, steps=20).model, model)
