"""The strategies that come with Torrential. One file each; they never import one another."""

from __future__ import annotations

from torrential.strategies.allreduce import AllReduce
from torrential.strategies.backup import Backup
from torrential.strategies.base import Strategy
from torrential.strategies.bsp import Bsp
from torrential.strategies.ddp import Ddp
from torrential.strategies.downpour import Downpour
from torrential.strategies.pipeline import Pipeline
from torrential.strategies.sandblaster import Sandblaster
from torrential.strategies.ssp import Ssp

STRATEGIES: dict[str, type[Strategy]] = {
    s.name: s for s in (AllReduce, Bsp, Ssp, Backup, Downpour, Sandblaster, Pipeline, Ddp)
}
