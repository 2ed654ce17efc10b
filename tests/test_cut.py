"""Cutting models that are no row of layers, by tracing or by hand; workers that have their own part alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from tests.killing import Killing
from tests.made_up import config as made_up_config
from tests.test_pipeline import DATA, TOLERANCE, difference, task, train
from torrential import shipping
from torrential.comm.protocol import Comm
from torrential.errors import BadInput, RunFailed
from torrential.params.layout import plan
from torrential.records import Event, Step, read_manifest
from torrential.stages.parameters import StageParameters, part_name
from torrential.stages.trace import trace_model
from torrential.strategies.pipeline import Pipeline
from torrential.trainer.handed import build_whole, handed_over, take_memory

pytestmark = pytest.mark.timeout(180)


class Block(nn.Module):
    """A residual block that works in place."""

    def __init__(self, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.inner, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(self.norm(x)).relu_())


class Skipping(nn.Module):
    """Its input, the output of its first layer and a number of samples are used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(24, 4)
        self.scale = torch.linspace(0.5, 1.5, 12)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        hidden = first = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        joined = torch.cat([(hidden + first) * self.scale.to(x), x.reshape(x.shape[0], -1)], dim=1)
        return self.last(joined.view(x.shape[0], 24))


class Tied(nn.Module):
    """A block that is called twice, and a weight that is used at both ends; blocks pass dicts and tuples on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(12, 12), Block(), nn.Linear(12, 12)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> dict[str, Any]:
        state = {"long": self.twice(self.first(x)), "short": x}
        state = {"long": self.twice(state["long"]), "short": state["short"] * 2}
        return {"logits": (self.last(state["long"] + state["short"]), x.sum()), "none": None}


def loss_of_tied(outputs: dict[str, Any], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"][0], targets)


def untied_task(**more: Any) -> tt.Task:
    return task(lambda: Skipping().double(), **more)


def tied_task(**more: Any) -> tt.Task:
    metric = lambda outputs, targets: (outputs["logits"][0].argmax(-1) == targets).double().mean()  # noqa: E731
    return task(lambda: Tied().double(), loss=loss_of_tied, metric=metric, **more)


def cuts_of(run: Path) -> str:
    options: dict[str, Any] = read_manifest(run).config["options"]
    return str(options["cuts"])


# -- traced -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "how"),
    [
        (3, {"cuts": "blocks.1,last"}),
        (4, {"microbatches": 3}),
        (2, {"order": "interleaved", "chunks": 2, "recompute": "stage"}),
    ],
)
def test_any_cuts_are_plain_training(tmp_path: Path, workers: int, how: dict[str, Any]) -> None:
    plain = train(tmp_path / "plain", untied_task(), 1, "allreduce")
    result = train(tmp_path / "run", untied_task(), workers, **how)
    assert difference(result.model, plain.model) < TOLERANCE
    assert len(cuts_of(tmp_path / "run").split(",")) == workers * how.get("chunks", 1) - 1


def test_tied_weights_and_modules_that_are_called_twice_are_one(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", tied_task(clip_norm=0.3), 1, "allreduce")
    for name, cuts in (("once", "twice,last"), ("inside", "twice.inner,last")):
        result = train(tmp_path / name, tied_task(clip_norm=0.3), 3, cuts=cuts)
        assert difference(result.model, plain.model) < TOLERANCE
        assert result.model.last.weight is result.model.first.weight


class Row(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def random_blocks() -> list[nn.Module]:
    return [Block(dropout=0.3), nn.BatchNorm1d(12), Block(dropout=0.3), nn.Linear(12, 4)]


def test_what_is_random_and_what_is_counted_is_as_in_a_sequential(tmp_path: Path) -> None:
    row = train(tmp_path / "row", task(lambda: Row(random_blocks()).double()), 2, cuts="blocks.2", microbatches=2)
    sequential = train(
        tmp_path / "sequential", task(lambda: nn.Sequential(*random_blocks()).double()), 2, cuts="2", microbatches=2
    )
    mine, theirs = row.model.state_dict(), sequential.model.state_dict()
    assert all(torch.equal(mine[f"blocks.{name}"], theirs[name]) for name in theirs)
    assert int(mine["blocks.1.num_batches_tracked"]) == 2 * row.summary.steps


def test_a_process_that_dies_or_goes_on_has_the_same_traced_parts(tmp_path: Path) -> None:
    """A run that is resumed, and one whose dead worker's stage its neighbour runs."""
    whole = train(tmp_path / "whole", untied_task(epochs=4), 2, world="local", threads=1)
    train(tmp_path / "cut", untied_task(epochs=2), 2, world="local", threads=1)
    resumed = tt.train(untied_task(), resume=tmp_path / "cut", epochs=4, progress=False)
    assert difference(resumed.model, whole.model) == 0.0
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Step) and record.step >= 4)
    left = train(tmp_path / "killed", untied_task(epochs=4), 2, world="local", listeners=[killing])
    assert killing.killed.is_set()
    assert difference(left.model, whole.model) < TOLERANCE


def test_a_transformer_is_traced_for_any_number_of_samples() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.embedding = nn.Embedding(20, 16)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 20)

        def forward(self, tokens: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
            return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))

    tokens = torch.randint(20, (9, 6))
    data = TensorDataset(tokens, tokens)
    given = task(Language, train=data, validation=data, test=data, loss=lambda out, y: F.cross_entropy(out.mT, y))
    model = Language()
    parts = trace_model(given, model, ["encoder.layers.1"]).parts
    for samples in (1, 2, 5, 9):
        assert torch.allclose(parts(tokens[:samples]), model(tokens[:samples]), atol=1e-6)
    with pytest.raises(RunFailed, match=r"traced for inputs of shape \(samples, 6\) and is given \(2, 4\)"):
        parts(tokens[:2, :4])
    assert trace_model(given, model).names == ["embedding", "encoder.layers.0", "encoder.layers.1", "head"]


@pytest.mark.parametrize(("strategy", "how"), [("pipeline", {"order": "zero-bubble"}), ("pipedream", {})])
def test_traced_parts_are_run_in_any_order(tmp_path: Path, strategy: str, how: dict[str, Any]) -> None:
    traced = task(lambda: Row([Block(), Block(), nn.Linear(12, 4)]).double())
    layered = task(lambda: nn.Sequential(Block(), Block(), nn.Linear(12, 4)).double())
    row = train(tmp_path / "row", traced, 2, strategy, cuts="blocks.1", **how).model.state_dict()
    sequential = train(tmp_path / "sequential", layered, 2, strategy, cuts="1", **how).model.state_dict()
    assert max(float((row[f"blocks.{name}"] - sequential[name]).abs().max()) for name in sequential) < TOLERANCE


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_a_sequential_with_a_forward_of_its_own_is_traced(tmp_path: Path) -> None:
    given = task(lambda: Doubling(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 4)).double())
    result = train(tmp_path / "run", given, 2, cuts="2")
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE


# -- by hand ----------------------------------------------------------------------------------------------------------
def test_stages_by_hand_are_the_layers_of_the_model(tmp_path: Path) -> None:
    stages: list[Callable[[], nn.Module]] = [lambda: Block().double(), Deciding, lambda: nn.Linear(12, 4).double()]
    given = task(None, stages=stages)
    assert isinstance(given.model(), nn.Sequential) and len(given.model()) == 3
    result = train(tmp_path / "run", given, 3)
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE
    assert cuts_of(tmp_path / "run") == "1,2"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"model": nn.Identity, "stages": [nn.Identity]}, "a task has a model or stages .both are given"),
        ({}, "a task has a model or stages .neither is given"),
        ({"stages": []}, r"stages must be a list of functions that build modules \(got \[\]\)"),
        ({"stages": [nn.Linear(2, 2)]}, r"stages\[0\] is a built module .Linear.; give a function that builds one"),
    ],
)
def test_bad_stages_are_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        tt.Task(loss=F.cross_entropy, train=DATA, test=DATA, **more)


# -- what cannot be cut -----------------------------------------------------------------------------------------------
class Deciding(nn.Module):
    """A block whose forward looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.inner.weight.sum() > 0:
            x = x * 2
        return x


class BySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12).double(), nn.Linear(12, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) if x.shape[0] < 10 else self.one(x) * 2)


class Fixed(BySize):
    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) + torch.ones(2, 12))


class Unused(BySize):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(12, 12).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


@pytest.mark.parametrize(
    ("model", "cuts", "why"),
    [
        (lambda: Row([Deciding(), nn.Linear(12, 4).double()]), "", r"cannot be traced at \S+test_cut.py:\d+: .*where"),
        (BySize, "", r"decides by the number of samples \(.*test_cut.py"),
        (Fixed, "", "fixed to the 2 samples of its tracing"),
        (lambda: nn.Linear(12, 4).double(), "", "1 layers cannot be cut into 2 parts"),
        (Unused, "three", "cuts names 'three', which is no module of the model; its blocks are: two"),
        (Unused, "unused", "cannot be cut at unused: the traced forward has no operation of that module"),
        (Unused, "one", "cannot be cut at one: nothing is computed between the beginning and one"),
        (Unused, "one,two", "cannot be cut at one"),
        (lambda: Skipping().double(), "blocks.1,blocks.0", "not in the order of forward: blocks.1 and blocks.0"),
        (lambda: Skipping().double(), "blocks.1,blocks.2", "does not cut 3 layers into 2 parts"),
    ],
)
def test_what_cannot_be_cut_is_named(tmp_path: Path, model: Any, cuts: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", task(model), 2, cuts=cuts)


# -- one's own part alone ---------------------------------------------------------------------------------------------
WIDTH = 512  # of layers of a megabyte


def wide_task() -> tt.Task:
    def model() -> nn.Module:
        return Row([nn.Linear(12, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 4)]).double()

    return task(model)


def mapped_bytes() -> list[int]:
    """The bytes in memory of each mapping of a parcel's tensors in this process."""
    found, lines = list[int](), Path("/proc/self/smaps").read_text().splitlines()
    for place, line in enumerate(lines):
        if "torrential-tensors" in line:
            found.append(next(int(each.split()[1]) * 1024 for each in lines[place:] if each.startswith("Rss:")))
    return found


def test_a_worker_reads_its_own_part_of_the_model_alone() -> None:
    given, config = wide_task(), made_up_config("pipeline", seed=7)
    strategy = Pipeline(stages=4, cuts="blocks.2,blocks.4,blocks.6", copies=False)
    whole = build_whole(given, config, strategy, torch.device("cpu"))
    names = {id(parameter): name for name, parameter in whole.model.named_parameters()}
    with handed_over(given, config, strategy, lambda record: None) as handed:
        assert handed is not None
        own = set[str]()
        for rank in range(4):
            mine = shipping.unpack_from(*handed)
            part = strategy.part(mine.cuttable, rank, 4)
            take_memory(part)
            size = sum(parameter.nbytes for parameter in part.parameters())
            (read,) = mapped_bytes()
            assert read <= size + 20 * (64 << 10)  # the kernel maps some pages around each that is read
            del mine
            assert mapped_bytes() == []
            reference = strategy.part(whole.cuttable, rank, 4)
            for one, other in zip(part.parameters(), reference.parameters(), strict=True):
                assert torch.equal(one, other)
            own |= {names[id(parameter)] for parameter in reference.parameters()}
        assert own == set(names.values())


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lock = nn.Linear(12, 4), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.inner(x)


def test_a_model_that_does_not_travel_is_built_by_every_worker_and_that_is_on_record(tmp_path: Path) -> None:
    given = task(lambda: nn.Sequential(nn.Linear(12, 12), Locked()).double())
    result = train(tmp_path / "run", given, 2)
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE
    said = [record.detail for record in result.history if isinstance(record, Event) and record.event == "warning"]
    assert len(said) == 1 and said[0].startswith("every worker builds the whole model before it keeps its part: ")


def test_handing_a_model_over_draws_nothing_of_the_programs(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with handed_over(wide_task(), made_up_config("pipeline"), Pipeline(stages=2, cuts="blocks.3"), lambda record: None):
        assert torch.equal(torch.rand(2), expected)


class OwnBuffers:
    rank = 0

    def buffer(self, name: str, numel: int, dtype: torch.dtype, rank: int) -> Tensor:
        return torch.full((numel,), 7.0, dtype=dtype)


def test_backward_leaves_gradients_in_the_vector_that_travels() -> None:
    inner = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    model = nn.ModuleDict({part_name(0, 0): inner})
    mine = StageParameters(cast(Comm, OwnBuffers()), model, plan(model, 1 << 20), 0, 1)
    mine.take_gradients()
    inputs = torch.randn(4, 3)
    for piece in inputs.split(2):
        inner["used"](piece).sum().backward()
    low, high = mine.gradient.data_ptr(), mine.gradient.data_ptr() + mine.gradient.nbytes
    assert all(low <= p.grad.data_ptr() < high for p in inner["used"].parameters() if p.grad is not None)
    mine.collect()
    mine.spread()
    assert all(p.grad is None for p in inner["unused"].parameters())
    for parameter, expected in zip(
        inner["used"].parameters(), (inputs.sum(0).expand(2, 3), torch.full((2,), 4.0)), strict=True
    ):
        assert parameter.grad is not None and torch.allclose(parameter.grad, expected)
