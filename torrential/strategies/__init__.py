"""The table of strategies. One file each; they never import one another."""

from __future__ import annotations

from typing import Any

from torrential.errors import UnknownName
from torrential.options import make
from torrential.strategies.allreduce import AllReduce
from torrential.strategies.backup import Backup
from torrential.strategies.base import Strategy
from torrential.strategies.bsp import Bsp
from torrential.strategies.ddp import Ddp
from torrential.strategies.downpour import Downpour
from torrential.strategies.ssp import Ssp

STRATEGIES: dict[str, type[Strategy]] = {s.name: s for s in (AllReduce, Bsp, Ssp, Backup, Downpour, Ddp)}


def make_strategy(name: str, options: dict[str, Any]) -> Strategy:
    """A strategy from its name and options, which may come as text from the command line."""
    if name not in STRATEGIES:
        raise UnknownName("strategy", name, STRATEGIES)
    kind = STRATEGIES[name]
    for option in options:
        if option not in kind.__struct_fields__:
            raise UnknownName(f"option of {name}", option, kind.__struct_fields__)
    return make(kind, options)
