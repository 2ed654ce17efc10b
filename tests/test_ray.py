"""Runs on a Ray cluster, on the test bed of hosts.py: what they learn is what one host learns, and what is lost is
replaced. The cluster has tokens switched on."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, cluster, needs_root
from ray_cluster import RayRun, agents, ray_cluster, roles

import torrential
from torrential.records import Evaluation, Record, Step, read_records
from torrential.worlds.local.crew import AWAIT_SECONDS

pytestmark = [needs_root, pytest.mark.timeout(400)]

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a token that all hosts of the cluster know"}
ONE_EACH = ("digits-mlp", "--workers", 3, "--set", "threads=1")
LONG = (*ONE_EACH, "--epochs", 1000, "--set", "algorithm=ring", "--set", "host_timeout=3")
Train = Callable[..., RayRun]


@pytest.fixture(autouse=True)
def nothing_left_by_test() -> None:
    """Ray keeps idle processes for its next tasks, which go with their hosts when the module ends (tests/conftest.py);
    what a run has begun is looked for by the tests themselves."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], Path]]:
    shared = tmp_path_factory.mktemp("shared")
    with ray_cluster(3, shared, env=TOKEN) as hosts:
        yield hosts, shared


@pytest.fixture
def train(three: tuple[list[Host], Path], request: pytest.FixtureRequest) -> Iterator[Train]:
    hosts, shared = three
    with contextlib.ExitStack() as stack:

        def start(*words: object, host_count: int = 3, env: dict[str, str] | None = None) -> RayRun:
            out = shared / f"{request.node.name.replace('[', '-').rstrip(']')}-{time.monotonic_ns()}"
            on_ray = ("--world", "ray", "--set", f"hosts={host_count}", "--out", out)
            run = RayRun(hosts, out, "train", *words, *on_ray, env=TOKEN | (env or {}))
            stack.callback(run.close)
            return run

        yield start
    nothing_is_left(hosts, 10.0)


def nothing_is_left(hosts: list[Host], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [name for host in hosts for name in (*roles(host), *agents(host))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def losses(records: list[Record]) -> dict[int, float]:
    return {r.step: r.loss for r in records if isinstance(r, Step)}


def evaluations(records: list[Record]) -> list[tuple[int, str, float, float | None]]:
    return [(r.step, r.split, r.value, r.loss) for r in records if isinstance(r, Evaluation)]


# -- what is learnt ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [("--set", "algorithm=ring", "--set", "placement=observer:2"), ("--strategy", "pipeline")],
    ids=["allreduce", "pipeline"],
)
def test_what_is_learnt_is_that_of_one_host_bit_for_bit(
    train: Train, run_cli: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """And the evaluations are, whichever host the observer is on."""
    run = train(*ONE_EACH, "--epochs", 2, *words)
    own = [word for pair in zip(words[::2], words[1::2], strict=True) for word in pair if "placement" not in pair[1]]
    alone = run_cli(
        "train", *ONE_EACH, "--epochs", 2, *own, "--set", "transport=tcp", "--out", tmp_path / "alone", timeout=100
    )
    assert alone.returncode == 0, alone.stderr
    run.finished()
    there, here = run.records(), read_records(tmp_path / "alone" / "records.jsonl")
    both = losses(there).keys() & losses(here).keys()  # steps are sampled by time
    assert both and {losses(there)[step] == losses(here)[step] for step in both} == {True}
    assert len(evaluations(there)) == 3 and evaluations(there) == evaluations(here)
    last = max(run.out.glob("checkpoints/step-*")).name
    model = [path / "checkpoints" / last / "model.safetensors" for path in (run.out, tmp_path / "alone")]
    assert model[0].read_bytes() == model[1].read_bytes()
    (met,) = run.events("hosts_met")
    assert all(host.name in met.detail and host.address in met.detail for host in run.hosts)


@pytest.mark.parametrize(("strategy", "epochs"), [("ssp", 8), ("downpour", 20)])
def test_servers_and_workers_on_different_hosts_learn(train: Train, strategy: str, epochs: int) -> None:
    run = train(*ONE_EACH, "--strategy", strategy, "--servers", 3, "--epochs", epochs)
    run.finished()
    (test,) = [value for _, split, value, _ in evaluations(run.records()) if split == "test"]
    assert test > 0.9


OWN = """
import os
import ray, torch
import torrential as tt


class Telling(torch.nn.Linear):
    told = 0

    def forward(self, x):
        if self.training and Telling.told != os.getpid():
            Telling.told = os.getpid()
            print("threads", torch.get_num_threads(), "of", os.environ.get("OMP_NUM_THREADS"), os.uname().nodename)
        return super().forward(x)


def model():
    return torch.nn.Sequential(torch.nn.Flatten(), Telling(64, 10))


if __name__ == "__main__":
    ray.init(address="auto", logging_level="warning")
    import dataclasses
    digits = tt.load_task("digits-mlp")
    task = dataclasses.replace(digits, model=model, name="own")
    made = tt.train(task, world="ray", workers=2, epochs=1, cpus_per_worker=2, out=OUT, progress=False)
    assert ray.is_initialized()
    print("result", made.summary.world, made.summary.workers)
"""


def test_a_driver_that_is_connected_trains_a_task_of_its_own(three: tuple[list[Host], Path]) -> None:
    """It takes as many hosts as there must be for its CPUs; lines of workers come with their names."""
    hosts, shared = three
    program = shared / "program.py"
    program.write_text(OWN.replace("OUT", repr(str(shared / "own"))))
    script = RayRun(hosts, shared / "own", env=TOKEN, script=program)
    said = script.finished()
    assert "result ray 2" in said
    for rank in (0, 1):
        (line,) = [line for line in said.splitlines() if f"worker {rank}: " in line]
        assert "(host " in line and "threads 2 of 2 host" in line
    assert len({host.name for host in hosts if f"2 of 2 {host.name}" in said}) == 2
    nothing_is_left(hosts, 5.0)


def test_a_study(three: tuple[list[Host], Path]) -> None:
    hosts, shared = three
    words = ("compare", "digits-mlp", "--strategies", "allreduce,ssp", "--trials", 1, "--epochs", 1, "--target", 0.5)
    run = RayRun(hosts, shared / "study", *words, "--world", "ray", "--out", shared / "study", env=TOKEN)
    said = run.finished()
    assert "allreduce" in said and "ssp" in said
    assert [len(list(shared.glob(f"study/runs/{name}-1/records.jsonl"))) for name in ("allreduce", "ssp")] == [1, 1]
    nothing_is_left(hosts, 5.0)


# -- deaths -----------------------------------------------------------------------------------------------------------
def step_after(run: RayRun, event: str) -> float:
    """Seconds from an event to the next step on record."""
    run.until(lambda: run.events(event), event)
    first = run.events(event)[0]
    later = lambda: [r.time for r in run.records() if isinstance(r, Step) and r.time > first.time]  # noqa: E731
    run.until(later, f"a step after {event}")
    return min(later()) - first.time


def test_a_role_that_is_killed_is_gone_from_the_next_step(train: Train) -> None:
    run = train(*LONG)
    run.until_training()
    host = next(host for host in run.hosts if "tt-worker-2" in roles(host))
    assert host.run("pkill", "-KILL", "-x", "tt-worker-2").wait(10) == 0
    step_after(run, "worker_lost")
    (lost,) = run.events("worker_lost")
    assert (lost.worker, lost.detail) == (2, "was ended by SIGKILL")
    assert not run.events("host_lost")


def test_an_agent_that_is_killed_is_begun_again_on_its_host(train: Train) -> None:
    run = train(*LONG, "--set", "restart=true")
    run.until_training()
    host = next(host for host in run.hosts if "tt-worker-1" in roles(host))
    (agent,) = agents(host)
    assert host.run("pkill", "-KILL", "-f", f"^{agent}").wait(10) == 0
    run.until(lambda: run.events("worker_joined"), "the worker's successor")
    assert [run.events(name)[0].detail.partition(" (")[0] for name in ("host_lost", "host_joined")] == ["host 1"] * 2
    assert roles(host) == ["tt-worker-1"]
    run.until_training()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_is_ended_leaves_nothing_anywhere_and_resume_goes_on(train: Train, how: signal.Signals) -> None:
    run = train(*ONE_EACH, "--epochs", 12, "--set", "evaluate_every=10")
    run.until(lambda: len(evaluations(run.records())) >= 2, "two checkpoints")
    drivers = ["-f", "python -m torrential"] if how == signal.SIGKILL else ["-o", "-f", "python -m torrential"]
    assert run.hosts[0].run("pkill", f"-{how.name[3:]}", *drivers).wait(10) == 0
    nothing_is_left(run.hosts, 8.0)
    code, _, err = run.wait()
    assert code == (-9 if how == signal.SIGKILL else 130), err
    again = RayRun(run.hosts, run.out, "train", "--resume", run.out, env=TOKEN)
    again.finished()
    assert again.events("resumed") and evaluations(again.records())[-1][1] == "test"


def test_a_host_that_is_lost_is_replaced_on_a_spare_one(tmp_path: Path) -> None:
    with ray_cluster(4, tmp_path) as hosts, contextlib.ExitStack() as stack:
        words = ("digits-mlp", "--workers", 6, "--epochs", 1000, "--set", "host_timeout=3", "--set", "restart=true")
        on_ray = ("--world", "ray", "--set", "hosts=3", "--out", tmp_path / "run")
        run = RayRun(hosts, tmp_path / "run", "train", *words, *on_ray)
        stack.callback(run.close)
        run.until_training()
        spare = next(host for host in hosts if not roles(host))
        lost = next(host for host in hosts[1:] if host is not spare)
        gone = [int(name.rpartition("-")[2]) for name in roles(lost) if "worker" in name]
        lost.kill()
        run.until(lambda: run.events("host_joined"), "another host")
        run.until(lambda: len(run.events("worker_joined")) == 2, "replacements")
        (event,), (came,) = run.events("host_lost"), run.events("host_joined")
        assert lost.name in event.detail and spare.name in came.detail
        assert [worker.worker for worker in run.events("worker_lost")] == gone
        if came.time < event.time + AWAIT_SECONDS - 1:  # they wait no longer for another host
            assert [name for name in roles(spare) if "worker" in name] == [f"tt-worker-{rank}" for rank in gone]
        run.until_training()


# -- what is wrong ----------------------------------------------------------------------------------------------------
def refused(run: RayRun, code: int = 2) -> str:
    """The one line that says why."""
    ended, out, err = run.wait()
    assert ended == code and "Traceback" not in out + err, out + err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--set", "hosts=4", "--workers", 4),
            "too few hosts (asked for: 4, in the Ray cluster: 3); begin Ray on more",
        ),
        (("--set", "hosts=3", "--workers", 2), "more hosts than workers (hosts: 3, workers: 2)"),
        (("--workers", 7), "7 workers with 1 CPUs each do not fit the Ray cluster (hosts: 10.217.0.1 with 2 CPUs and"),
        (("--set", "gpus_per_worker=1"), "1 workers with 1 CPUs and 1 GPUs each do not fit"),
        (("--set", "interface=eth7"), "interface: 'eth7' has no address here (interfaces: lo, eth0)"),
        (("--device", "cuda"), "--device cuda needs GPUs that Ray reserves; add --set gpus_per_worker=1"),
        (("--strategy", "hogwild"), "hogwild needs memory that all workers see"),
        (("--set", "hosts=0.5"), "hosts must be"),
    ],
)
def test_what_the_cluster_has_not(three: tuple[list[Host], Path], words: tuple[object, ...], said: str) -> None:
    hosts, shared = three
    run = RayRun(hosts, shared / "never", "train", "digits-mlp", "--world", "ray", *words, env=TOKEN)
    assert said in refused(run)
    assert not (shared / "never").exists()


def test_a_wrong_token_and_no_cluster(three: tuple[list[Host], Path], tmp_path: Path) -> None:
    hosts, shared = three
    words = ("train", "digits-mlp", "--world", "ray")
    wrong = RayRun(hosts, shared / "never", *words, env=TOKEN | {"RAY_AUTH_TOKEN": "another"})
    assert "does not answer this process: see that it runs, and that RAY_AUTH_MODE and the token" in refused(wrong)
    with cluster(1, tmp_path) as alone:
        said = refused(RayRun(alone, tmp_path / "never", *words))
        assert "there is no running Ray cluster that this host knows; begin one with ray start --head" in said


OWN_FILE = """
import dataclasses
import beside
import torrential as tt

task = dataclasses.replace(tt.load_task("digits-mlp"), model=beside.model)
"""
BESIDE = """
import torch


def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def test_what_one_host_lacks_is_said_before_training(three: tuple[list[Host], Path], tmp_path: Path) -> None:
    """The task's own file need not be there, as it travels; the modules that it imports must."""
    hosts, shared = three
    words = ("--workers", 3, "--world", "ray", "--set", "hosts=3", "--epochs", 1)
    unseen = RayRun(hosts, shared, "train", "digits-mlp", *words, "--out", "/tmp/run", env=TOKEN)
    assert "the run's directory /tmp/run is not seen here; give --out a path that all hosts see" in refused(unseen)

    write = "mkdir -p /tmp/own && printf '%s' \"$1\" > /tmp/own/own.py && printf '%s' \"$2\" > /tmp/own/beside.py"
    assert hosts[0].run("sh", "-c", write, "sh", OWN_FILE, BESIDE).wait(10) == 0  # host 0's own /tmp
    missing = RayRun(hosts, shared, "train", "/tmp/own/own.py", *words, "--out", shared / "missing", env=TOKEN)
    assert "cannot take part: the task cannot be rebuilt in a worker: ModuleNotFoundError" in refused(missing)
    for host in hosts[1:]:
        write = "mkdir -p /tmp/own && printf '%s' \"$1\" > /tmp/own/beside.py"
        assert host.run("sh", "-c", write, "sh", BESIDE).wait(10) == 0
    RayRun(hosts, shared, "train", "/tmp/own/own.py", *words, "--out", shared / "there", env=TOKEN).finished()

    (shared / "version.py").write_text('__version__ = "9.9"\n')
    place = Path(torrential.__file__).with_name("version.py")
    assert hosts[2].run("mount", "--bind", shared / "version.py", place).wait(10) == 0
    try:
        other = RayRun(hosts, shared, "train", "digits-mlp", *words, "--out", shared / "other", env=TOKEN)
        assert "torrential is 9.9 there and 0.1.0 on the driver's host; install the same" in refused(other)
    finally:
        assert hosts[2].run("umount", place).wait(10) == 0


@pytest.mark.timeout(60)
def test_without_ray(run_cli: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *more: None if name == 'ray' else find(name, *more)\n"
        "import torrential as tt\nassert 'ray' not in sys.modules\n"
        "try:\n    tt.train('digits-mlp', world='ray')\nexcept tt.TorrentialError as error:\n    print(error)\n"
    )
    done = run_cli(script=script)
    assert "which is not installed; pip install 'torrential[ray]'" in done.stdout, done.stderr
