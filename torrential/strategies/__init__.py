"""The strategies that come with Torrential. One file each; they never import one another."""

from __future__ import annotations

from torrential.strategies.adacomm import AdaComm
from torrential.strategies.allreduce import AllReduce
from torrential.strategies.backup import Backup
from torrential.strategies.base import Strategy
from torrential.strategies.bsp import Bsp
from torrential.strategies.ddp import Ddp
from torrential.strategies.diloco import DiLoCo
from torrential.strategies.downpour import Downpour
from torrential.strategies.easgd import Easgd
from torrential.strategies.fedavg import FedAvg
from torrential.strategies.hogwild import Hogwild
from torrential.strategies.local import Local
from torrential.strategies.pipedream import PipeDream
from torrential.strategies.pipeline import Pipeline
from torrential.strategies.sandblaster import Sandblaster
from torrential.strategies.ssp import Ssp
from torrential.strategies.streaming import StreamingDiLoCo
from torrential.strategies.tensor import TensorParallel

STRATEGIES: dict[str, type[Strategy]] = {
    s.name: s
    for s in (
        AllReduce,
        Bsp,
        Ssp,
        Backup,
        Downpour,
        Local,
        AdaComm,
        DiLoCo,
        StreamingDiLoCo,
        Easgd,
        FedAvg,
        Hogwild,
        Sandblaster,
        Pipeline,
        PipeDream,
        TensorParallel,
        Ddp,
    )
}
