"""One run of several hosts, on those of benchmarks/hosts.py: the command on each, and what it says and records."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.hosts import Host
from torrential.records import Event, Record, Step, read_records

SECRET = "a secret that three hosts know"
PORT = 29500
SECONDS = 240.0  # for anything that is waited for


class HostsRun:
    def __init__(
        self,
        hosts: list[Host],
        out: Path,
        *words: object,
        count: int = 0,
        resume: bool = False,
        **changed: list[object],
    ) -> None:
        """`count`: hosts without spare ones; `resume`: go on with the run in `out`; `changed`: words for one host
        alone, as host1=[...]."""
        self.hosts, self.out = hosts, out
        self._logs = hosts[0].shared / f"logs-{time.monotonic_ns()}"
        self._logs.mkdir()
        where = f"{hosts[0].address}:{PORT}"
        self._words = [*words, "--rendezvous", where, "--hosts", count or len(hosts)]
        self._words += ["--resume" if resume else "--out", out]
        self._changed = changed
        self.commands = [self._begin(number) for number in range(len(hosts))]

    def _begin(self, host: int) -> subprocess.Popen[str]:
        own = [*self._words, "--host-rank", host, *self._changed.get(f"host{host}", [])]
        environment = os.environ | {"TORRENTIAL_SECRET": SECRET}
        with open(self._log(host), "ab") as log:
            program = [sys.executable, "-m", "torrential", "train", *own]
            return self.hosts[host].run(*program, env=environment, stdout=log, stderr=log)

    def begin_again(self, host: int) -> None:
        """The command on a host on which it has ended."""
        self.commands[host].wait(SECONDS)
        self.commands[host] = self._begin(host)

    def _log(self, host: int) -> Path:
        return self._logs / f"host{host}.log"

    def said(self, host: int) -> str:
        return self._log(host).read_text()

    def wait(self) -> list[tuple[int, str]]:
        """Exit codes, and what was said."""
        codes = [command.wait(SECONDS) for command in self.commands]
        return [(code, self.said(number)) for number, code in enumerate(codes)]

    def records(self) -> list[Record]:
        path = self.out / "records.jsonl"
        return read_records(path) if path.exists() else []

    def events(self, name: str) -> list[Event]:
        return [record for record in self.records() if isinstance(record, Event) and record.event == name]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"hung: {what}; {self.said(0)}"
            assert self.commands[0].poll() is None, f"ended before {what}: {self.said(0)}"
            time.sleep(0.05)

    def kill(self, host: int, role: str) -> None:
        """End a role with SIGKILL."""
        done = self.hosts[host].run("pkill", "-KILL", "-x", role)
        assert done.wait(10) == 0, role

    def until_training(self, step: int) -> None:
        self.until(lambda: any(r.step >= step for r in self.records() if isinstance(r, Step)), f"step {step}")

    def close(self) -> None:
        for host, command in zip(self.hosts, self.commands, strict=True):
            if command.poll() is None:  # it is the command that enters the host: what it began there is ended there
                host.run("pkill", "-KILL", "-f", "torrential").wait(10)
            command.wait(20)
