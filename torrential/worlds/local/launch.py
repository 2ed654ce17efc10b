"""Starts the nursery. Imports nothing heavy, so that torch can load there while it loads here."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from torrential.worlds.local import start

END_SECONDS = 5.0


class Launch:
    """The nursery's process, and our end of the socket to it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            start.command("nursery", theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the supervisor alone
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        theirs.close()
        self.used = False  # whether it was asked for a child

    def close(self) -> None:
        """End it, and with it every process it has forked. Safe to call twice."""
        with contextlib.suppress(OSError):  # it was quicker
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        if not self.used:
            self._process.kill()  # it may still be loading
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
