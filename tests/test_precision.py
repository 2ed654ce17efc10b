"""Mixed precision: what half precision loses is kept in float32, and steps that overflow are left out by everybody."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.checkpoint import latest
from torrential.compute import precision as halves
from torrential.errors import BadInput
from torrential.trainer.loss_scale import FIRST, INTERVAL, LossScale

torch.manual_seed(0)
INPUTS = torch.randn(128, 6)
LABELS = (INPUTS[:, 0] > INPUTS[:, 1]).long()
DOUBLE = TensorDataset(INPUTS.double(), LABELS)
SIM: dict[str, Any] = {"world": "sim", "cluster": {"compute": {"seconds_per_sample": 1e-3}}}


def works(half: str) -> bool:
    """Whether this machine computes in half precision."""
    try:
        halves.check_machine(half, "cpu")
    except BadInput:
        return False
    return True


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def task(make: Callable[[], nn.Module] = model, **more: Any) -> tt.Task:
    data = TensorDataset(INPUTS, LABELS)
    given: dict[str, Any] = {"loss": F.cross_entropy, "train": data, "test": data, "validation": data, "batch_size": 8}
    return tt.Task(model=make, **(given | {"optimizer": tt.optimizer("sgd", lr=0.1, momentum=0.9)} | more))


def train(out: Path, given: tt.Task, strategy: str = "allreduce", workers: int = 2, **options: Any) -> tt.TrainResult:
    return tt.train(given, strategy, workers=workers, out=out, device="cpu", progress=False, **options)


# -- what half precision loses ----------------------------------------------------------------------------------------
class Slope(nn.Module):
    """A weight whose gradient is 1 in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return -self.weight * torch.ones(len(x), 1)


def test_small_steps_reach_the_float32_parameters(tmp_path: Path) -> None:
    """T17.1."""
    half = torch.ones(1, dtype=torch.float16)
    for _ in range(1000):
        half += 2.0**-13
    assert float(half) == 1.0
    given = task(Slope, loss=lambda outputs, _: outputs.mean(), metric=lambda outputs, _: outputs.mean())
    given = replace(given, optimizer=tt.optimizer("sgd", lr=2.0**-13), epochs=100)
    result = train(tmp_path / "run", given, workers=1, **SIM, precision="fp16", steps=1000, evaluate_every=1000)
    assert float(result.model.weight.detach()) == 1.0 + 1000 * 2.0**-13  # type: ignore[arg-type]


class Tiny(torch.autograd.Function):
    """A half precision product with a slope of 1e-8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1e-8

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return (slope.half() * 1e-8).float()


def test_scaling_recovers_gradients_that_are_too_small() -> None:
    """T17.2."""
    for scale, expected in ((1.0, 0.0), (2.0**12, 1e-8)):
        parameter = nn.Parameter(torch.ones(4))
        loss_scale = LossScale([parameter])
        loss_scale.value = scale
        (Tiny.apply(parameter).sum() * scale).backward()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == pytest.approx([expected] * 4, rel=1e-2)


# -- the scale --------------------------------------------------------------------------------------------------------
def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps() -> None:
    loss_scale = LossScale([])
    for _ in range(INTERVAL - 1):
        loss_scale.decide(overflowed=False)
    assert loss_scale.value == FIRST
    loss_scale.decide(overflowed=False)
    assert loss_scale.value == 2 * FIRST
    loss_scale.decide(overflowed=True)
    assert loss_scale.value == FIRST and loss_scale.skipping
    again = LossScale([])
    again.load(loss_scale.save())
    assert again.value == FIRST


class Spoiled(torch.autograd.Function):
    """Its gradient is infinite where the marked sample is part of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (marked,) = ctx.saved_tensors
        return (slope * float("inf") if bool(marked) else slope), None


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x).float()
        return Spoiled.apply(output, (x == INPUTS[7]).all(1).any())  # type: ignore[no-any-return]


def half(*halves_needed: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not all(map(works, halves_needed)), reason=f"this CPU has no {halves_needed}")


TOGETHER: dict[str, dict[str, Any]] = {"allreduce": {}, "local": {"period": 1}, "bsp": {"servers": 2}}


@half("fp16")
@pytest.mark.parametrize(
    ("strategy", "world"), [*((s, "sim") for s in TOGETHER), ("allreduce", "local"), ("ddp", "local")]
)
def test_all_leave_out_the_same_steps(tmp_path: Path, strategy: str, world: str) -> None:
    """T17.3: in each of two epochs one sample spoils the gradient of one worker."""
    how = {"epochs": 2, "precision": "fp16"} | (SIM if world == "sim" else {}) | TOGETHER.get(strategy, {})
    spoiled = train(tmp_path / "spoiled", task(Marked), strategy, **how)
    assert all(tensor.isfinite().all() for tensor in spoiled.model.state_dict().values())
    saved, _ = latest(tmp_path / "spoiled" / "checkpoints")
    assert saved is not None
    (scale,) = (float(tensor) for name, tensor in saved.workers.items() if name.endswith("loss scale/scale"))
    assert scale in ((FIRST / 4,) if strategy != "bsp" else (FIRST, FIRST / 2, FIRST / 4))  # which is the worker's own
    if strategy in ("allreduce", "bsp"):
        steps = 2 * len(INPUTS) // 16
        assert set(saved.applied.values()) == {steps - 2}


@half("fp16")
def test_with_servers_the_same_steps_are_left_out(tmp_path: Path) -> None:
    how = SIM | {"epochs": 1, "precision": "fp16"}
    summed = train(tmp_path / "allreduce", task(Marked), **how).model.state_dict()
    served = train(tmp_path / "bsp", task(Marked), "bsp", servers=2, **how).model.state_dict()
    for name, tensor in summed.items():
        torch.testing.assert_close(served[name], tensor, rtol=1e-5, atol=1e-5)


@half("fp16")
@pytest.mark.parametrize("strategy", ["downpour", "ssp", "easgd", "hogwild", "fedavg"])
def test_no_overflow_reaches_the_parameters(tmp_path: Path, strategy: str) -> None:
    result = train(tmp_path / "run", task(Marked), strategy, **SIM, epochs=1, precision="fp16")
    assert all(tensor.isfinite().all() for tensor in result.model.state_dict().values())


# -- bfloat16 ---------------------------------------------------------------------------------------------------------
WHOLE = [("allreduce", "local"), ("ddp", "local"), ("bsp", "local")]
WHOLE += [(s, "sim") for s in ("allreduce", "local", "bsp", "downpour", "easgd", "hogwild", "fedavg", "sandblaster")]


@half("bf16")
@pytest.mark.parametrize(("strategy", "world"), WHOLE)
def test_bf16_is_float32_to_its_rounding(tmp_path: Path, strategy: str, world: str) -> None:
    how = {"steps": 4} | (SIM if world == "sim" else {}) | ({"period": 1} if strategy == "local" else {})
    full = train(tmp_path / "float32", task(), strategy, **how).model.state_dict()
    rounded = train(tmp_path / "bf16", task(), strategy, **how, precision="bf16").model.state_dict()
    assert any(not torch.equal(tensor, full[name]) for name, tensor in rounded.items())
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, full[name], rtol=0, atol=0.1 if strategy == "sandblaster" else 0.01)


@half("bf16")
def test_bf16_and_recomputation_go_together_and_with_helpers(tmp_path: Path) -> None:
    results = []
    for name, more in (("plain", {}), ("again", {"recompute": "sqrt"}), ("helped", {"processes": 1})):
        results.append(train(tmp_path / name, task(), **SIM, steps=4, precision="bf16", **more).model.state_dict())
    for other in results[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in results[0].items())


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("strategy", "options", "why"),
    [
        ("allreduce", {"precision": "half"}, "precision must be float32, bf16 or fp16"),
        ("tensor", {"precision": "bf16"}, "tensor computes parts of the model in float32 alone"),
        ("pipeline", {"precision": "bf16"}, "pipeline computes parts of the model in float32 alone"),
        ("sandblaster", {"precision": "fp16"}, "sandblaster cannot leave out a step, as fp16 may have to"),
        ("allreduce", SIM | {"precision": "fp16", "processes": 1}, "helpers do not know how the loss is scaled"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, strategy: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", task(), strategy, **options)


def test_a_model_in_half_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"precision=bf16 is for parameters of float32 \(0.weight: float64\)"):
        train(
            tmp_path / "run",
            task(lambda: model().double(), train=DOUBLE, test=DOUBLE, validation=DOUBLE),
            precision="bf16",
        )


def test_a_cpu_that_dies_is_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    tries = []

    def run(*_: Any, env: dict[str, str], **__: Any) -> subprocess.CompletedProcess[bytes]:
        tries.append(env.get("ONEDNN_MAX_CPU_ISA"))
        return subprocess.CompletedProcess([], 0 if tries[-1] else -4, b"", b"")

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        with pytest.raises(BadInput) as refused:
            halves.check_machine("bf16", "cpu")
        assert str(refused.value) == (
            "precision=bf16 does not work on this machine's CPU (a trial was ended by SIGILL); set "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, which helps here"
        )
    assert tries == [None, "AVX512_CORE_BF16"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    halves.check_machine("bf16", "cpu")
    assert len(tries) == 2
