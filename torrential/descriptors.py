"""How many files and sockets a process may have open, and what is said where that is too few."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from torrential.errors import BadInput, RunFailed

OWN = 40  # descriptors that a run on this machine's processes takes at most, whatever its size
EACH_ROLE = 8  # and as many for each worker and server: its connection, and the buffers it shares
A_FEW = 4  # that a command opens before it knows what it runs
ENOUGH = 1 << 16  # of no use to anybody if it is more
USUAL = 1024
NONE_LEFT = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> None:
    """Let this process, and those that it will start, have as many as the system lets it allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_descriptors(roles: int, early: bool = False) -> None:
    """Refuse a run of so many workers and servers where there are too few for it; rather than in the midst of it.

    `early`: refuse only where no run could begin, for the numbers are not checked yet. Who then allows as many as are
    said is not refused again."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    own = len(os.listdir("/proc/self/fd")) + OWN
    needed = own + EACH_ROLE * roles + (A_FEW if early else 0)
    if limit != resource.RLIM_INFINITY and limit < (own + EACH_ROLE if early else needed):
        raise BadInput(f"too few open files are allowed (limit: {limit}, needed: about {needed}); {_remedy(needed)}")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Say it clearly if what is done here fails because there are none left."""
    try:
        yield
    except (OSError, ImportError) as error:  # a library in C++ that cannot be opened is an ImportError
        words = os.strerror(errno.EMFILE)
        if words not in str(error) and getattr(error, "errno", None) not in NONE_LEFT:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise RunFailed(f"{words.lower()} (limit: {limit}); {_remedy(limit + 1)}") from error


def _remedy(needed: int) -> str:
    return f"raise the limit: ulimit -n {max(USUAL, 1 << (needed - 1).bit_length())}"
