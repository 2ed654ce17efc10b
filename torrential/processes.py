"""Processes that help this one: how they begin, and how long they live.

A helper has the search path of the process that starts it, so that both import alike: a script's own directory is on
it, as in any Python program, and a task may import the modules that lie beside its file. The directory that one
happens to stand in, which Python itself would add, is not. It is bound to its parent before anything heavy is loaded,
so that it ends with it, even if it was stopped meanwhile.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torrential import streams

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from torrential import processes; processes.begin({parent}, {module!r}, {fds})"
)


def start_helper(module: str, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a process that calls `main` of a module with these descriptors, which it inherits."""
    path = [entry for entry in sys.path if entry]  # "" is the current directory
    program = _PROGRAM.format(path=path, parent=os.getpid(), module=module, fds=list(fds))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt at the terminal is for this process alone
    )


def begin(parent: int, module: str, fds: Sequence[int]) -> None:
    """The helper's side of `start_helper`."""
    end_with(parent)
    streams.keep()  # what a task prints must not end the process it is printed in
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    importlib.import_module(module).main(*fds)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends: also if this one is stopped or busy.

    What counts is the thread of the parent that started it, so that must last as long as the process is wanted.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we asked


def set_name(name: str) -> None:
    """Give this process a name for `ps` and `top`; of long ones the first 15 letters are kept."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


_progress: mmap.mmap | None = None  # of the work in a child, seen by both processes: is it finished, and where it is
_WHERE = 1
_LONGEST = 4096  # bytes of a path that Linux takes, its end included


def mark_begun(directory: Path) -> None:
    """Say that from here on the work of this child leaves something behind, in a directory."""
    if _progress is not None:
        path = os.fsencode(directory)
        _progress[_WHERE : _WHERE + len(path) + 1] = path + b"\0"


def begun() -> Path | None:
    """The directory that the work of this child has last marked as begun."""
    path = b"" if _progress is None else _progress[_WHERE:].partition(b"\0")[0]
    return Path(os.fsdecode(path)) if path else None


def run_in_child(work: Callable[[], int]) -> tuple[int, bool]:
    """Do `work`, which gives an exit code, in a forked child; return the child's exit code (minus the signal's number
    if one ended it), and whether `work` came to its end.

    If `work` calls os._exit or crashes, only the child ends: the parent is there to report it. An interrupt at the
    terminal reaches both, and what other processes send to the parent is passed on. Only the child returns by leaving
    the interpreter.
    """
    global _progress
    _progress = progress = mmap.mmap(-1, _WHERE + _LONGEST)  # shared
    awaited = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    parent = os.getpid()
    child = os.fork()
    if not child:
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            code = work()
        finally:
            progress[0] = 1
        os._exit(code) if code else sys.exit(0)
    while True:
        sent = signal.sigwaitinfo(awaited)
        if sent.si_signo != signal.SIGCHLD:
            if sent.si_code <= 0:  # by a process, not by the terminal
                os.kill(child, sent.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), bool(progress[0])
