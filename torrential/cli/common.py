"""What the commands share: where they print, what is done around each, and how --set is read."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torrential import descriptors
from torrential.errors import BadInput, Terminated
from torrential.terminal import Terminal
from torrential.usercode import telling_interrupts
from torrential.worlds.local.launch import Launch

err = Terminal(stderr=True)


def options_of(pairs: list[str]) -> dict[str, Any]:
    """The options that --set gives, as text by their names."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise BadInput(f"--set takes name=value (given: {pair!r})")
        options[name.strip().replace("-", "_")] = value.strip()
    return options


def only_given(**options: Any) -> dict[str, Any]:
    """Those options that were given a value."""
    return {name: value for name, value in options.items() if value is not None}


def count_roles(workers: int | None, servers: int | None) -> int:
    """Workers and servers at most: whether the strategy has a server is not known yet."""
    return (1 if workers is None else workers) + (1 if servers is None else servers)


def end(signum: int, frame: FrameType | None) -> None:
    """Handle a signal that ends the command."""
    signal.signal(signum, signal.SIG_IGN)  # a whole group may have been sent it, and we be told twice
    raise Terminated(signum)


@contextlib.contextmanager
def prepared(local: bool = True, roles: int = 1) -> Iterator[Launch | None]:
    """A block that carries a command out: signals are exceptions there, and a process that starts others is at hand if
    the command is `local`. `roles`: workers and servers, as far as they are known before torch is loaded."""
    signal.signal(signal.SIGTERM, end)
    descriptors.raise_limit()
    if local:
        descriptors.check_descriptors(roles, early=True)  # before anything is started
    launch = Launch() if local else None
    try:
        with telling_interrupts():
            yield launch
    finally:
        if launch is not None:
            launch.close()
