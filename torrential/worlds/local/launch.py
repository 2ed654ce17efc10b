"""Starts the nursery. Imports nothing heavy, so that torch can load there while it loads here."""

from __future__ import annotations

import contextlib
import socket
import subprocess

from torrential.processes import start_helper

END_SECONDS = 5.0


class Launch:
    """The nursery's process, and our end of the socket to it."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self._process = start_helper("torrential.worlds.local.nursery", [theirs.fileno()])
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
