"""One process of a contender that is not ours: a plain training loop, alone or under DDP.

Prints `ready` when it could take its first step, waits for a line on stdin, trains, and prints when each step ended.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """What one process does; travels as JSON on the command line."""

    model: str
    optimizer: str
    steps: int
    threads: int
    batch_size: int
    rank: int
    workers: int
    store: str  # a file where the members of a DDP group meet, or nothing
    malloc: bool  # with torrential's malloc settings
    tuned: bool  # DDP: gradients are views of the buckets, the graph is static, buffers stay per worker


def train(part: Part) -> dict[str, Any]:
    if part.malloc:
        from torrential.worlds.local.nursery import keep_freed_memory

        keep_freed_memory()
    import torch
    from torch.nn import functional as F

    from benchmarks import models

    torch.set_num_threads(part.threads)
    torch.manual_seed(0)
    workload = models.WORKLOADS[part.model]
    model = workload.build()
    inputs, targets = workload.data(workload.samples).tensors
    if part.store:
        model = _distributed(model, part)
    optimizer = models.spec(part.optimizer).build(model.parameters())  # fused, as in torrential
    size = part.batch_size
    generator = torch.Generator().manual_seed(part.rank)
    order = torch.empty(0, dtype=torch.long)
    print("ready", flush=True)
    sys.stdin.readline()
    ends = []
    for _ in range(part.steps):
        if len(order) < size:
            order = torch.randperm(len(targets), generator=generator)
        indices, order = order[:size], order[size:]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.index_select(0, indices)), targets.index_select(0, indices))
        loss.backward()
        optimizer.step()
        ends.append(time.monotonic())  # one clock for all processes of a machine
    assert torch.isfinite(loss), loss
    if part.store:
        torch.distributed.destroy_process_group()
    return {"batch": size, "ends": ends}


def _distributed(model: Any, part: Part) -> Any:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{part.store}", rank=part.rank, world_size=part.workers)
    if not part.tuned:
        return DistributedDataParallel(model)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)


if __name__ == "__main__":
    print(json.dumps(train(Part(**json.loads(sys.argv[1])))), flush=True)
