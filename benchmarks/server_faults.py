"""Kills servers and workers at random moments while workers add to a vector, and audits every addition.

python -m benchmarks.server_faults --kills 100
python -m benchmarks.server_faults --kills 40 --hosts 3      # on hosts of benchmarks/hosts.py: needs root

A run has three workers and three servers, every range on two of them (`--replicas 1`), and suffers ten kills (SIGKILL)
one after the other: of a server, of a worker, or of both at once. Whoever was killed is replaced. Each addition touches
every range (benchmarks/audit.py), by keys or as a whole, straight or through the optimizer, and is one of:

    acknowledged        before its worker was killed, or at any time: it must have been applied exactly once everywhere
    not acknowledged    its worker was killed before: on each range it was applied once or not at all

Told: seconds from a kill until every other worker has had an addition acknowledged that it began after the kill, and
the same when nobody was killed; until a killed server's replacement has its share of the ranges, and a killed worker's
has joined; and what a run left behind.
With --hosts, one in four kills is of a host (its agent and all its roles), of one that has one server; it joins again.
The next server is killed only when the last one's replacement is complete: with one replica, two at a time are not
survived, and not meant to be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import audit
from benchmarks.audit import LAST_CLOCKS, PATIENCE_SECONDS, Entry, Plan, Word, numbers, objections
from benchmarks.faults import Family, shared_files
from benchmarks.host_runs import PORT
from benchmarks.hosts import Host, cluster
from torrential.worlds.hosts.rendezvous import SECRET_VARIABLE

LOOK_SECONDS = 0.002
START_SECONDS = 240.0  # torch loads on all hosts
WARM_UP = 20  # additions of each worker before the first kill
PAUSE_SECONDS = 1.0  # at most, between a recovery and the next kill
VICTIMS = {"server": 0.5, "worker": 0.3, "both": 0.2}
HOST_SHARE = 0.25  # of the kills on several hosts


class Hung(SystemExit):
    pass


class Siege:
    """One run."""

    def __init__(self, plan: Plan, chance: random.Random, hosts: list[Host]) -> None:
        self._plan, self._chance, self._hosts = plan, chance, hosts
        Path(plan.directory).mkdir(parents=True)
        self._control = numbers(plan.control, Word, "w+")
        self._files = shared_files()
        self._lives = [1] * plan.workers  # of each worker, the one that is due included
        self._servers_killed = 0
        log, command = Path(plan.directory, "log"), ("benchmarks.audit", json.dumps(msgspec.structs.asdict(plan)))
        self._family = HostsFamily(hosts, plan.rendezvous, log, *command) if hosts else Family(log, *command)
        self.kills: list[dict[str, Any]] = []
        self.usual: list[float] = []  # what is told of kills, when nobody was killed

    def run(self, kills: int) -> None:
        try:
            begun = lambda: len(self._working(WARM_UP)) == self._plan.workers  # noqa: E731
            self._until("the workers to begin", begun, START_SECONDS)
            self.usual = [self._measure([], range(self._plan.workers)) for _ in range(kills)]
            while len(self.kills) < kills:
                self._kill()
            self._until("the replacements", lambda: self._complete() and len(self._working()) == self._plan.workers)
            self._stop()
        except BaseException:
            self._family.kill_all()
            raise

    def wrong(self) -> list[str]:
        """In words."""
        status = self._family.process.returncode
        left = [f"left behind: {what}" for what in self._family.leftovers(self._files)]
        return left + ([f"exit status {status}"] if status else list(objections(self._plan)))

    def acknowledged(self) -> int:
        paths = [path for rank in range(self._plan.workers) for path in self._plan.ledgers(rank)]
        return sum(int(numbers(path, Entry)[Entry.ACKNOWLEDGED]) for path in paths)

    def replacements(self, lost: str, back: str) -> list[float]:
        """Seconds from each event of one name to the next of the other."""
        pairs = zip(self._events(lost), self._events(back), strict=True)
        return [after["time"] - before["time"] for before, after in pairs]

    # -- looking ------------------------------------------------------------------------------------------------------
    def _until(self, what: str, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._family.process.poll() is not None:
                raise Hung(f"the run ended while {what} was waited for; see {self._family.log}")
            if time.monotonic() > deadline:
                raise Hung(f"waited {seconds:.0f} s for {what}; see {self._plan.directory}")
            time.sleep(LOOK_SECONDS)

    def _events(self, name: str) -> list[dict[str, Any]]:
        lines = self._plan.events.read_bytes().splitlines(keepends=True) if self._plan.events.exists() else []
        records = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [record for record in records if record.get("event") == name]

    def _entry(self, rank: int, entry: Entry) -> float:
        """Of its newest life; nothing while a replacement is due."""
        ledgers = self._plan.ledgers(rank)
        if len(ledgers) < self._lives[rank] or not ledgers[-1].stat().st_size:
            return 0.0
        return float(numbers(ledgers[-1], Entry)[entry])

    def _working(self, least: int = 1) -> list[int]:
        return [r for r in range(self._plan.workers) if self._entry(r, Entry.ACKNOWLEDGED) >= least]

    def _complete(self) -> bool:
        """Whether all ranges have all their copies."""
        return len(self._events("server_filled")) == self._servers_killed

    # -- killing ------------------------------------------------------------------------------------------------------
    def _kill(self) -> None:
        (what,) = self._chance.choices(list(VICTIMS), list(VICTIMS.values()))
        if self._hosts and self._chance.random() < HOST_SHARE:
            self._until("the last server's replacement", self._complete)
            if with_one_server := [host for host in self._hosts[1:] if len(roles(host, "server")) == 1]:
                return self._kill_host(self._chance.choice(with_one_server))
        victims = []
        if what != "worker":
            self._until("the last server's replacement", self._complete)
            victims.append(f"server-{self._chance.randrange(self._plan.servers)}")
            self._servers_killed += 1
        others = self._working()
        if what != "server" and len(others) > 1:
            rank = others.pop(self._chance.randrange(len(others)))
            victims.append(f"worker-{rank}")
            self._lives[rank] += 1
        pids = {name: pid for pid, name in self._family.members().items()}
        seconds = self._measure([pids[f"tt-{victim}"] for victim in victims], others)
        self.kills += [{"victim": victim, "at_once": len(victims), "others_after": seconds} for victim in victims]

    def _kill_host(self, host: Host) -> None:
        assert isinstance(self._family, HostsFamily)
        self._servers_killed += 1
        lost = [int(name.rpartition("-")[2]) for name in roles(host, "worker")]
        for rank in lost:
            self._lives[rank] += 1
        others = [rank for rank in self._working() if rank not in lost]
        seconds = self._measure(list(host.pids()), others)
        self.kills.append({"victim": "host", "at_once": 1, "others_after": seconds})
        before = len(self._events("host_joined"))
        self._family.begin_again(host)
        self._until("the host to join again", lambda: len(self._events("host_joined")) > before)

    def _measure(self, victims: Sequence[int], others: Collection[int]) -> float:
        """Kill, and wait until the others have had something acknowledged that they began later."""
        time.sleep(self._chance.uniform(0, PAUSE_SECONDS if victims else PAUSE_SECONDS / 10))
        killed_at = self._control[Word.KILLED_AT] = time.time()
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):  # it ended with one before
                os.kill(victim, signal.SIGKILL)
        self._until("the others to go on", lambda: all(self._entry(r, Entry.KILL) == killed_at for r in others))
        return max(self._entry(r, Entry.RECOVERED_AT) for r in others) - killed_at

    def _stop(self) -> None:
        clocks = [self._entry(rank, Entry.CLOCK) for rank in range(self._plan.workers)]
        self._control[Word.STOP] = max(clocks) + LAST_CLOCKS
        self._until("the end", lambda: self._family.process.poll() is not None)


class HostsFamily:
    """A run's processes on several hosts, as Family has those of one."""

    def __init__(self, hosts: list[Host], where: str, log: Path, *command: str) -> None:
        self.hosts, self.log, self._where = hosts, log, where
        self._commands = {host.number: self._begin(host) for host in hosts[1:]}
        self.process = self._python(hosts[0], "-m", *command)

    def _begin(self, host: Host) -> subprocess.Popen[str]:
        words = "--rendezvous", self._where, "--hosts", len(self.hosts), "--host-rank", host.number
        return self._python(host, "-m", "torrential", "train", f"{Path(audit.__file__).resolve()}:task", *words)

    def _python(self, host: Host, *words: object) -> subprocess.Popen[str]:
        with open(self.log, "ab") as file:
            environment = os.environ | {SECRET_VARIABLE: "a secret of those that audit"}
            return host.run(sys.executable, *words, stdout=file, stderr=file, env=environment)

    def begin_again(self, host: Host) -> None:
        self._commands[host.number].wait(PATIENCE_SECONDS)
        self._commands[host.number] = self._begin(host)

    def members(self) -> dict[int, str]:
        return {pid: name for host in self.hosts for pid, name in host.pids().items()}

    def kill_all(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def leftovers(self, files_before: set[str]) -> list[str]:
        """What is still there three seconds after the end. Nothing else runs on these hosts."""
        deadline = time.monotonic() + 3
        while left := [f"process {name}" for name in self.members().values()]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.05)
        return []


def roles(host: Host, role: str) -> list[str]:
    return [name for name in host.processes() if name.startswith(f"tt-{role}")]


def spread(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "worst": max(seconds)} if seconds else {}


def besiege(options: argparse.Namespace, root: Path, hosts: list[Host]) -> dict[str, Any]:
    chance = random.Random(options.seed)
    kills: list[dict[str, Any]] = []
    usual, servers, workers, wrong = list[float](), list[float](), list[float](), list[str]()
    additions = runs = 0
    while len(kills) < options.kills:
        plan = Plan(
            directory=str(root / f"run-{runs}"),
            workers=options.workers,
            servers=options.servers,
            replicas=options.replicas,
            transport=options.transport,
            staleness=options.staleness,
            seed=chance.randrange(1 << 30),
            hosts=len(hosts),
            rendezvous=f"{hosts[0].address}:{PORT + runs}" if hosts else "",
        )
        siege = Siege(plan, chance, hosts)
        siege.run(min(options.each, options.kills - len(kills)))
        found = siege.wrong()
        kills, usual = kills + siege.kills, usual + siege.usual
        servers += siege.replacements("server_lost", "server_filled")
        workers += siege.replacements("worker_lost", "worker_joined")
        additions, runs, wrong = additions + siege.acknowledged(), runs + 1, wrong + found
        slowest = max(kill["others_after"] for kill in siege.kills)
        print(
            f"run {runs}: {len(siege.kills)} kills, {siege.acknowledged():,} additions, the others on after "
            f"{slowest:.3f} s at most; {'; '.join(found) or 'all as it should be'}",
            flush=True,
        )
        if not found:
            shutil.rmtree(plan.directory)
    by_victim = {
        kind: [k["others_after"] for k in kills if k["victim"].startswith(kind)]
        for kind in ("server", "worker", "host")
    }
    return {
        "killed": {kind: len(times) for kind, times in by_victim.items()},
        "at_once": sum(k["at_once"] > 1 for k in kills) // 2,
        "runs": runs,
        "additions": additions,
        "others_on_after": {kind: spread(times) for kind, times in by_victim.items()} | {"nobody": spread(usual)},
        "replaced_after": {"server": spread(servers), "worker": spread(workers)},
        "wrong": wrong,
        "every_kill": kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--each", type=int, default=10, help="kills in one run")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--transport", choices=["shared", "unix", "tcp"], default="shared")
    parser.add_argument(
        "--staleness", type=int, help="clocks that workers may be apart; by default as many as they like"
    )
    parser.add_argument("--hosts", type=int, default=0, help="several hosts, of which some are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="server-faults-"))
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(cluster(options.hosts, root)) if options.hosts else []
        result = vars(options) | besiege(options, root, hosts)
    shown = {name: value for name, value in result.items() if name not in vars(options) and name != "every_kill"}
    print(json.dumps(shown, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    if result["wrong"]:
        raise SystemExit(f"{len(result['wrong'])} things are wrong; see {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
