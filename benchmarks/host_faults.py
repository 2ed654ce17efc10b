"""Kills roles, hosts and supervisors, and pulls cables, while strategies train on three hosts of benchmarks/hosts.py.

python -m benchmarks.host_faults --events 40        needs root

A run suffers six events one after the other, and then takes two more epochs and ends. `--strategies` take turns.

    role          a worker or server anywhere is killed (SIGKILL)
    host          all that runs on host 1 or 2 is killed, its agent included
    link          the cable of host 1 or 2 is pulled, and put back once its roles have ended by themselves
    supervisor    the supervisor is killed; the run goes on by --resume on all hosts

A lost host joins again, and the next event waits until what was lost is replaced. Told: seconds from each event to the
next step on record that follows the record of the loss (steps are recorded every 0.2 s); from pulling a cable to the
end of the isolated roles; from killing the supervisor to the end of the last role anywhere. A run is wrong if it hangs,
fails, loses more roles or hosts than were killed, counts a sample twice or not at all, or leaves a process behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.host_runs import HostsRun
from benchmarks.hosts import Host, cluster

HOSTS = 3
HOST_TIMEOUT = 3
LOOK_SECONDS = 0.005
PATIENCE_SECONDS = 300.0
EVENTS = ("role", "host", "supervisor", "role", "link", "supervisor")  # of a run; a resumed one has all hosts again
LAST_EPOCHS = 2
TASK = (
    "digits-mlp",
    "--epochs",
    1_000_000,
    "--set",
    "threads=1",
    "--set",
    "restart=true",
    "--set",
    "evaluate_every=20",
)
ROLES = {
    "allreduce": ("--workers", 6),
    "downpour": ("--workers", 6, "--servers", 3),
    "ssp": ("--workers", 6, "--servers", 3),
    "pipeline": ("--workers", 3),
}
RESUMED = b'"event":"resumed"'
LOSSES = {"role": {"worker_lost", "server_lost"}, "host": {"host_lost"}, "link": {"host_lost"}}
GOALS = {"role": 1.0, "host": 3.0, "link": 6.0, "roles of a lost link gone": 6.0, "roles of a supervisor gone": 5.0}


class Wrong(Exception):
    pass


class Told(NamedTuple):
    what: str
    seconds: float


class Siege:
    """One run, from its beginning to its end."""

    def __init__(self, strategy: str, hosts: list[Host], out: Path, chance: random.Random) -> None:
        self._strategy, self._hosts, self._out, self._chance = strategy, hosts, out, chance
        words = (*TASK, "--strategy", strategy, *ROLES[strategy], "--set", f"host_timeout={HOST_TIMEOUT}")
        self._run = HostsRun(hosts, out, *words)
        self._read = 0  # bytes of the records
        self._records: list[dict[str, Any]] = []  # all that were ever read; resuming drops those after its checkpoint
        self._resumed = 0
        self._expected: Counter[str] = Counter()
        self.told: list[Told] = []

    def suffer(self, events: list[str]) -> None:
        try:
            self._train()
            for number, event in enumerate(events):
                time.sleep(self._chance.uniform(0, 0.5))
                getattr(self, f"_{event}")(last=number + 1 == len(events))
            if events[-1] != "supervisor":
                self._supervisor(last=True)
            self._end()
        finally:
            self._run.close()

    # -- what happens -------------------------------------------------------------------------------------------------
    def _role(self, last: bool) -> None:
        host = self._chance.choice(self._hosts)
        roles = {pid: name for pid, name in host.pids().items() if name.startswith(("tt-worker", "tt-server"))}
        pid = self._chance.choice(sorted(roles))
        kind = roles[pid].removeprefix("tt-").partition("-")[0]
        self._expected[f"{kind}_lost"] += 1
        self._step_after("role", lambda: kill([pid]))
        self._replaced()

    def _host(self, last: bool) -> None:
        host = self._victim()
        pids = host.pids()
        self._lose(pids)
        self._step_after("host", lambda: kill(pids))
        self._join_again(host)

    def _link(self, last: bool) -> None:
        host = self._victim()
        self._lose(host.pids())
        began = self._step_after("link", host.disconnect)
        self._until("the isolated roles to end", lambda: not roles_on(host))
        self.told.append(Told("roles of a lost link gone", time.monotonic() - began))
        host.connect()
        self._join_again(host)

    def _supervisor(self, last: bool) -> None:
        self._until("a checkpoint", lambda: any(self._out.glob("checkpoints/step-*")))
        pids = self._hosts[0].pids()
        began = time.monotonic()
        kill(pid for pid, name in pids.items() if not name.startswith("tt-"))  # what has begun the roles ends first
        self._until("the end of all roles", lambda: not any(map(roles_on, self._hosts)), alive=False)
        self.told.append(Told("roles of a supervisor gone", time.monotonic() - began))
        for command in self._run.commands:
            command.wait(PATIENCE_SECONDS)
        self._look()
        words = []
        if last:
            done = max(r["samples"] for r in self._records if r["kind"] == "step") // self._samples()
            self._epochs = done + LAST_EPOCHS
            words = ["--epochs", self._epochs]
        self._run = HostsRun(self._hosts, self._out, *words, resume=True)
        self._until("the run to be resumed", self._goes_on)
        if not last:
            self._train()

    # -- looking ------------------------------------------------------------------------------------------------------
    def _look(self) -> None:
        new = self._written()[self._read :]
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._records += map(json.loads, whole.splitlines())

    def _written(self) -> bytes:
        path = self._out / "records.jsonl"
        return path.read_bytes() if path.exists() else b""

    def _goes_on(self) -> bool:
        """Whether the run is resumed; what follows is new."""
        written = self._written()
        if written.count(RESUMED) == self._resumed:
            return False
        self._resumed += 1
        self._read = written.index(b"\n", written.rindex(RESUMED)) + 1
        return True

    def _until(self, what: str, condition: Callable[[], Any], alive: bool = True) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if alive and self._run.commands[0].poll() is not None:
                raise Wrong(f"the run ended while {what} was waited for: {self._run.said(0)[-500:]}")
            if time.monotonic() > deadline:
                raise Wrong(f"hung for {PATIENCE_SECONDS:.0f} s ({what})")
            time.sleep(LOOK_SECONDS)
            if condition != self._goes_on:
                self._look()

    def _count(self, event: str, since: int = 0) -> int:
        return sum(record.get("event") == event for record in self._records[since:])

    def _train(self) -> None:
        """Until the run, begun or resumed, takes steps on all hosts."""
        since = len(self._records)
        self._until("steps", lambda: self._step_in(self._records[since:]))
        self._until("the roles of all hosts", lambda: all(map(roles_on, self._hosts)))

    def _step_in(self, records: list[dict[str, Any]]) -> bool:
        return any(record["kind"] == "step" for record in records)

    def _step_after(self, what: str, harm: Callable[[], Any]) -> float:
        """Do harm, and wait for the first step after the record of the loss; returns when it was done."""
        self._look()
        since, began = len(self._records), time.monotonic()
        harm()

        def gone_on() -> bool:
            new = self._records[since:]
            lost = next((i for i, record in enumerate(new) if record.get("event") in LOSSES[what]), None)
            return lost is not None and self._step_in(new[lost:])

        self._until(f"a step after the loss of a {what}", gone_on)
        self.told.append(Told(what, time.monotonic() - began))
        return began

    def _victim(self) -> Host:
        """A host besides that of the supervisor."""
        return self._chance.choice(self._hosts[1:])

    def _lose(self, pids: dict[int, str]) -> None:
        self._expected["host_lost"] += 1
        for name in pids.values():
            if name.startswith(("tt-worker", "tt-server")):
                self._expected[f"{name.split('-')[1]}_lost"] += 1

    def _join_again(self, host: Host) -> None:
        before = self._count("host_joined")
        self._run.begin_again(host.number)
        self._until("the host to join again", lambda: self._count("host_joined") > before)
        self._replaced()

    def _replaced(self) -> None:
        for lost, back in (("worker_lost", "worker_joined"), ("server_lost", "server_filled")):
            self._until(f"{back} after {lost}", lambda: self._count(back) >= self._count(lost))  # noqa: B023

    def _samples(self) -> int:
        return int(json.loads((self._out / "manifest.json").read_text())["config"]["samples"])

    # -- the end ------------------------------------------------------------------------------------------------------
    def _end(self) -> None:
        for number, (code, said) in enumerate(self._run.wait()):
            if code:
                raise Wrong(f"host {number} ended with status {code}: {said[-500:]}")
        self._look()
        (summary,) = [record for record in self._records if record["kind"] == "summary"]
        wanted = self._epochs * self._samples()
        if summary["samples"] != wanted:
            raise Wrong(f"{summary['samples']} samples instead of {wanted}")
        found = {name: self._count(name) for name in ("worker_lost", "server_lost", "host_lost")}
        if found != {name: self._expected[name] for name in found}:
            raise Wrong(f"on record: {found}, and killed: {dict(self._expected)}")
        deadline = time.monotonic() + 3
        while left := [name for host in self._hosts for name in host.processes()]:
            if time.monotonic() > deadline:
                raise Wrong(f"left behind: {left}")
            time.sleep(LOOK_SECONDS)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended with one before
            os.kill(pid, signal.SIGKILL)


def roles_on(host: Host) -> list[str]:
    return [name for name in host.processes() if name.startswith("tt-")]


def besiege(options: argparse.Namespace, root: Path) -> tuple[list[Told], list[str]]:
    chance, told, wrong, suffered, runs = random.Random(options.seed), list[Told](), list[str](), 0, 0
    while suffered < options.events:
        strategy = options.strategies[runs % len(options.strategies)]
        events = list(EVENTS)
        began = time.monotonic()
        directory = root / f"run-{runs}"
        directory.mkdir()
        with cluster(HOSTS, directory) as hosts:
            siege = Siege(strategy, hosts, directory / "run", chance)
            fault = ""
            try:
                siege.suffer(events)
            except (Wrong, AssertionError) as error:
                fault = str(error)
                wrong.append(f"{strategy}, {directory}: {fault}")
        told += siege.told
        suffered, runs = suffered + len(events), runs + 1
        shown = ", ".join(f"{what} {seconds:.2f}" for what, seconds in siege.told)
        print(
            f"run {runs}, {strategy}, {time.monotonic() - began:.0f} s: {shown}; {fault or 'as it should be'}",
            flush=True,
        )
    return told, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40, help="at least as many; runs suffer six each")
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=list(ROLES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="host-faults-"))
    told, wrong = besiege(options, root)
    for what, goal in GOALS.items():
        seconds = [one.seconds for one in told if one.what == what]
        if seconds:
            figures = f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
            print(f"{what:28} {len(seconds):3} times: {figures} (goal: {goal:.0f} s)")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
