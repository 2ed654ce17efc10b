"""A slow link on one host: from now on this process and its children have a loopback of their own, of a given rate.

    enter("2gbit")    needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN), or: unshare --map-root-user COMMAND

It lies in a network namespace without a name, which goes with the last process in it: nothing is left behind, however
they end. All that workers say to one another over TCP shares the rate, both directions together, as on a bus; a
network card has as much again for the other direction. What goes through shared memory or unix sockets is not slowed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

CLONE_NEWNET = 0x40000000
SHAPE = ("burst", "256kb", "latency", "50ms")  # a queue of 50 ms: TCP fills it and waits, nothing is dropped
TIMEOUT_SECONDS = 60.0


def enter(rate: str) -> None:
    """Of the calling thread and whatever it starts from now on. Ends the program where it cannot be done."""
    own_loopback("--link")
    _do("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, *SHAPE)


def own_loopback(what: str) -> None:
    """Give the calling thread and whatever it starts from now on a loopback of their own. `what` needs it."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"{what} needs {' and '.join(missing)}, which this machine has not; install iproute2")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise SystemExit(
            f"{what} needs a network namespace, which this user may not make ({why}); run it as root, "
            "or put this before the command: unshare --map-root-user"
        )
    _do("ip", "link", "set", "lo", "up")


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise SystemExit(f"--link: {' '.join(command)} failed: {said}; a rate is for example 2gbit or 500mbit")
