"""Ghost batch norm is ordinary batch norm on one group after the other; what is decayed; what starts at zero."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torrential.errors import BadInput
from torrential.optim import norms as norms_module
from torrential.optim.norms import GhostBatchNorm, exempt, ghost, zero_last_gamma

SHAPES = {1: (6,), 2: (6, 5, 3), 3: (6, 2, 3, 2), 12: (6, 7)}  # per sample; 12: one dimension beside the channels
KINDS: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d, 12: nn.BatchNorm1d}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """On tensors this small, threads that wait for one another on a busy machine are all that takes time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pair(kind: int, n: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """An ordinary batch norm and its ghost, with parameters of their own kind."""
    norms = [KINDS[kind](6, **options).double() for _ in range(2)]
    for norm in norms:
        generator = torch.Generator().manual_seed(1)
        for parameter in norm.parameters():
            nn.init.normal_(parameter, generator=generator)
    return norms[0], ghost(norms[1], n)


def batch(samples: int, kind: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *SHAPES[kind], generator=generator, dtype=torch.float64) * 3 + 1


@pytest.fixture(params=["one by one", "at once"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes the first way, accelerators the second."""
    if request.param == "at once":
        monkeypatch.setattr(norms_module, "_ONE_BY_ONE", ())


def compare(plain: nn.Module, ghosted: nn.Module, inputs: Tensor, groups: list[int]) -> Tensor:
    """Outputs, gradients and statistics; returns the ghost's output."""
    one, other = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    expected = torch.cat([plain(group) for group in one.split(groups)])
    output: Tensor = ghosted(other)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7), dtype=expected.dtype)
    for result, module in ((expected, plain), (output, ghosted)):
        module.zero_grad()
        (result * weights).sum().backward()
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(other.grad, one.grad, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(ghosted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(ghosted.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    return output


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("samples", "groups"), [(12, [4, 4, 4]), (15, [4, 4, 4, 3]), (3, [3])])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_ghosts_are_groups_one_after_the_other(
    kind: int, samples: int, groups: list[int], momentum: float | None
) -> None:
    plain, ghosted = pair(kind, 4, momentum=momentum)
    for step in range(2):
        compare(plain, ghosted, batch(samples, kind, step), groups)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}])
def test_without_parameters_or_statistics(options: dict[str, bool]) -> None:
    compare(*pair(2, 4, **options), batch(10, 2), [4, 4, 2])


@pytest.mark.usefixtures("way")
def test_in_single_precision() -> None:
    plain, ghosted = pair(2, 8)
    compare(plain.float(), ghosted.float(), (batch(20, 2) / 3).float(), [8, 8, 4])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("kind", "layout"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_channels_last_stay_last(kind: int, layout: torch.memory_format) -> None:
    for samples, groups in ((12, [4, 4, 4]), (14, [4, 4, 4, 2])):
        inputs = batch(samples, kind).contiguous(memory_format=layout)
        output = compare(*pair(kind, 4), inputs, groups)
        assert output.is_contiguous(memory_format=layout)


@pytest.mark.usefixtures("way")
def test_one_value_alone_joins_the_group_before() -> None:
    compare(*pair(1, 4), batch(13, 1), [4, 4, 5])
    compare(*pair(1, 4), batch(5, 1), [5])
    compare(*pair(2, 4), batch(13, 2), [4, 4, 4, 1])  # one image has many values


@pytest.mark.usefixtures("way")
def test_evaluation_is_plain() -> None:
    plain, ghosted = pair(2, 4)
    compare(plain, ghosted, batch(12, 2), [4, 4, 4])
    plain.eval()
    ghosted.eval()
    compare(plain, ghosted, batch(12, 2, seed=5), [12])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.norm2 = nn.BatchNorm2d(4)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        assert isinstance(self.norm2, nn.BatchNorm2d)
        return self.norm2

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.norm2(torch.relu(self.norm1(self.conv(x))))
        return y


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), Block(), Block(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5))


def test_ghost_keeps_everything_but_the_way_of_working() -> None:
    model = network()
    before = {name: (id(p), p.clone()) for name, p in [*model.named_parameters(), *model.named_buffers()]}
    assert ghost(model, 8) is model
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert list(after) == list(before)
    assert all(id(after[name]) == i and torch.equal(after[name], value) for name, (i, value) in before.items())
    assert list(model.state_dict()) == list(network().state_dict())
    norms = [m for m in model.modules() if isinstance(m, GhostBatchNorm)]
    assert len(norms) == 5 and all(m.group == 8 for m in norms) and "group=8" in repr(model)
    assert all(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in norms)
    ghost(model, 4)
    assert {m.group for m in norms} == {4}
    copy = pickle.loads(pickle.dumps(model))
    inputs = torch.randn(12, 3, 4, 4)
    assert torch.equal(copy(inputs), model(inputs))


def test_inputs_are_still_checked() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        ghost(nn.BatchNorm2d(3), 2)(torch.zeros(8, 3))


def test_one_norm_in_two_places_stays_one() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    ghost(model, 2)
    assert model[0] is model[2] and isinstance(model[0], GhostBatchNorm)


@pytest.mark.parametrize("other", [nn.SyncBatchNorm(4), nn.LazyBatchNorm2d()])
def test_norms_that_cannot_be_ghosts(other: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), other)
    with pytest.raises(BadInput, match=rf"{type(other).__name__} cannot work on ghost batches \(1\)"):
        ghost(model, 8)
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None])
def test_bad_sizes_of_ghosts(n: Any) -> None:
    with pytest.raises(BadInput, match="at least 1"):
        ghost(network(), n)


def test_blocks_begin_as_the_identity() -> None:
    model = ghost(network(), 4)
    assert zero_last_gamma(model) == ["1.norm2.weight", "2.norm2.weight"]
    inputs = torch.randn(8, 4, 4, 4)
    for block in (model[1], model[2]):  # type: ignore[index]
        assert torch.equal(block(inputs), inputs) and (block.norm1.weight == 1).all()
    assert (model[5].weight == 1).all()  # type: ignore[index]


def test_blocks_of_torchvision_are_known_and_others_of_their_names_are_not() -> None:
    class BasicBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(2) for _ in range(3))

    known = {"__module__": "torchvision.models.resnet"}
    theirs, wide = type("BasicBlock", (BasicBlock,), known), type("Bottleneck", (BasicBlock,), known)
    derived = type("Mine", (wide,), {})
    model = nn.Sequential(BasicBlock(), theirs(), wide(), derived())
    assert zero_last_gamma(model) == ["1.bn2.weight", "2.bn3.weight", "3.bn3.weight"]
    assert not any(p.any() for p in (model[1].bn2.weight, model[2].bn3.weight, model[3].bn3.weight))


def test_no_blocks_nothing_zeroed() -> None:
    assert zero_last_gamma(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == []


@pytest.mark.parametrize("last", ["norm", nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False)])
def test_bad_last_norms(last: object) -> None:
    block = nn.Linear(2, 2)
    block.last_norm = last  # type: ignore[assignment]
    if isinstance(last, nn.Module) and last.weight is not None:
        del block.last_norm
        object.__setattr__(block, "last_norm", last)  # not part of the model
    with pytest.raises(BadInput, match="last_norm of Linear 0 must give a norm"):
        zero_last_gamma(nn.Sequential(block))


def test_what_weight_decay_leaves_alone() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.batch = nn.BatchNorm2d(4)
            self.group = nn.GroupNorm(2, 4)
            self.instance = nn.InstanceNorm2d(4, affine=True)
            self.layer = nn.LayerNorm(4)
            self.rms = nn.RMSNorm(4)
            self.attention = nn.MultiheadAttention(4, 2)
            self.recurrent = nn.GRU(4, 4)
            self.head = nn.Linear(4, 2)
            self.head.bias = self.conv.bias  # tied: named once, as in named_parameters
            self.scale = nn.Parameter(torch.ones(4))

    model = Mixed()
    decayed = {
        *("scale", "conv.weight", "head.weight", "attention.in_proj_weight", "attention.out_proj.weight"),
        *("recurrent.weight_ih_l0", "recurrent.weight_hh_l0"),
    }
    names = {name for name, _ in model.named_parameters()}
    assert exempt(model) == names - decayed and decayed < names
    assert exempt(ghost(model, 8)) == names - decayed
    assert exempt(nn.Linear(2, 2)) == {"bias"}
