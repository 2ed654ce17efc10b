"""What the roles of one simulated host share: cores, and memory in which whoever copies, adds or updates takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import torrential as tt
from torrential import checkpoint as checkpoints
from torrential.records import RECORDS, Step
from torrential.tasks.digits import digits_mlp
from torrential.worlds.sim.cluster import Inside
from torrential.worlds.sim.cores import Cores
from torrential.worlds.sim.kernel import Kernel, SimRole
from torrential.worlds.sim.mail import ADD, COPY, LOOK
from torrential.worlds.sim.timed import update

COMPUTE, MEMORY, LATENCY = 0.032, 1e-6, 1e-4  # seconds: of a batch, a byte, a message
LETTER, REQUEST = 1e-3, 3e-3  # that a letter takes a worker, and a request a server
NBYTES = 4 * sum(p.numel() for p in digits_mlp().model().parameters())
PASS = NBYTES * MEMORY  # once over the vector
UPDATE = update(1)  # SGD with momentum, or Adagrad


# -- cores --------------------------------------------------------------------------------------------------------
def ends(inside: Inside, jobs: list[tuple[float, float]], kill: tuple[float, int] | None = None) -> list[float]:
    """When roles that begin at some time and work for some seconds are done."""
    kernel = Kernel()
    cores, roles = Cores(kernel, inside), list[SimRole]()
    done = [0.0] * len(jobs)

    def program(number: int, begin: float, seconds: float) -> None:
        roles[number].sleep(begin)
        cores.work(roles[number], seconds)
        done[number] = kernel.now

    for number, job in enumerate(jobs):
        roles.append(kernel.role(str(number), lambda number=number, job=job: program(number, *job)))
    if kill is not None:
        kernel.after(kill[0], lambda: roles[kill[1]].kill())
    kernel.run()
    return done


@pytest.mark.parametrize(
    ("inside", "jobs", "expected"),
    [
        (Inside(), [(0.0, 1.0), (0.0, 2.0), (1.0, 1.0)], [1.0, 2.0, 2.0]),
        (Inside(cores=2), [(0.0, 2.0), (0.0, 2.0), (0.0, 2.0)], [3.0, 3.0, 3.0]),
        (Inside(cores=1), [(0.0, 2.0), (1.0, 0.5)], [2.5, 2.0]),
        (Inside(cores=2, contention=0.5), [(0.0, 2.0), (0.0, 2.0)], [3.0, 3.0]),
        (Inside(cores=4, contention=0.5), [(0.0, 2.0), (0.0, 2.0), (0.0, 2.0), (0.0, 2.0)], [3.0, 3.0, 3.0, 3.0]),
        (Inside(cores=1, contention=0.5), [(0.0, 2.0), (0.0, 2.0)], [4.0, 4.0]),
    ],
)
def test_whoever_works_has_its_share_of_the_cores(
    inside: Inside, jobs: list[tuple[float, float]], expected: list[float]
) -> None:
    assert ends(inside, jobs) == pytest.approx(expected)


def test_who_is_killed_at_work_frees_its_core() -> None:
    assert ends(Inside(cores=1), [(0.0, 2.0), (0.0, 9.0)], kill=(1.0, 1)) == pytest.approx([2.5, 0.0])


# -- memory -------------------------------------------------------------------------------------------------------
def simulate(out: Path, strategy: str, workers: int, **more: Any) -> Any:
    cluster = {
        "workers_per_host": workers,
        "compute": {"seconds_per_sample": COMPUTE / 32},
        "network": {"inside_latency": LATENCY},
        "inside": {"memory": MEMORY, "letter": LETTER, "request": REQUEST},
    }
    options = {"steps": 6, "epochs": 99, "gradients": "off", "cluster": cluster} | more
    return tt.train(
        "digits-mlp", strategy, workers=workers, world="sim", out=out, device="cpu", progress=False, **options
    )


def step_seconds(result: Any) -> float:
    steps = [r for r in result.history if isinstance(r, Step) and r.worker == 0]
    return (steps[-1].time - steps[0].time) / (steps[-1].step - steps[0].step)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_members_copy_and_add_up_what_is_not_theirs_and_update_what_is(workers: int, tmp_path: Path) -> None:
    others = (workers - 1) / workers
    expected = COMPUTE + PASS * UPDATE
    if workers > 1:  # each keeps a copy of its slice of parameters and momentum while it updates it
        expected = COMPUTE + PASS * ((COPY + ADD) * others + (2 * COPY + UPDATE) / workers) + 3 * LATENCY
        expected += 2 * (workers - 1) * LETTER  # what the others have left of gradients, and of votes
    assert step_seconds(simulate(tmp_path / "run", "allreduce", workers)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("strategy", ["downpour", "ssp"])
def test_a_push_is_copied_looked_at_and_applied_and_a_pull_is_copied(strategy: str, tmp_path: Path) -> None:
    expected = COMPUTE + PASS * (COPY + LOOK + UPDATE + COPY) + 4 * LATENCY + 2 * (LETTER + REQUEST)
    assert step_seconds(simulate(tmp_path / "run", strategy, 1)) == pytest.approx(expected, rel=1e-3)


def test_servers_add_up_the_pushes_of_a_clock_and_look_at_each(tmp_path: Path) -> None:
    """All three come at once, so the server looks at them in turn; then it answers all at once."""
    expected = COMPUTE + PASS * (COPY + 3 * LOOK + 2 * ADD + UPDATE + COPY) + 4 * LATENCY + 2 * (3 * REQUEST + LETTER)
    assert step_seconds(simulate(tmp_path / "run", "bsp", 3)) == pytest.approx(expected, rel=1e-3)


def test_what_takes_time_changes_no_number(tmp_path: Path) -> None:
    def weights(result: Any) -> dict[str, Tensor]:
        found, _ = checkpoints.latest(result.out / "checkpoints")
        assert found is not None
        return dict(found.model)

    for strategy in ("allreduce", "bsp"):
        timed = simulate(tmp_path / f"{strategy}-timed", strategy, 2, gradients="on")
        plain = {"compute": {"seconds_per_sample": 1e-3}}
        free = weights(simulate(tmp_path / strategy, strategy, 2, gradients="on", cluster=plain))
        assert all(bool((free[name] == value).all()) for name, value in weights(timed).items()), strategy


@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "bsp"])
def test_deaths_at_work_are_survived_and_repeat_to_the_byte(strategy: str, tmp_path: Path) -> None:
    faults = [{"kind": "crash", "worker": 2, "at": 0.31, "lasts": 0.3}, {"kind": "crash", "worker": 1, "at": 0.52}]
    if strategy != "allreduce":
        faults.append({"kind": "crash", "server": 1, "at": 0.36, "lasts": 0.2})
    cluster = {
        "workers_per_host": 2,
        "compute": {"seconds_per_sample": COMPUTE / 32},
        "inside": {"cores": 2, "contention": 0.2, "memory": 1e-8, "letter": LETTER},
        "faults": faults,
        "detection": 0.05,
    }
    options = {"gradients": "on", "steps": 40, "servers": None if strategy == "allreduce" else 2}
    one, other = (simulate(tmp_path / name, strategy, 4, cluster=cluster, **options) for name in ("one", "other"))
    assert one.summary.steps >= 40 and one.summary.events >= 3
    assert (one.out / RECORDS).read_text().replace("/one", "/other") == (other.out / RECORDS).read_text()
