"""Tensor parallelism: layers split over workers are the layers that are not, in both worlds; what is refused."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from tests.killing import Killing
from torrential.data.deal import order
from torrential.errors import BadInput, RunFailed
from torrential.randomness import MODEL, seed_all
from torrential.records import Evaluation, Step
from torrential.splits.group import SplitGroup
from torrential.splits.plan import cut_model, found_plan, read_plan
from torrential.splits.rehearse import rehearse
from torrential.splits.slices import Slice, put_together, slice_of
from torrential.strategies.tensor import TensorParallel

pytestmark = pytest.mark.timeout(120)
DRAW = torch.Generator().manual_seed(0)
LABELS = torch.randint(4, (70,), generator=DRAW)
ROWS = TensorDataset(torch.randn(70, 12, dtype=torch.float64, generator=DRAW), LABELS)
WORDS = TensorDataset(torch.randint(16, (70, 6), generator=DRAW), LABELS)
IMAGES = TensorDataset(torch.randn(70, 3, 16, 16, dtype=torch.float64, generator=DRAW), LABELS)
TOLERANCE = 1e-12  # in float64


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 4)
    ).double()


class Encoder(nn.Module):
    """torch's own transformer, between an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 4)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.size(1), dtype=torch.float64)
        return self.head(self.encoder(self.words(words), mask, is_causal=True).mean(1))


class Attention(nn.Module):
    """Attention as people write it: queries, keys and values in one layer, dropout on the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.size = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(*x.shape[:2], self.n_head, self.size).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        weights = self.drop((q @ k.transpose(-1, -2) / self.size**0.5).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A hand-written block, and a language model's tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.before, self.between = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = Attention(8, 4)
        self.wide, self.narrow, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.1)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = x + self.attention(self.before(x))
        x = x + self.narrow(self.drop(F.gelu(self.wide(self.between(x)))))
        return self.head(x).mean(1)[:, :4]


BLOCK = (
    "words=rowwise,attention=heads,attention.qkv=qkv,attention.drop=sliced,attention.out=rowwise,"
    "wide=colwise,drop=sliced,narrow=rowwise,head=colwise-gather"
)


def columns() -> nn.Module:
    """AlexNet in miniature: two columns that meet in the third convolution and in the linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, groups=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32, 24),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(24, 24),
        nn.ReLU(),
        nn.Linear(24, 4),
    ).double()


COLUMNS = (  # as in the paper: only the third convolution and the linear layers see both columns
    "0=colwise,3=sliced,4=sliced,6=colwise,8=sliced,10=sliced,14=sliced,15=colwise,17=sliced,18=colwise,20=rowwise"
)


def task(model: Any = mlp, data: TensorDataset = ROWS, **more: Any) -> tt.Task:
    given: dict[str, Any] = {
        "model": model,
        "loss": F.cross_entropy,
        "train": data,
        "validation": data,
        "test": data,
        "optimizer": tt.optimizer("sgd", lr=0.2, momentum=0.9, weight_decay=1e-3),
        "batch_size": 20,
        "epochs": 2,
        "name": "split",
    }
    return tt.Task(**given | more)


def train(out: Path, given: tt.Task, workers: int, strategy: str = "tensor", world: str = "sim", **more: Any) -> Any:
    cluster = {"cluster": {"compute": {"seconds_per_sample": 1e-3}}} if world == "sim" else {}
    options = cluster | {"device": "cpu", "progress": False} | more
    return tt.train(given, strategy, workers=workers, world=world, out=out, **options)


def difference(one: nn.Module, other: nn.Module) -> float:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


MODELS: dict[str, tuple[Any, TensorDataset, str]] = {
    "mlp": (mlp, ROWS, ""),
    "encoder": (Encoder, WORDS, ""),
    "block": (Block, WORDS, BLOCK),
    "columns": (columns, IMAGES, ""),
    "columns of the paper": (columns, IMAGES, COLUMNS),
}


# -- plain training ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_split_models_are_plain_training_in_both_worlds(tmp_path: Path, name: str) -> None:
    model, data, split = MODELS[name]
    given = task(model, data, clip_norm=0.5)
    plain = train(tmp_path / "plain", given, 1, "allreduce").model
    for ways in (1, 2) if "columns" in name else (1, 2, 4):
        result = train(tmp_path / f"sim{ways}", given, ways, split=split)
        assert result.summary.samples == 140 and result.summary.steps == 8
        assert difference(result.model, plain) < TOLERANCE, ways
    result = train(tmp_path / "local", given, 2, world="local", split=split)
    assert difference(result.model, plain) < TOLERANCE


@pytest.mark.parametrize("world", ["sim", "local"])
def test_several_groups_are_one_large_batch(tmp_path: Path, world: str) -> None:
    given = task(clip_norm=0.3, optimizer=tt.optimizer("adamw", lr=0.01, weight_decay=0.1))
    together = train(tmp_path / "groups", given, 4, world=world, ways=2)
    reference = train(tmp_path / "plain", given, 2, "allreduce")
    assert difference(together.model, reference.model) < 1e-9  # the norm is summed in another order
    assert together.summary.samples == 140


def test_groups_of_parameters_keep_their_options(tmp_path: Path) -> None:
    own = tt.optimizer("sgd", lr=0.2, groups=[("*.bias", {"weight_decay": 0.0, "lr": 0.1})], weight_decay=0.05)
    given = task(optimizer=own)
    result = train(tmp_path / "run", given, 2)
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE


def test_a_step_of_the_tasks_own_and_figures_are_as_elsewhere(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        outputs = model(batch[0])
        return {"loss": F.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}

    given = task(loss=None, step=step, metric="size")
    result = train(tmp_path / "run", given, 2)
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE


@pytest.mark.parametrize("world", ["local", "sim"])
def test_a_run_goes_on_to_the_same_bytes(tmp_path: Path, world: str) -> None:
    given = task(columns, IMAGES, optimizer=tt.optimizer("adam", lr=0.01))
    how: dict[str, Any] = {"world": world} | ({"threads": 1} if world == "local" else {})
    whole = train(tmp_path / "whole", given, 2, epochs=3, **how)
    train(tmp_path / "cut", given, 2, epochs=1, **how)
    resumed = tt.train(given, resume=tmp_path / "cut", epochs=3, progress=False)
    assert resumed.summary.steps == whole.summary.steps == 12
    assert difference(resumed.model, whole.model) == 0.0


def test_a_task_may_say_how_it_is_split(tmp_path: Path) -> None:
    given = task(split={"3": "colwise", "5": "rowwise"})
    fitted = TensorParallel().fitted(given, mlp(), 2)
    assert fitted == TensorParallel(ways=2, split="3=colwise,5=rowwise")
    assert TensorParallel(split="[03]=colwise-gather").fitted(given, mlp(), 4).split == (
        "0=colwise-gather,3=colwise-gather"
    )


# -- what is sent, and kept -------------------------------------------------------------------------------------------
class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.wide, self.narrow = nn.Linear(12, 12), nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + self.narrow(self.wide(x).tanh())


def sums_of(model: nn.Module, plan: dict[str, str], given: Tensor) -> tuple[list[int], list[int]]:
    """Elements that one of two workers sums in forward, and in backward; the other's terms are taken to be zero."""
    group, sums = SplitGroup(0, 2), list[int]()

    def summed(tensor: Tensor) -> Tensor:
        sums.append(tensor.numel())
        return tensor.clone()

    group.summed = summed
    output = cut_model(copy.deepcopy(model), plan, group)(given)
    forward = len(sums)
    output.sum().backward()
    return sums[:forward], sums[forward:]


def test_a_pair_sums_activations_once_forward_and_once_backward() -> None:
    plan = {"wide": "colwise", "narrow": "rowwise"}
    assert sums_of(Pair(), plan, torch.randn(5, 12)) == ([60], [60])
    first = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    assert sums_of(first, {"0": "colwise", "2": "rowwise"}, torch.randn(5, 12)) == ([20], [])  # no gradient of data
    layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True)
    given = torch.randn(5, 6, 8, requires_grad=True)
    assert sums_of(layer, found_plan(layer, 2), given) == ([240, 240], [240, 240])


def test_the_bytes_of_a_run_are_those_of_its_sums(tmp_path: Path) -> None:
    """Two workers that sum n numbers send n each: half of them to be added, half of the sum."""
    data = TensorDataset(ROWS.tensors[0][:40], LABELS[:40])
    given = task(lambda: Pair().double(), data, split={"wide": "colwise", "narrow": "rowwise"})
    sent = [train(tmp_path / str(epochs), given, 2, epochs=epochs).summary.bytes_sent for epochs in (1, 2)]
    forward = backward = 20 * 12 * 8  # bytes of the activations of 20 samples, in float64
    vote = (3 + 3) * 8
    assert sent[1] - sent[0] == 2 * 2 * (forward + backward + vote)  # two steps, two workers


def test_a_worker_has_its_slices_alone() -> None:
    model = Encoder()
    strategy = TensorParallel(ways=4).fitted(task(Encoder, WORDS), model, 4)
    part = strategy.part(copy.deepcopy(model), 6, 8)
    whole = dict(model.named_parameters())
    split = {name: p for name, p in part.named_parameters() if slice_of(p) is not None}
    assert len(split) == 2 * 6  # of each block: in_proj and linear1 with their biases, and two weights that sum
    assert all(4 * p.numel() == whole[name].numel() for name, p in split.items())
    assert all(slice_of(p) == Slice(1, 2, 4) for name, p in split.items() if name.endswith("linear2.weight"))
    rest = [p.numel() for name, p in part.named_parameters() if name not in split]
    assert sum(rest) == sum(p.numel() for name, p in whole.items() if name not in split)
    assert part.encoder.layers[0].self_attn.in_proj_weight.untyped_storage().nbytes() == 3 * 8 * 8 * 8 / 4


def test_slices_are_put_together_by_their_names() -> None:
    whole = {"a": torch.randn(6, 4), "b": torch.randn(12, 2), "c": torch.randn(3)}
    cuts = {"a": (1, 1), "b": (0, 3)}
    found = {"c": whole["c"]}
    for name, (dim, blocks) in cuts.items():
        for place in range(2):
            cut = Slice(dim, place, 2, blocks)
            found[cut.name(name)] = cut.of(whole[name])
    together = put_together(found)
    assert together.keys() == whole.keys() and all(torch.equal(together[name], whole[name]) for name in whole)
    assert Slice(0, 1, 2, 3).of(whole["b"]).tolist() == whole["b"][[2, 3, 6, 7, 10, 11]].tolist()
    del found["b[dim 0 in 3 blocks, slice 1 of 2]"]
    assert put_together(found).keys() == {"a", "c"}


# -- which layers, and how --------------------------------------------------------------------------------------------
def test_what_is_found_in_models() -> None:
    assert found_plan(mlp(), 4) == {"0": "colwise", "2": "sliced", "3": "rowwise", "5": "colwise", "6": "rowwise"}
    assert found_plan(mlp(), 3) == {} and found_plan(Block(), 2) == {}
    assert found_plan(columns(), 2) == read_plan(
        "0=colwise,3=sliced,4=sliced,6=rowwise,8=sliced,10=sliced,14=sliced,15=rowwise,18=colwise,20=rowwise"
    )
    nested = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1)))
    assert found_plan(nested, 2) == {"0.0": "colwise", "1.0": "rowwise"}
    mixing = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert found_plan(mixing, 2) == {"2": "colwise", "3": "rowwise"}
    mixing[2].bias.requires_grad_(False)
    assert found_plan(mixing, 2) == {}
    decoder = nn.TransformerDecoderLayer(8, 2, 16)
    assert set(found_plan(decoder, 2)) == {"self_attn", "multihead_attn", "linear1", "dropout", "linear2"}


ATTENTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": ({}, {}),
    "each head's weights": ({"dropout": 0.2}, {"average_attn_weights": False}),
    "no weights": ({"dropout": 0.2}, {"need_weights": False}),
    "samples first": ({"batch_first": True, "bias": False}, {}),
    "a mask of bits": ({}, {"attn_mask": torch.ones(5, 5).triu(1).bool()}),
    "a mask for each head": ({}, {"attn_mask": torch.randn(3 * 4, 5, 5, generator=DRAW), "need_weights": False}),
    "padding": ({"batch_first": True}, {"key_padding_mask": torch.arange(5).expand(3, 5) > 2}),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_by_heads_is_torchs_own(name: str) -> None:
    made, how = ATTENTIONS[name]
    module = nn.MultiheadAttention(8, 4, **made)
    x = torch.randn(*((3, 5) if made.get("batch_first") else (5, 3)), 8)
    for ways in (2, 4):
        rehearse(module_in(module), {"inner": "heads"}, ways, lambda part: part.inner(x, x, x, **how))


def module_in(inner: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.inner = inner
    return outer


def test_attention_over_other_keys_and_values_is_torchs_own() -> None:
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=3)
    q, k, v = torch.randn(5, 3, 8), torch.randn(7, 3, 6), torch.randn(7, 3, 3)
    rehearse(module_in(module), {"inner": "heads"}, 2, lambda part: part.inner(q, k, v))
    rehearse(module_in(module), {"inner": "heads"}, 2, lambda part: part.inner(q[:, 0], k[:, 0], v[:, 0]))


def test_layers_by_themselves_are_the_whole_ones() -> None:
    words, image = torch.randint(8, (3, 5)), torch.randn(3, 8, 6, 6)
    for module, way, given in (
        (nn.Embedding(8, 4, padding_idx=5), "rowwise", words),
        (nn.Embedding(8, 4), "colwise-gather", words),
        (nn.Linear(8, 4), "rowwise", torch.randn(3, 8)),  # of an input that is whole
        (nn.Conv2d(8, 4, 3, padding=1, padding_mode="circular"), "colwise-gather", image),
        (nn.Conv2d(8, 4, 3), "rowwise", image),
        (nn.Conv2d(8, 4, 3), "rowwise", image[0]),
    ):
        rehearse(module_in(module), {"inner": way}, 2, lambda part, given=given: part.inner(given))
    chain = nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8), nn.PReLU(8), nn.Dropout2d(0.3), nn.Conv2d(8, 8, 1, groups=4)
    )
    plan = {"0": "colwise", "1": "sliced", "2": "sliced", "3": "sliced", "4": "sliced"}
    rehearse(nn.Sequential(*chain, nn.Conv2d(8, 2, 1)), plan | {"5": "rowwise"}, 2, lambda part: part(image))


# -- what cannot be done ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "options", "why"),
    [
        (3, {}, "no layers were found that 3 workers can have in equal parts; name them"),
        (3, {"ways": 2}, r"ways=2 does not divide the workers \(3\)"),
        (
            3,
            {"split": "0=colwise"},
            "0 has out_features=16, which 3 workers cannot have in equal parts; use a multiple",
        ),
        (2, {"split": "0"}, "split has layer=way with commas"),
        (2, {"split": "0=diagonal"}, "no way to split named 'diagonal'; known: colwise, "),
        (2, {"split": "9*=colwise"}, r"no layer named '9\*'"),
        (2, {"split": "1=colwise"}, "1 is a Tanh, which cannot be split colwise"),
        (2, {"split": "1=heads"}, r"1 \(Tanh\) cannot be split heads: it has no number of heads"),
        (2, {"split": "0=qkv"}, "its 16 outputs are not queries, keys and values in 2 equal parts"),
        (
            2,
            {"split": "0=colwise"},
            "the split model does not run: .* shapes cannot be multiplied .*; a layer that gets",
        ),
        (2, {"split": "6=colwise"}, "the split model does not run: the task's loss .* out of bounds"),
        (2, {"split": "0=colwise,3=rowwise"}, "draws random numbers; split fewer layers"),  # nor the dropout between
    ],
)
def test_bad_splits_are_refused(tmp_path: Path, workers: int, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", task(), workers, **options)


def test_what_would_be_silently_wrong_is_found() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(BadInput, match=r"gives outputs of \[\(3, 2\)\], the whole one of \[\(3, 4\)\]"):
        rehearse(nn.Sequential(nn.Linear(4, 4)), {"0": "colwise"}, 2, lambda part: part(x))
    for between in (nn.Softmax(-1), nn.LayerNorm(8)):
        model = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4))
        with pytest.raises(BadInput, match=r"mixes channels|does not run: Given normalized_shape"):
            rehearse(model, {"0": "colwise", "2": "rowwise"}, 2, lambda part, model=model: part(x))


def test_layers_and_optimizers_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    def refused(module: nn.Module, way: str, why: str) -> None:
        with pytest.raises(BadInput, match=why):
            cut_model(module_in(module), {"inner": way}, SplitGroup(0, 2))

    refused(nn.Conv2d(4, 4, 1, groups=2), "colwise", "it has groups=2; split it sliced")
    refused(nn.Conv2d(4, 4, 1), "sliced", "each output depends on all channels")
    refused(nn.Embedding(4, 4, max_norm=1.0), "rowwise", "it has max_norm=1.0; leave out max_norm")
    refused(nn.MultiheadAttention(8, 4, add_bias_kv=True), "heads", "add_bias_kv")
    refused(nn.MultiheadAttention(9, 3), "heads", "num_heads=3, which 2 workers cannot have in equal parts")
    refused(nn.Linear(4, 4).requires_grad_(False), "colwise", "its weight is not trained")
    tied = Block()
    with pytest.raises(BadInput, match=r"head.weight is shared by a layer that is split and one that is not"):
        cut_model(tied, {"words": "rowwise"}, SplitGroup(0, 2))
    with pytest.raises(BadInput, match="head shares its weight with a layer that is split along another dimension"):
        cut_model(Block(), {"words": "colwise", "head": "colwise"}, SplitGroup(0, 2))
    whole = task(optimizer=tt.optimizer(torch.optim.Adafactor, lr=0.01))
    with pytest.raises(BadInput, match="tensor has slices of tensors, and Adafactor may need whole ones; use one of"):
        train(tmp_path / "run", whole, 2)


class Careless(nn.Linear):
    """A layer that depends on where it lies in memory, and so gives something else on every worker."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * random.Random(id(self)).random())


def test_workers_that_compute_differently_are_found(tmp_path: Path) -> None:
    given = task(lambda: nn.Sequential(Careless(12, 12), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)).double())
    with pytest.raises(RunFailed, match="parameters that are not split have got other gradients on one worker"):
        train(tmp_path / "run", given, 2)


# -- deaths -----------------------------------------------------------------------------------------------------------
def crashing(*faults: dict[str, Any]) -> dict[str, Any]:
    crashes = [{"kind": "crash", **fault} for fault in faults]
    return {"faults": crashes, "compute": {"seconds_per_sample": 1e-3}, "detection": 1e-3}


def test_the_last_copy_of_a_slice_ends_the_run_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no worker has slice 1 of 2 of the model any more; resume the run"):
        train(tmp_path / "run", task(), 2, cluster=crashing({"worker": 1, "at": 0.05}))
    lost = crashing({"worker": 1, "at": 0.03}, {"worker": 3, "at": 0.05})
    with pytest.raises(RunFailed, match="no worker has slice 1 of 2 of the model any more; resume the run"):
        train(tmp_path / "two", task(), 4, ways=2, cluster=lost)


def sizes_of(result: Any, samples: int, batch: int) -> list[list[int]]:
    """The samples of each step, all ways that fit the records. Only some steps are on record, the first of every
    generation among them: before it, all had as many groups, one or two."""
    points = sorted({(r.step, r.samples) for r in result.history if isinstance(r, Step)})
    found: list[list[int]] = [[]]
    for step, done in points:
        longer = list[list[int]]()
        for sizes, first, second in itertools.product(found, (1, 2), (1, 2)):
            tried = list(sizes)
            for groups in [first] * (step - len(sizes) - 1) + [second]:
                tried.append(min(groups * batch, samples - sum(tried) % samples))
            if sum(tried) == done and tried not in longer:
                longer.append(tried)
        found = longer
    assert found, f"{points} are no steps of one or two groups"
    return found


def plain_steps(given: tt.Task, sizes: list[int]) -> nn.Module:
    """A plain loop over the run's order of samples."""
    seed_all(torch.device("cpu"), 0, MODEL)
    model = given.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    for first, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        rows = order(70, 0, first // 70)[first % 70 : first % 70 + size]
        optimizer.zero_grad()
        F.cross_entropy(model(ROWS.tensors[0][rows]), LABELS[rows]).backward()
        optimizer.step()
    return model


def is_plain(result: Any, given: tt.Task) -> bool:
    """Whether a run's model is a plain loop's on steps of the sizes that the run had, to rounding."""
    loops = (dict(plain_steps(given, sizes).named_parameters()) for sizes in sizes_of(result, 70, 20))
    trained = dict(result.model.named_parameters())
    return any(all(torch.allclose(trained[n], p, rtol=0, atol=1e-9) for n, p in loop.items()) for loop in loops)


class Counting(nn.Module):
    """A model with a buffer that its outputs depend on, so that workers of a group must agree on it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("calls", torch.zeros(1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x) + 1e-12 * self.calls


@pytest.mark.parametrize("seed", range(16))
def test_dead_workers_change_nothing_beyond_rounding(tmp_path: Path, seed: int) -> None:
    """Whoever dies, as long as every slice is left: those that are left form groups."""
    chance = random.Random(seed)
    victims = [place + 2 * chance.randrange(2) for place in range(2)][: chance.choice([1, 2])]
    lasts = {} if chance.random() < 0.5 else {"lasts": chance.choice([0.005, 0.05])}
    faults = [{"worker": victim, "at": chance.uniform(0.0, 0.08)} | lasts for victim in victims]
    given = task(Counting, epochs=3)
    result = train(tmp_path / "run", given, 4, ways=2, cluster=crashing(*faults))
    assert result.summary.samples == 210
    assert is_plain(result, given)


@pytest.mark.parametrize(("worker", "restart"), [(0, False), (3, True)])
def test_a_worker_that_is_killed_changes_nothing_beyond_rounding(tmp_path: Path, worker: int, restart: bool) -> None:
    given = task(Counting, epochs=40)
    killing = Killing(f"tt-worker-{worker}", lambda record: isinstance(record, Step))
    result = train(tmp_path / "run", given, 4, ways=2, world="local", restart=restart, listeners=[killing])
    assert killing.killed.is_set() and result.summary.samples == 2800
    assert is_plain(result, given)


def test_a_run_that_lost_a_slice_is_resumed(tmp_path: Path) -> None:
    given = task(optimizer=tt.optimizer("adam", lr=0.01), epochs=40)
    whole = train(tmp_path / "whole", given, 2)
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Evaluation))
    with pytest.raises(RunFailed, match="no worker has slice 1 of 2 of the model any more; resume the run"):
        train(tmp_path / "cut", given, 2, world="local", listeners=[killing])
    resumed = tt.train(given, resume=tmp_path / "cut", progress=False)
    assert resumed.summary.samples == 2800
    assert difference(resumed.model, whole.model) < 1e-9
