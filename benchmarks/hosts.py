"""Hosts on this machine: each has its own network, process numbers, memory files, /tmp and clock, and a name.

    with cluster(3, shared=tmp_path) as hosts:
        hosts[1].run("python", "-c", "...").wait(10)     # what lies in `shared` all of them see

A network namespace alone would share /proc, /dev/shm and the clock, and hide what relies on one host. A switch, in a
namespace of its own, connects them; `limit` and `disconnect` are of a host's cable. When the process that keeps a host
is killed the kernel ends all in it and takes its network away, so nothing has to be cleaned up. Hosts see the directory
that they are made from, wherever it lies. Only root can do this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

NETWORK = "10.217.0"
APART_SECONDS = 100_000  # between the clocks of two hosts
START_SECONDS = 10.0
BEGIN = """
set -e
exec 8<"$3" 9<"$1"
mount --make-rprivate /
for place in /tmp /dev/shm; do mount -t tmpfs -o size=4g tmpfs $place; done
mkdir -p "$1" "$3"
mount -c --bind /proc/self/fd/9 "$1"
mount -c --bind /proc/self/fd/8 "$3"
hostname "$2"
ip link set lo up
echo ready
exec 8<&- 9<&-
exec sleep infinity
"""


def _do(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def _keep(words: list[str]) -> tuple[subprocess.Popen[str], int]:
    """A process that keeps new namespaces, and the pid by which they are entered, once it is ready."""
    keeper = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "ready\n", f"{words[0]} did not make the namespaces"
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    return keeper, int(children[0]) if children else keeper.pid


class Host:
    def __init__(self, number: int, switch: int, shared: Path) -> None:
        self.shared = shared
        self.number, self.switch = number, switch  # the pid of a process in the network of the switch
        self.address, self.name = f"{NETWORK}.{number + 1}", f"host{number}"
        self._port = f"port{number}"
        spaces = ["--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts", "--ipc", "--time"]
        ahead = ["--monotonic", str((number + 1) * APART_SECONDS)]
        words = ["unshare", *spaces, *ahead, "sh", "-c", BEGIN, "sh", str(shared), self.name, os.getcwd()]
        self._keeper, self._pid = _keep(words)
        self._space = os.stat(f"/proc/{self._pid}/ns/pid").st_ino
        cable = ["type", "veth", "peer", "name", "eth0", "netns", self._pid]
        _do("ip", "link", "add", self._port, "netns", switch, *cable)
        _do("nsenter", "-t", switch, "-n", "ip", "link", "set", self._port, "master", "switch", "up")
        for change in (("addr", "add", f"{self.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _do("nsenter", "-t", self._pid, "-n", "ip", *change)

    def run(self, *words: object, **options: object) -> subprocess.Popen[str]:
        """Begin a command on this host."""
        enter = ["nsenter", "-t", str(self._pid), "--all", f"--wdns={os.getcwd()}"]
        return subprocess.Popen([*enter, *map(str, words)], text=True, **options)  # type: ignore[call-overload, no-any-return]

    def limit(self, bits_per_second: int) -> None:
        """Bound what this host sends and what it is sent."""
        shape = ["root", "tbf", "rate", f"{bits_per_second}bit", "burst", "64kb", "latency", "50ms"]
        _do("nsenter", "-t", self._pid, "-n", "tc", "qdisc", "replace", "dev", "eth0", *shape)
        _do("nsenter", "-t", self.switch, "-n", "tc", "qdisc", "replace", "dev", self._port, *shape)

    def disconnect(self) -> None:
        """Pull the cable: nobody is told."""
        _do("nsenter", "-t", self.switch, "-n", "ip", "link", "set", self._port, "down")

    def connect(self) -> None:
        _do("nsenter", "-t", self.switch, "-n", "ip", "link", "set", self._port, "up")

    def processes(self) -> list[str]:
        """The names of what runs here."""
        return sorted(self.pids().values())

    def pids(self) -> dict[int, str]:
        """The names of what runs here, besides the process that keeps the host, by the pids that they have outside.
        What has ended and is an orphan nobody waits for: it is left out."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                if (
                    entry.name.isdigit()
                    and int(entry.name) != self._pid
                    and (entry / "ns/pid").stat().st_ino == self._space
                    and "\nState:\tZ" not in (entry / "status").read_text()
                ):
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
        return found

    def kill(self) -> None:
        """Lose the host: all that runs on it, and its network."""
        if self._keeper.poll() is None:
            os.kill(self._pid, signal.SIGKILL)  # the kernel ends the rest before this one is gone
            self._keeper.wait(START_SECONDS)
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()


@contextlib.contextmanager
def cluster(count: int, shared: Path) -> Iterator[list[Host]]:
    begin = "ip link add switch type bridge && ip link set switch up && echo ready && exec sleep infinity"
    switch, pid = _keep(["unshare", "--net", "sh", "-c", begin])
    hosts: list[Host] = []
    try:
        for number in range(count):
            hosts.append(Host(number, pid, shared))
        yield hosts
    finally:
        for host in hosts:
            host.kill()
        switch.kill()
        switch.wait(START_SECONDS)
        assert switch.stdout is not None
        switch.stdout.close()
