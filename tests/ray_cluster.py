"""A Ray cluster on the test bed of hosts.py, and runs on it whose driver is on host 0."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hosts import Host, cluster

from torrential.records import Event, Record, Step, read_records

PORT = 6379
SECONDS = 200.0
RAY = Path(sys.executable).with_name("ray")


def begin_ray(host: Host, head: Host, *words: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Begin Ray on a host; it goes with the host."""
    where = (
        ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if host is head
        else [f"--address={head.address}:{PORT}"]
    )
    memory = f"--object-store-memory={100 << 20}"
    command = [
        sys.executable,
        RAY,
        "start",
        *where,
        f"--node-ip-address={host.address}",
        "--num-cpus=2",
        memory,
        *words,
    ]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = os.environ | {"RAY_worker_niceness": "0"} | (env or {})  # Ray has what it begins give way to everything else
    return host.run(*command, "--disable-usage-stats", env=env, **quiet)


@contextlib.contextmanager
def ray_cluster(count: int, shared: Path, *words: object, env: dict[str, str] | None = None) -> Iterator[list[Host]]:
    """Hosts with Ray on each of them, with two CPUs."""
    with cluster(count, shared) as hosts:
        for some in (hosts[:1], hosts[1:]):  # the others need the first
            for begun in [begin_ray(host, hosts[0], *words, env=env) for host in some]:
                said, _ = begun.communicate(timeout=SECONDS)
                assert begun.returncode == 0, said
        yield hosts


class RayRun:
    """One run, by the command on host 0."""

    def __init__(
        self,
        hosts: list[Host],
        out: Path,
        *words: object,
        env: dict[str, str] | None = None,
        script: Path | None = None,
    ) -> None:
        """`script`: run that in the place of the command."""
        self.hosts, self.out = hosts, out
        program = [sys.executable, "-m", "torrential", *words] if script is None else [sys.executable, script]
        self._words = "python -m torrential" if script is None else str(script)
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.command = hosts[0].run(*program, env=os.environ | (env or {}), **quiet)

    def wait(self) -> tuple[int, str, str]:
        """The exit code and what was said."""
        out, err = self.command.communicate(timeout=SECONDS)
        return self.command.returncode, out, err

    def finished(self) -> str:
        code, out, err = self.wait()
        assert code == 0, out + err
        return out

    def records(self) -> list[Record]:
        path = self.out / "records.jsonl"
        return read_records(path) if path.exists() else []

    def events(self, name: str) -> list[Event]:
        return [record for record in self.records() if isinstance(record, Event) and record.event == name]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, (what, self.records())
            assert self.command.poll() is None, (what, self.command.communicate())
            time.sleep(0.02)

    def step(self) -> int:
        return max((record.step for record in self.records() if isinstance(record, Step)), default=0)

    def until_training(self, further: int = 20) -> None:
        """Wait for so many steps more."""
        first = self.step()
        self.until(lambda: self.step() >= first + further, f"{further} steps")

    def close(self) -> None:
        if self.command.poll() is None:  # it is the command that enters the host: what it began there is ended there
            self.hosts[0].run("pkill", "-KILL", "-f", self._words).wait(10)
        self.command.communicate(timeout=20)


def roles(host: Host) -> list[str]:
    return [name for name in host.processes() if name.startswith("tt-")]


def agents(host: Host) -> list[str]:
    return [name for name in host.processes() if name.startswith("ray::Agent")]
