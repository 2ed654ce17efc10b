"""How long processes live: a child ends with its parent, and a parent learns whether its child came to its end."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends: also if this one is stopped or busy.

    What counts is the thread of the parent that started it, so that must last as long as the process is wanted.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we asked


def run_in_child(work: Callable[[], int]) -> tuple[int, bool]:
    """Do `work`, which gives an exit code, in a forked child; return the child's exit code (minus the signal's number
    if one ended it) and whether `work` came to its end.

    Whatever calls os._exit in `work`, or crashes, ends the child alone: the parent is there to say so. An interrupt at
    the terminal reaches both, and what other processes send to the parent is passed on. Only the child returns by
    leaving the interpreter.
    """
    finished = mmap.mmap(-1, 1)  # shared
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
            finished[0] = 1
        os._exit(code) if code else sys.exit(0)
    while True:
        sent = signal.sigwaitinfo(awaited)
        if sent.si_signo != signal.SIGCHLD:
            if sent.si_code <= 0:  # by a process, not by the terminal
                os.kill(child, sent.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), bool(finished[0])
