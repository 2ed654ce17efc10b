"""How a helper process begins: `python -m torrential.worlds.local.start nursery|warm FD PARENT`.

It is bound to its parent before anything heavy is loaded, so that it ends with it even if it was stopped meanwhile.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from torrential import lifetime, streams


def command(name: str, fd: int) -> list[str]:
    """What starts the helper of that name as a child of this process, with its end of a socket."""
    return [sys.executable, "-m", __name__, name, str(fd), str(os.getpid())]


def main(name: str, fd: int, parent: int) -> None:
    lifetime.end_with(parent)
    streams.keep()  # what a task prints in a worker must not end it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides what an interrupt means
    importlib.import_module(f"torrential.worlds.local.{name}").main(fd)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
