"""Random fault schedules in simulated time: what must hold does; and what breaks it on purpose is found."""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import torrential as tt
from torrential.errors import RunFailed
from torrential.membership.generations import Generations
from torrential.membership.messages import Go, Standing
from torrential.membership.roll import Member
from torrential.params.unlocked import UnlockedParameters
from torrential.records import Event, Step
from torrential.server import ring
from torrential.server.consistency import ALWAYS, Consistency
from torrential.server.shard import Shard
from torrential.strategies.easgd import Easgd
from torrential.strategies.pipeline import Pipeline
from torrential.testing.command import app
from torrential.testing.schedule import DRAWN, WHOLE, draw
from torrential.testing.sweep import ScheduleFailed, check, outcome, outcomes
from torrential.trainer.state import NamedStates
from torrential.trainer.watch import BackwardWatch
from torrential.worlds.sim import outlet
from torrential.worlds.sim.cluster import Fault, make_cluster
from torrential.worlds.sim.comm import SimComm
from torrential.worlds.sim.faults import Faults
from torrential.worlds.sim.kernel import Kernel


@pytest.mark.timeout(180)
def test_what_must_hold_holds() -> None:
    """Two hundred schedules; scripts/soak runs as many as wanted."""
    lost = [check(seed) for seed in range(200)]
    assert sum(map(bool, lost)) < 50, lost  # most of them can be survived


@pytest.mark.parametrize("seed", [40, 229, 4202, 7438, 9631, 27583])
def test_schedules_that_once_failed_hold(seed: int) -> None:
    """40: a pipeline's worker died before all had agreed on the beginning. 229: another came back while one was a step
    behind, and kept a copy that was as old. 4202: a server joined while another's ranges were being filled
    (tests/test_server_found.py). 7438: the only worker died after its last word. 9631: a worker died with the head of
    the first range, which alone lost its push. 27583: a worker was dealt nothing, and the samples that were left when
    a copy of its request came."""
    assert check(seed) == ""


def test_nothing_is_left_of_a_simulation_that_is_over() -> None:
    """Autograd's hooks, which the garbage collector does not see, kept every worker of an all-reduce, its model too."""

    def there() -> int:
        gc.collect()
        return sum(type(thing) in (BackwardWatch, SimComm) for thing in gc.get_objects())

    before = there()
    assert draw(13).strategy == "allreduce"
    check(13)
    assert there() <= before


def test_what_several_processes_run_can_be_imported_by_them() -> None:
    """Nothing can be that is in a module started with -m: it is called __main__ there, and something else is here."""
    assert pickle.loads(pickle.dumps(outcome)) is outcome
    assert outcome.__module__ == "torrential.testing.sweep"
    assert [bool(found) for found in outcomes(range(20), jobs=1)] == [bool(check(seed)) for seed in range(20)]


def test_a_failure_travels_between_processes() -> None:
    failure = pickle.loads(pickle.dumps(ScheduleFailed(7, "seed 7: wrong")))
    assert failure.seed == 7 and str(failure) == "seed 7: wrong"


def test_schedules_are_of_all_kinds() -> None:
    schedules = [draw(seed) for seed in range(300)]
    strategies = Counter(schedule.strategy for schedule in schedules)
    assert strategies.keys() == set(DRAWN) and min(strategies[name] for name in WHOLE[1:]) > 30
    assert min(strategies.values()) > 7
    faults = Counter(fault["kind"] for schedule in schedules for fault in schedule.cluster["faults"])
    assert faults.keys() == {"crash", "partition", "slow-link"} and min(faults.values()) > 30
    hosts = [fault for schedule in schedules for fault in schedule.cluster["faults"] if "host" in fault]
    assert len(hosts) > 30 and len({type(fault["at"]) for fault in hosts}) == 2
    for accident in ("loss", "duplication", "delay"):
        assert 30 < sum(schedule.cluster["accidents"][accident] > 0 for schedule in schedules) < 270


HOSTS = {"compute": {"seconds_per_sample": 0.001}, "workers_per_host": 2, "detection": 0.01}


def with_dying_host(out: Path, strategy: str, servers: int | None, **fault: Any) -> tt.TrainResult:
    """Four workers on two hosts; two epochs of 1,350 samples."""
    cluster = HOSTS | {"faults": [{"kind": "crash"} | fault]}
    options: dict[str, Any] = {"world": "sim", "device": "cpu", "progress": False, "epochs": 2}
    return tt.train("digits-mlp", strategy, workers=4, servers=servers, cluster=cluster, out=out, **options)


def events(result: tt.TrainResult) -> list[tuple[str, int | None, str]]:
    return [(r.event, r.worker, r.detail) for r in result.history if isinstance(r, Event)]


@pytest.mark.parametrize(
    ("strategy", "servers", "here"),
    [
        ("allreduce", None, "worker 2, worker 3"),
        ("ssp", 2, "worker 2, worker 3, server 1"),
        ("ssp", 4, "worker 2, worker 3, server 1, server 3"),
    ],
)
def test_all_roles_of_a_host_die_at_once_and_come_back(
    strategy: str, servers: int | None, here: str, tmp_path: Path
) -> None:
    result = with_dying_host(tmp_path / "run", strategy, servers, host=1, at="50 %", lasts=0.1)
    told = [event for event in events(result) if event[0] not in ("regrouped", "server_filled")]
    lost = [told for told in told if told[0].endswith("lost")]
    assert lost[0] == ("host_lost", None, f"host 1: {here}")
    workers = [("worker_lost", 2, "crashed"), ("worker_lost", 3, "crashed")]
    numbers = range(1, servers or 0, 2)
    heirs = {n: (n + 1) % (servers or 1) for n in numbers}
    assert lost[1:] == workers + [
        ("server_lost", None, f"server {n}; its ranges go to server {heir}") for n, heir in heirs.items()
    ]
    joined = [("worker_joined", 2, ""), ("worker_joined", 3, "")]
    assert told[len(lost) :] == joined + [
        ("server_joined", None, f"server {n}, 0.09 s after it was lost") for n in numbers
    ]
    assert result.summary.samples == 2 * 1350


def test_a_share_of_the_run_is_one_of_samples(tmp_path: Path) -> None:
    """With batches of 32 by each of four workers, 1,024 samples are those of eight steps."""
    for share, steps in ((0, 0), (1024 / 27, 8)):
        result = with_dying_host(tmp_path / str(steps), "allreduce", None, host=1, at=f"{share:.4f} %")
        (struck,) = (r for r in result.history if isinstance(r, Event) and r.event == "host_lost")
        before = [r.step for r in result.history if isinstance(r, Step) and r.time <= struck.time]
        assert struck.time == pytest.approx(steps * 0.032, rel=0.1) and max(before, default=0) <= steps


class Struck:
    """A world that keeps what its faults ask for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def crash(self, addresses: list[int], lasts: float | None) -> None:
        self.asked.append((addresses, lasts))

    def crash_host(self, host: int, lasts: float | None) -> None:
        self.asked.append((host, lasts))

    def disturb(self, fault: Fault) -> None:
        self.asked.append((fault.kind, fault.lasts))


@pytest.mark.parametrize(
    ("seen", "lasts", "begun", "struck"),
    [
        (0, 9.0, 0, 1),
        (49, 9.0, 0, 1),
        (50, 9.0, 0, 0),  # over, as far as can be known
        (50, None, 1, 1),
    ],
)
def test_a_run_that_goes_on_meets_what_is_not_over(seen: int, lasts: float | None, begun: int, struck: int) -> None:
    """Of 100 samples, `seen` were trained on before; the fault is at half of them."""
    kernel, world = Kernel(), Struck()
    cluster = make_cluster({"faults": [{"kind": "crash", "host": 1, "at": "50 %", "lasts": lasts}]})
    config: Any = SimpleNamespace(workers=2, servers=0, seed=0)
    faults = Faults(kernel, cluster, config, 100, seen, world)
    faults.plan()
    kernel.run()
    assert world.asked == [(1, lasts)] * begun
    for _ in range(100 - seen):
        faults.computed(1)
    kernel.run()
    assert world.asked == [(1, lasts)] * struck


def test_nothing_starts_on_a_host_that_is_down(tmp_path: Path) -> None:
    """Worker 3 would come back at 0.13 s; its host dies at 0.1 s, for 0.2 s."""
    faults = [
        {"kind": "crash", "worker": 3, "at": 0.08, "lasts": 0.05},
        {"kind": "crash", "host": 1, "at": 0.1, "lasts": 0.2},
    ]
    options: dict[str, Any] = {"world": "sim", "device": "cpu", "progress": False, "epochs": 2}
    result = tt.train("digits-mlp", workers=4, cluster=HOSTS | {"faults": faults}, out=tmp_path / "run", **options)
    back = {r.worker: r.time for r in result.history if isinstance(r, Event) and r.event == "worker_joined"}
    assert back == {2: pytest.approx(0.3), 3: pytest.approx(0.3)}


def test_what_only_a_dead_host_had_is_lost(tmp_path: Path) -> None:
    """Of three servers on two hosts, two neighbours in the ring are on one."""
    with pytest.raises(RunFailed, match=r"parameters \d+ to \d+ are lost: server 0 .* no checkpoint was made yet"):
        with_dying_host(tmp_path / "servers", "ssp", 3, host=1, at="50 %")
    cluster = HOSTS | {"workers_per_host": 4, "faults": [{"kind": "crash", "host": 0, "at": "50 %"}]}
    with pytest.raises(RunFailed, match="all workers are gone"):
        tt.train("digits-mlp", workers=4, world="sim", cluster=cluster, out=tmp_path / "workers", progress=False)


def skip_dedupe(self: Shard, worker: int, seq: int) -> None:
    """Every request is new."""


def wait_for_less(self: Consistency, clock: int) -> int:
    return ALWAYS if self.staleness is None else clock - self.staleness - 1


def stay(self: SimComm) -> None:
    """Members change, and this one goes on waiting for those that were."""


stands, begin, step = Generations.stands, UnlockedParameters.begin, Easgd._step


def count_twice(self: Generations, worker: Member, message: Standing, began: float) -> Go | None:
    """Where one worker stands is taken for where the next one does, too."""
    ranks = sorted(self._roll.workers)
    other = self._roll.workers[ranks[(ranks.index(worker.number) + 1) % len(ranks)]]
    return stands(self, other, message, began) or stands(self, worker, message, began)


def keep_the_dead(table: ring.Table, server: int, replicas: int = 0) -> ring.Table:
    """The next view has a dead server answer for what it answered for."""
    return table


def save_nothing(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def stay_changed(self: NamedStates) -> None:
    """A round that is given up leaves statistics behind."""


def write_on(self: UnlockedParameters) -> None:
    """A round is concluded as soon as it has begun, so what was written in it is not put back."""
    begin(self)
    self.conclude()


def drift(self: Easgd, ctx: tt.Context, minibatch: tt.Batch, vector: Tensor, *more: Tensor) -> float:
    """Something else than steps and exchanges moves a worker."""
    vector.mul_(0.999)
    return step(self, ctx, minibatch, vector, *more)  # type: ignore[arg-type]


def have_no_fellows(self: Pipeline, rank: int, workers: int) -> range:
    """A newcomer takes what it needs from any pipeline."""
    return range(rank, rank + 1)


@pytest.mark.parametrize(
    ("where", "name", "bug", "says"),
    [
        (Shard, "answered", skip_dedupe, "as applied and as dropped|not the sum|updates; |waited|no end"),
        (Consistency, "needs", wait_for_less, "staleness|older than"),
        (SimComm, "check", stay, "waited|no end|no role can go on"),
        (Generations, "stands", count_twice, "different (parameters|values)|off plain training|not all of it was done"),
        (ring, "leave", keep_the_dead, "waited|no end|no role can go on|AssertionError"),
        (NamedStates, "put_back", stay_changed, "off the run without faults|off plain training|different"),
        (UnlockedParameters, "begin", write_on, "of where these lead"),
        (Easgd, "_step", drift, "of where its own moves lead"),
        (Pipeline, "fellows", have_no_fellows, "running_(mean|var) is off the run without faults"),
        (outlet, "_copy", save_nothing, "the checkpoint at 0 is off plain training|not the sum of what was pushed"),
    ],
)
def test_a_planted_bug_is_found(
    where: Any, name: str, bug: Callable[..., Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(ScheduleFailed, match=says) as found:
        for seed in range(1000):
            check(seed)
    monkeypatch.undo()
    check(found.value.seed)


def test_a_failure_says_what_happened_and_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "_copy", save_nothing)
    runner = CliRunner()
    swept = runner.invoke(app, ["--schedules", "40"])
    assert swept.exit_code == 1
    seed = next(line.split(":")[0].removeprefix("seed ") for line in swept.stdout.splitlines() if line[:5] == "seed ")
    again = runner.invoke(app, ["--seed", seed])
    assert again.exit_code == 1 and again.stdout in swept.stdout
    for word in (
        draw(int(seed)).strategy,
        "workers",
        "faults: kind=crash",
        "the last events:",
        "gets",
        f"--seed {seed}",
    ):
        assert word in again.stdout
    monkeypatch.undo()
    held = runner.invoke(app, ["--seed", seed])
    assert held.exit_code == 0 and "all held" in held.stdout
