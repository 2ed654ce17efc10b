"""What scripts/demo-cluster does: three hosts with Ray learn digits, and one of them is lost in the middle.

The hosts are isolated from one another as those of tests/hosts.py, where this user can make such; else they are three
Ray nodes on this one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torrential.records import Event, Step, Summary, read_records

LEAST = 0.97
AT_STEP = 40
SECONDS = 300.0
TRAIN = ("train", "digits", "--world", "ray", "--workers", "3", "--set", "hosts=3", "--set", "host_timeout=3")


class Hosts(NamedTuple):
    kind: str
    run: Callable[[list[str]], subprocess.Popen[Any]]
    """Begins a command on the first."""
    lose: Callable[[], None]
    """Ends the last."""


@contextlib.contextmanager
def isolated(shared: Path) -> Iterator[Hosts]:
    from ray_cluster import ray_cluster

    with ray_cluster(3, shared) as hosts:
        yield Hosts("isolated hosts", lambda words: hosts[0].run(*words), hosts[2].kill)


@contextlib.contextmanager
def nodes(shared: Path) -> Iterator[Hosts]:
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_worker_niceness="0")
    cluster = Cluster()
    try:
        begun = [cluster.add_node(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20) for _ in range(3)]
        environment = os.environ | {"RAY_ADDRESS": cluster.address}
        yield Hosts(
            "Ray nodes on this host (only root can make isolated ones)",
            lambda words: subprocess.Popen(words, env=environment),
            lambda: cluster.remove_node(begun[2], allow_graceful=False),
        )
    finally:
        cluster.shutdown()


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        shared, began = Path(directory), time.monotonic()
        with (isolated if os.geteuid() == 0 else nodes)(shared) as hosts:
            print(f"3 {hosts.kind} are up after {time.monotonic() - began:.0f} s; they learn digits", flush=True)
            out, began = shared / "run", time.monotonic()
            command = hosts.run([sys.executable, "-m", "torrential", *TRAIN, "--out", str(out)])
            try:
                await_step(out, 1, command)
                print(f"the first step was on record {time.monotonic() - began:.1f} s after the command", flush=True)
                await_step(out, AT_STEP, command)
                hosts.lose()
                print("one host was ended", flush=True)
                command.wait(SECONDS)
            finally:
                command.kill()
        return tell(out)


def await_step(out: Path, step: int, command: subprocess.Popen[Any]) -> None:
    deadline, path = time.monotonic() + SECONDS, out / "records.jsonl"
    while not (path.exists() and any(isinstance(r, Step) and r.step >= step for r in read_records(path))):
        if command.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"error: the run did not come to step {step}; see above")
        time.sleep(0.05)


def tell(out: Path) -> int:
    records = read_records(out / "records.jsonl")
    for event in records:
        if isinstance(event, Event) and event.event in ("hosts_met", "host_lost", "regrouped", "observer_lost"):
            print(f"{event.time:5.1f} s · {event.event.replace('_', ' ')} · {event.detail}")
    (lost,) = (event for event in records if isinstance(event, Event) and event.event == "host_lost")
    again = min(step.time for step in records if isinstance(step, Step) and step.time > lost.time)
    (summary,) = (record for record in records if isinstance(record, Summary))
    assert summary.value is not None
    said = f"{100 * summary.value:.1f} % of the test digits are read, and {100 * LEAST:.0f} % are asked for"
    print(f"the next step was on record {again - lost.time:.1f} s after the loss; {said}")
    return 0 if summary.value >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
