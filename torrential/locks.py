"""One process at a time writes to the directory of a run or a study; one at a time does what others then need not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from torrential.errors import BadInput


def lock_directory(directory: Path, what: str, seconds: float = 0.0) -> int:
    """Lock a directory for this process; returns the descriptor that holds the lock until it is closed.

    The lock is on the directory itself: it can be had before anything is in there, so a decision that is made by
    looking into it is decided by one process, and it leaves nothing behind. `what`: a run or a study, for the message;
    `seconds`: how long to wait for the holder of the lock, which may be about to end.
    """
    deadline = time.monotonic() + seconds
    while True:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(directory)):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            raise BadInput(f"the {what} in {directory} is still going on; wait for it, or end it first") from error
        except OSError as error:
            os.close(fd)
            raise BadInput(f"cannot lock {directory} ({error.strerror}); choose a directory of this machine") from error
        os.close(fd)  # another one is in its place by now


@contextlib.contextmanager
def in_turn(directory: Path, seconds: float) -> Iterator[None]:
    """A block that one process enters at first, and all that wait for it together when it has left. After so many
    seconds a process enters anyway."""
    deadline = time.monotonic() + seconds
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    kind = fcntl.LOCK_EX  # of the first; those that find it there come after it, beside one another
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                kind = fcntl.LOCK_SH
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)
