"""`torrential ...` or a script in a process of its own, forked, as is its nursery, from one that has torch loaded.

A command that a user gives loads torch twice, here and in the nursery; the suite gives a hundred. Some tests start
`python -m torrential` itself, as a user does.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path

from torrential import cli, launching, run
from torrential.cli import common
from torrential.worlds.local import nursery, warm
from torrential.worlds.local.warm import Launched

ROOT = Path(__file__).parents[1]
CLOSED_PIPE = Path("a pipe that nobody reads")  # in the place of a file
CONTEXT = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Starts the process that all are forked from. It ends with this one."""
    CONTEXT.set_forkserver_preload([__name__, "torrential.worlds.local.child"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    multiprocessing.forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class Command:
    """What subprocess.Popen would be for `python -m torrential ARGS`, or for `python SCRIPT`."""

    def __init__(
        self, args: list[str], out: Path, err: Path, env: dict[str, str] | None = None, script: Path | None = None
    ) -> None:
        given = (args, str(out), str(err), dict(os.environ) | (env or {}), os.getcwd(), script)
        self._process = CONTEXT.Process(target=_become, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("torrential", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(args: list[str], out: str, err: str, env: dict[str, str], directory: str, script: Path | None) -> None:
    for number, path in enumerate(("/dev/null", out, err)):
        if path == str(CLOSED_PIPE):
            reading, descriptor = os.pipe()
            os.close(reading)
        else:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *(path for path in sys.path if path != str(Path(__file__).parent))]
    if script is not None:
        sys.argv = [str(script), *args]
        run.Launch = launching.Launch = ForkedWarm().launch  # type: ignore[assignment, misc]
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.argv = ["torrential", *args]
    common.Launch = forked_nursery  # type: ignore[assignment, misc]
    cli.main()


class ForkedWarm(warm.Warm):
    """Forks a script's nurseries, from a process as it was before the script computed anything: after that, threads of
    torch's would be missed in a fork. It ends with the script."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(warm.START_SECONDS)
        if not os.fork():
            self._socket.close()
            warm.main(theirs.detach())
            os._exit(0)
        theirs.close()


def forked_nursery() -> Launched:
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        ours.close()
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nursery.keep_freed_memory()
        nursery.preload()
        nursery.serve_and_exit(theirs.detach(), parent)
    theirs.close()
    return Launched(ours, pid)
