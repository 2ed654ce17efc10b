"""Runs of several hosts, on the test bed of hosts.py: what they learn is what one host learns."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import Host, cluster, needs_root

from benchmarks.host_runs import SECONDS, SECRET, HostsRun
from benchmarks.wiretap import Wiretap, forms
from torrential.records import Evaluation, Record, Step, read_records
from torrential.worlds.hosts.rendezvous import secret_of_run

pytestmark = [needs_root, pytest.mark.timeout(300)]

HOSTS = 3


Train = Callable[..., HostsRun]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], Path]]:
    shared = tmp_path_factory.mktemp("shared")
    with cluster(HOSTS, shared) as hosts:
        yield hosts, shared


@pytest.fixture
def train(three: tuple[list[Host], Path], request: pytest.FixtureRequest) -> Iterator[Train]:
    hosts, shared = three
    with contextlib.ExitStack() as stack:

        def start(*words: object, **changed: list[object]) -> HostsRun:
            out = shared / f"{request.node.name.replace('[', '-').rstrip(']')}-{time.monotonic_ns()}"
            run = HostsRun(hosts, out, *words, **changed)
            stack.callback(run.close)
            return run

        yield start
    for host in hosts:
        deadline = time.monotonic() + 10
        while host.processes():
            assert time.monotonic() < deadline, host.processes()
            time.sleep(0.05)


def losses(records: list[Record]) -> dict[int, float]:
    return {r.step: r.loss for r in records if isinstance(r, Step)}


def evaluations(records: list[Record]) -> list[tuple[int, str, float, float | None]]:
    return [(r.step, r.split, r.value, r.loss) for r in records if isinstance(r, Evaluation)]


def finished(run: HostsRun) -> None:
    for code, said in run.wait():
        assert code == 0, said


@pytest.mark.parametrize(
    ("workers", "algorithm", "observer", "pretended"),
    [(3, "ring", 2, ()), (6, "hierarchical", 1, ("--set", f"hosts={HOSTS}"))],
    ids=["ring", "hierarchical"],
)
def test_all_reduce_over_hosts_is_that_of_one_host_bit_for_bit(
    train: Train, run_cli: Any, tmp_path: Path, workers: int, algorithm: str, observer: int, pretended: tuple[str, ...]
) -> None:
    """And its evaluations are, with the observer on each host in turn: by default it is on host 0."""
    same = "--workers", workers, "--epochs", 2, "--set", "threads=1", "--set", f"algorithm={algorithm}"
    run = train("digits-mlp", *same, "--set", f"placement=observer:{observer}")
    finished(run)
    words = *same, *pretended, "--set", "transport=tcp", "--out", tmp_path / "alone"
    alone = run_cli("train", "digits-mlp", *words, timeout=SECONDS)
    assert alone.returncode == 0, alone.stderr
    there, here = run.records(), read_records(tmp_path / "alone" / "records.jsonl")
    both = losses(there).keys() & losses(here).keys()  # steps are sampled by time
    assert len(both) > 1 and {losses(there)[step] == losses(here)[step] for step in both} == {True}
    assert evaluations(there) == evaluations(here)
    last = max(run.out.glob("checkpoints/step-*")).name
    model = [path / "checkpoints" / last / "model.safetensors" for path in (run.out, tmp_path / "alone")]
    assert model[0].read_bytes() == model[1].read_bytes()
    (met,) = run.events("hosts_met")
    assert all(host.name in met.detail and host.address in met.detail for host in run.hosts)
    manifest = json.loads((run.out / "manifest.json").read_text())
    assert SECRET not in json.dumps(manifest)


def test_servers_and_workers_on_different_hosts_learn(train: Train) -> None:
    run = train("digits-mlp", "--strategy", "ssp", "--workers", 3, "--servers", 3, "--epochs", 8, "--set", "threads=1")
    finished(run)
    (test,) = [value for _, split, value, _ in evaluations(run.records()) if split == "test"]
    assert test > 0.9


def test_a_model_that_is_cut_is_built_on_each_host(train: Train) -> None:
    words = "--strategy", "pipeline", "--workers", 3, "--epochs", 2, "--set", "threads=1", "--set", "security=tls"
    run = train("digits-mlp", *words)
    finished(run)
    assert evaluations(run.records())


# -- what others can read ---------------------------------------------------------------------------------------------
TASK = """
import torch.nn.functional as F
from torch import nn

import torrential as tt
from torrential.tasks.digits import digits


def model():
    made = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    nn.init.constant_(made[1].weight, 0.0123456)
    return made


data = digits()
task = tt.Task(model=model, loss=F.cross_entropy, train=data.train, test=data.test, name="words of the task")
"""
SAID_IN_CLEAR = {
    "agents": [b"Come", b"RunPlan", b"Begin", b"words of the task"],
    "roles": [b"Hello", b"Roster"],
    "letters": [b"Greeting", b"Pull", b"Push"],
    "parameters": [torch.full((16,), 0.0123456).numpy().tobytes()],
}


@pytest.mark.parametrize("security", ["token", "tls"])
def test_a_recording_of_a_whole_run_between_hosts(three: tuple[list[Host], Path], train: Train, security: str) -> None:
    hosts, shared = three
    (shared / "task.py").write_text(TASK)
    with Wiretap(hosts[0].switch) as tap:
        roles = "--strategy", "downpour", "--workers", 3, "--servers", 3
        run = train(shared / "task.py", *roles, "--steps", 6, "--set", f"security={security}")
        finished(run)
    assert sum(map(len, tap.said.values())) > 6 * 17_000 * 4  # it is a recording of that run
    known = hashlib.sha256(SECRET.encode()).digest()
    secrets = [SECRET.encode(), *forms(known)]
    if security == "token":
        plans = [bytes(words) for words in tap.said.values() if b"RunPlan" in words]
        (salt,) = {plan.partition(b"\xa4salt\xc4\x10")[2][:16] for plan in plans}
        assert len(plans) == 2 and len(salt) == 16
        secrets += forms(secret_of_run(known, salt))
    assert not any(tap.holds(form) for form in (*secrets, b"PRIVATE KEY", b"nn.init.constant_"))
    for what, words in SAID_IN_CLEAR.items():
        assert {tap.holds(word) for word in words} == {security == "token"}, what


# -- deaths -----------------------------------------------------------------------------------------------------------
LONG_TWO_EACH = ("digits-mlp", "--workers", 6, "--epochs", 1000, "--set", "threads=1", "--set", "host_timeout=3")
LONG = ("--workers", 3, "--epochs", 1000, "--set", "threads=1", "--set", "algorithm=ring", "--set", "host_timeout=3")


def step_after(run: HostsRun, event: str) -> float:
    """Seconds from an event to the next step on record."""
    run.until(lambda: run.events(event), event)
    (lost,) = run.events(event)
    later = lambda: [r.time for r in run.records() if isinstance(r, Step) and r.time > lost.time]  # noqa: E731
    run.until(later, f"a step after {event}")
    return min(later()) - lost.time


def test_a_role_killed_on_another_host_is_gone_from_the_next_step(train: Train) -> None:
    run = train("digits-mlp", *LONG)
    run.until_training(20)
    run.kill(2, "tt-worker-2")
    assert step_after(run, "worker_lost") < 2
    (lost,) = run.events("worker_lost")
    assert (lost.worker, lost.detail) == (2, "was ended by SIGKILL")
    assert not run.events("host_lost")


def test_a_host_killed_is_one_event_and_the_others_go_on(tmp_path: Path) -> None:
    with cluster(HOSTS, tmp_path) as hosts, contextlib.ExitStack() as stack:
        run = HostsRun(hosts, tmp_path / "run", *LONG_TWO_EACH)
        stack.callback(run.close)
        run.until_training(20)
        began = time.monotonic()
        hosts[2].kill()
        run.until(lambda: run.events("regrouped"), "the others")
        assert time.monotonic() - began < 10
        (lost,) = run.events("host_lost")
        assert lost.detail.endswith(": worker 4, worker 5")
        assert sorted(event.worker for event in run.events("worker_lost")) == [4, 5]
        (again,) = run.events("regrouped")
        assert again.detail == "workers 0, 1, 2, 3"
        assert run.commands[1].poll() is None


def test_a_host_whose_link_is_down_is_lost_and_its_roles_end_by_themselves(tmp_path: Path) -> None:
    with cluster(HOSTS, tmp_path) as hosts, contextlib.ExitStack() as stack:
        words = (
            "digits-mlp",
            "--strategy",
            "ssp",
            "--workers",
            6,
            "--servers",
            3,
            "--epochs",
            1000,
            "--set",
            "threads=1",
        )
        run = HostsRun(hosts, tmp_path / "run", *words, "--set", "host_timeout=3")
        stack.callback(run.close)
        run.until_training(20)
        assert hosts[2].processes().count("tt-worker-5") == 1
        hosts[2].disconnect()
        began = time.monotonic()
        run.until(lambda: run.events("host_lost"), "the loss of the host")
        run.until(lambda: not [name for name in hosts[2].processes() if name.startswith("tt-")], "the end of its roles")
        assert time.monotonic() - began < 12
        hosts[2].connect()
        assert run.commands[2].wait(20) == 1
        (lost,) = run.events("host_lost")
        assert lost.detail.endswith(": server 2, worker 4, worker 5")
        step = max(record.step for record in run.records() if isinstance(record, Step))
        run.until_training(step + 20)
        assert len(run.events("host_lost")) == 1 and len(run.events("worker_lost")) == 2


def test_roles_of_a_lost_host_are_replaced_on_a_spare_one(tmp_path: Path) -> None:
    with cluster(HOSTS + 1, tmp_path) as hosts, contextlib.ExitStack() as stack:
        run = HostsRun(hosts, tmp_path / "run", *LONG_TWO_EACH, "--set", "restart=true", count=HOSTS)
        stack.callback(run.close)
        run.until_training(20)
        run.until(
            lambda: hosts[3].name in str([*run.events("hosts_met"), *run.events("host_joined")]), "the spare host"
        )
        hosts[2].kill()
        began = time.monotonic()
        run.until(lambda: len(run.events("worker_joined")) == 2, "replacements")
        assert time.monotonic() - began < 45
        assert [name for name in hosts[3].processes() if name.startswith("tt-")] == ["tt-worker-4", "tt-worker-5"]
        step = max(record.step for record in run.records() if isinstance(record, Step))
        run.until_training(step + 20)


def test_a_supervisor_that_is_killed_leaves_no_role_anywhere_and_resume_goes_on(train: Train, tmp_path: Path) -> None:
    words = ("--workers", 3, "--epochs", 6, "--set", "threads=1", "--set", "algorithm=ring", "--set", "host_timeout=3")
    run = train("digits-mlp", *words, "--set", "evaluate_every=10")
    run.until(lambda: len(evaluations(run.records())) >= 2, "two checkpoints")
    ended = run.hosts[0].run("pkill", "-KILL", "-f", "torrential")  # in the host's own space of processes
    assert ended.wait(10) == 0
    began = time.monotonic()
    while any(name.startswith("tt-") for host in run.hosts for name in host.processes()):
        assert time.monotonic() - began < 8
        time.sleep(0.02)
    codes = [command.wait(20) for command in run.commands[1:]]
    assert codes == [1, 1]
    again = HostsRun(run.hosts, run.out, resume=True)
    finished(again)
    assert again.events("resumed") and [split for _, split, _, _ in evaluations(again.records())][-1] == "test"


# -- what one host lacks --------------------------------------------------------------------------------------------
def test_a_file_that_one_host_lacks_and_a_directory_that_it_does_not_see(tmp_path: Path) -> None:
    with cluster(2, tmp_path) as hosts, contextlib.ExitStack() as stack:
        own = "import torrential as tt\ntask = tt.load_task('digits-mlp')\n"
        assert hosts[0].run("sh", "-c", f'printf "{own}" > /tmp/mine.py').wait(10) == 0
        for task, out, said in (
            ("/tmp/mine.py", tmp_path / "run", "the task's file /tmp/mine.py is not there; copy it from host 0"),
            (
                "digits-mlp",
                Path("/tmp/run"),
                "the run's directory /tmp/run is not seen here; give --out a path that all",
            ),
        ):
            run = HostsRun(hosts, out, task, "--workers", 2)
            stack.callback(run.close)
            ended = run.wait()
            assert [code for code, _ in ended] == [2, 1], ended
            (line,) = [line for line in ended[0][1].splitlines() if line.startswith("error: ")]
            assert line.startswith("error: host 1 (host1, 10.217.0.2) cannot take part: ") and said in line
            assert said in ended[1][1]
