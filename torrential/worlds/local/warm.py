"""Nurseries one after another without loading torch again: one process has it loaded and forks them.

    ours ── a nursery's end of its socket ──► warm    (as a descriptor)
    ours ◄── the nursery's pid ────────────── warm

It ends when our end of the socket closes; nurseries end with sockets of their own, and with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess

from torrential.errors import RunFailed
from torrential.processes import start_helper
from torrential.worlds.local.launch import END_SECONDS, Launch

START_SECONDS = 120.0


class Warm:
    """The process, and our end of the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(START_SECONDS)
        self._loaded = False
        self._process = start_helper("torrential.worlds.local.warm", [theirs.fileno()])
        theirs.close()

    def launch(self) -> Launch:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [b"nursery"], [theirs.fileno()])
                pid = int.from_bytes(self._socket.recv(8))
                self._loaded = True
        except OSError as error:
            ours.close()
            why = f"did not answer within {START_SECONDS:.0f} s" if isinstance(error, TimeoutError) else "is gone"
            raise RunFailed(f"the process that starts the processes of runs {why}; run again") from error
        if not pid:
            ours.close()
            raise RunFailed("the process that starts the processes of runs is gone; run again")
        return Launched(ours, pid)

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()
        if not self._loaded:
            self._process.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Launched(Launch):
    """A nursery that was forked, here or elsewhere."""

    def __init__(self, ours: socket.socket, pid: int) -> None:
        self.socket, self.used = ours, False
        self._pid = pid
        self._ended: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            self._ended = os.pidfd_open(pid)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was quicker
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        if self._ended is None:
            return
        ended = select.poll()  # select itself knows the first 1,024 descriptors only
        ended.register(self._ended, select.POLLIN)
        if not ended.poll(1000 * END_SECONDS):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, signal.SIGKILL)
        os.close(self._ended)
        self._ended = None


def main(fd: int) -> None:
    from torrential.worlds.local import nursery

    nursery.keep_freed_memory()
    nursery.preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for nurseries
    me = os.getpid()
    with socket.socket(fileno=fd) as control:
        while True:
            word, fds, _, _ = socket.recv_fds(control, 16, 1)
            if not word:
                return
            pid = os.fork()
            if pid == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                nursery.serve_and_exit(fds[0], me)
            os.close(fds[0])
            try:
                control.send(pid.to_bytes(8))
            except OSError:
                return  # whoever asked is gone
