"""Replicas of several workers with servers: plain training whatever the stages; what each worker sends; who may die."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torrential as tt
from tests.killing import Killing
from tests.test_pipeline import TOLERANCE, crashing, difference, layered, normed, task, train, twice
from torrential.comm.points import PointToPoint
from torrential.comm.protocol import SERVERS
from torrential.errors import BadInput, RunFailed
from torrential.params.layout import plan
from torrential.records import Event, Step
from torrential.server import ring
from torrential.server.messages import Pull, Push, Take
from torrential.server.shares import OwnedSpan, share_out
from torrential.strategies.bsp import Bsp
from torrential.testing import sweep
from torrential.testing.schedule import draw
from torrential.trainer.server_plan import shares_of
from torrential.worlds.sim.mail import SimMail

pytestmark = pytest.mark.timeout(120)
SERVED: dict[str, dict[str, Any]] = {
    "downpour": {"server": "task"},
    "ssp": {"staleness": 2},
    "bsp": {},
    "backup": {"backups": 0},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return train(tmp_path_factory.mktemp("plain") / "run", task(), 1, "allreduce").model


# -- whose parameters are whose ---------------------------------------------------------------------------------------
def test_every_key_belongs_to_one_stage() -> None:
    """Parameters stand in the vector from the last to the first, each from a multiple of 16 on."""
    model = layered()
    strategy = Bsp(stages=3, cuts="2,4", costs="1,1,1")
    whole = plan(model, strategy.bucket_bytes)
    shares = shares_of(model, whole, [strategy.part(model, stage, 6) for stage in range(3)])
    sizes = [12 * 20 + 20, 20 * 16 + 16, 16 * 16 + 16 + 16 * 4 + 4]  # of the layers 0, 2, 4 and 6
    padded = [240 + 32, 320 + 16, 256 + 16 + 64 + 16]
    assert [sum(p.numel() for p in strategy.part(model, stage, 6).parameters()) for stage in range(3)] == sizes
    assert shares.owners == (2, 1, 0) and shares.starts == (0, padded[2], padded[2] + padded[1])
    for stage in range(3):
        part = strategy.part(model, stage, 6)
        names = {
            f"stage {stage} chunk 0.{n}": f"{stage * 2 + int(n[0])}{n[1:]}"
            for n, _ in part[f"stage {stage} chunk 0"].named_parameters()
        }  # type: ignore[index]
        mine = plan(part, strategy.bucket_bytes, names)
        assert shares.owned(stage, whole, mine) == [OwnedSpan(shares.starts[2 - stage], 0, padded[stage])]
    assert shares.leaders(range(6)) == (2, 5) and shares.leader(3) == 5 and shares.replica(4) == (3, 4, 5)
    assert shares.holders(padded[2], [0, 1, 2, 3, 5]) == (1,), "a replica that lacks a worker does not count"
    assert shares.leaders([0, 1, 3, 4, 5]) == (5,) and shares.leaders([0, 1, 3, 4]) == ()


def test_what_stages_share_belongs_to_the_first_of_them() -> None:
    layout = plan(twice(), 1 << 22)  # 0, 2 (twice), 5
    shares = share_out(
        layout, [{"0.weight", "0.bias", "2.weight", "2.bias"}, {"2.weight", "2.bias", "5.weight", "5.bias"}]
    )
    assert shares.owners == (1, 0) and shares.starts == (0, 16 + 32)


def test_ranges_end_where_shares_do() -> None:
    table = ring.begin([SERVERS, SERVERS + 1], 100, 1, shares=[0, 30, 70])
    assert [(r.start, r.stop, r.chain[0] - SERVERS) for r in table] == [
        (0, 30, 0),
        (30, 64, 0),
        (64, 70, 1),
        (70, 100, 1),
    ]
    assert ring.begin([SERVERS], 100, shares=[0]) == ring.begin([SERVERS], 100)


# -- plain training ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stages", "servers"), [(2, 1), (3, 3), (4, 2)])
@pytest.mark.parametrize("strategy", SERVED)
def test_one_replica_is_plain_training(
    plain: nn.Module, tmp_path: Path, strategy: str, stages: int, servers: int
) -> None:
    options = {"stages": stages, "microbatches": 2 * servers, "servers": servers} | SERVED[strategy]
    result = train(tmp_path / "run", task(), stages, strategy, **options)
    assert difference(result.model, plain) < TOLERANCE
    assert (result.summary.samples, result.summary.steps, result.summary.staleness_max) == (140, 8, 0)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_one_replica_of_processes_is_plain_training(plain: nn.Module, tmp_path: Path, transport: str) -> None:
    given = {"stages": 2, "server": "task", "servers": 2, "transport": transport}
    result = train(tmp_path / "run", task(), 2, "downpour", "local", **given)
    assert difference(result.model, plain) < TOLERANCE and result.summary.steps == 8


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("strategy", ["bsp", "ssp", "backup"])
def test_replicas_in_step_are_one_large_batch(tmp_path: Path, strategy: str, clip: float | None) -> None:
    given, options = task(clip_norm=clip), {"ssp": {"staleness": 0}}.get(strategy, SERVED[strategy])
    together = train(tmp_path / "run", given, 6, strategy, stages=3, servers=2, **options)
    reference = train(tmp_path / "plain", given, 2, strategy, **options)
    assert difference(together.model, reference.model) < 1e-9
    assert together.summary.samples == 140 and together.summary.steps == 4


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("downpour", {"push_every": 2, "fetch_every": 3, "warm": 2}),
        ("downpour", {"overlap": True}),
        ("ssp", {"staleness": 1}),
        ("backup", {"backups": 1}),
    ],
)
def test_replicas_at_their_own_pace_use_every_sample_once(
    tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    slow = {"compute": {"seconds_per_sample": 1e-3}, "stragglers": [{"worker": 1, "factor": 3.0}]}
    result = train(tmp_path / "run", task(), 6, strategy, stages=2, servers=2, cluster=slow, **options)
    assert result.summary.samples == 140
    last = {r.worker: r for r in result.history if isinstance(r, Step)}
    counted = {worker for worker, r in last.items() if r.staleness}
    assert counted <= {1, 3, 5}, "one worker of each replica counts its pushes"
    assert (
        sum(sum(r.staleness.values()) for r in last.values())
        == {"downpour": result.summary.steps, "ssp": 8, "backup": 8}[strategy]
    )


def test_stages_draw_what_those_of_a_pipeline_do(tmp_path: Path) -> None:
    def dropping() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(12, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 4)
        ).double()

    how = {"cuts": "2", "microbatches": 3}
    served = train(tmp_path / "served", task(dropping), 2, "bsp", stages=2, **how)
    assert difference(served.model, train(tmp_path / "pipeline", task(dropping), 2, **how).model) < TOLERANCE


class Residual(nn.Module):
    """A model that is no row of layers: it is cut by tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return self.last(x + torch.tanh(self.second(x)))  # type: ignore[no-any-return]


def test_a_model_of_any_kind_is_cut_where_the_user_says(tmp_path: Path) -> None:
    given = task(lambda: Residual().double())
    result = train(tmp_path / "run", given, 2, "downpour", stages=2, cuts="second", servers=2, server="task")
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE


@pytest.mark.parametrize("cuts", ["2", "3", "4"])
@pytest.mark.parametrize("strategy", ["bsp", "downpour"])
def test_a_parameter_of_two_stages_is_summed_and_pulled_by_one(tmp_path: Path, strategy: str, cuts: str) -> None:
    given = task(twice, clip_norm=0.5)
    result = train(tmp_path / "run", given, 2, strategy, stages=2, cuts=cuts, servers=2, **SERVED[strategy])
    assert difference(result.model, train(tmp_path / "plain", given, 1, "allreduce").model) < TOLERANCE


def test_checkpoints_have_the_module_buffers_of_all_stages(tmp_path: Path) -> None:
    """With one microbatch the statistics are those of plain training; a run that is resumed begins with them."""
    given, options = task(normed, epochs=4), {"stages": 3, "microbatches": 1, "servers": 2}
    reference = train(tmp_path / "plain", given, 1, "allreduce")
    train(tmp_path / "cut", given, 3, "bsp", epochs=2, **options)
    resumed = tt.train(given, resume=tmp_path / "cut", epochs=4, progress=False)
    assert difference(resumed.model, reference.model) < TOLERANCE


def test_batches_that_loaders_read_are_the_same(plain: nn.Module, tmp_path: Path) -> None:
    given = task(train=list(zip(*task().train.tensors, strict=True)))  # type: ignore[attr-defined]
    result = train(tmp_path / "run", given, 2, "downpour", "local", stages=2, server="task", loaders=1)
    assert difference(result.model, plain) < TOLERANCE


@pytest.mark.parametrize("strategy", ["bsp", "ssp"])
def test_a_resumed_run_takes_the_same_steps(tmp_path: Path, strategy: str) -> None:
    given = task(optimizer=tt.optimizer("adam", lr=0.01), epochs=4)
    options = {"stages": 2, "servers": 2} | ({"staleness": 0} if strategy == "ssp" else {})
    whole = train(tmp_path / "whole", given, 4, strategy, **options)
    train(tmp_path / "cut", given, 4, strategy, steps=5, **options)  # amid an epoch
    resumed = tt.train(given, resume=tmp_path / "cut", steps=100, progress=False)
    assert resumed.summary.samples == 280 and difference(resumed.model, whole.model) == 0.0


# -- what travels -----------------------------------------------------------------------------------------------------
def test_a_worker_pushes_and_pulls_its_own_stage_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activations, asked, takers = Counter[int](), dict[int, set[tuple[int, int]]](), set[int]()
    send, post = PointToPoint.send, SimMail.post

    def sent(self: PointToPoint, tensor: Tensor, to: int, tag: str) -> Any:
        activations[self.rank] += tensor.nbytes
        return send(self, tensor, to, tag)

    def posted(self: SimMail, to: int, message: Any, tensors: Any = ()) -> Any:
        if isinstance(message, Push | Pull):
            asked.setdefault(self.address, set()).update(span for span in message.spans if span[0] < span[1])
        if isinstance(message, Take):
            takers.add(self.address)
        return post(self, to, message, tensors)

    monkeypatch.setattr(PointToPoint, "send", sent)
    monkeypatch.setattr(SimMail, "post", posted)
    result = train(tmp_path / "run", task(), 3, "downpour", stages=3, cuts="2,4", servers=2)
    padded = [272, 336, 352]  # of the stages, as above
    assert asked == {0: {(688, 960)}, 1: {(352, 480), (480, 688)}, 2: {(0, 352)}}, "the servers share at key 480"
    assert takers == {2}
    last = {r.worker: r.bytes_sent for r in result.history if isinstance(r, Step)}
    assert {w: sent - activations[w] for w, sent in last.items()} == {w: 8 * 8 * padded[w] for w in range(3)}


# -- what cannot be done ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "options", "why"),
    [
        (3, {"stages": 2}, r"stages=2 does not divide the workers \(3\)"),
        (8, {"stages": 8}, "7 layers cannot be cut into 8 stages; use --set stages=7"),
        (2, {"stages": 2, "cuts": "2,3"}, "give 1 of 1, 2, 3, 4, 5, 6, in rising order"),
        (2, {"cuts": "2"}, r"cuts is for replicas of several stages \(stages: 1\)"),
        (3, {"stages": 3, "cuts": "1,2"}, r"stage 1 has nothing of its own to train \(cuts=1,2\)"),
        (2, {"stages": 0}, "stages"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, workers: int, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        train(tmp_path / "run", task(), workers, "downpour", **options)


class TogetherNormed(torch.optim.Optimizer):
    """An optimizer whose step depends on the gradients of all parameters."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in given) ** 0.5
        for p in given:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / (1 + norm))


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"a step needs at least one gradient \(backups: 2, replicas: 2\)"):
        train(tmp_path / "run", task(), 4, "backup", stages=2, backups=2)
    own = task(loss=None, step=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    with pytest.raises(BadInput, match="stages need outputs and targets apart"):
        train(tmp_path / "run", own, 2, "bsp", stages=2)
    together = task(optimizer=tt.optimizer(TogetherNormed, lr=0.1))
    with pytest.raises(BadInput, match=r"TogetherNormed .*cannot be stepped stage by stage \(stages: 2\)"):
        train(tmp_path / "run", together, 2, "bsp", stages=2)
    with pytest.raises(RunFailed, match="stages have nothing to pass on with gradients=off"):
        train(tmp_path / "run", task(), 2, "bsp", stages=2, gradients="off")


# -- deaths -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", SERVED)
def test_the_other_replicas_train_on_what_a_broken_one_had(tmp_path: Path, strategy: str) -> None:
    for worker in (0, 1):
        faults = crashing({"worker": worker, "at": 0.03})
        options = SERVED[strategy] | {"stages": 2, "servers": 2}
        result = train(tmp_path / str(worker), task(), 4, strategy, cluster=faults, **options)
        assert result.summary.samples == 140
        assert {r.event for r in result.history if isinstance(r, Event)} >= {"worker_lost"}


@pytest.mark.parametrize("strategy", SERVED)
def test_a_replica_goes_on_when_its_worker_is_replaced(tmp_path: Path, strategy: str) -> None:
    for worker in (0, 1, 2):
        faults = crashing({"worker": worker, "at": 0.05, "lasts": 0.02})
        options = SERVED[strategy] | {"stages": 3}
        result = train(tmp_path / str(worker), task(), 3, strategy, cluster=faults, **options)
        assert result.summary.samples == 140


def test_without_a_complete_replica_the_run_ends_with_a_line(tmp_path: Path) -> None:
    both = crashing({"worker": 1, "at": 0.03}, {"worker": 2, "at": 0.03})
    with pytest.raises(
        RunFailed, match=r"no replica has all its stages any more: worker \d \(stage \d of replica \d\)"
    ):
        train(tmp_path / "run", task(), 4, "bsp", stages=2, cluster=both)


STAGED = [seed for seed in range(400) if "stages" in draw(seed).options][:40]


@pytest.mark.parametrize("seed", STAGED)
def test_whatever_happens_every_sample_is_used_once(seed: int) -> None:
    """And every acknowledged push is in the parameters once, and in checkpoints: torrential/testing/audit.py."""
    sweep.check(seed)


@pytest.mark.parametrize(("strategy", "worker"), [("downpour", 0), ("bsp", 3)])
def test_a_killed_worker_ends_its_replica_alone(tmp_path: Path, strategy: str, worker: int) -> None:
    killing = Killing(f"tt-worker-{worker}", lambda record: isinstance(record, Step) and record.step >= 20)
    result = train(tmp_path / "run", task(epochs=60), 4, strategy, "local", stages=2, listeners=[killing])
    assert killing.killed.is_set() and result.summary.samples == 70 * 60


@pytest.mark.parametrize(("strategy", "worker"), [("downpour", 1), ("bsp", 0)])
def test_a_killed_worker_is_replaced_and_its_replica_goes_on(tmp_path: Path, strategy: str, worker: int) -> None:
    killing = Killing(f"tt-worker-{worker}", lambda record: isinstance(record, Step) and record.step >= 20)
    options = {"stages": 2, "restart": True, "listeners": [killing]}
    result = train(tmp_path / "run", task(epochs=60), 2, strategy, "local", **options)
    assert killing.killed.is_set() and result.summary.samples == 70 * 60
    assert any(isinstance(r, Event) and r.event == "worker_joined" for r in result.history)


def test_a_killed_worker_of_the_only_replica_ends_the_run_with_a_line(tmp_path: Path) -> None:
    killing = Killing("tt-worker-1", lambda record: isinstance(record, Step) and record.step >= 20)
    with pytest.raises(RunFailed, match=r"worker 1 \(stage 1 of replica 0\) is gone; resume the run, or have workers"):
        train(tmp_path / "run", task(epochs=500), 2, "downpour", "local", stages=2, listeners=[killing])
