"""Ways to all-reduce, each as data: `ALGORITHMS` holds them by name."""

from __future__ import annotations

from torrential.comm.schedules.base import Algorithm
from torrential.comm.schedules.blocks import BLOCKS
from torrential.comm.schedules.direct import DIRECT
from torrential.comm.schedules.halving import HALVING
from torrential.comm.schedules.naive import NAIVE
from torrential.comm.schedules.ring import RING
from torrential.comm.schedules.tree import TREE

ALGORITHMS: dict[str, Algorithm] = {a.name: a for a in (NAIVE, DIRECT, RING, HALVING, BLOCKS, TREE)}
