"""Large-batch optimizers do what their papers say, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from velocity import VelocitySGD

from torrential.errors import BadInput
from torrential.optim.lamb import LAMB
from torrential.optim.lars import LARS

SHAPES = [(4, 3, 3, 3), (4,), (5, 4), (5,), ()]
KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (LARS, {"lr": 2.0, "weight_decay": 1e-4}),
    (LAMB, {"lr": 0.01, "weight_decay": 1e-4}),
    (VelocitySGD, {"lr": 0.1, "weight_decay": 1e-4}),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On tensors this small, threads that wait for one another on a busy machine are all that takes time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def furthest(ours: list[Any], theirs: list[Any]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


# -- against slow references ------------------------------------------------------------------------------------


def lars_by_hand(weights: list[float], grads: list[float], velocity: list[float], lr: float, decay: float) -> None:
    w_norm, g_norm = math.hypot(*weights), math.hypot(*grads)
    local = 1.0 if w_norm == 0 or g_norm == 0 else 0.001 * w_norm / (g_norm + decay * w_norm)
    for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
        velocity[i] = 0.9 * velocity[i] + lr * local * (g + decay * w)
        weights[i] = w - velocity[i]


def test_lars_is_the_paper_line_by_line() -> None:
    params = parameters()
    optimizer = LARS(params, lr=10.0, weight_decay=0.01)
    theirs = [p.flatten().tolist() for p in params]
    velocities = [[0.0] * len(w) for w in theirs]
    for step in range(20):
        lr = optimizer.param_groups[0]["lr"] = 10.0 * (1 - step / 20) ** 2
        give_gradients(params, step)
        for param, weights, velocity in zip(params, theirs, velocities, strict=True):
            assert param.grad is not None
            lars_by_hand(weights, param.grad.flatten().tolist(), velocity, lr, 0.01)
        optimizer.step()
        assert furthest([p.detach().flatten() for p in params], [torch.tensor(w).double() for w in theirs]) < 1e-5


def lamb_by_hand(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, *, lr: float, decay: float, layerwise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    m = 0.9 * m + (1 - 0.9) * g
    v = 0.999 * v + (1 - 0.999) * g * g
    r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * w
    ratio = float(w.norm() / r.norm()) if layerwise and w.norm() > 0 and r.norm() > 0 else 1.0
    return w - lr * ratio * r, m, v


@pytest.mark.parametrize("layerwise", [True, False])
def test_lamb_is_the_paper_line_by_line(layerwise: bool) -> None:
    params = parameters()
    optimizer = LAMB(params, lr=0.02, weight_decay=0.01, layerwise=layerwise)
    theirs = values(params)
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in theirs]
    taken = [0] * len(params)
    for step in range(20):
        give_gradients(params, step)
        if step < 5:
            params[2].grad = None  # used later than the others: it has a count of its own
        for i, param in enumerate(params):
            if param.grad is not None:
                taken[i] += 1
                theirs[i], *moments[i] = lamb_by_hand(  # type: ignore[call-overload]
                    theirs[i], param.grad, *moments[i], taken[i], lr=0.02, decay=0.01, layerwise=layerwise
                )
        optimizer.step()
        assert furthest(values(params), theirs) < 1e-12


def test_a_group_that_is_not_layerwise_is_plain_sgd_in_lars() -> None:
    ours, theirs = parameters(), parameters()
    lars = LARS([{"params": ours, "layerwise": False, "weight_decay": 0.02}], lr=0.1, weight_decay=0.5)
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.02)
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        lars.step()
        sgd.step()
    assert furthest(values(ours), values(theirs)) < 1e-12


# -- what the digest asks (section 9) ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_an_update_does_not_depend_on_the_scale_of_the_gradient(kind: type[torch.optim.Optimizer]) -> None:
    """T9.1, over several steps; for LAMB as far as its eps allows."""
    ours, scaled = parameters(), parameters()
    one, other = (kind(p, lr=0.1) for p in (ours, scaled))  # type: ignore[call-arg]
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(scaled, step)
        assert scaled[0].grad is not None
        scaled[0].grad *= 1000
        one.step()
        other.step()
    assert furthest(values(ours), values(scaled)) < (1e-12 if kind is LARS else 1e-4)


def test_the_first_update_is_in_proportion_to_the_weights() -> None:
    """T9.2."""
    params = parameters(torch.float32)
    before = values(params)
    give_gradients(params, 0)
    LARS(params, lr=10.0, trust=0.002).step()
    for old, new in zip(before, values(params), strict=True):
        assert float((new - old).norm() / old.norm()) == pytest.approx(10.0 * 0.002, rel=1e-5)


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("grad", [0.0, 1.0])
def test_zeros_stay_finite(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], weight: float, grad: float
) -> None:
    """T9.3; with neither weight nor gradient nothing moves."""
    param = nn.Parameter(torch.full((3, 2), weight))
    optimizer = kind([param], **options)  # type: ignore[arg-type]
    for _ in range(3):
        param.grad = torch.full((3, 2), grad)
        optimizer.step()
        assert param.isfinite().all()
    assert (param == weight).all() == (weight == grad == 0)


@pytest.mark.parametrize("tiny", [0.0, 1e-12])
def test_weight_decay_really_decays(tiny: float) -> None:
    """T9.3 and its pitfall: a version copied widely has the decay in the denominator only."""
    param = nn.Parameter(torch.ones(10))
    optimizer = LARS([param], lr=1.0, momentum=0.0, weight_decay=0.01)
    param.grad = torch.full((10,), tiny)
    optimizer.step()
    # without a gradient local is 1; with next to none it is trust / wd
    assert param.detach().numpy() == pytest.approx(1 - 0.01 if tiny == 0 else 1 - 0.001, abs=1e-6)


def test_norms_of_half_precision_do_not_overflow() -> None:
    param = nn.Parameter(torch.full((1000,), 8.0, dtype=torch.float16))
    optimizer = LARS([param], lr=100.0, momentum=0.0)
    param.grad = torch.full((1000,), 6e4, dtype=torch.float16)  # its norm is 1.9e6
    optimizer.step()
    assert param.detach().float().numpy() == pytest.approx(8.0 * (1 - 100.0 * 0.001), rel=1e-3)


# -- momentum correction (section 8) ----------------------------------------------------------------------------


def rates() -> list[float]:
    """Warm-up by a constant amount per iteration, then three drops."""
    warm = [0.02 + (0.2 - 0.02) * t / 30 for t in range(30)]
    return warm + [0.2 / 10**drop for drop in range(4) for _ in range(30)]


def trajectory(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Tensor:
    """Least squares on a new minibatch each step; (steps, 8)."""
    generator = torch.Generator().manual_seed(3)
    path = []
    for lr in rates():
        optimizer.param_groups[0]["lr"] = lr
        inputs = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        residual = inputs @ param.detach() - inputs.sum(1) + torch.randn(16, generator=generator, dtype=torch.float64)
        param.grad = inputs.T @ residual / 16
        optimizer.step()
        path.append(param.detach().clone())
    return torch.stack(path)


def test_corrected_velocity_is_what_torch_does() -> None:
    """T8.2."""
    start = torch.zeros(8, dtype=torch.float64)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    u, corrected, plain = (nn.Parameter(start.clone()) for _ in range(3))
    reference = trajectory(torch.optim.SGD([u], **options), u)  # type: ignore[arg-type]
    assert (trajectory(VelocitySGD([corrected], **options), corrected) - reference).abs().max() < 1e-6  # type: ignore[arg-type]
    off = (trajectory(VelocitySGD([plain], correct=False, **options), plain) - reference).abs()  # type: ignore[arg-type]
    assert off[:30].max() > 1e-3 and off[60:].max() > 1e-3  # already in the warm-up, and at the drops
    assert reference.isfinite().all()


def test_the_correction_survives_a_rate_of_zero() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = VelocitySGD([param], lr=0.1)
    for lr in (0.0, 0.1, 0.0, 0.0, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.ones(2)
        optimizer.step()
    assert param.detach().numpy() == pytest.approx(1 - 2 * 0.1)


# -- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_is_what_a_checkpoint_keeps_and_goes_on_from(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    ours, theirs = parameters(), parameters()
    one, other = kind(ours, **options), kind(theirs, **options)
    for step in range(6):
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = options["lr"] * (1 + step)
        give_gradients(ours, step)
        give_gradients(theirs, step)
        one.step()
        other.step()
        if step == 2:  # only the tensors travel, each a copy
            fresh = parameters()
            with torch.no_grad():
                torch._foreach_copy_(fresh, theirs)
            resumed = kind(fresh, **options)
            for old, new in zip(theirs, fresh, strict=True):
                assert all(torch.is_tensor(t) for t in other.state[old].values())
                assert all(t.shape in (old.shape, ()) for t in other.state[old].values())
                resumed.state[new] = {k: t.clone() for k, t in other.state[old].items()}
            theirs, other = fresh, resumed
    assert furthest(values(ours), values(theirs)) == 0


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_parameter_without_gradient_stays(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    params = parameters()
    optimizer = kind(params, **options)
    give_gradients(params, 0)
    params[1].grad = None
    before, grads = values(params), [None if p.grad is None else p.grad.clone() for p in params]
    assert optimizer.step(lambda: 7.0) == 7.0
    moved = [not torch.equal(p.detach(), old) for p, old in zip(params, before, strict=True)]
    assert moved == [True, False, True, True, True]
    assert not optimizer.state.get(params[1])
    for param, grad in zip(params, grads, strict=True):
        assert grad is None or (param.grad is not None and torch.equal(param.grad, grad))


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (LARS, {"lr": -1.0}, "lr must not be negative"),
        (LARS, {"lr": 1.0, "trust": math.nan}, "trust must not be negative"),
        (LARS, {"lr": 1.0, "momentum": 1.0}, "momentum must be at least 0 and below 1"),
        (LAMB, {"lr": 1.0, "betas": (0.9, 1.5)}, "beta2 must be at least 0 and below 1"),
        (VelocitySGD, {"lr": 1.0, "weight_decay": -1.0}, "weight_decay must not be negative"),
    ],
)
def test_bad_options(kind: type[torch.optim.Optimizer], options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        kind(parameters(), **options)


# -- noise scale (section 10) -----------------------------------------------------------------------------------


def stationary_variance(lr: float, batch: int, curvature: float, sigma: float, chains: int = 30_000) -> float:
    """Of SGD on curvature x² / 2 whose gradients have noise of variance sigma² / batch, over many chains at once."""
    generator = torch.Generator().manual_seed(batch)
    x = nn.Parameter(torch.zeros(chains))
    optimizer = torch.optim.SGD([x], lr=lr)
    for _ in range(round(4 / (lr * curvature))):
        x.grad = curvature * x.detach() + torch.randn(chains, generator=generator) * sigma / math.sqrt(batch)
        optimizer.step()
    return float(x.detach().var())


def test_growing_the_batch_is_like_lowering_the_rate() -> None:
    """T10.2: (lr / q, B) and (lr, q B) have the same noise."""
    lr, batch, q, curvature, sigma = 0.02, 8, 4, 1.5, 3.0
    decayed = stationary_variance(lr / q, batch, curvature, sigma)
    grown = stationary_variance(lr, batch * q, curvature, sigma)
    assert decayed == pytest.approx(grown, rel=0.05)
    for found, rate, size in ((decayed, lr / q, batch), (grown, lr, batch * q)):
        assert found == pytest.approx(rate * sigma**2 / (size * curvature * (2 - rate * curvature)), rel=0.05)
